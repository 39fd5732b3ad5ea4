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
    source: str
    denominator: Literal["either", "recomputed", "none"] = "either"  # what π_old may be; none: the formula has none
    weighs_by_sampler: bool = False  # a factor π/μ or π_start/μ is in it already: a weight ρ beside it would count twice


_CLIP = {"clip_low": Parameter(0.2), "clip_high": Parameter(0.2)}
_MASK = {"mask_low": Parameter(0.2), "mask_high": Parameter(0.2)}
_CAP = Parameter(20.0)

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 at most -dual_clip A",
        {**_CLIP, "dual_clip": Parameter(None, above=1.0)},
        "PPO, arXiv:1707.06347; dual clip 1912.09729",
    ),
    "gspo": PolicyLoss(
        "-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean log r) of the rollout",
        {"clip_low": Parameter(3e-4), "clip_high": Parameter(4e-4)},
        "GSPO, arXiv:2507.18071",
    ),
    "gmpo": PolicyLoss(
        "-A exp(mean log r) of the rollout; log r at most clip_high where A > 0, at least -clip_low where A < 0",
        {"clip_low": Parameter(0.4), "clip_high": Parameter(0.4)},
        "GMPO, arXiv:2507.20673",
    ),
    "cispo": PolicyLoss(
        "-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π",
        {"clip_low": Parameter(0.2), "clip_high": Parameter(0.28)},
        "MiniMax-M1, arXiv:2506.13585",
    ),
    "sapo": PolicyLoss(
        "-4/τ sigmoid(τ (r - 1)) A, τ by the sign of A",
        {"tau_positive": Parameter(1.0), "tau_negative": Parameter(1.05)},
        "SAPO, arXiv:2511.20347",
    ),
    "dppo_tv": PolicyLoss(
        "-keep sg(min(r, ratio_cap)) A log π; not kept: A > 0 and π - π_old > mask_high, A < 0 and π_old - π > mask_low",
        {**_MASK, "ratio_cap": _CAP},
        "DPPO, arXiv:2602.04879",
    ),
    "dppo_kl": PolicyLoss(
        "as dppo_tv; the distance is KL(π_old, π) of (this token, any other), with the sign of π - π_old",
        {"mask_low": Parameter(0.05), "mask_high": Parameter(0.05), "ratio_cap": _CAP},
        "DPPO, arXiv:2602.04879",
    ),
    "dppo_behaviour": PolicyLoss(
        "-keep A c + square_weight (log c)²; keep as dppo_tv, on π - μ",
        {**_MASK, "square_weight": Parameter(1e-3, zero_allowed=True)},
        "prime-rl's default",
        denominator="none",
        weighs_by_sampler=True,
    ),
    "topr": PolicyLoss(
        "-A log π where A > 0, -sg(min(c, ratio_cap)) A log π where A < 0",
        {"ratio_cap": Parameter(1.0)},
        "TOPR, arXiv:2503.14286",
        denominator="none",
        weighs_by_sampler=True,
    ),
    "reinforce": PolicyLoss(
        "-sg(min(c, 1 + clip_high)) A log π",
        {"clip_high": Parameter(0.02)},
        "Williams 1992; weights truncated as in Ionides 2008",
        denominator="none",
        weighs_by_sampler=True,
    ),
    "kimi": PolicyLoss("-(A log π - τ/2 (log r)²)", {"tau": Parameter(0.1)}, "Kimi k1.5, arXiv:2501.12599"),
    "dro": PolicyLoss("-(A log π - β/2 (log r)²)", {"beta": Parameter(0.05)}, "DRO, arXiv:2405.19107"),
    "decoupled_ppo": PolicyLoss(
        "-min(ρ, ratio_cap) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        {**_CLIP, "ratio_cap": Parameter(5.0)},
        "arXiv:2110.00641; AReaL, 2505.24298",
        denominator="recomputed",
        weighs_by_sampler=True,
    ),
}

# ---- advantages and aggregations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advantage:
    """One row of the table; mean and std are over the rollouts of one group and agent."""

    formula: str
    source: str
    needs_siblings: bool = True  # without them nothing is taken from the reward


ADVANTAGES: dict[str, Advantage] = {
    "group_mean_std": Advantage("(R - mean) / (std + 1e-6)", "GRPO, arXiv:2402.03300"),
    "group_mean": Advantage("R - mean", "Dr. GRPO, arXiv:2503.20783"),
    "leave_one_out": Advantage("R - mean of the others", "RLOO, arXiv:2402.14740"),
    "group_mean_then_batch_whiten": Advantage(
        "R - mean, then whitened over the batch's tokens", "REINFORCE++ baseline, arXiv:2501.03262", needs_siblings=False
    ),
    "length_weighted_baseline": Advantage("R - Σ length R / Σ length", "OPO, arXiv:2505.23585"),
    "max_rl": Advantage("(R - mean) / mean", "MaxRL, arXiv:2602.02710"),
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
    source: str
    bounds: tuple[str, ...]  # of "low" and "high", each needed
    levels: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    weighs: bool = False  # by ρ itself, not only 0 or 1
    whole_batch: bool = False  # judges all tokens of a batch together, before its first update
    uses_start: bool = True  # needs the logprobs of the weights at the start of the step


_MIS = "Liu et al. 2025, When speed kills stability"

CORRECTIONS: dict[str, CorrectionType] = {
    "truncate": CorrectionType("min(ρ, high)", "TIS, Yao et al. 2025", ("high",), ("token", "sequence"), weighs=True),
    "mask": CorrectionType(
        "ρ where low <= ρ <= high, else 0", f"MIS, {_MIS}; IcePop, arXiv:2510.18855", ("low", "high"), ("token", "sequence"), weighs=True
    ),
    "geometric": CorrectionType("1 where low <= (∏ρ)^(1/T) <= high of the rollout, else 0", _MIS, ("low", "high")),
    "opsm": CorrectionType(
        "0 for rollouts with A < 0 and mean(log μ - log π) > high, else 1",
        "DeepSeek-V3.2, arXiv:2512.02556",
        ("high",),
        uses_start=False,
    ),
    "m2po": CorrectionType(
        "0 for the largest (log ρ)² of the batch until their mean is <= high, else 1", "M2PO, arXiv:2510.01161", ("high",), whole_batch=True
    ),
    "version_gate": CorrectionType("1 for tokens at most high versions old, else 0", "", ("high",), uses_start=False),
    "reject": CorrectionType(
        "1 where k1 = -log ρ is in log low .. log high, k2 = (log ρ)²/2 or k3 = ρ - 1 - log ρ at most high, else 0",
        "Schulman 2020; verl's rejection sampling",
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
