"""The metric line of a step. Numbers come from the step's own groups, and from what the run's totals grew by since the step before."""

from __future__ import annotations

import math
from collections import Counter  # noqa: F401 (in a doctest)
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.controller.buffer import has_zero_variance
from slipstream.controller.events import BatchRecorded, StepFinished
from slipstream.controller.run_state import Member, RunState
from slipstream.controller.stale import trained_by
from slipstream.controller.totals import Totals
from slipstream.types import Group, StepReport

PER_STEP = ("generated_tokens", "filtered", "dropped", "wasted_tokens", "failures")  # of `Totals`


def step_line(
    report: StepReport,
    finished: StepFinished,
    record: BatchRecorded,
    groups: tuple[Group, ...],
    state: RunState,
    *,
    time_s: float,
    grown: Totals,
    weight_sync_s: float | None,
    sync_repairs: int | None = None,
    engines: dict[str, Any],
) -> dict[str, Any]:
    """The flat line of one step. `grown`: see `growth`. The trainer's own metrics come last and do not overwrite what is counted here."""
    active = finished.active_s
    line: dict[str, Any] = {
        "step": report.step,
        "incarnation": state.incarnation,
        "version": report.version,
        "time_s": time_s,
        **reward_stats(groups),
        **_lengths(groups),
        **staleness_stats(dict(record.staleness)),
        "max_staleness": state.max_staleness,
        "staleness_bound": _bound(state.batches[report.step].members),
        "several_versions_fraction": _ratio(record.num_several_versions, record.num_samples),
        **version_spreads(groups),
        **_interrupts(groups),
        "masked_stale_tokens": record.num_masked_tokens,
        "down_weighted_tokens": record.num_down_weighted_tokens,
        **dropping_bias(state.totals),
        "trainer_idle_fraction": _ratio(finished.trainer_wait_s, finished.trainer_active_s),
        "rollout_idle_fraction": _ratio(finished.rollout_idle_s, active),
        "generated_tokens_per_s": _ratio(grown.generated_tokens, active),
        "trained_tokens_per_s": _ratio(record.num_loss_tokens, active),
        "trained_samples_per_s": _ratio(record.num_samples, active),
        "buffer_groups": state.num_finished,
        "slots_taken": state.slots_taken,
        "slots": state.num_slots,
        "weight_sync_s": weight_sync_s,
        **({} if sync_repairs is None else {"sync_repairs": sync_repairs}),
        **engines,
        "step_s": report.step_s,
        "wait_s": report.wait_s,
        "publish_s": report.publish_s,
        "skipped": report.skipped,
        "num_loss_tokens": record.num_loss_tokens,
        "filtered_groups": grown.filtered,
        **{f"dropped_groups/{reason}": count for reason, count in sorted(grown.dropped.items())},
        **{f"wasted_tokens/{cause}": count for cause, count in sorted(grown.wasted_tokens.items())},
        **{f"failures/{cause}": count for cause, count in sorted(grown.failures.items())},
    }
    return line | {key: value for key, value in report.metrics.items() if key not in line}


def growth(before: Totals, now: Totals) -> Totals:
    """What those totals that the lines tell step by step grew by; the others are 0.

    >>> growth(Totals(filtered=1, failures=Counter(deadline=2)), Totals(filtered=4, failures=Counter(deadline=2, aborted=1))).failures
    Counter({'aborted': 1})
    """
    return Totals(**{name: getattr(now, name) - getattr(before, name) for name in PER_STEP})


def _bound(members: Sequence[Member]) -> int | None:
    """The worst staleness that was derived for these groups; None: there is none for some."""
    bounds = [m.bound for m in members]
    return None if None in bounds else max((b for b in bounds if b is not None), default=0)


def dropping_bias(totals: Totals) -> dict[str, Any]:
    """Mean length and mean reward of the rollouts that the run has dropped because they were stale, beside those it has trained; nothing
    where it has dropped none. A running rollout that was cancelled counts with its tokens so far, and has no reward."""
    if not totals.stale.rollouts:
        return {}
    return {
        "stale_dropped_rollouts": totals.stale.rollouts,
        "stale_dropped_tokens_mean": totals.stale.mean_tokens,
        "stale_trained_tokens_mean": totals.trained.mean_tokens,
        "stale_dropped_reward_mean": totals.stale.mean_reward,
        "stale_trained_reward_mean": totals.trained.mean_reward,
    }


def reward_stats(groups: Sequence[Group]) -> dict[str, Any]:
    """Mean and deviation of the rewards, the mean of each score and of each of its parts where it applied."""
    rewards = [r for g in groups for r in g.rewards]
    scores: dict[str, list[float]] = {}  # "<scorer>" and, of what it reported besides, "<scorer>/<part>"
    for score in (s for g in groups for r in g.rollouts for s in r.scores):
        values = {} if score.value is None else {score.name: score.value}
        for name, value in (values | {f"{score.name}/{part}": value for part, value in score.parts.items()}).items():
            scores.setdefault(name, []).append(value)
    return {
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        **{f"reward/{name}": float(np.mean(values)) for name, values in sorted(scores.items())},
        "zero_variance_fraction": _ratio(sum(has_zero_variance(g.rewards) for g in groups), len(groups)),
    }


def _lengths(groups: tuple[Group, ...]) -> dict[str, Any]:
    rollouts = [r for g in groups for r in g.rollouts]
    truncated = sum(r.stop_reason is not None and r.stop_reason.truncated for r in rollouts)
    return {
        "completion_tokens_mean": _ratio(sum(r.num_sampled_tokens for r in rollouts), len(rollouts)),
        "truncated_fraction": _ratio(truncated, len(rollouts)),
    }


def version_spreads(groups: Sequence[Group]) -> dict[str, Any]:
    """How many versions lie between the oldest and the newest trained token: within a rollout, and within a group."""
    of_rollouts, of_groups = [], []
    for group in groups:
        trained = [[span.version for span, _ in spans] for r in group.rollouts if (spans := trained_by(r))]
        of_rollouts += [max(versions) - min(versions) for versions in trained]
        if trained:
            of_groups.append(max(map(max, trained)) - min(map(min, trained)))
    return {
        "version_spread_mean": _ratio(sum(of_rollouts), len(of_rollouts)),
        "version_spread_max": max(of_rollouts, default=None),
        "group_version_spread_mean": _ratio(sum(of_groups), len(of_groups)),
    }


def _interrupts(groups: Sequence[Group]) -> dict[str, Any]:
    counts = [r.interrupts for g in groups for r in g.rollouts]
    return {"interrupts": sum(counts), "interrupted_fraction": _ratio(sum(n > 0 for n in counts), len(counts))}


def staleness_stats(histogram: dict[int, int]) -> dict[str, Any]:
    """Mean, p99 and maximum over tokens.

    >>> staleness_stats({0: 50, 1: 49, 3: 1})
    {'staleness_mean': 0.52, 'staleness_p99': 1, 'staleness_max': 3}
    """
    counts = sorted((age, n) for age, n in histogram.items() if n > 0)
    total = sum(n for _, n in counts)
    if not total:
        return {"staleness_mean": None, "staleness_p99": None, "staleness_max": None}
    rank, seen, p99 = math.ceil(0.99 * total), 0, 0
    for age, n in counts:
        seen += n
        if seen >= rank:
            p99 = age
            break
    return {"staleness_mean": sum(a * n for a, n in counts) / total, "staleness_p99": p99, "staleness_max": counts[-1][0]}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
