"""Run someone else's function in a thread with a deadline.

A thread cannot be killed. One that is past its deadline is counted as lost until it ends, and a limit on lost threads keeps memory
bounded: past it the run stops and names the function. Threads are daemons, so that a lost one does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from slipstream.errors import DeadlineExceeded, RunFailed

MAX_LOST_THREADS = 4


class ThreadCalls:
    """Calls of one named function, sync or async, each in a thread of its own."""

    def __init__(self, what: str, max_lost: int = MAX_LOST_THREADS):
        self._what, self._max_lost = what, max_lost
        self._lost: set[threading.Thread] = set()

    @property
    def num_lost(self) -> int:
        """Threads that are past their deadline and still run."""
        self._lost = {thread for thread in self._lost if thread.is_alive()}
        return len(self._lost)

    async def call(self, function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Any:
        """The function's result or its own exception; DeadlineExceeded past the deadline; RunFailed once too many threads are lost."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        thread = threading.Thread(target=_run, args=(function, arguments, loop, answer), name=f"call {self._what}", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            if not answer.cancelled():
                raise  # the function's own TimeoutError
            self._lost.add(thread)
            if self.num_lost >= self._max_lost:
                raise RunFailed(
                    f"{self._what} did not answer within {timeout_s:g} s; {self.num_lost} of its threads still run and cannot be killed; "
                    "give it deadlines of its own, or name it in the run file, where it runs in a process that can be killed"
                ) from error
            raise DeadlineExceeded(f"{self._what} did not answer within {timeout_s:g} s (its thread is lost)") from error
        except asyncio.CancelledError:
            self._lost.add(thread)
            raise


def _run(function: Callable[..., Any], arguments: dict[str, Any], loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any]) -> None:
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        outcome: tuple[Any, BaseException | None] = (result, None)
    except BaseException as error:
        plain = isinstance(error, Exception) and not isinstance(error, StopIteration)  # a future takes no StopIteration
        outcome = (None, error if plain else RuntimeError(f"{type(error).__name__}: {error}"))
    try:
        loop.call_soon_threadsafe(_settle, answer, *outcome)
    except RuntimeError:
        pass  # the loop has been closed meanwhile: nobody waits any more


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
