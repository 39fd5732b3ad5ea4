"""The engine's working loop with a real engine, a controller that is a fake, and a client fed by its frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.embedded.loop import run_engine
from slipstream.engines.frames import FrameRouter
from slipstream.engines.interrupts import CONTINUE, InterruptPolicy
from slipstream.errors import PeerLost
from slipstream.protocols import Generation, Manifest, WeightsOffer
from slipstream.types import EngineReport, Frame, GenerateRequest, Purpose, Sampling, StopReason
from slipstream.weight_sync.ends import Reader

DEADLINE_S = 30


def make_engine(policy: InterruptPolicy) -> EmbeddedEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256
    )
    return EmbeddedEngine(LlamaForCausalLM(config), engine_id="e", slots=4, max_context=256, policy=policy)


def make_request(sample: int = 0, new: int = 20, min_version: int = 0) -> GenerateRequest:
    return GenerateRequest(
        group_id=0,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=Purpose.TRAIN,
        token_ids=np.arange(3, 12, dtype=np.int32),
        prompt_length=9,
        num_sampled=0,
        sampling=Sampling(max_new_tokens=new),
        stop_token_ids=(),
        min_version=min_version,
    )


class FakeController:
    """Offers the versions it is given, one at a time, and keeps the reports."""

    def __init__(self) -> None:
        self.offers: asyncio.Queue[WeightsOffer | Exception] = asyncio.Queue()
        self.asked: list[tuple[str, int, int]] = []
        self.reports: list[tuple[int, EngineReport]] = []

    def offer(self, version: int, slot: int = 0) -> None:
        manifest = Manifest(incarnation=1, version=version, checksum=f"sum-{version}", total_bytes=0, entries=())
        self.offers.put_nowait(WeightsOffer(slot=slot, manifest=manifest))

    async def next_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer:
        self.asked.append((engine_id, incarnation, version))
        offer = await self.offers.get()
        if isinstance(offer, Exception):
            raise offer
        return offer

    async def confirm_weights(self, slot: int, report: EngineReport) -> None:
        self.reports.append((slot, report))


class Page:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        assert deadline_s > 0
        self.phases.append(phase)

    def idle(self) -> None:
        self.phases.append("idle")


class Weights(Reader):
    """A version's number is the seed of what it holds."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def __call__(self, offer: WeightsOffer) -> str:
        with torch.no_grad():
            self._engine.model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(offer.manifest.version))
        return offer.manifest.checksum


class Running:
    """The loop as a task, and the requests it serves."""

    def __init__(self, policy: InterruptPolicy) -> None:
        self.engine, self.controller, self.page = make_engine(policy), FakeController(), Page()
        self.wake, self.router = asyncio.Event(), FrameRouter()
        self.frames: list[Frame] = []
        self.on_frame = lambda: None
        self.after_frame: Callable[[Frame], Awaitable[None]] | None = None
        self.task = asyncio.create_task(
            run_engine(self.engine, self.controller, Weights(self.engine), self._send, self.wake, self.page)  # type: ignore[arg-type]
        )

    async def _send(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.router.feed(frame)
        self.on_frame()
        if self.after_frame is not None:
            await self.after_frame(frame)

    def generate(self, request: GenerateRequest) -> tuple[Generation, asyncio.Future[None]]:
        into = Generation(len(request.token_ids))
        future = self.router.open(self.engine.submit(request), into)
        self.wake.set()
        return into, future


@contextlib.asynccontextmanager
async def running(policy: InterruptPolicy = CONTINUE):
    loop = Running(policy)
    async with asyncio.timeout(DEADLINE_S):
        yield loop
    loop.task.cancel()
    await asyncio.gather(loop.task, return_exceptions=True)
    left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert not left, left


def test_weights_are_adopted_between_ticks_and_reported() -> None:
    async def body() -> None:
        async with running() as loop:
            into, ended = loop.generate(make_request())
            loop.controller.offer(0, slot=2)

            def offer_the_next() -> None:
                if len(loop.frames) == 5:
                    loop.controller.offer(1, slot=0)

            loop.on_frame = offer_the_next
            await ended
        assert [s.version for s in into.spans] == [0, 1]
        assert 5 <= into.spans[0].end - into.start <= 7, "an offer is adopted within a tick or two"
        reports = loop.controller.reports
        assert [(slot, r.engine_id, r.incarnation, r.version, r.checksum) for slot, r in reports] == [
            (2, "e", 1, 0, "sum-0"),
            (0, "e", 1, 1, "sum-1"),
        ]
        assert all(r.sync_s >= 0 for _, r in reports)
        assert loop.controller.asked == [("e", 0, -1), ("e", 1, 0), ("e", 1, 1)]
        assert [f.tick for f in loop.frames] == list(range(1, 21))

    asyncio.run(body())


def test_an_offer_that_came_during_a_tick_is_adopted_before_the_next_one() -> None:
    """It lies in a socket then, and has to be read first."""

    async def body() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        async with running() as loop:
            offered = loop.controller.next_weights

            async def next_weights(engine_id: str, incarnation: int, version: int) -> WeightsOffer:
                if version >= 0:
                    await reader.readexactly(1)
                return await offered(engine_id, incarnation, version)

            loop.controller.next_weights = next_weights  # type: ignore[method-assign]
            loop.controller.offer(0)
            loop.controller.offer(1)
            into, ended = loop.generate(make_request())
            loop.on_frame = lambda: len(loop.frames) == 5 and theirs.send(b"x")
            await ended
            writer.close()
            theirs.close()
        assert [(s.version, s.end - s.start) for s in into.spans] == [(0, 5), (1, 15)]

    asyncio.run(body())


def test_an_idle_engine_wakes_for_a_request_and_for_the_weights_it_needs() -> None:
    async def body() -> None:
        async with running() as loop:
            loop.controller.offer(0)
            first, ended = loop.generate(make_request(0, 3))
            await ended
            later, ended = loop.generate(make_request(1, 3, min_version=1))
            free, free_ended = loop.generate(make_request(2, 3))
            await free_ended
            assert len(first.token_ids) == len(free.token_ids) == 3 and not later.token_ids
            loop.controller.offer(1)
            await ended
            assert [s.version for s in later.spans] == [1]
        assert loop.page.phases.count("adopt weights") == 2
        assert loop.page.phases.count("tick") == 9
        assert "idle" in loop.page.phases

    asyncio.run(body())


def test_a_draining_engine_finishes_what_runs_and_starts_the_rest_on_the_new_weights() -> None:
    async def body() -> None:
        async with running(InterruptPolicy("drain")) as loop:
            loop.controller.offer(0)
            first = [loop.generate(make_request(sample, 10 + 5 * sample)) for sample in range(3)]
            waiting: list[tuple[Generation, asyncio.Future[None]]] = []

            def offer_the_next() -> None:
                if len(loop.frames) == 5:
                    loop.controller.offer(1)
                if len(loop.frames) == 8:  # in hand by now: a slot is free, but nothing new starts
                    waiting.append(loop.generate(make_request(3, 4)))

            loop.on_frame = offer_the_next
            await asyncio.gather(*(ended for _, ended in first))
            await waiting[0][1]
        assert [[s.version for s in into.spans] for into, _ in first] == [[0], [0], [0]]
        assert [s.version for s in waiting[0][0].spans] == [1]
        assert [r.version for _, r in loop.controller.reports] == [0, 1] and len(loop.frames) == 20 + 4

    asyncio.run(body())


def test_a_controller_lost_while_the_engine_drains_ends_it_at_once() -> None:
    async def body() -> None:
        async with running(InterruptPolicy("drain")) as loop:
            loop.controller.offer(0)
            into, _ = loop.generate(make_request(0, 200))
            loop.on_frame = lambda: len(loop.frames) == 5 and loop.controller.offers.put_nowait(PeerLost("the controller is gone"))
            with pytest.raises(PeerLost, match="is gone"):
                await loop.task
            assert len(into.token_ids) < 10

    asyncio.run(body())


def test_interrupted_requests_are_told_and_go_on_when_they_are_asked_for_again() -> None:
    async def body() -> None:
        async with running(InterruptPolicy("abort_resume")) as loop:
            loop.controller.offer(0)
            into, ended = loop.generate(make_request())
            loop.on_frame = lambda: len(loop.frames) == 5 and loop.controller.offer(1)
            await ended
            assert into.stop_reason is StopReason.INTERRUPT and into.state is not None
            done = len(into.token_ids)
            request = make_request(new=20 - done)
            request = msgspec.structs.replace(
                request,
                token_ids=np.array([*request.token_ids, *into.token_ids], np.int32),
                num_sampled=done,
                oldest_version=0,
                state=into.state,
            )
            rest, ended = loop.generate(request)
            await ended
            assert [s.version for s in rest.spans] == [1] and len(rest.token_ids) == 20 - done
            assert sum(f.num_prefill_tokens for f in loop.frames) == 8, "the prompt, once"

    asyncio.run(body())


def test_an_engine_whose_worker_does_not_read_owes_nothing() -> None:
    async def body() -> None:
        async with running() as loop:
            read, full = asyncio.Event(), asyncio.Event()

            async def stuck(frame: Frame) -> None:
                full.set()
                await read.wait()

            loop.after_frame = stuck
            loop.controller.offer(0)
            into, ended = loop.generate(make_request(0, 3))
            await full.wait()
            assert loop.page.phases[-2:] == ["tick", "idle"] and len(into.token_ids) == 1
            read.set()
            await ended

    asyncio.run(body())


def test_a_lost_controller_ends_an_idle_engine_with_that_error() -> None:
    async def body() -> None:
        async with running() as loop:
            loop.controller.offers.put_nowait(PeerLost("the controller's connection is closed"))
            with pytest.raises(PeerLost, match="controller's connection"):
                await loop.task

    asyncio.run(body())
