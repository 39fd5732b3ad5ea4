"""From the `[loss]` settings to one `ResolvedLoss`: preset, the keys that override it, aliases expanded, parameters filled in. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from slipstream.config.loss_problems import find_problems
from slipstream.config.loss_tables import ADVANTAGES, AGGREGATIONS, CORRECTIONS, POLICY_LOSSES, PRESETS, corrections_of, expand, is_own
from slipstream.config.settings import CorrectionSettings, LossSettings
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """What the `[loss]` settings amount to."""

    preset: str
    policy: str  # a name of POLICY_LOSSES, or a person's own as "module:function" or "file.py:function"
    options: dict[str, float]  # of the policy loss; parameters that are off are absent
    advantage: str
    aggregation: str
    old_logprobs: Literal["sampler", "recomputed"]
    corrections: tuple[CorrectionSettings, ...] = ()

    @property
    def own_policy(self) -> bool:
        return is_own(self.policy)

    @property
    def needs_whole_batch(self) -> bool:
        """Some correction judges all tokens of a batch before its first update."""
        return any(CORRECTIONS[c.type].whole_batch for c in self.corrections)

    @property
    def uses_start(self) -> bool:
        """The logprobs at the start of the step enter: with several updates per batch they take a pass of their own."""
        return self.own_policy or self.old_logprobs == "recomputed" or any(CORRECTIONS[c.type].uses_start for c in self.corrections)

    def lines(self) -> list[str]:
        """The expansion for people, one part a line."""
        policy, formula = _call(self.policy, self.options), "" if self.own_policy else f": {POLICY_LOSSES[self.policy].formula}"
        out = [
            f"loss {self.preset}: {policy}{formula}",
            f"  advantage {self.advantage}: {ADVANTAGES[self.advantage].formula}",
            f"  aggregation {self.aggregation}: {AGGREGATIONS[self.aggregation]}",
            f"  {self._denominator()}",
        ]
        if not self.corrections:
            out.append("  no correction")
        for correction in self.corrections:
            keys = correction.model_dump(exclude={"type"}, exclude_none=True)
            out.append(f"  correction {_call(correction.type, keys)}: weight {CORRECTIONS[correction.type].formula}")
        return out

    def _denominator(self) -> str:
        if not self.own_policy and POLICY_LOSSES[self.policy].denominator == "none":
            return "no π_old: c = π / the sampler's logprobs"
        return f"π_old {self.old_logprobs}: " + (
            "the sampler's logprobs" if self.old_logprobs == "sampler" else "the logprobs of the weights at the start of the step"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "corrections": [c.model_dump(exclude_none=True) for c in self.corrections]}


def resolve(settings: LossSettings) -> ResolvedLoss:
    """The loss with every part and parameter filled in. ConfigError with every problem.

    >>> resolve(LossSettings(preset="dapo", clip_low=0.1)).options
    {'clip_low': 0.1, 'clip_high': 0.28}
    >>> resolve(LossSettings(correction=["tis"])).old_logprobs
    'recomputed'
    """
    problems = list(find_problems(settings))
    if problems:
        raise ConfigError([f"loss.{keys[0]}: {text}" for keys, text in problems])
    preset = PRESETS[settings.preset]
    policy = settings.policy or preset.policy
    corrections = tuple(expand(c) for c in corrections_of(settings))
    return ResolvedLoss(
        preset=settings.preset,
        policy=policy,
        options=_options(settings, policy),
        advantage=settings.advantage or preset.advantage,
        aggregation=settings.aggregation or preset.aggregation,
        old_logprobs=_old_logprobs(settings, policy, corrections),
        corrections=corrections,
    )


def _options(settings: LossSettings, policy: str) -> dict[str, float]:
    """Defaults of the policy loss, under the preset's (of its own policy loss), under what the settings say."""
    if is_own(policy):
        return dict(settings.options)
    preset = PRESETS[settings.preset]
    values = {name: parameter.default for name, parameter in POLICY_LOSSES[policy].parameters.items()}
    values |= preset.options if policy == preset.policy else {}
    values |= {"clip_low": settings.clip_low} if settings.clip_low is not None else {}
    values |= {"clip_high": settings.clip_high} if settings.clip_high is not None else {}
    values |= settings.options
    return {name: value for name, value in values.items() if value is not None}


def _old_logprobs(settings: LossSettings, policy: str, corrections: Iterable[CorrectionSettings]) -> Literal["sampler", "recomputed"]:
    """As set; where nothing is set, the sampler's unless policy loss or corrections need the other."""
    if settings.old_logprobs is not None:
        return settings.old_logprobs
    denominator = "either" if is_own(policy) else POLICY_LOSSES[policy].denominator
    if denominator == "none":
        return "sampler"
    if denominator == "recomputed" or any(CORRECTIONS[c.type].weighs for c in corrections):
        return "recomputed"
    return "sampler"


def _call(name: str, values: dict[str, Any]) -> str:
    inside = ", ".join(f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}" for key, value in values.items())
    return f"{name}({inside})"
