"""A blocking call beside the event loop, which nobody has to wait for once it is not wanted any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def beside(call: Callable[..., T], *args: Any) -> T:
    """What `call(*args)` gives or raises, run in a thread of its own while the loop goes on.

    Unlike `asyncio.to_thread` the thread is a daemon: a run that is stopped amid a download does not wait for its end, neither when the
    loop closes nor when the interpreter exits.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():  # cancelled: nobody waits
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)

    def work() -> None:
        value, error = None, None
        try:
            value = call(*args)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop is closed: the run is over
            pass

    threading.Thread(target=work, name=f"beside: {getattr(call, '__name__', call)}", daemon=True).start()
    return await answer
