"""What a loss is put together from, and the presets: tables of names, parameters and formulas. No torch.

The functions of these names live in `trainer/` (losses, corrections, advantages, aggregation); tests hold both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.config.settings import CorrectionSettings, LossSettings

# ---- policy losses -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that a policy loss takes."""

    default: float | None  # None: off
    above: float = 0.0  # it must be greater than this
    zero_allowed: bool = False


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One row of the table. r = π/π_old, ρ = π_start/μ, c = π/μ."""

    formula: str  # minimised, per token
    parameters: dict[str, Parameter]
    denominator: Literal["either", "recomputed", "none"] = "either"  # what π_old may be; none: the formula has none
    weighs_by_sampler: bool = False  # a factor π/μ or π_start/μ is in it already: a weight ρ beside it would count twice


_CLIP = {"clip_low": Parameter(0.2), "clip_high": Parameter(0.2)}
_CLIP_HIGHER = {"clip_low": Parameter(0.2), "clip_high": Parameter(0.28)}
_MASK = {"mask_low": Parameter(0.2), "mask_high": Parameter(0.2)}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss("-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)", {**_CLIP, "dual_clip": Parameter(None, above=1.0)}),
    "gspo": PolicyLoss(
        "-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean log r) per rollout",
        {"clip_low": Parameter(3e-4), "clip_high": Parameter(4e-4)},
    ),
    "gmpo": PolicyLoss(
        "-A exp(mean log r) per rollout, log r limited to clip_high where A > 0 and -clip_low where A < 0",
        {"clip_low": Parameter(0.4), "clip_high": Parameter(0.4)},
    ),
    "cispo": PolicyLoss("-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π", _CLIP_HIGHER),
    "sapo": PolicyLoss("-4/τ sigmoid(τ (r - 1)) A, τ by the sign of A", {"tau_positive": Parameter(1.0), "tau_negative": Parameter(1.05)}),
    "dppo_tv": PolicyLoss(
        "-keep sg(min(r, ratio_cap)) A log π, keep unless π - π_old leaves mask_low .. mask_high on the side of A",
        {**_MASK, "ratio_cap": Parameter(20.0)},
    ),
    "dppo_kl": PolicyLoss(
        "-keep sg(min(r, ratio_cap)) A log π, keep unless the binary KL(π_old, π) exceeds mask_low, mask_high on the side of A",
        {"mask_low": Parameter(0.05), "mask_high": Parameter(0.05), "ratio_cap": Parameter(20.0)},
    ),
    "dppo_behaviour": PolicyLoss(
        "-keep A c + square_weight (log c)², keep unless π - μ leaves mask_low .. mask_high on the side of A",
        {**_MASK, "square_weight": Parameter(1e-3, zero_allowed=True)},
        denominator="none",
        weighs_by_sampler=True,
    ),
    "topr": PolicyLoss(
        "-A log π where A > 0, -sg(min(c, ratio_cap)) A log π where A < 0",
        {"ratio_cap": Parameter(1.0)},
        denominator="none",
        weighs_by_sampler=True,
    ),
    "reinforce": PolicyLoss(
        "-sg(min(c, 1 + clip_high)) A log π", {"clip_high": Parameter(0.02)}, denominator="none", weighs_by_sampler=True
    ),
    "kimi": PolicyLoss("-(A log π - τ/2 (log r)²)", {"tau": Parameter(0.1)}),
    "dro": PolicyLoss("-(A log π - β/2 (log r)²)", {"beta": Parameter(0.05)}),
    "decoupled_ppo": PolicyLoss(
        "-min(ρ, ratio_cap) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        {**_CLIP, "ratio_cap": Parameter(5.0)},
        denominator="recomputed",
        weighs_by_sampler=True,
    ),
}

# ---- advantages and aggregations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advantage:
    """One row of the table; mean and std are over the rollouts of one group and agent."""

    formula: str
    needs_siblings: bool = True  # without them nothing is taken from the reward


ADVANTAGES: dict[str, Advantage] = {
    "group_mean_std": Advantage("(R - mean) / (std + 1e-6)"),
    "group_mean": Advantage("R - mean"),
    "leave_one_out": Advantage("R - mean of the others"),
    "group_mean_then_batch_whiten": Advantage("R - mean, then whitened over the batch's tokens", needs_siblings=False),
    "length_weighted_baseline": Advantage("R - Σ length R / Σ length"),
    "max_rl": Advantage("(R - mean) / mean"),
}

AGGREGATIONS: dict[str, str] = {
    "token_mean": "every token of the batch weighs the same",
    "sequence_mean_of_token_mean": "every rollout weighs the same",
    "sequence_mean_of_token_sum_over_max_length": "token sums / (rollouts x longest completion)",
}

# ---- corrections ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CorrectionType:
    """One row of the table: which keys a correction takes. `levels` empty: it takes no level; the first is the default."""

    formula: str  # the weight
    bounds: tuple[str, ...]  # of "low" and "high", each needed
    levels: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    weighs: bool = False  # by ρ itself, not only 0 or 1
    whole_batch: bool = False  # judges all tokens of a batch together, before its first update
    uses_start: bool = True  # needs the logprobs of the weights at the start of the step


CORRECTIONS: dict[str, CorrectionType] = {
    "truncate": CorrectionType("min(ρ, high)", ("high",), ("token", "sequence"), weighs=True),
    "mask": CorrectionType("ρ where low <= ρ <= high, else 0", ("low", "high"), ("token", "sequence"), weighs=True),
    "geometric": CorrectionType("1 where low <= (∏ρ)^(1/T) <= high of the rollout, else 0", ("low", "high")),
    "opsm": CorrectionType("0 for rollouts with A < 0 and mean(log μ - log π) > high, else 1", ("high",), uses_start=False),
    "m2po": CorrectionType("0 for the largest (log ρ)² of the batch until their mean is <= high, else 1", ("high",), whole_batch=True),
    "version_gate": CorrectionType("1 for tokens at most high versions old, else 0", ("high",), uses_start=False),
    "reject": CorrectionType(
        "1 where the statistic of ρ is within its bounds (k1: low <= 1/ρ <= high), else 0",
        ("low", "high"),  # low: of k1 alone
        ("token", "sequence", "sequence_mean", "sequence_max"),
        ("k1", "k2", "k3"),
    ),
}

ALIASES: dict[str, CorrectionSettings] = {
    "tis": CorrectionSettings(type="truncate", level="token", high=2.0),
    "seq_tis": CorrectionSettings(type="truncate", level="sequence", high=2.0),
    "mis": CorrectionSettings(type="mask", level="token", low=0.5, high=2.0),
    "seq_mis": CorrectionSettings(type="mask", level="sequence", low=0.5, high=2.0),
    "icepop": CorrectionSettings(type="mask", level="token", low=0.5, high=5.0),
    "geo": CorrectionSettings(type="geometric", low=0.99, high=1.01),
    "opsm": CorrectionSettings(type="opsm", high=0.05),
    "m2po": CorrectionSettings(type="m2po", high=0.04),
}

# ---- presets -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preset:
    """A named choice of all parts. `options` differ from the policy loss's own defaults; `correction` names aliases."""

    policy: str
    advantage: str
    aggregation: str
    options: dict[str, float] = field(default_factory=dict)
    correction: tuple[str, ...] = ()


_CONSTANT = "sequence_mean_of_token_sum_over_max_length"
_PER_ROLLOUT = "sequence_mean_of_token_mean"

PRESETS: dict[str, Preset] = {
    "grpo": Preset("ppo_clip", "group_mean_std", "token_mean"),
    "dr_grpo": Preset("ppo_clip", "group_mean", _CONSTANT),
    "dapo": Preset("ppo_clip", "group_mean_std", "token_mean", {"clip_high": 0.28}),
    "gspo": Preset("gspo", "group_mean_std", _PER_ROLLOUT),
    "gmpo": Preset("gmpo", "group_mean_std", _PER_ROLLOUT),
    "cispo": Preset("cispo", "group_mean_std", "token_mean"),
    "sapo": Preset("sapo", "group_mean_std", _PER_ROLLOUT),
    "rloo": Preset("ppo_clip", "leave_one_out", "token_mean"),
    "reinforce": Preset("reinforce", "group_mean", "token_mean"),
    "reinforce_pp": Preset("ppo_clip", "group_mean_then_batch_whiten", "token_mean"),
    "opo": Preset("reinforce", "length_weighted_baseline", "token_mean"),
    "maxrl": Preset("ppo_clip", "max_rl", "token_mean"),
    "decoupled_ppo": Preset("decoupled_ppo", "group_mean_std", "token_mean"),
    "dppo": Preset("dppo_tv", "group_mean", "token_mean"),
    "prime_rl": Preset("dppo_behaviour", "group_mean", "token_mean"),
    "topr": Preset("topr", "group_mean", _CONSTANT),
    "kimi": Preset("kimi", "group_mean", "token_mean"),
    "dro": Preset("dro", "group_mean", "token_mean"),
    "m2po": Preset("reinforce", "group_mean_std", "token_mean", {"clip_high": 4.0}, correction=("m2po",)),
}


# ---- looking up ----------------------------------------------------------------------------------------------------------------


def is_own(policy: str) -> bool:
    """A person's own function rather than one of the table."""
    return ":" in policy


def alias(name: str) -> str:
    """A correction's name as the tables write it: `Seq-TIS` -> `seq_tis`."""
    return name.lower().replace("-", "_")


def corrections_of(settings: LossSettings) -> Sequence[str | CorrectionSettings]:
    """The settings' own corrections, else the preset's."""
    return PRESETS[settings.preset].correction if settings.correction is None else settings.correction


def expand(correction: str | CorrectionSettings) -> CorrectionSettings:
    """A valid correction with its alias expanded and its level filled in."""
    if isinstance(correction, str):
        return ALIASES[alias(correction)]
    levels = CORRECTIONS[correction.type].levels
    return correction if correction.level or not levels else correction.model_copy(update={"level": levels[0]})
