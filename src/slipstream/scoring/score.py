"""The scoring stage: a group whose rollouts have ended becomes a group with rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from slipstream.errors import DeadlineExceeded, ScoringDeadline, ScoringError
from slipstream.protocols import Scorer
from slipstream.rollout.external import ExternalCalls, FreeCalls
from slipstream.types import Group, Purpose, Rollout, RolloutStatus, Score

SCORING_FAILED = "scoring failed"
NO_REWARD_APPLIES = "no reward applies"


async def score_group(
    group: Group,
    scorers: Sequence[Scorer],
    external: ExternalCalls | None = None,
    *,
    deadlines_are_fatal: bool = False,
    needed: int | None = None,
) -> Group:
    """The group with scores and rewards on every rollout.

    A reward is the weighted sum of the applicable scores (see `combined`). A rollout to which none applies becomes failed ("no reward
    applies"); a scorer that fails makes all rollouts of the group failed ("scoring failed: ..."). Only finished rollouts are scored, and
    none where fewer than `needed` (all by default) have finished: such a group counts as failed already. Without any scorer, which only a
    run with a teacher has, a reward is 0 in training, by definition of the task, and None in an evaluation. With `deadlines_are_fatal`
    (deterministic runs) a scorer's deadline raises DeadlineExceeded.
    """
    if not scorers:
        return _without_rewards(group)
    finished = tuple(rollout for rollout in group.rollouts if rollout.status.ok)
    if len(finished) < (len(group.rollouts) if needed is None else needed):
        return group
    scored = await _score(msgspec.structs.replace(group, rollouts=finished), scorers, external or FreeCalls(), deadlines_are_fatal)
    rest = iter(scored)
    return msgspec.structs.replace(group, rollouts=tuple(next(rest) if r.status.ok else r for r in group.rollouts))


async def _score(group: Group, scorers: Sequence[Scorer], external: ExternalCalls, deadlines_are_fatal: bool) -> Sequence[Rollout]:
    """The rollouts of a group in which all have finished, scored or failed."""
    try:
        columns = await _all_scores(group, scorers, external)
    except ScoringDeadline as error:
        if deadlines_are_fatal:
            raise DeadlineExceeded(f"{error}; a deadline that fires ends a deterministic run") from error
        return _failed(group, error)
    except ScoringError as error:
        return _failed(group, error)
    return [_rewarded(rollout, tuple(scores)) for rollout, scores in zip(group.rollouts, zip(*columns, strict=True), strict=True)]


async def start_scorers(scorers: Sequence[Scorer]) -> None:
    """Start what can be started ahead, so that a function that does not import is known at once (ConfigError)."""
    for scorer in scorers:
        start = getattr(scorer, "start", None)
        if start is not None:
            await start()


async def close_scorers(scorers: Sequence[Scorer]) -> None:
    """Close them all, whatever one of them does; the first error is raised in the end."""
    results = await asyncio.gather(*(scorer.close() for scorer in scorers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def combined(scores: Sequence[Score], purpose: Purpose = Purpose.TRAIN) -> float | None:
    """The weighted sum of the applicable scores; None if none applies. Where every weight is 0 (they are measured, a teacher is what is
    learned from) an evaluation takes their plain sum.

    >>> measured = [Score(name="exact", value=1.0, weight=0.0)]
    >>> combined(measured), combined(measured, Purpose.EVAL)
    (0.0, 1.0)
    """
    plain = purpose is Purpose.EVAL and all(score.weight == 0 for score in scores)
    applicable = [score.value if plain else score.weight * score.value for score in scores if score.value is not None]
    return sum(applicable) if applicable else None


def _without_rewards(group: Group) -> Group:
    reward = 0.0 if group.purpose is Purpose.TRAIN else None
    rollouts = tuple(msgspec.structs.replace(r, reward=reward) if r.status.ok else r for r in group.rollouts)
    return msgspec.structs.replace(group, rollouts=rollouts)


async def _all_scores(group: Group, scorers: Sequence[Scorer], external: ExternalCalls) -> list[list[Score]]:
    """[scorers][G]; the scorers work at the same time, and the first failure in their order is raised once all have ended."""

    async def one(index: int, scorer: Scorer) -> list[Score]:  # a group that is dropped before this begins has called nobody
        return await external.run((group.purpose.value, group.group_id, group.attempt, "score", index, 0), scorer.score(group))

    results = await asyncio.gather(*(one(*numbered) for numbered in enumerate(scorers)), return_exceptions=True)
    columns: list[list[Score]] = []
    for scorer, result in zip(scorers, results, strict=True):
        if isinstance(result, BaseException):
            raise result
        if len(result) != len(group.rollouts):
            raise ScoringError(f"scorer {scorer.name!r} gave {len(result)} scores for {len(group.rollouts)} rollouts")
        columns.append(result)
    return columns


def _rewarded(rollout: Rollout, scores: tuple[Score, ...]) -> Rollout:
    reward = combined(scores, rollout.purpose)
    if reward is None:
        error = f"{NO_REWARD_APPLIES}: every scorer said None ({', '.join(score.name for score in scores)})"
        return msgspec.structs.replace(rollout, scores=scores, status=RolloutStatus.FAILED, error=error)
    return msgspec.structs.replace(rollout, scores=scores, reward=reward)


def _failed(group: Group, error: ScoringError) -> Sequence[Rollout]:
    text = f"{SCORING_FAILED}: {error}"
    return [msgspec.structs.replace(r, status=RolloutStatus.FAILED, error=text) for r in group.rollouts]
