"""Calls that leave the worker's loop: scorers and environments. Where a run is deterministic their answers arrive at engine ticks.

A rollout worker makes every such call through `ExternalCalls.run(key, awaitable)`:

    FreeCalls     the answer arrives when it is there
    TickedCalls   answers are held until the scheduler asks for them (`settle`), and then released in the order of their keys, so that
                  the order in which they happen to end decides nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Key = tuple[Any, ...]  # (purpose, group_id, attempt, "environment" | "score", sample or scorer, number of the call): sortable


class ExternalCalls(Protocol):
    async def run(self, key: Key, awaitable: Awaitable[T]) -> T:
        """The awaitable's result, or its exception. Cancelling the caller cancels the call."""
        ...


class FreeCalls:
    """Just awaits."""

    async def run(self, key: Key, awaitable: Awaitable[T]) -> T:
        return await awaitable


class TickedCalls:
    """Holds results and exceptions until `settle`."""

    def __init__(self) -> None:
        self._calls: dict[Key, tuple[asyncio.Task[Any], asyncio.Future[None]]] = {}

    @property
    def num_outstanding(self) -> int:
        """Calls made and not yet released."""
        return len(self._calls)

    async def run(self, key: Key, awaitable: Awaitable[T]) -> T:
        if key in self._calls:
            raise ValueError(f"external call {key} is already outstanding")
        task = asyncio.ensure_future(_awaited(awaitable))
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[key] = (task, released)
        try:
            await released
        except asyncio.CancelledError:
            self._calls.pop(key, None)
            task.cancel()
            await asyncio.wait({task})  # its own clean-up (killing a child, say) is part of the call
            raise
        return task.result()

    async def settle(self) -> None:
        """Wait until every outstanding call has ended, then release them all in key order.

        Each call has a deadline of its own (a scorer's, a rollout's), so this wait ends.
        """
        while pending := [task for task, _ in self._calls.values() if not task.done()]:
            await asyncio.wait(pending)
        due, self._calls = sorted(self._calls.items()), {}
        for _, (_, released) in due:
            if not released.done():
                released.set_result(None)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
