"""The engine as a rollout worker in the same process sees it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_harness import make_engine, prompt, request, run, tiny_model

from slipstream.engines.embedded.client import InProcessClient
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.protocols import Generation
from slipstream.types import Purpose, StopReason


@pytest.fixture(scope="module")
def model():
    return tiny_model()


class Ticker:
    """Ticks while there is work, then waits for the next submission: what the inline launcher does."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.wake = asyncio.Event()
        self.client = InProcessClient(engine, on_submit=self.wake.set)

    async def run(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            while self.engine.has_work():
                self.client.feed(self.engine.tick())
                await asyncio.sleep(0)


async def with_ticker(engine, body):
    ticker = Ticker(engine)
    task = asyncio.create_task(ticker.run())
    try:
        return await asyncio.wait_for(body(ticker.client), 30)
    finally:
        task.cancel()


def test_generations_are_filled_and_end(model) -> None:
    requests = [request(g, s, prompt(9, g), 6) for g in range(2) for s in range(3)]
    expected = run(make_engine(model), *requests)

    async def body(client: InProcessClient) -> list[Generation]:
        into = [Generation(9) for _ in requests]
        await asyncio.gather(*(client.generate(r, g) for r, g in zip(requests, into, strict=True)))
        return into

    got = asyncio.run(with_ticker(make_engine(model), body))
    for a, b in zip(got, expected, strict=True):
        assert (a.token_ids, a.logprobs, a.spans, a.prefill_version) == (b.token_ids, b.logprobs, b.spans, (1, 0))
        assert a.stop_reason is StopReason.LENGTH


async def started(client: InProcessClient, engine, wanted, into: Generation) -> asyncio.Task[None]:
    """A generation in progress, three tokens in; nobody else ticks the engine."""
    task = asyncio.create_task(client.generate(wanted, into))
    await asyncio.sleep(0)
    for _ in range(3):
        client.feed(engine.tick())
    assert len(into.token_ids) == 3
    return task


def test_cancelling_the_awaiting_task_frees_the_slot(model) -> None:
    async def body() -> None:
        engine = make_engine(model)
        client = InProcessClient(engine)
        task = await started(client, engine, request(0, 0, prompt(9), 100), Generation(9))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine._live.running == []
        assert engine._live.cache.blocks.num_taken == 0
        assert len(client._router) == 0

    asyncio.run(body())


def test_asking_for_the_same_key_twice_at_once_is_refused(model) -> None:
    async def body(client: InProcessClient) -> None:
        first = Generation(9)
        task = asyncio.create_task(client.generate(request(0, 0, prompt(9), 20), first))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="asked for twice"):
            await client.generate(request(0, 0, prompt(9), 20), Generation(9))
        await task
        assert len(first.token_ids) == 20, "the first asker is not disturbed"

    asyncio.run(with_ticker(make_engine(model), body))


def test_a_refused_request_raises_at_once(model) -> None:
    async def body(client: InProcessClient) -> None:
        with pytest.raises(ValueError, match="no room"):
            await client.generate(request(0, 0, prompt(200)), Generation(200))

    asyncio.run(with_ticker(make_engine(model), body))


def test_states_are_saved_by_key_and_freed(model) -> None:
    async def body() -> None:
        engine = make_engine(model)
        client, wanted = InProcessClient(engine), request(0, 0, prompt(9), 100)
        assert await client.save(wanted.key) is None, "nothing of that key runs"
        task = await started(client, engine, wanted, Generation(9))
        state = await client.save(wanted.key)
        assert state is not None and len(engine._live.cache.states) == 1
        await client.free(state)
        await client.free(state)
        assert len(engine._live.cache.states) == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())


@pytest.mark.parametrize("moment", ["before the interrupt is told", "when it is told", "while it waits to go on"])
def test_cancelling_an_interrupted_generation_frees_its_state(model, moment: str) -> None:
    async def body() -> None:
        engine = make_engine(model, policy=InterruptPolicy("abort_resume"))
        client, wanted, into = InProcessClient(engine), request(0, 0, prompt(9), 100), Generation(9)
        task = await started(client, engine, wanted, into)
        engine.set_version(1, 1, "sum-1")
        assert len(engine._live.cache.states) == 1
        if moment != "before the interrupt is told":
            client.feed(engine.tick())
        if moment == "while it waits to go on":
            await task
            assert into.stop_reason is StopReason.INTERRUPT
            ids = np.array([*wanted.token_ids, *into.token_ids], dtype=np.int32)
            into.stop_reason = None
            again = request(0, 0, ids, 90, prompt_length=9, num_sampled=3, oldest_version=0, state=into.state)
            task = asyncio.create_task(client.generate(again, into))
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine._live.cache.blocks.num_taken == 0 and not engine.has_work() and len(client._router) == 0

    asyncio.run(body())


def test_unpinning_ends_evaluations_with_abort(model) -> None:
    async def body() -> None:
        engine, into = make_engine(model), Generation(9)
        client = InProcessClient(engine)
        assert await client.pin() == (1, 0, "sum-0")
        task = await started(client, engine, request(0, 0, prompt(9), 100, purpose=Purpose.EVAL), into)
        assert await client.unpin() > 0
        assert engine.has_work(), "the abort must be told"
        client.feed(engine.tick())
        await task
        assert into.stop_reason is StopReason.ABORT

    asyncio.run(body())


def test_an_engine_that_ended_gives_its_error_to_everybody(model) -> None:
    async def body() -> None:
        client = InProcessClient(make_engine(model))
        tasks = [asyncio.create_task(client.generate(request(0, s, prompt(9)), Generation(9))) for s in range(3)]
        await asyncio.sleep(0)
        client.fail(RuntimeError("the engine's own error"))
        for task in tasks:
            with pytest.raises(RuntimeError, match="own error"):
                await task

    asyncio.run(body())
