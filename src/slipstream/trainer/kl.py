"""KL divergences between the model and a frozen one: estimates from the sampled tokens, and the exact one over the vocabulary.

All are KL(π ‖ π_ref) with tokens sampled from π. What an estimator says on average and where its gradient points are two things
(Tang & Munos 2025, arXiv:2506.09477). As a term of the loss, under tokens of π:

| estimator | mean | gradient when minimised |
|---|---|---|
| k1 | exact | 0 on average, noise only: use it in the reward |
| k2 | close, for small distances | of KL(π ‖ π_ref): the right one |
| k3 | exact, never negative | of KL(π_ref ‖ π), the other direction; close to it for small distances |

In the reward no gradient flows through the estimator, which leaves E[estimator · grad log π]. With k1 that is the gradient of
KL(π ‖ π_ref). With k3 it is that less the gradient of KL(π_ref ‖ π), with k2 E[(log(π / π_ref))² / 2 · grad log π]: both are of second
order in the distance, so near the reference they pull nowhere. So k1 belongs in the reward, k2 or k3 in the loss.
Minimising k2 of a teacher is on-policy distillation from the sampled tokens (Agarwal et al. 2024, arXiv:2306.13649).
Shapes: N tokens, R rows of logits, V vocabulary. Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.trainer.losses import log_ratio


def k1(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Per token [N]: log(π / π_ref)."""
    return log_ratio(logprob, reference_logprob)


def k2(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Per token [N]: (log(π / π_ref))² / 2."""
    return log_ratio(logprob, reference_logprob).square() / 2


def k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Per token [N]: π_ref/π - 1 - log(π_ref/π) >= 0."""
    inverse = -log_ratio(logprob, reference_logprob)
    return torch.expm1(inverse) - inverse


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def full_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Per row [R]: KL(π ‖ other) over the vocabulary, of logits [R, V] and [R, V'], both divided by the sampling temperature.

    Models of one family pad the same vocabulary to different sizes: both are taken over the entries that both have. An entry that π
    excludes (logit -inf) counts 0.
    """
    width = min(logits.shape[-1], other_logits.shape[-1])
    log_p, log_q = logits[:, :width].log_softmax(-1), other_logits[:, :width].log_softmax(-1)
    difference = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)  # 0 x inf is NaN
    return (log_p.exp() * difference).sum(-1)
