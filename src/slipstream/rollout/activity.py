"""What the rollout worker owes, told to whoever watches it.

Waiting for the engine or the controller is their work, so the worker is idle then. It owes what it started itself: calls of scorers and
environments. Each of those has a deadline of its own that the worker's loop enforces; the watcher's deadline is the longest of them plus
slack, counted anew whenever a call begins or ends, so it passes only where the loop itself is stuck.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

from slipstream.protocols import Progress
from slipstream.rollout.external import ExternalCalls

T = TypeVar("T")

SLACK_S = 60.0


class WatchedCalls:
    """External calls that show on the progress page."""

    def __init__(self, calls: ExternalCalls, progress: Progress, longest_s: float):
        self._calls, self._progress, self._deadline_s = calls, progress, longest_s + SLACK_S
        self._outstanding: dict[Any, str] = {}  # key -> what is owed

    async def run(self, key: Any, awaitable: Awaitable[T]) -> T:
        purpose, group_id, _, what, *_ = key
        self._outstanding[key] = f"{what} of {purpose} group {group_id}"
        self._show()
        try:
            return await self._calls.run(key, awaitable)
        finally:
            del self._outstanding[key]
            self._show()

    def _show(self) -> None:
        if not self._outstanding:
            self._progress.idle()
            return
        oldest = next(iter(self._outstanding.values()))
        more = len(self._outstanding) - 1
        self._progress.working("scoring and environments", self._deadline_s, oldest + (f" and {more} more" if more else ""))
