"""An engine over a socket behaves as in one process: same tokens, cancellation, pins; its death reaches everyone who waits."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from slipstream.errors import PeerLost
from slipstream.launch import engine_socket
from slipstream.launch.framing import private_directory
from slipstream.protocols import Generation
from slipstream.types import Frame, GenerateRequest, Purpose, Sampling, Span, StopReason

DEADLINE_S = 20.0


class FakeEngine:
    """Gives every request the tokens 100, 101, ... one a tick; ends it at `max_new_tokens`."""

    def __init__(self):
        self.running: dict[int, list] = {}  # handle -> [request, tokens given]
        self.cancelled: list[int] = []
        self.pins: list[str] = []
        self.states: list[int] = []
        self.freed: list[int] = []
        self.interrupt: int | None = None  # the next tick ends all that runs, and saves this state of it
        self.remade = False
        self.version = (1, 3)
        self._next = 10

    def submit(self, request: GenerateRequest) -> int:
        if len(request.token_ids) > 100:
            raise ValueError("the prompt does not fit")
        for handle, (other, _) in self.running.items():
            if other.key == request.key:
                return handle
        self._next += 1
        self.running[self._next] = [request, 0]
        return self._next

    def cancel(self, handle: int) -> None:
        if self.running.pop(handle, None):
            self.cancelled.append(handle)

    def handle(self, key) -> int | None:
        return next((h for h, (request, _) in self.running.items() if request.key == key), None)

    def save(self, handle: int) -> int:
        self.states.append(100 + len(self.states))
        return self.states[-1]

    def free(self, state: int) -> None:
        self.freed.append(state)

    def free_all_states(self) -> None:
        self.freed += self.states

    def pin(self) -> tuple[int, int, str]:
        self.pins.append("pin")
        return (*self.version, "checksum")

    def unpin(self) -> float:
        self.pins.append("unpin")
        return 1.5

    def tick(self) -> Frame:
        handles = list(self.running)
        tokens = [100 + self.running[h][1] for h in handles]
        first = tuple((h, *self.version) for h in handles if self.running[h][1] == 0)
        finished: list[tuple[int, StopReason]] = []
        saved: tuple[tuple[int, int], ...] = ()
        if self.interrupt is not None:
            finished, saved = [(h, StopReason.INTERRUPT) for h in handles], tuple((h, self.interrupt) for h in handles)
            self.running.clear()
            self.interrupt = None
        for handle in self.running:
            self.running[handle][1] += 1
            if self.running[handle][1] == self.running[handle][0].sampling.max_new_tokens:
                finished.append((handle, StopReason.LENGTH))
        for handle, _ in finished:
            self.running.pop(handle, None)
        return Frame(
            tick=0,
            engine_id="e0",
            incarnation=self.version[0],
            version=self.version[1],
            handles=np.array(handles, np.int32),
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(handles), -0.5, np.float32),
            finished=tuple(finished),
            prefilled=first,
            saved=saved,
            recomputed=tuple(handles) if self.remade else (),
        )


class Wired:
    """A fake engine that ticks while it has work, and a client of it."""

    async def __aenter__(self):
        self._directory = private_directory()
        self.path = os.path.join(self._directory.__enter__(), "engine")
        self.engine = FakeEngine()
        self.wake = asyncio.Event()
        self.server = await engine_socket.serve(self.engine, self.path, self.wake.set)
        self.client = await engine_socket.connect(self.path)
        self.num_ticks = 0
        self.frozen = False
        self._loop = asyncio.create_task(self._tick())
        return self

    async def _tick(self):
        while True:
            while self.engine.running and not self.frozen:
                self.num_ticks += 1
                await self.server.send_frame(self.engine.tick())
                await asyncio.sleep(0)
            self.wake.clear()
            await self.wake.wait()

    async def __aexit__(self, *_):
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self.client.close()
        await self.server.close()
        self._directory.__exit__(None, None, None)


def request(sample: int = 0, new: int = 5, length: int = 4) -> GenerateRequest:
    return GenerateRequest(
        group_id=1,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=Purpose.TRAIN,
        token_ids=np.arange(length, dtype=np.int32),
        prompt_length=length,
        num_sampled=0,
        sampling=Sampling(max_new_tokens=new),
        stop_token_ids=(),
    )


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


def test_generations_are_filled_frame_by_frame():
    async def main():
        async with Wired() as w:
            into = [Generation(4) for _ in range(8)]
            await asyncio.gather(*(w.client.generate(request(i, new=3 + i), into[i]) for i in range(8)))
            for i, generation in enumerate(into):
                assert generation.token_ids == list(range(100, 103 + i))
                assert generation.stop_reason is StopReason.LENGTH
                assert generation.spans == [Span(4, 7 + i, 1, 3, "e0")] and generation.prefill_version == (1, 3)
                assert generation.logprobs == [-0.5] * (3 + i)
            assert not w.server._handles and not w.server._ids and not w.client._ended and not len(w.client._router)

    run(main())


def test_cancelling_frees_the_request_in_the_engine():
    async def main():
        async with Wired() as w:
            into = Generation(4)
            task = asyncio.create_task(w.client.generate(request(new=10**9), into))
            while not into.token_ids:  # noqa: ASYNC110  # the fake engine ticks in this loop
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await w.client.pin()  # the engine has read everything before this
            assert not w.engine.running and len(w.engine.cancelled) == 1
            assert not w.server._handles and not w.client._ended and not len(w.client._router)

    run(main())


def test_cancelling_before_the_engine_has_answered():
    async def main():
        async with Wired() as w:
            task = asyncio.create_task(w.client.generate(request(new=10**9), Generation(4)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await w.client.pin()
            assert not w.engine.running
            assert not w.client._opening and not w.client._ended and not len(w.client._router)

    run(main())


def test_the_same_request_twice_is_refused_and_the_first_goes_on():
    async def main():
        async with Wired() as w:
            w.frozen = True
            into = Generation(4)
            first = asyncio.create_task(w.client.generate(request(), into))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="awaited already"):
                await w.client.generate(request(), Generation(4))
            w.frozen = False
            w.wake.set()
            await first
            assert len(into.token_ids) == 5

    run(main())


def test_a_request_the_engine_refuses():
    async def main():
        async with Wired() as w:
            with pytest.raises(ValueError, match="the prompt does not fit"):
                await w.client.generate(request(length=101), Generation(101))
            assert not w.client._opening

    run(main())


def test_states_are_saved_by_key_and_freed():
    async def main():
        async with Wired() as w:
            assert await w.client.save(request().key) is None, "nothing of that key runs"
            task = asyncio.create_task(w.client.generate(request(new=10**9), Generation(4)))
            await w.client.pin()  # the engine has read everything before this
            assert await w.client.save(request().key) == 100
            await w.client.free(100)
            await w.client.pin()
            assert w.engine.freed == [100]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_an_interrupt_is_told_with_its_state_and_whoever_gives_up_frees_it():
    async def main():
        async with Wired() as w:
            into = Generation(4)
            w.engine.interrupt = 7
            await w.client.generate(request(new=10**9), into)
            assert (into.stop_reason, into.state, into.recomputed) == (StopReason.INTERRUPT, 7, False)
            into.stop_reason, w.engine.remade = None, True
            task = asyncio.create_task(w.client.generate(request(new=10**9, length=5), into))
            while len(into.token_ids) < 3:  # noqa: ASYNC110  # the fake engine ticks in this loop
                await asyncio.sleep(0)
            assert into.recomputed and into.prefill_version == (1, 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await w.client.pin()
            assert w.engine.freed == [7] and not w.engine.running

    run(main())


def test_a_state_told_of_while_its_request_is_being_called_off_is_freed():
    async def main():
        async with Wired() as w:
            into = Generation(4)
            task = asyncio.create_task(w.client.generate(request(new=10**9), into))
            while not into.token_ids:  # noqa: ASYNC110  # the fake engine ticks in this loop
                await asyncio.sleep(0)
            w.frozen = True
            task.cancel()
            w.engine.interrupt = 7
            await w.server.send_frame(w.engine.tick())  # on its way before the engine has read that nobody waits any more
            with pytest.raises(asyncio.CancelledError):
                await task
            assert into.state is None, "it was told after the task had ended"
            await w.client.pin()
            await w.client.pin()  # the first answer comes after the frame, so the second question after what the frame made the client say
            assert w.engine.freed == [7]

    run(main())


def test_pin_and_unpin():
    async def main():
        async with Wired() as w:
            assert await w.client.pin() == (1, 3, "checksum")
            assert await w.client.unpin() == 1.5

    run(main())


def test_death_of_the_engine_reaches_everyone():
    async def main():
        async with Wired() as w:
            tasks = [asyncio.create_task(w.client.generate(request(i, new=10**9), Generation(4))) for i in range(3)]
            await w.client.pin()
            link = w.server._link
            assert link is not None
            link.abort("test")
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, PeerLost) and "the engine was lost" in str(result)
            with pytest.raises(PeerLost):
                await w.client.pin()
            with pytest.raises(PeerLost):
                await w.client.generate(request(), Generation(4))

    run(main())


def test_death_of_the_worker_frees_what_it_held():
    async def main():
        async with Wired() as w:
            tasks = [asyncio.create_task(w.client.generate(request(i, new=10**9), Generation(4))) for i in range(3)]
            await w.client.pin()
            assert await w.client.save(request(1).key) == 100
            server_link = w.server._link
            assert server_link is not None
            w.client.link.abort("test")
            await server_link.wait_closed()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert not w.engine.running and w.engine.pins == ["pin", "unpin"]
            assert w.engine.freed == [100], "nobody is left who knows of them"
            again = await engine_socket.connect(w.path)
            into = Generation(4)
            await again.generate(request(), into)
            assert len(into.token_ids) == 5
            await again.close()

    run(main())


def test_a_second_worker_is_refused():
    async def main():
        async with Wired() as w:
            other = await engine_socket.connect(w.path)
            with pytest.raises(PeerLost):
                await other.pin()
            assert await w.client.pin() == (1, 3, "checksum")

    run(main())


def test_a_worker_that_does_not_read_stops_the_engine():
    async def main():
        async with Wired() as w:
            for i in range(200):
                w.engine.submit(request(i, new=10**9))
            w.client.link.pause_reading()
            w.wake.set()
            stuck = -1
            while stuck != w.num_ticks:
                stuck = w.num_ticks
                await asyncio.sleep(0.2)
            assert 0 < stuck < 10_000
            w.client.link.resume_reading()
            while w.num_ticks == stuck:  # noqa: ASYNC110  # it goes on, or the test's deadline fires
                await asyncio.sleep(0.01)

    run(main())
