"""What may leave the buffer: clean groups in, batches within their staleness bound out. Pure functions over records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from slipstream.controller.events import BatchRecorded, LeftOut
from slipstream.controller.selection import NOT_SELECTED, usable
from slipstream.errors import StalenessError
from slipstream.types import Batch, Group, Rollout

MAX_CAUSE_CHARS = 200  # of a failure that a group could spare


def failure_of(group: Group, group_size: int) -> str | None:
    """Why this attempt of the group failed; None if `group_size` rollouts finished with rewards.

    Without oversampling one failed rollout fails the group.
    """
    unusable = [r for r in group.rollouts if not usable(r)]
    if not unusable or len(group.rollouts) - len(unusable) >= group_size:
        return None
    return next((failure_cause(r) for r in unusable if not r.status.ok), "no reward: no scorer was applicable to some rollout")


def failure_cause(rollout: Rollout) -> str:
    return rollout.error or "a rollout failed without a cause"


def bad_data(group: Group, group_size: int, newest_versions: dict[int, int], num_samples: int | None = None) -> str | None:
    """What makes this group unfit to train on (promise 4), None for a clean one.

    `num_samples`: how many were sampled, of which `group_size` were kept; as many by default. `newest_versions`: incarnation -> the newest
    version it ever published. Every sampled token must come from a version that existed, and have a finite logprob <= 0; only sampled
    tokens may be trained; rewards are finite.
    """
    num_samples = num_samples or group_size
    samples = sorted(r.sample for r in group.rollouts)
    if len(samples) != group_size or not set(samples) <= set(range(num_samples)) or len(set(samples)) < group_size:
        return f"samples {samples}, expected " + ("" if num_samples == group_size else f"{group_size} of ") + f"0 to {num_samples - 1}"
    for rollout in group.rollouts:
        problem = _bad_rollout(rollout, newest_versions)
        if problem:
            return f"sample {rollout.sample}: {problem}"
    return None


def _bad_rollout(rollout: Rollout, newest_versions: dict[int, int]) -> str | None:
    length = len(rollout.token_ids)
    if not len(rollout.logprobs) == len(rollout.loss_mask) == length:
        return f"{length} tokens, {len(rollout.logprobs)} logprobs, {len(rollout.loss_mask)} mask entries"
    sampled = np.zeros(length, dtype=bool)
    end = 0
    for span in rollout.spans:
        if not end <= span.start < span.end <= length:
            return f"span [{span.start}, {span.end}) after token {end} of {length}"
        newest = newest_versions.get(span.incarnation)
        if newest is None or not 0 <= span.version <= newest:
            return f"token of version {span.incarnation}.{span.version}, newest is {span.incarnation}.{newest}"
        sampled[span.start : span.end] = True
        end = span.end
    logprobs = rollout.logprobs[sampled]
    if not np.isfinite(logprobs).all():
        return f"logprob {logprobs[~np.isfinite(logprobs)][0]}"
    if (logprobs > 0).any():
        return f"positive logprob {logprobs.max()}"
    if (rollout.loss_mask & ~sampled).any():
        return "the loss mask covers tokens that the model did not sample"
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        return f"reward {rollout.reward}"
    return None


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Equal rewards teach nothing relative to their mean."""
    return len(rewards) > 0 and max(rewards) == min(rewards)


def num_sampled_tokens(group: Group) -> int:
    return sum(r.num_sampled_tokens for r in group.rollouts)


def left_out(rollouts: Sequence[Rollout]) -> LeftOut | None:
    """What is recorded of the rollouts that a selection left out; None where it left out none."""
    if not rollouts:
        return None
    tokens: Counter[str] = Counter()
    for rollout in rollouts:
        tokens[NOT_SELECTED if usable(rollout) else "failed"] += rollout.num_sampled_tokens
    causes = (failure_cause(r).strip().partition("\n")[0] for r in rollouts if not r.status.ok)
    return LeftOut(tokens=dict(tokens), failures=tuple(cause[:MAX_CAUSE_CHARS] for cause in causes))


def make_batch(step: int, groups: Sequence[Group], bounds: Sequence[int], max_staleness: int, on_stale: str) -> tuple[Batch, BatchRecorded]:
    """Batch `step` and the event that records it. The trainer's version when it trains batch s is s, so staleness is s - version.

    `bounds`: the worst staleness derived when each group was admitted; an older token, or one from the future, raises StalenessError.
    With on_stale = "mask_tokens", tokens older than `max_staleness` leave the loss mask (only a window > 1 lets them occur).
    """
    staleness: Counter[int] = Counter()
    num_samples = num_several = num_masked = 0
    out = []
    for group, bound in zip(groups, bounds, strict=True):
        _check_bound(step, group, bound)
        rollouts = []
        for rollout in group.rollouts:
            kept = _without_stale(rollout, step - max_staleness) if on_stale == "mask_tokens" else rollout
            num_masked += int(rollout.loss_mask.sum()) - int(kept.loss_mask.sum())
            rollouts.append(kept)
            ages = step - kept.model_versions()[kept.loss_mask]
            if len(ages):
                num_samples += 1
                num_several += len({(s.incarnation, s.version) for s in kept.spans if kept.loss_mask[s.start : s.end].any()}) > 1
                for age, tokens in enumerate(np.bincount(ages)):
                    staleness[age] += int(tokens)
        same = all(a is b for a, b in zip(rollouts, group.rollouts, strict=True))
        out.append(group if same else msgspec.structs.replace(group, rollouts=tuple(rollouts)))
    num_loss_tokens = sum(staleness.values())
    record = BatchRecorded(
        step=step,
        group_ids=tuple(g.group_id for g in groups),
        num_loss_tokens=num_loss_tokens,
        num_samples=num_samples,
        num_several_versions=num_several,
        staleness=tuple(sorted((age, tokens) for age, tokens in staleness.items() if tokens)),
        num_masked_tokens=num_masked,
    )
    return Batch(step=step, groups=tuple(out), num_loss_tokens=num_loss_tokens), record


def _check_bound(step: int, group: Group, bound: int) -> None:
    for rollout in group.rollouts:
        for span in rollout.spans:
            if not 0 <= step - span.version <= bound:
                raise StalenessError(
                    f"group {group.group_id} sample {rollout.sample} has tokens of version {span.incarnation}.{span.version} from "
                    f"{span.engine_id}, to be trained at step {step}: staleness {step - span.version}, allowed are 0 to {bound}"
                )


def _without_stale(rollout: Rollout, oldest: int) -> Rollout:
    """The rollout with tokens of versions below `oldest` out of the loss mask."""
    if rollout.oldest_version is None or rollout.oldest_version >= oldest:
        return rollout
    versions = rollout.model_versions()
    return msgspec.structs.replace(rollout, loss_mask=rollout.loss_mask & ~((versions >= 0) & (versions < oldest)))
