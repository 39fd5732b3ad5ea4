"""Policy losses over flat packed tokens. Pure functions: shapes are [N], N = the trained tokens of a micro-batch, in any order.

Per token: π the model that is trained (gradient flows through log π), π_old the denominator, μ the weights that sampled it, A the
advantage. r = π / π_old, ρ = π_start / μ with π_start the weights at the start of the step, c = π / μ; sg is stop-gradient.

A loss gives every token a value; the step's loss is their sum under the weights of aggregation and corrections. All weights are known
before the first micro-batch runs, so a batch may be split between rollouts anywhere: the parts add up to the whole, in loss and gradient.
Which loss takes which parameter, with its default, stands in `config/loss_tables.py`; docs/losses.md compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config.losses import ResolvedLoss

_MAX_LOG_RATIO = 20.0  # exp(20) is 5e8; beyond, exp overflows and inf * 0 in the backward pass would be NaN


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of whole rollouts. Tokens of different rollouts may be interleaved."""

    logprob: Tensor  # float[N] log π; the only one with a gradient
    old_logprob: Tensor  # float[N] log π_old, the ratio's denominator: μ, or the weights at the start of the step
    start_logprob: Tensor  # float[N] log π at the start of the step
    sampler_logprob: Tensor  # float[N] log μ, recorded when the token was sampled
    advantage: Tensor  # float[N]
    sequence: Tensor  # int64[N], 0 .. num_sequences - 1: the token's rollout
    num_sequences: int
    staleness: Tensor  # int32[N], versions

    def sequence_sum(self, values: Tensor) -> Tensor:
        """float[N]: at each token the sum over its rollout."""
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence, values)[self.sequence]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """float[N]: at each token the mean over its rollout."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


class LossValue(NamedTuple):
    """What a policy loss says of each token."""

    per_token: Tensor  # float[N], minimised
    cut: Tensor  # bool[N]: where its clip or mask cuts the gradient off, or its cap bounds the weight


PolicyLoss = Callable[[Tokens], LossValue]


def log_ratio(logprob: Tensor, denominator: Tensor) -> Tensor:
    """log(π / denominator) per token [N], limited to ±20."""
    return (logprob - denominator).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _uncut(t: Tokens) -> Tensor:
    return torch.zeros_like(t.logprob, dtype=torch.bool)


def _outside(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """bool[N]: the ratio has gone as far as it may, in the direction in which the advantage drives it."""
    return ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))


# ---- clipped ratios ------------------------------------------------------------------------------------------------------------


def ppo_clip(t: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossValue:
    """-min(rA, clip(r, 1 - clip_low, 1 + clip_high) A); with `dual_clip` and A < 0 at most -dual_clip A.

    PPO (Schulman et al. 2017, arXiv:1707.06347); clip_high > clip_low is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476); the dual
    clip bounds what one token with A < 0 and a huge ratio can do (Ye et al. 2020, arXiv:1912.09729).
    """
    ratio = log_ratio(t.logprob, t.old_logprob).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * t.advantage, clipped * t.advantage)
    cut = _outside(ratio, t.advantage, clip_low, clip_high)
    if dual_clip is not None:
        negative = t.advantage < 0
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * t.advantage), loss)
        cut = cut | (negative & (ratio > dual_clip))
    return LossValue(loss, cut)


def gspo(t: Tokens, *, clip_low: float, clip_high: float) -> LossValue:
    """-min(sA, clip(s, 1 - clip_low, 1 + clip_high) A) with one s per rollout: s = exp(mean of log r over its tokens).

    Each token has the value of its rollout, and its gradient through its own log π alone; summed over the rollout that is the gradient
    of s. So a correction that leaves a token out leaves its gradient out. GSPO (Zheng et al. 2025, arXiv:2507.18071, "GSPO-token").
    """
    mean = t.sequence_mean(log_ratio(t.logprob, t.old_logprob).detach())
    ratio = (mean + t.logprob - t.logprob.detach()).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return LossValue(-torch.minimum(ratio * t.advantage, clipped * t.advantage), _outside(ratio, t.advantage, clip_low, clip_high))


def gmpo(t: Tokens, *, clip_low: float, clip_high: float) -> LossValue:
    """-A exp(mean of log r over the rollout), log r limited to at most clip_high where A > 0, at least -clip_low where A < 0.

    Value and gradient per token as in `gspo`. GMPO (Zhao et al. 2025, arXiv:2507.20673): the geometric mean of clipped ratios.
    """
    log_r = log_ratio(t.logprob, t.old_logprob)
    limited = torch.where(t.advantage > 0, log_r.clamp(max=clip_high), torch.where(t.advantage < 0, log_r.clamp(min=-clip_low), 0.0))
    ratio = (t.sequence_mean(limited.detach()) + limited - limited.detach()).exp()
    cut = ((t.advantage > 0) & (log_r > clip_high)) | ((t.advantage < 0) & (log_r < -clip_low))
    return LossValue(-ratio * t.advantage, cut)


def sapo(t: Tokens, *, tau_positive: float, tau_negative: float) -> LossValue:
    """-gate(r) A, gate(x) = 4/τ sigmoid(τ (x - 1)), τ by the sign of A: a soft clip, which fades the gradient and never cuts it.

    SAPO (Gao et al. 2025, arXiv:2511.20347).
    """
    ratio = log_ratio(t.logprob, t.old_logprob).exp()
    positive = t.advantage > 0
    tau = torch.where(positive, torch.full_like(ratio, tau_positive), torch.full_like(ratio, tau_negative))
    return LossValue(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * t.advantage, _uncut(t))


# ---- policy gradient under a weight that has no gradient -------------------------------------------------------------------------


def cispo(t: Tokens, *, clip_low: float, clip_high: float) -> LossValue:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π: the weight is clipped, every token keeps a gradient.

    CISPO (MiniMax-M1, 2025, arXiv:2506.13585).
    """
    ratio = log_ratio(t.logprob, t.old_logprob).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return LossValue(-weight * t.advantage * t.logprob, weight != ratio)


def reinforce(t: Tokens, *, clip_high: float) -> LossValue:
    """-sg(min(c, 1 + clip_high)) A log π: the policy gradient, weighed by c = π / μ from above only.

    REINFORCE (Williams 1992) with truncated importance weights (Ionides 2008).
    """
    ratio = log_ratio(t.logprob, t.sampler_logprob).exp().detach()
    return LossValue(-ratio.clamp(max=1 + clip_high) * t.advantage * t.logprob, ratio > 1 + clip_high)


def topr(t: Tokens, *, ratio_cap: float) -> LossValue:
    """A > 0: -A log π, unweighted. A < 0: -sg(min(c, ratio_cap)) A log π: what μ overdid is not pushed down further.

    TOPR (Le Roux et al. 2025, arXiv:2503.14286), per token where the paper takes the ratio of whole answers.
    """
    ratio = log_ratio(t.logprob, t.sampler_logprob).exp().detach()
    negative = t.advantage < 0
    weight = torch.where(negative, ratio.clamp(max=ratio_cap), torch.ones_like(ratio))
    return LossValue(-weight * t.advantage * t.logprob, negative & (ratio > ratio_cap))


# ---- masks by the change of probability ----------------------------------------------------------------------------------------


def dppo_tv(t: Tokens, *, mask_low: float, mask_high: float, ratio_cap: float) -> LossValue:
    """-keep sg(min(r, ratio_cap)) A log π; a token is left out if A > 0 and π - π_old > mask_high, or A < 0 and π - π_old < -mask_low.

    DPPO with the total variation of (this token, any other) (Qi et al. 2026, arXiv:2602.04879).
    """
    change = (t.logprob.exp() - t.old_logprob.exp()).detach()
    return _masked_policy_gradient(t, _drifted(change, t.advantage, mask_low, mask_high), ratio_cap)


def dppo_kl(t: Tokens, *, mask_low: float, mask_high: float, ratio_cap: float) -> LossValue:
    """As `dppo_tv`, the distance being KL(π_old ‖ π) of (this token, any other), with the sign of π - π_old."""
    new, old = t.logprob.exp().detach(), t.old_logprob.exp()
    new_rest, old_rest = -torch.expm1(t.logprob).detach(), -torch.expm1(t.old_logprob)
    divergence = torch.xlogy(old, old) - torch.xlogy(old, new) + torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, new_rest)
    return _masked_policy_gradient(t, _drifted(divergence * (new - old).sign(), t.advantage, mask_low, mask_high), ratio_cap)


def dppo_behaviour(t: Tokens, *, mask_low: float, mask_high: float, square_weight: float) -> LossValue:
    """-keep A c + square_weight (log c)²; `keep` as in `dppo_tv`, on π - μ.

    prime-rl's default: no π_old at all, the square pulls every token (kept or not) towards the sampler.
    """
    log_c = log_ratio(t.logprob, t.sampler_logprob)
    change = (t.logprob.exp() - t.sampler_logprob.exp()).detach()
    cut = _drifted(change, t.advantage, mask_low, mask_high)
    return LossValue(-(log_c.exp() * t.advantage).masked_fill(cut, 0.0) + square_weight * log_c.square(), cut)


def _drifted(change: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return ((advantage > 0) & (change > high)) | ((advantage < 0) & (change < -low))


def _masked_policy_gradient(t: Tokens, cut: Tensor, ratio_cap: float) -> LossValue:
    weight = log_ratio(t.logprob, t.old_logprob).exp().detach().clamp(max=ratio_cap)
    return LossValue(-(weight * t.advantage * t.logprob).masked_fill(cut, 0.0), cut)


# ---- squared log ratio instead of a clip -----------------------------------------------------------------------------------------


def kimi(t: Tokens, *, tau: float) -> LossValue:
    """-(A log π - τ/2 (log π/π_old)²), A = R - mean: a mirror descent step around π_old.

    Kimi k1.5 (2025, arXiv:2501.12599), per token where the report takes whole answers.
    """
    return _regularised(t, tau)


def dro(t: Tokens, *, beta: float) -> LossValue:
    """-(A log π - β/2 (log π/π_old)²): the same objective, met from offline data.

    DRO (Richemond et al. 2024, arXiv:2405.19107), per token, with the group's baseline in place of a learned value.
    """
    return _regularised(t, beta)


def _regularised(t: Tokens, strength: float) -> LossValue:
    return LossValue(-t.advantage * t.logprob + strength / 2 * log_ratio(t.logprob, t.old_logprob).square(), _uncut(t))


# ---- proximal policy apart from the sampler --------------------------------------------------------------------------------------


def decoupled_ppo(t: Tokens, *, clip_low: float, clip_high: float, ratio_cap: float) -> LossValue:
    """-min(ρ, ratio_cap) min(rA, clip(r, 1 - clip_low, 1 + clip_high) A): the clip around the step's start, ρ for the sampler.

    Hilton et al. 2021 (arXiv:2110.00641), as in AReaL (Fu et al. 2025, arXiv:2505.24298). `cut` is the clip's.
    """
    rho = log_ratio(t.start_logprob, t.sampler_logprob).exp().clamp(max=ratio_cap)
    loss, cut = ppo_clip(t, clip_low=clip_low, clip_high=clip_high)
    return LossValue(rho * loss, cut)


POLICY_LOSSES = {
    f.__name__: f
    for f in (
        ppo_clip, gspo, gmpo, cispo, sapo, dppo_tv, dppo_kl, dppo_behaviour, topr, reinforce, kimi, dro, decoupled_ppo,
    )
}  # fmt: skip


def policy_loss(resolved: ResolvedLoss) -> PolicyLoss:
    """The function that the settings name, with its parameters. ConfigError if a person's own one cannot be loaded."""
    if resolved.own_policy:
        from slipstream.trainer.user_loss import load_policy_loss  # which stands on this module

        return load_policy_loss(resolved.policy, resolved.options)
    return partial(POLICY_LOSSES[resolved.policy], **resolved.options)
