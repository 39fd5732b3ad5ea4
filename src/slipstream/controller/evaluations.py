"""Evaluations: which are due, one at a time, what became of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slipstream.config.settings import Config
from slipstream.controller import events as ev
from slipstream.controller.journal import Journal
from slipstream.errors import WeightSyncError
from slipstream.types import EvalResult, EvalTask


def pending(handled: dict[int, int], confirmed: int, every: int, steps: int) -> list[int]:
    """Due versions that some engine can serve and that were neither evaluated nor skipped, ascending.

    Due are version 0, every multiple of `every`, and the last version. `handled`: due version -> what became of it.

    >>> pending({}, 0, 25, 60), pending({0: 0}, 55, 25, 60), pending({0: 0, 25: 26, 50: 50}, 60, 25, 60)
    ([0], [25, 50], [60])
    """
    last = max(handled, default=-1)
    due = list(range(0 if last < 0 else (last // every + 1) * every, min(confirmed, steps) + 1, every))
    if confirmed >= steps > last and due[-1:] != [steps]:
        due.append(steps)
    return due


def choose(due: list[int], confirmed: int) -> tuple[int | None, dict[int, str]]:
    """(the one to order now, those that are skipped and why). The newest due wins, except that version 0 is evaluated first, and only
    on the start weights themselves: after a crash amid it a later version would pass for the start.

    >>> choose([0, 25], 0), choose([25, 50], 51), choose([], 0)
    ((0, {}), (50, {25: 'version 50 became due before it could start'}), (None, {}))
    >>> choose([0], 7)
    (None, {0: 'it had not ended when its worker stopped, and the engine holds version 7 now'})
    """
    skipped = {}
    if due and due[0] == 0:
        if confirmed == 0:
            return 0, {}
        skipped[0] = f"it had not ended when its worker stopped, and the engine holds version {confirmed} now"
        due = due[1:]
    skipped |= {old: f"version {due[-1]} became due before it could start" for old in due[:-1]}
    return (due[-1] if due else None), skipped


def rewards_of(result: EvalResult) -> list[float]:
    return [r for item in result.items for r in item.rewards if r is not None]


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def evaluation_line(result: EvalResult, due: int, samples: int) -> dict[str, Any]:
    """The flat line of one evaluation, for metrics.jsonl and the display."""
    rewards = rewards_of(result)
    center = mean(rewards)
    spread = None if center is None else math.sqrt(math.fsum((r - center) ** 2 for r in rewards) / len(rewards))
    return {
        "step": due,
        "version": result.version,
        "incarnation": result.incarnation,
        "eval_reward": center,
        "eval_reward_std": spread,
        "num_items": len(result.items),
        "samples": samples,
        "failed": sum(r is None for item in result.items for r in item.rewards),
        "duration_s": result.duration_s,
        "engine_s": result.engine_s,
        "completion_tokens_mean": mean([float(n) for item in result.items for n in item.num_tokens]),
    }


class EvaluationDesk:
    """Orders evaluations and takes their results in."""

    def __init__(self, journal: Journal, config: Config, rows: Sequence[dict[str, Any]]):
        self._journal, self._config = journal, config
        self._rows = tuple(rows)[: config.evaluation.limit]

    @property
    def settled(self) -> bool:
        """Whether the last version is evaluated and nothing runs (or there is nothing to evaluate on)."""
        evaluations, last = self._journal.state.evaluations, self._config.trainer.steps
        return not self._rows or (evaluations.running is None and last in evaluations.handled)

    def order(self) -> EvalTask | None:
        state, settings = self._journal.state, self._config.evaluation
        evaluations = state.evaluations
        if not self._rows or evaluations.running is not None:
            return None
        confirmed = max(state.engines.values(), default=-1)
        due, skipped = choose(pending(evaluations.handled, confirmed, settings.every, self._config.trainer.steps), confirmed)
        for old, reason in skipped.items():
            self._journal.record(ev.EvaluationSkipped(due=old, reason=reason))
            self._journal.observer.note(f"the evaluation of version {old} is skipped: {reason}")
        if due is None:
            return None
        number = evaluations.num_ordered
        self._journal.record(ev.EvaluationOrdered(number=number, due=due))
        return EvalTask(
            number=number,
            rows=self._rows,
            samples=settings.samples,
            temperature=settings.temperature,
        )

    def finish(self, result: EvalResult) -> None:
        """Take in an evaluation; one that is not the running one (ordered before a restart, or reported twice) changes nothing."""
        running = self._journal.state.evaluations.running
        if running is None or running.number != result.number:
            return
        if result.version < running.due:  # the engine that made it due has died, and another was pinned
            return self.abort()
        published = self._journal.ledger.version_checksum(result.incarnation, result.version)
        if published != result.checksum:
            raise WeightSyncError(
                f"evaluation {result.number} ran on version {result.incarnation}.{result.version} with checksum {result.checksum}, "
                f"published was {published}"
            )
        line = evaluation_line(result, running.due, self._config.evaluation.samples)
        self._journal.record(
            ev.EvaluationFinished(
                number=result.number,
                due=running.due,
                incarnation=result.incarnation,
                version=result.version,
                checksum=result.checksum,
                reward=mean(rewards_of(result)),
                num_failed=line["failed"],
                duration_s=result.duration_s,
                engine_s=result.engine_s,
            ),
            result,
        )
        self._journal.tell(lambda: self._journal.observer.evaluation(line, result))

    def lost(self, number: int) -> None:
        """The weights that this evaluation ran on are gone with their engine; nothing where it is not the running one."""
        running = self._journal.state.evaluations.running
        if running is not None and running.number == number:
            self.abort()

    def abort(self) -> None:
        """The worker of the running evaluation, or its engine, is gone: it is ordered again from its beginning."""
        running = self._journal.state.evaluations.running
        if running is not None:
            self._journal.record(ev.EvaluationAborted(number=running.number))
