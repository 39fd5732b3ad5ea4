"""The deterministic scheduler of the inline launcher: one process, one thread, a logical clock whose unit is the engine tick.

    loop
        settle      every task runs until it waits; calls to the outside (scores, environments) are awaited and their results
                    released in key order. A trainer whose batch is complete makes its step in here, so a step takes no tick.
        adopt       newest published weights (or, with `weight_sync.lag`, the next version once the engine has run dry)
        tick        one forward pass for every live sequence; its frame is handed to the waiting rollouts

Nothing here depends on time, so the same settings and seed give the same order of everything: promise 7(b). Deadlines still run
on the real clock, but one that fires ends the run or fails its rollout with that cause; it never reorders anything silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from slipstream.errors import DeadlineExceeded

SETTLE_DEADLINE_S = 3600.0  # longest that outside calls may hold one tick; each has a shorter deadline of its own


class OutsideCalls(Protocol):
    @property
    def num_outstanding(self) -> int: ...

    async def settle(self) -> None: ...


async def run_until_blocked() -> None:
    """Let every other task of this loop run until all of them wait for something."""
    loop = asyncio.get_running_loop()
    ready: Any = loop._ready  # type: ignore[attr-defined]  # CPython's queue of runnable callbacks: the only exact answer to "does anything still want to run?"
    while True:
        await asyncio.sleep(0)
        if not ready:
            return


async def settle(outside: OutsideCalls, stopped: Callable[[], bool]) -> None:
    """Run every task and every outside call to its next wait."""
    while not stopped():
        await run_until_blocked()
        if outside.num_outstanding == 0:
            return
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                await outside.settle()
        except TimeoutError:
            raise DeadlineExceeded(f"scores or environments did not answer within {SETTLE_DEADLINE_S:.0f} s") from None
