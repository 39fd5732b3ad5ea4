"""The scorers other than child processes, and which setting becomes which scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.config.settings import RewardSettings
from slipstream.errors import DeadlineExceeded, ScoringDeadline
from slipstream.protocols import Scorer
from slipstream.scoring.builtin import BUILTIN_REWARDS
from slipstream.scoring.functions import RewardFunction
from slipstream.scoring.loading import function_name, split_spec
from slipstream.scoring.process import ProcessScorer
from slipstream.scoring.threads import ThreadCalls
from slipstream.types import Group, Score

INLINE_REWARDS = ("exact", "number")  # pure and quick; regex runs in a child: a pattern may take for ever
JUDGE = "judge"


class InlineScorer:
    """A built-in, computed on the spot."""

    def __init__(self, reward: RewardFunction):
        self.name, self.weight, self._reward = reward.name, reward.weight, reward

    async def score(self, group: Group) -> list[Score]:
        return await self._reward.call(group)

    async def close(self) -> None:
        """Nothing to end."""


class CallableScorer:
    """A Python callable (closures included) in a thread of this process, one call at a time, with a deadline per group.

    Past its deadline the group fails and the thread is counted as lost; after a limit RunFailed names the function.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, weight: float = 1.0, timeout_s: float = 30.0):
        self.name, self.weight, self.timeout_s = name or getattr(function, "__name__", type(function).__name__), weight, timeout_s
        self._reward = RewardFunction(function, self.name, weight)
        self._threads = ThreadCalls(f"reward {self.name!r}")
        self._turn = asyncio.Lock()  # a closure may keep state: never two threads in it, lost ones aside

    async def score(self, group: Group) -> list[Score]:
        async with self._turn:
            try:
                return await self._threads.call(self._reward.call, {"group": group}, self.timeout_s)
            except DeadlineExceeded as error:
                raise ScoringDeadline(str(error)) from error

    async def close(self) -> None:
        """Nothing to end: lost threads are daemons."""


def make_scorers(rewards: Sequence[RewardSettings], callables: Sequence[Callable[..., Any]] = ()) -> list[Scorer]:
    """The scorers of a run: one per [[reward]] table, then one per callable. ConfigError for a setting that cannot be meant."""
    scorers: list[Scorer] = []
    for settings in rewards:
        scorers.append(_from_settings(settings, _free_name(settings.name or function_name(settings.function), scorers)))
    for function in callables:
        scorer = CallableScorer(function)
        scorers.append(CallableScorer(function, name=_free_name(scorer.name, scorers)))
    return scorers


def _from_settings(settings: RewardSettings, name: str) -> Scorer:
    if settings.function in INLINE_REWARDS:
        return InlineScorer(RewardFunction(BUILTIN_REWARDS[settings.function], name, settings.weight, settings.options))
    if settings.function == JUDGE:
        from slipstream.scoring.judge import JudgeScorer  # which needs the openai package

        return JudgeScorer(settings.options, name=name, weight=settings.weight, timeout_s=settings.timeout_s)
    if settings.function not in BUILTIN_REWARDS:
        split_spec(settings.function)
    return ProcessScorer(settings.function, name=name, weight=settings.weight, options=settings.options, timeout_s=settings.timeout_s)


def _free_name(name: str, scorers: Sequence[Scorer]) -> str:
    """`name`, numbered if another scorer has it: metrics are kept by name."""
    taken = {scorer.name for scorer in scorers}
    number, free = 2, name
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free
