"""KL divergences between the model and a frozen one: estimates from the sampled tokens, and the exact one over the vocabulary.

All are KL(π ‖ π_ref) with tokens sampled from π. What an estimator says on average and where its gradient points are two things
(Tang & Munos 2025, arXiv:2506.09477). As a term of the loss, under tokens of π:

| estimator | mean | gradient when minimised |
|---|---|---|
| k1 | exact | 0 on average, noise only: use it in the reward |
| k2 | close, for small distances | of KL(π ‖ π_ref): the right one |
| k3 | exact, never negative | of KL(π_ref ‖ π), the other direction; close to it for small distances |

In the reward no gradient flows through the estimator; k1 and k3 are exact there.
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


def sampled_distillation(logprob: Tensor, teacher_logprob: Tensor) -> Tensor:
    """Per token [N]: -A log π with A = sg(log π_teacher - log π): the policy gradient of -KL(π ‖ teacher), as of `k2`.

    On-policy distillation from the sampled tokens alone (Agarwal et al. 2024, arXiv:2306.13649; Gu et al. 2024, arXiv:2306.08543).
    The value says nothing; `k1` of the same tokens is the divergence.
    """
    return log_ratio(logprob, teacher_logprob).detach() * logprob


def full_kl(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Per row [R]: KL(π ‖ teacher) over the vocabulary, of logits [R, V] already divided by the sampling temperature.

    Entries that π excludes (logit -inf) count 0. The softmaxes are in float32 at least.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = logits.log_softmax(-1, dtype=dtype), teacher_logits.log_softmax(-1, dtype=dtype)
    difference = (log_p - log_q).masked_fill(log_p == -torch.inf, 0.0)  # 0 x inf is NaN
    return (log_p.exp() * difference).sum(-1)
