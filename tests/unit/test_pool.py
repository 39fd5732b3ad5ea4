"""Several engines behind one client: they come, take new weights, die and are replaced, and no generation notices but by its spans."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from slipstream.engines import pool as pool_module
from slipstream.engines.pool import EnginePool
from slipstream.errors import DeadlineExceeded, PeerLost
from slipstream.protocols import EngineInService, Generation
from slipstream.types import GenerateRequest, Purpose, Sampling, Span, StopReason

DEADLINE_S = 20.0


class FakeEngine:
    """Token n of a rollout is 1000 * sample + n; one a turn of the loop, while it is not held."""

    def __init__(self, house: House, engine_id: str, version: int):
        self.house, self.engine_id, self.version = house, engine_id, version
        self.requests: list[GenerateRequest] = []
        self.held = asyncio.Event()
        self.held.set()
        self.dead = self.closed = False
        self.stop_for_weights = False
        self.freed: list[int] = []
        self.pins = self.num_running = 0

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        self.check()
        self.requests.append(request)
        self.num_running += 1
        try:
            for index in range(request.sampling.max_new_tokens):
                await self.alive()
                if self.stop_for_weights:
                    into.state, into.stop_reason = 7, StopReason.INTERRUPT
                    return
                into.append(1000 * request.sample + request.num_sampled + index, -0.5, 1, self.version, self.engine_id)
            into.stop_reason = StopReason.LENGTH
        finally:
            self.num_running -= 1

    async def alive(self) -> None:
        await asyncio.sleep(0)
        while not self.held.is_set() and not self.dead:
            await asyncio.wait(
                {asyncio.ensure_future(self.held.wait()), asyncio.ensure_future(self.house.died.wait())}, return_when="FIRST_COMPLETED"
            )
        self.check()

    def check(self) -> None:
        if self.dead or self.closed:
            raise PeerLost(f"{self.engine_id} was lost")

    async def save(self, key):
        return 7

    async def free(self, state):
        self.check()
        self.freed.append(state)

    async def pin(self):
        self.check()
        self.pins += 1
        return (1, self.version, "sum")

    async def unpin(self):
        self.check()
        return 1.5

    async def close(self):
        self.closed = True


class House:
    """The engines there are, and the controller's view of them."""

    def __init__(self, *versions: int, slots: int = 4, ahead: int = 4):
        self.engines: dict[str, FakeEngine] = {}
        self.in_service: dict[str, EngineInService] = {}
        self.changed, self.died = asyncio.Event(), asyncio.Event()
        self.pool = EnginePool(self.next_engines, self.connect, slots=slots, ahead=ahead)
        for number, version in enumerate(versions):
            self.add(f"engine-{number}", version)

    def add(self, engine_id: str, version: int) -> FakeEngine:
        starts = self.starts.get(engine_id, 0) + 1
        self.starts[engine_id] = starts
        engine = self.engines[engine_id] = FakeEngine(self, engine_id, version)
        self.tell(engine_id, EngineInService(starts=starts, version=version))
        return engine

    @property
    def starts(self) -> dict[str, int]:
        return self.__dict__.setdefault("_starts", {})

    def tell(self, engine_id: str, now: EngineInService | None) -> None:
        self.in_service.pop(engine_id, None)
        if now is not None:
            self.in_service[engine_id] = now
        self.changed.set()

    def adopt(self, engine_id: str, version: int) -> None:
        self.engines[engine_id].version = version
        self.tell(engine_id, EngineInService(starts=self.starts[engine_id], version=version))

    def kill(self, engine_id: str, *, known: bool = True) -> None:
        """Its connections end; `known`: the controller has heard of it, too."""
        self.engines[engine_id].dead = True
        self.died.set()
        self.died = asyncio.Event()
        if known:
            self.tell(engine_id, None)

    async def next_engines(self, known):
        while self.in_service == known:
            self.changed.clear()
            await self.changed.wait()
        return dict(self.in_service)

    async def connect(self, engine_id: str) -> FakeEngine:
        if self.engines[engine_id].dead:
            raise PeerLost(f"{engine_id} does not listen")
        return self.engines[engine_id]

    async def __aenter__(self) -> House:
        self.following = asyncio.create_task(self.pool.follow())
        await self.pool.ready()
        return self

    async def __aexit__(self, *_) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        await self.pool.close()

    def start(self, group: int = 0, sample: int = 0, new: int = 6, **more) -> tuple[asyncio.Task[None], Generation]:
        into = Generation(3)
        return asyncio.create_task(self.pool.generate(request(group, sample, new, **more), into)), into


def request(group: int = 0, sample: int = 0, new: int = 6, *, purpose: Purpose = Purpose.TRAIN, **more) -> GenerateRequest:
    return GenerateRequest(
        group_id=group,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=purpose,
        token_ids=np.array([1, 2, 3], np.int32),
        prompt_length=3,
        num_sampled=0,
        sampling=Sampling(max_new_tokens=new),
        stop_token_ids=(),
        **more,
    )


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110  # everything happens in this loop
        await asyncio.sleep(0)


def test_a_generation_goes_on_from_its_tokens_when_its_engine_dies() -> None:
    async def main():
        async with House(3, 4) as house:
            paused = []
            task, into = house.start(new=6)
            into.on_engine_lost = lambda: paused.append(len(into.token_ids))
            told = []
            into.notify, into.notify_at = lambda: told.append(len(into.token_ids)), 1
            await until(lambda: len(into.token_ids) == 2)
            first = next(e for e in house.engines.values() if e.requests)
            house.kill(first.engine_id)
            await task
            second = next(e for e in house.engines.values() if e is not first)
            assert into.token_ids == list(range(6)) and into.stop_reason is StopReason.LENGTH
            assert into.spans == [Span(3, 5, 1, first.version, first.engine_id), Span(5, 9, 1, second.version, second.engine_id)]
            (again,) = second.requests
            assert again.token_ids.tolist() == [1, 2, 3, 0, 1] and again.key == first.requests[0].key
            assert (again.num_sampled, again.num_sampled_in_turn, again.sampling.max_new_tokens) == (2, 2, 4)
            assert again.oldest_version == first.version and again.state is None
            assert paused == [2] and told == [1, 3]  # its clock stands still until the next engine's first token

    run(main())


def test_without_another_engine_it_waits_for_the_successor() -> None:
    async def main():
        async with House(3) as house:
            task, into = house.start()
            await until(lambda: len(into.token_ids) == 2)
            house.kill("engine-0", known=False)
            await turns()
            assert not task.done() and house.pool.num_slots == 4
            house.tell("engine-0", EngineInService(starts=1, version=4))  # the controller does not know yet: it leads nowhere
            await turns()
            house.tell("engine-0", None)
            await turns()
            house.add("engine-0", -1)
            house.engines["engine-0"].held.clear()
            await turns()
            assert len(house.engines["engine-0"].requests) == 1, "an engine alone holds what it cannot start yet"
            house.adopt("engine-0", 5)
            house.engines["engine-0"].held.set()
            await task
            assert [(s.version, s.end - s.start) for s in into.spans] == [(3, 2), (5, 4)]

    run(main())


def test_no_engine_for_too_long_ends_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SUCCESSOR_S", 0.05)

    async def main():
        async with House(3) as house:
            task, into = house.start(new=10**6)
            await until(lambda: into.token_ids)
            house.kill("engine-0")
            with pytest.raises(DeadlineExceeded, match="for an engine: none is in service"):
                await task
            with pytest.raises(DeadlineExceeded):
                await house.pool.generate(request(), Generation(3))

    run(main())


def test_an_engine_that_is_dropped_hands_over_and_slots_follow() -> None:
    async def main():
        async with House(3, 3) as house:
            changes = []
            house.pool.on_change = lambda: changes.append(house.pool.num_slots)
            tasks = [house.start(group, sample, 30) for group in (0, 1) for sample in range(3)]
            await until(lambda: all(into.token_ids for _, into in tasks))
            house.tell("engine-1", None)  # it lives
            await asyncio.gather(*(task for task, _ in tasks))
            for _, into in tasks:
                assert [t % 1000 for t in into.token_ids] == list(range(30))
            assert house.engines["engine-1"].closed and changes == [4]
            house.add("engine-2", 3)
            await turns()
            assert changes == [4, 8]

    run(main())


def test_states_belong_to_their_engine() -> None:
    async def main():
        async with House(3, 3) as house:
            one, two = house.engines["engine-0"], house.engines["engine-1"]
            two.stop_for_weights = one.stop_for_weights = True
            (a, into_a), (b, into_b) = house.start(0), house.start(1)
            await asyncio.gather(a, b)
            assert into_a.stop_reason is into_b.stop_reason is StopReason.INTERRUPT and into_a.state != into_b.state
            two.stop_for_weights = one.stop_for_weights = False
            task = asyncio.create_task(house.pool.generate(request(1, state=into_b.state), into_b))
            await task
            assert two.requests[-1].state == 7 and len(one.requests) == 1
            await house.pool.free(into_a.state)
            assert one.freed == [7] and not two.freed

    run(main())


def test_a_state_whose_engine_is_behind_is_let_go_of_and_one_whose_engine_died_is_forgotten() -> None:
    async def main():
        async with House(3, 3) as house:
            one, two = house.engines["engine-0"], house.engines["engine-1"]
            one.stop_for_weights = two.stop_for_weights = True
            (a, into_a), (b, into_b) = house.start(0), house.start(1)
            await asyncio.gather(a, b)
            one.stop_for_weights = two.stop_for_weights = False
            house.adopt("engine-1", 4)
            await turns()
            await house.pool.generate(request(0, state=into_a.state, min_version=4), into_a)
            assert two.requests[-1].state is None and one.freed == [7]
            house.kill("engine-1")
            await turns()
            await house.pool.generate(request(1, state=into_b.state), into_b)
            assert one.requests[-1].state is None
            await house.pool.free(into_b.state or 0)

    run(main())


def test_a_saved_state_is_asked_for_where_the_request_runs() -> None:
    async def main():
        async with House(3, 3) as house:
            (a, _), (b, into_b) = house.start(0, new=100), house.start(1, new=100)
            await until(lambda: into_b.token_ids)
            state = await house.pool.save(request(1).key)
            assert await house.pool.save(request(2).key) is None
            await house.pool.free(state)
            assert house.engines["engine-1"].freed == [7]
            a.cancel()
            b.cancel()
            await asyncio.gather(a, b, return_exceptions=True)
            assert not any(load.running for load in house.pool._dispatch.engines.values())

    run(main())


def test_an_evaluation_runs_on_the_engine_with_the_newest_version_and_is_lost_with_it() -> None:
    async def main():
        async with House(3, 3) as house:
            house.in_service["engine-1"] = EngineInService(starts=1, version=4)  # nobody was told yet
            house.engines["engine-1"].version = 4
            assert await house.pool.pin() == (1, 4, "sum")
            into = Generation(3)
            await house.pool.generate(request(purpose=Purpose.EVAL), into)
            assert {s.engine_id for s in into.spans} == {"engine-1"} and await house.pool.unpin() == 1.5
            await house.pool.pin()
            house.kill("engine-1")
            with pytest.raises(PeerLost):
                await house.pool.generate(request(purpose=Purpose.EVAL), Generation(3))
            with pytest.raises(PeerLost):
                await house.pool.unpin()
            assert (await house.pool.pin())[1] == 3

    run(main())


def test_what_waits_is_taken_in_order_but_tokens_go_first_and_a_cancelled_wait_leaves_nothing() -> None:
    async def main():
        async with House(3, slots=1, ahead=0) as house:
            engine = house.engines["engine-0"]
            engine.held.clear()
            tasks = [house.start(group, new=1)[0] for group in range(4)]
            fresh = request(9, new=1)
            tasks.append(asyncio.create_task(house.pool.generate(_with_tokens(fresh), Generation(3))))
            await turns()
            assert [r.group_id for r in engine.requests] == [0]
            tasks[2].cancel()
            engine.held.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert [r.group_id for r in engine.requests] == [0, 9, 1, 3]
            assert not house.pool._waiting and house.pool._dispatch.engines[1].running == 0

    run(main())


def _with_tokens(fresh: GenerateRequest) -> GenerateRequest:
    import msgspec

    return msgspec.structs.replace(fresh, num_sampled=2)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_dies_and_comes_back_every_generation_is_whole(seed: int) -> None:
    async def main():
        choose = random.Random(seed)
        async with House(0, 0, 0, slots=3, ahead=1) as house:
            version, tasks = 0, [house.start(group, sample, 40, min_version=0) for group in range(4) for sample in range(4)]
            while not all(task.done() for task, _ in tasks):
                await turns(choose.randrange(8))
                engine_id = choose.choice(["engine-0", "engine-1", "engine-2"])
                what = choose.choice(["kill", "kill unknown", "adopt", "drop", "add"])
                there = engine_id in house.in_service and not house.engines[engine_id].dead
                if what == "add" and not there:
                    house.tell(engine_id, None)
                    await turns(choose.randrange(3))
                    house.add(engine_id, version)
                elif what == "adopt" and there:
                    version += 1
                    house.adopt(engine_id, version)
                elif what == "drop" and there:
                    house.tell(engine_id, None)
                elif what.startswith("kill") and there:
                    house.kill(engine_id, known=what == "kill")
            for task, into in tasks:
                await task
                assert [t % 1000 for t in into.token_ids] == list(range(40)) and into.stop_reason is StopReason.LENGTH
                assert [s.start for s in into.spans] == [3, *(s.end for s in into.spans[:-1])] and into.spans[-1].end == 43
            await turns()
            assert not any(load.running for load in house.pool._dispatch.engines.values()) and not house.pool._waiting

    run(main())
