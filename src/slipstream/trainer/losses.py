"""Losses over flat packed tokens. Pure functions: shapes are [N], N = the trained tokens of a micro-batch.

Notation: log π `logprob` (gradient flows), log μ `sampler_logprob` (recorded when the token was sampled), A `advantage`. There is one
optimizer step per batch, so the sampler's own logprobs are the denominator and no second forward pass is made for π_old.

Every loss is a sum over tokens divided by one number that is known for the whole batch before the first micro-batch runs
(`normalizer`). So a batch may be split anywhere: the parts add up to the whole, in loss and in gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from slipstream.config.settings import LossSettings

_MAX_LOG_RATIO = 20.0  # exp(20) is 5e8; beyond, exp overflows and inf * 0 in the backward pass would be NaN


def log_ratio(logprob: torch.Tensor, sampler_logprob: torch.Tensor) -> torch.Tensor:
    """log(π / μ) per token [N], limited to ±20."""
    return (logprob - sampler_logprob).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ppo_clip(
    logprob: torch.Tensor, sampler_logprob: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Per token [N]: -min(rA, clip(r, 1 - clip_low, 1 + clip_high) A), r = π / μ.

    PPO (Schulman et al. 2017, arXiv:1707.06347); clip_high > clip_low is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476).
    """
    ratio = log_ratio(logprob, sampler_logprob).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def is_clipped(ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """bool[N]: tokens whose gradient `ppo_clip` cuts off."""
    return ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & (ratio < 1 - clip_low))


def aggregate(per_token: torch.Tensor, normalizer: float) -> torch.Tensor:
    """This micro-batch's share of the batch's loss: the sum over its trained tokens, divided by the batch's `normalizer`."""
    return per_token.sum() / normalizer


Aggregation = Literal["token_mean", "token_sum_over_max_length"]


def normalizer(aggregation: Aggregation, num_loss_tokens: int, num_rollouts: int, max_tokens: int) -> float:
    """What the token sum of a whole batch is divided by.

    token_mean: the trained tokens of the batch, so every token weighs the same (DAPO).
    token_sum_over_max_length: rollouts x the longest completion possible, so no weight depends on a length (Dr. GRPO).
    """
    return float(num_loss_tokens if aggregation == "token_mean" else num_rollouts * max_tokens)


@dataclass(frozen=True)
class Preset:
    """A named choice of advantage, clip range and aggregation."""

    advantage: str  # a name in advantages.ESTIMATORS
    clip_low: float
    clip_high: float
    aggregation: Aggregation


PRESETS = {
    "grpo": Preset("group_mean_std", 0.2, 0.2, "token_mean"),
    "dr_grpo": Preset("group_mean", 0.2, 0.2, "token_sum_over_max_length"),
    "dapo": Preset("group_mean_std", 0.2, 0.28, "token_mean"),
}


def resolve(settings: LossSettings) -> Preset:
    """The preset with the keys that the settings override.

    >>> resolve(LossSettings(preset="dapo", clip_low=0.1))
    Preset(advantage='group_mean_std', clip_low=0.1, clip_high=0.28, aggregation='token_mean')
    """
    given = {key: value for key in ("clip_low", "clip_high") if (value := getattr(settings, key)) is not None}
    return replace(PRESETS[settings.preset], **given)
