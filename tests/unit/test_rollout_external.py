"""Calls to the outside whose answers are held until the scheduler asks."""

import asyncio

import pytest

from slipstream.rollout.external import FreeCalls, TickedCalls


def test_free_calls_just_await():
    async def answer():
        return 5

    assert asyncio.run(FreeCalls().run((1,), answer())) == 5


def test_answers_are_released_in_key_order_whatever_order_they_end_in():
    async def main(first_to_end: int) -> list[int]:
        calls, order = TickedCalls(), []
        ends = [asyncio.Event() for _ in range(3)]

        async def call(number: int) -> None:
            await calls.run(("train", number), ends[number].wait())
            order.append(number)

        tasks = [asyncio.create_task(call(number)) for number in (2, 0, 1)]
        await asyncio.sleep(0)
        for number in (first_to_end, *(n for n in range(3) if n != first_to_end)):
            ends[number].set()
            await asyncio.sleep(0)
        assert order == []  # ended, and yet not released
        assert calls.num_outstanding == 3
        await calls.settle()
        await asyncio.gather(*tasks)
        assert calls.num_outstanding == 0
        return order

    for first in range(3):
        assert asyncio.run(main(first)) == [0, 1, 2]


def test_exceptions_are_held_too():
    async def main():
        calls = TickedCalls()

        async def fail():
            raise KeyError("x")

        task = asyncio.create_task(calls.run((1,), fail()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        await calls.settle()
        with pytest.raises(KeyError):
            await task

    asyncio.run(main())


def test_settle_waits_for_calls_that_have_not_ended():
    async def main():
        calls, end = TickedCalls(), asyncio.Event()
        task = asyncio.create_task(calls.run((1,), end.wait()))
        await asyncio.sleep(0)
        settling = asyncio.create_task(calls.settle())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not settling.done()
        end.set()
        await settling
        assert await task is True

    asyncio.run(main())


def test_cancelling_the_caller_cancels_the_call():
    async def main():
        calls, cancelled = TickedCalls(), asyncio.Event()

        async def call():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        task = asyncio.create_task(calls.run((1,), call()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled.is_set()
        assert calls.num_outstanding == 0
        await calls.settle()  # nothing left to wait for

    asyncio.run(main())
