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
from typing import Any, Protocol


class OutsideCalls(Protocol):
    @property
    def num_outstanding(self) -> int: ...

    async def settle(self) -> None: ...


async def run_until_blocked() -> None:
    """Let every other task of this loop run until all of them wait for something."""
    # CPython's queue of runnable callbacks is the only exact answer to "does anything still want to run?".
    ready: Any = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    while ready:  # noqa: ASYNC110  # there is no event for "nothing is runnable"
        await asyncio.sleep(0)


async def settle(outside: OutsideCalls) -> None:
    """Run every task and every outside call to its next wait. Each outside call has a deadline of its own, so this ends."""
    await run_until_blocked()
    while outside.num_outstanding:
        await outside.settle()
        await run_until_blocked()
