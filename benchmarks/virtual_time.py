"""An event loop whose clock jumps: whatever waits for a time is there at once, in the right order, and nothing takes any time by itself.

So a schedule of hours is played in seconds, exactly, and no load of the machine can be seen in it. Only for code whose waits are all in
this loop: a thread or a process that is waited for would find that hours have passed.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(Exception):
    """Every task waits, and none of them for a time: the schedule has come to a dead end."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` stands still while anything can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self.virtual_now = 0.0  # seconds
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.virtual_now


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would sleep, its clock jumps instead."""

    def __init__(self, loop: VirtualTimeLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise NothingLeft("every task waits for another")
        self._loop.virtual_now += max(0.0, timeout)
        return []


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
