"""Blocking calls beside the loop: the loop goes on, errors arrive, and a call that is not wanted any more holds nobody up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from slipstream.beside import beside


def test_the_loop_goes_on_meanwhile():
    async def main() -> str:
        go_on = threading.Event()

        def call(text: str) -> str:
            assert go_on.wait(10)
            return text

        asyncio.get_running_loop().call_soon(go_on.set)
        return await beside(call, "done")

    assert asyncio.run(main()) == "done"


def test_its_error_is_raised_here():
    def call() -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        asyncio.run(beside(call))


def test_a_cancelled_wait_ends_at_once_and_so_does_the_loop():
    started, release = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        release.wait(60)

    async def main() -> None:
        task = asyncio.create_task(beside(call))
        await beside(started.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 10))
    (thread,) = [t for t in threading.enumerate() if t.name == "beside: call"]
    release.set()
    thread.join(10)  # it finds its loop closed, and says nothing
    assert not thread.is_alive()
