"""Corrections for tokens that other weights, or another implementation, sampled. Pure functions over flat packed tokens [N].

Each gives a weight >= 0 per token that multiplies its loss; 0 rejects the token. ρ = π_start / μ: the weights at the start of the step
against the sampler. No gradient flows through a weight. Bounds have no defaults here; the usual ones are in `config/loss_tables.py`.
A correction that rejects much of a batch hides a fault in the weight sync, so the rejected fractions are always reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.config.loss_tables import CORRECTIONS as TABLE
from slipstream.config.settings import CorrectionSettings
from slipstream.trainer.losses import Tokens, log_ratio


def truncate(t: Tokens, *, level: str, high: float) -> Tensor:
    """min(ρ, high), of the token or of the rollout's product: bounded importance weights.

    Ionides 2008; for the gap between sampler and trainer Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL".
    """
    return _rho(t, level).clamp(max=high)


def mask(t: Tokens, *, level: str, low: float, high: float) -> Tensor:
    """ρ where low <= ρ <= high, else 0: outliers are left out instead of truncated.

    Masked importance sampling (Liu et al. 2025, "When speed kills stability"); IcePop with 0.5 .. 5 (Ling team 2025, arXiv:2510.18855).
    """
    rho = _rho(t, level)
    return rho.masked_fill((rho < low) | (rho > high), 0.0)


def geometric(t: Tokens, *, low: float, high: float) -> Tensor:
    """1 for the tokens of rollouts with low <= (∏ρ)^(1/T) <= high, else 0: the length takes no part. Liu et al. 2025 as above."""
    mean = t.sequence_mean(_log_rho(t)).exp()
    return ((mean >= low) & (mean <= high)).to(mean.dtype)


def opsm(t: Tokens, *, high: float) -> Tensor:
    """0 for rollouts with A < 0 and mean(log μ - log π) > high: mistakes that the model no longer makes teach it nothing.

    Off-policy sequence masking (DeepSeek-V3.2 2025, arXiv:2512.02556); π is the model as it is now, μ the sampler's own logprobs.
    """
    drifted = t.sequence_mean(log_ratio(t.sampler_logprob, t.logprob.detach())) > high
    return (~(drifted & (t.advantage < 0))).to(t.logprob.dtype)


def version_gate(t: Tokens, *, high: float) -> Tensor:
    """1 for tokens at most `high` versions old, else 0."""
    return (t.staleness <= high).to(t.logprob.dtype)


def reject(t: Tokens, *, level: str, statistic: str, high: float, low: float | None = None) -> Tensor:
    """1 where a statistic of x = log ρ is within its bounds, else 0; judged per token, or per rollout by sum, mean or worst token.

    k1: low <= exp(-x) <= high, the bounds being ratios μ / π_start. k2: x²/2 <= high. k3: ρ - 1 - x <= high.
    """
    x = _log_rho(t)
    values = {"k1": -x, "k2": x.square() / 2, "k3": torch.expm1(x) - x}[statistic]
    upper, lower = (high, -math.inf) if low is None else (math.log(high), math.log(low))
    if level == "sequence":
        values = t.sequence_sum(values)
    elif level == "sequence_mean":
        values = t.sequence_mean(values)
    outside = ((values > upper) | (values < lower)).to(x.dtype)
    if level == "sequence_max":
        outside = t.sequence_sum(outside)
    return (outside == 0).to(x.dtype)


def m2po_kept(start_logprob: Tensor, sampler_logprob: Tensor, *, high: float) -> Tensor:
    """bool[N_all]: the tokens of a whole batch that stay when those with the largest (log ρ)² leave until the mean of it is <= high.

    M2PO (Zheng et al. 2025, arXiv:2510.01161). Of equal ones the later leave first, so the answer does not depend on sorting.
    """
    square = log_ratio(start_logprob, sampler_logprob).square()
    ascending, order = square.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(square) + 1, dtype=square.dtype, device=square.device)
    kept = torch.zeros_like(square, dtype=torch.bool)
    kept[order[: int((means <= high).sum())]] = True  # the means of ascending values never fall
    return kept


def correction_weight(t: Tokens, correction: CorrectionSettings) -> Tensor:
    """The weight [N] of one resolved correction that needs no more than these tokens."""
    return _FUNCTIONS[correction.type](t, **parameters(correction))


def whole_batch_weight(start_logprob: Tensor, sampler_logprob: Tensor, corrections: Iterable[CorrectionSettings]) -> Tensor:
    """The weight [N_all] of those corrections that judge the whole batch at once, from its tokens before the first update."""
    weight = torch.ones_like(start_logprob)
    for correction in corrections:
        if TABLE[correction.type].whole_batch:
            weight = weight * m2po_kept(start_logprob, sampler_logprob, **parameters(correction))
    return weight


def parameters(correction: CorrectionSettings) -> dict[str, Any]:
    """The keys that are set, without the type."""
    return correction.model_dump(exclude={"type"}, exclude_none=True)


_FUNCTIONS = {f.__name__: f for f in (truncate, mask, geometric, opsm, version_gate, reject)}


def _log_rho(t: Tokens) -> Tensor:
    return log_ratio(t.start_logprob, t.sampler_logprob)


def _rho(t: Tokens, level: str) -> Tensor:
    log_rho = _log_rho(t)
    if level == "sequence":
        log_rho = log_ratio(t.sequence_sum(log_rho), torch.zeros_like(log_rho))  # limited again: a product can overflow
    return log_rho.exp()
