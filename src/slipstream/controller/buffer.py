"""What may leave the buffer: clean groups in, batches within their staleness bound out. Pure functions over records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from slipstream.controller.events import BatchRecorded, LeftOut, StaleRule
from slipstream.controller.selection import NOT_SELECTED, usable
from slipstream.controller.stale import tally, trained_by, treat
from slipstream.errors import StalenessError
from slipstream.types import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Batch, Group, Rollout

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
    version it ever published. Every sampled token must come from a version that existed, and have a finite logprob <= 0, under frozen
    models too; only sampled tokens may be trained; rewards are finite.
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
    end = 0
    for span in rollout.spans:
        if not end <= span.start < span.end <= length:
            return f"span [{span.start}, {span.end}) after token {end} of {length}"
        newest = newest_versions.get(span.incarnation)
        if newest is None or not 0 <= span.version <= newest:
            return f"token of version {span.incarnation}.{span.version}, newest is {span.incarnation}.{newest}"
        end = span.end
    frozen = {name: rollout.arrays[name] for name in (REFERENCE_LOGPROBS, TEACHER_LOGPROBS) if name in rollout.arrays}
    for name, logprobs in {"logprob": rollout.logprobs, **frozen}.items():
        if problem := _bad_logprobs(name, logprobs, rollout):
            return problem
    if sum(tokens for _, tokens in trained_by(rollout)) < np.count_nonzero(rollout.loss_mask):
        return "the loss mask covers tokens that the model did not sample"
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        return f"reward {rollout.reward}"
    return None


def _bad_logprobs(name: str, logprobs: np.ndarray, rollout: Rollout) -> str | None:
    if logprobs.shape != rollout.token_ids.shape:
        return f"{name} of shape {logprobs.shape} for {len(rollout.token_ids)} tokens"
    for span in rollout.spans:
        values = logprobs[span.start : span.end]
        if not (values.max() <= 0 and values.min() > -np.inf):  # also for one that is not a number
            bad = values[~np.isfinite(values)]
            return f"{name} {bad[0]}" if len(bad) else f"positive {name} {values.max()}"
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


def make_batch(step: int, groups: Sequence[Group], bounds: Sequence[int | None], rule: StaleRule) -> tuple[Batch, BatchRecorded]:
    """Batch `step` and the event that records it. The trainer's version when it trains batch s is s, so staleness is s - version.

    `bounds`: the worst staleness derived when each group was admitted (None: there is none); an older token, or one from the future, raises
    StalenessError. `rule`: what happens to tokens older than its limit; groups that it would drop are not among these.
    """
    for group, bound in zip(groups, bounds, strict=True):
        _check_bound(step, group, bound)
    treated = [treat(group, step, rule) for group in groups]
    made = tuple(t.group for t in treated if t.group is not None)
    assert len(made) == len(groups), "a group that is to be dropped was pulled"
    trained = [(r, spans) for g in made for r in g.rollouts if (spans := trained_by(r))]
    staleness: Counter[int] = Counter()
    for _, spans in trained:
        for span, tokens in spans:
            staleness[step - span.version] += tokens
    record = BatchRecorded(
        step=step,
        group_ids=tuple(g.group_id for g in groups),
        num_loss_tokens=sum(staleness.values()),
        num_samples=len(trained),
        num_several_versions=sum(len({(span.incarnation, span.version) for span, _ in spans}) > 1 for _, spans in trained),
        staleness=tuple(sorted(staleness.items())),
        num_masked_tokens=sum(t.num_masked for t in treated),
        num_down_weighted_tokens=sum(t.num_down_weighted for t in treated),
        kept=tally([rollout for rollout, _ in trained]),
        dropped=tally([r for t in treated for r in t.dropped]),
        rule=rule,
    )
    return Batch(step=step, groups=made, num_loss_tokens=record.num_loss_tokens), record


def _check_bound(step: int, group: Group, bound: int | None) -> None:
    for rollout in group.rollouts:
        for span in rollout.spans:
            age = step - span.version
            if age < 0 or (bound is not None and age > bound):
                raise StalenessError(
                    f"group {group.group_id} sample {rollout.sample} has tokens of version {span.incarnation}.{span.version} from "
                    f"{span.engine_id}, to be trained at step {step}: staleness {age}, allowed are 0 to {'any' if bound is None else bound}"
                )
