"""What happens to data that is too old when its batch is formed: `buffer.on_stale`, judged per `buffer.stale_level`. Pure functions.

A token's age is the step that trains it minus the version that sampled it; its excess is what the age is above the limit, which is
`max_staleness`. At level "rollout" or "group" every trained token has the excess of the oldest trained one.

    on_stale        what has an excess
    mask_tokens     leaves the loss mask
    down_weight     is trained with weight decay ** excess (`Rollout.arrays["loss_weight"]`)
    drop            a rollout leaves its group; a group gives up its place, as does one that fewer than two rollouts are left of, or
                    whose rewards have become all equal: nothing can be learned relative to their mean
    cancel_early    the same for groups; running ones are not waited for (`intake.Intake.cancel_stale`, dropped as "cancelled")
    keep            is trained
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from slipstream.config.arithmetic import stale_level
from slipstream.config.settings import BufferSettings
from slipstream.controller.events import StaleRule, Tally
from slipstream.types import LOSS_WEIGHT, Group, Rollout, Span

DROPPING = ("drop", "cancel_early")


def rule_of(settings: BufferSettings, max_staleness: int) -> StaleRule:
    """The rule that holds now: the settings, and `max_staleness`, which may have been lowered."""
    decay = settings.stale_decay if settings.on_stale == "down_weight" else 1.0
    return StaleRule(settings.on_stale, stale_level(settings), max_staleness, decay)


@dataclass(slots=True)
class Treated:
    """A group as its batch gets it, and what happened to it."""

    group: Group | None  # None: it gives up its place
    num_masked: int = 0  # tokens
    num_down_weighted: int = 0
    dropped: list[Rollout] = field(default_factory=list)  # of a group that stays


def treat(group: Group, step: int, rule: StaleRule) -> Treated:
    """Apply the rule to a group that is to be trained at `step`; one without stale tokens is returned as it is."""
    if rule.on_stale == "keep" or (oldest := oldest_trained(group)) is None or step - oldest <= rule.limit:
        return Treated(group)
    if rule.on_stale in DROPPING:
        return _without_stale_rollouts(group, step, rule) if rule.level == "rollout" else Treated(None)
    treated = Treated(group)
    rollouts = []
    for rollout in group.rollouts:
        excess = _excess(rollout, step, rule, oldest)
        stale = int((excess > 0).sum())
        if not stale:
            rollouts.append(rollout)
        elif rule.on_stale == "mask_tokens":
            treated.num_masked += stale
            rollouts.append(msgspec.structs.replace(rollout, loss_mask=rollout.loss_mask & (excess <= 0)))
        else:
            treated.num_down_weighted += stale
            weight = (np.float64(rule.decay) ** excess).astype(np.float32)
            rollouts.append(msgspec.structs.replace(rollout, arrays=rollout.arrays | {LOSS_WEIGHT: weight}))
    treated.group = msgspec.structs.replace(group, rollouts=tuple(rollouts))
    return treated


def _excess(rollout: Rollout, step: int, rule: StaleRule, oldest: int) -> np.ndarray:
    """int64[L]: by how many versions each token is too old; 0 where it is not, or is not trained. `oldest`: of the group."""
    if rule.level == "token":
        versions = rollout.model_versions()
    else:
        versions = np.full(len(rollout.token_ids), oldest if rule.level == "group" else _oldest(rollout, default=step))
    return np.where(rollout.loss_mask, np.maximum(step - versions.astype(np.int64) - rule.limit, 0), 0)


def _without_stale_rollouts(group: Group, step: int, rule: StaleRule) -> Treated:
    left = [r for r in group.rollouts if step - _oldest(r, default=step) <= rule.limit]
    rewards = {r.reward for r in left}
    if len(left) < 2 or (len(rewards) == 1 and len(set(group.rewards)) > 1):
        return Treated(None)
    gone = [r for r in group.rollouts if r not in left]
    return Treated(msgspec.structs.replace(group, rollouts=tuple(left)), dropped=gone)


def oldest_trained(group: Group) -> int | None:
    """The oldest version among the group's trained tokens; None where none is trained. Masks are looked at from the oldest span on, so
    nearly always one."""
    spans = sorted([(span, rollout) for rollout in group.rollouts for span in rollout.spans], key=lambda pair: pair[0].version)
    return next((span.version for span, rollout in spans if _num_trained(rollout, span)), None)


def trained_by(rollout: Rollout) -> list[tuple[Span, int]]:
    """The spans that hold trained tokens, and how many. (Of a few spans, instead of an array over all tokens: a tenth of the time.)"""
    return [(span, count) for span in rollout.spans if (count := _num_trained(rollout, span))]


def _num_trained(rollout: Rollout, span: Span) -> int:
    return int(np.count_nonzero(rollout.loss_mask[span.start : span.end]))


def _oldest(rollout: Rollout, default: int) -> int:
    """The oldest version among the rollout's trained tokens."""
    return min([span.version for span, _ in trained_by(rollout)], default=default)


def tally(rollouts: list[Rollout] | tuple[Rollout, ...]) -> Tally:
    """Lengths and rewards of these rollouts."""
    rewards = [r.reward for r in rollouts if r.reward is not None]
    return Tally(len(rollouts), sum(r.num_sampled_tokens for r in rollouts), len(rewards), float(sum(rewards)))
