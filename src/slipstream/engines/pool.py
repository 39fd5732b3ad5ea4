"""Several engines behind one client, any of which may come, go or die.

    controller.next_engines ──► follow: connect, note versions, let go
                                     │
    generate ──► Dispatcher.take ──► an engine ──► ends
                  ▲   │ nobody yet       │ PeerLost: the engine is gone
                  │   ▼                  ▼
                  └─ waits ◄──── goes on from its tokens so far, same rollout, same attempt

    waits for     a slot, a version, an engine; bounded by what the worker asks for, which follows from the engines there are
    unblocked by  a request that ends, new versions, an engine that joins; when no engine is left for `SUCCESSOR_S`, DeadlineExceeded

An evaluation pins one engine, the one with the newest version: all its requests run on one copy of one version, so what it measured is one
policy. Where that engine dies the evaluation is lost (PeerLost) and ordered again by the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from slipstream.deadlines import SUCCESSOR_S
from slipstream.engines.dispatch import Dispatcher
from slipstream.errors import DeadlineExceeded, PeerLost
from slipstream.protocols import EngineClient, EngineInService, Generation
from slipstream.types import GenerateRequest, Purpose, RequestKey

Engines = dict[str, EngineInService]
_LOCAL_BITS = 40  # of a state's id: the engine's own number; above them, the connection's


class EngineConnection(EngineClient, Protocol):
    """A client that can be closed."""

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Member:
    """An engine that is connected."""

    number: int  # of the connection, never used again
    engine_id: str
    starts: int
    client: EngineConnection
    requests: set[RequestKey] = field(default_factory=set)  # that run on it


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that no engine has taken yet."""

    request: GenerateRequest
    given: asyncio.Future[_Member]


class EnginePool(EngineClient):
    """`protocols.EngineClient` over the engines in service.

    next_engines: the controller's call. connect: opens a connection to the engine of this id; PeerLost where there is none. slots:
    sequences that one engine runs at a time. ahead: requests that may wait in its own queue. on_change: called when engines come or go.
    """

    def __init__(
        self,
        next_engines: Callable[[Engines], Awaitable[Engines]],
        connect: Callable[[str], Awaitable[EngineConnection]],
        *,
        slots: int,
        ahead: int,
        on_change: Callable[[], None] = lambda: None,
    ):
        self._next_engines, self._connect, self._slots = next_engines, connect, slots
        self.on_change = on_change
        self._dispatch = Dispatcher(slots, ahead)
        self._members: dict[int, _Member] = {}  # by number
        self._known: Engines = {}  # in service, as the controller said last
        self._gone: dict[str, int] = {}  # engine id -> starts of the connection that was lost: what the controller may not know yet
        self._waiting: list[_Waiting] = []  # in order of arrival
        self._pinned: _Member | None = None
        self._updating = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._num_connections = 0
        self._connected = asyncio.Event()
        self._failed: BaseException | None = None
        self._give_up: asyncio.TimerHandle | None = None

    @property
    def num_slots(self) -> int:
        """Sequences that all engines together run at a time; one engine's while there is none, so that what waits is ready."""
        return self._slots * max(1, len(self._members))

    async def ready(self) -> None:
        """Wait for the first engine. No deadline of its own: a role that starts has one, and `follow` fails with the controller."""
        await self._connected.wait()

    async def follow(self) -> None:
        """Keep the connections equal to the engines in service, for ever; ends with the error of the controller's call."""
        if not self._members:
            self._start_giving_up()
        while True:
            await self._update(await self._next_engines(self._known))

    async def close(self) -> None:
        """Close every connection."""
        if self._give_up is not None:
            self._give_up.cancel()
        for member in list(self._members.values()):
            self._let_go(member)
        while self._closing:
            await asyncio.gather(*self._closing)

    # ---- requests ----------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        """Fill `into` until the request ends, on one engine after the other where they die. PeerLost only for an evaluation's request."""
        if request.purpose is Purpose.EVAL:
            return await self._evaluate(request, into)
        while True:
            member = await self._take(request)
            before = len(into.token_ids)
            try:
                await self._run(member, request, into)
                return
            except PeerLost:
                self._lost(member)
                request = continued(request, into, before)
                into.engine_lost()
            finally:
                member.requests.discard(request.key)
                self._dispatch.ended(member.number)
                self._hand_out()

    async def save(self, key: RequestKey) -> int | None:
        member = next((m for m in self._members.values() if key in m.requests), None)
        state = None if member is None else await member.client.save(key)
        return None if member is None or state is None else _global(member, state)

    async def free(self, state: int) -> None:
        member = self._members.get(state >> _LOCAL_BITS)
        if member is not None:
            await member.client.free(_local(state))

    async def pin(self) -> tuple[int, int, str]:
        """Pin the engine with the newest version. Which that is the controller says now: it orders evaluations by what it knows."""
        await self._update(await self._next_engines({"": EngineInService(starts=0, version=-1)}))  # differs from anything: answered at once
        if not self._members:
            raise PeerLost("no engine is in service that could pin its weights")
        loads = self._dispatch.engines
        self._pinned = max(self._members.values(), key=lambda m: (loads[m.number].version, -loads[m.number].running))
        return await self._pinned.client.pin()

    async def unpin(self) -> float:
        pinned, self._pinned = self._pinned, None
        return 0.0 if pinned is None else await pinned.client.unpin()

    async def _evaluate(self, request: GenerateRequest, into: Generation) -> None:
        if self._pinned is None:
            raise ValueError("an evaluation request came while no engine is pinned; call pin first")
        await self._pinned.client.generate(request, into)

    async def _run(self, member: _Member, request: GenerateRequest, into: Generation) -> None:
        """On this engine, which knows its own states by its own numbers; one that lies elsewhere is let go of."""
        member.requests.add(request.key)
        state = request.state
        if state is not None and state >> _LOCAL_BITS != member.number:
            await self._free_quietly(state)
            state = None
        if request.state is not None:
            into.state = None if state is None else _local(state)
            request = msgspec.structs.replace(request, state=into.state)
        await member.client.generate(request, into)
        if into.state is not None:
            into.state = _global(member, into.state)

    async def _free_quietly(self, state: int) -> None:
        try:
            await self.free(state)
        except PeerLost:
            return  # with the engine its states are gone

    async def _take(self, request: GenerateRequest) -> _Member:
        """The engine that takes the request, as soon as one does."""
        if self._failed is not None:
            raise self._failed
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._hand_out()
        try:
            return await waiting.given
        except BaseException:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif waiting.given.done() and not waiting.given.cancelled() and waiting.given.exception() is None:
                self._dispatch.ended(waiting.given.result().number)  # it was given one while we were being cancelled
                self._hand_out()
            if request.state is not None:
                await self._free_quietly(request.state)
            raise

    def _hand_out(self) -> None:
        """Give engines to those who wait: first those with tokens already, then in order of arrival."""
        for waiting in sorted(self._waiting, key=lambda w: w.request.num_sampled == 0):
            state = waiting.request.state
            if state is None and self._dispatch.full:
                continue
            number = self._dispatch.take(waiting.request, None if state is None else state >> _LOCAL_BITS)
            if number is not None:
                self._waiting.remove(waiting)
                waiting.given.set_result(self._members[number])

    # ---- engines -----------------------------------------------------------------------------------------------------------

    async def _update(self, engines: Engines) -> None:
        """Connect to engines that are new, note the versions of the others, let go of those that are not in service any more."""
        async with self._updating:  # connecting waits
            self._known = engines
            for member in list(self._members.values()):
                now = engines.get(member.engine_id)
                if now is None or now.starts != member.starts:
                    self._lost(member)
                else:
                    self._dispatch.confirmed(member.number, now.version)
            connected = {member.engine_id for member in self._members.values()}
            for engine_id, engine in engines.items():
                if engine_id not in connected and engine.starts > self._gone.get(engine_id, 0):
                    await self._join(engine_id, engine)
            self._hand_out()

    async def _join(self, engine_id: str, engine: EngineInService) -> None:
        try:
            client = await self._connect(engine_id)
        except PeerLost:  # it died meanwhile, of which the controller will tell
            self._gone[engine_id] = engine.starts
            return
        self._num_connections += 1
        member = _Member(self._num_connections, engine_id, engine.starts, client)
        self._members[member.number] = member
        self._dispatch.join(member.number, engine.version)
        self._connected.set()
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self.on_change()

    def _lost(self, member: _Member) -> None:
        """The engine is gone, or is to go: it gets nothing more, and what runs on it is ended there (PeerLost), to go on elsewhere."""
        if self._members.get(member.number) is member:
            self._gone[member.engine_id] = member.starts
            self._let_go(member)
            if not self._members:
                self._start_giving_up()
            self.on_change()

    def _let_go(self, member: _Member) -> None:
        del self._members[member.number]
        self._dispatch.leave(member.number)
        task = asyncio.create_task(member.client.close(), name=f"close the connection to {member.engine_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _start_giving_up(self) -> None:
        self._give_up = asyncio.get_running_loop().call_later(SUCCESSOR_S, self._end_waiting)

    def _end_waiting(self) -> None:
        self._failed = DeadlineExceeded(f"waited {SUCCESSOR_S:.0f} s for an engine: none is in service")
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.given.done():
                each.given.set_exception(self._failed)


def continued(request: GenerateRequest, into: Generation, before: int) -> GenerateRequest:
    """The request that goes on after the tokens that came since `into` had `before` of them; over no state."""
    fresh = into.token_ids[before:]
    num = len(fresh)
    sampled_by = [span.version for span in into.spans]
    oldest = min([*sampled_by, *([] if request.oldest_version is None else [request.oldest_version])], default=None)
    return msgspec.structs.replace(
        request,
        token_ids=np.concatenate([request.token_ids, np.asarray(fresh, dtype=np.int32)]),
        num_sampled=request.num_sampled + num,
        num_sampled_in_turn=request.num_sampled_in_turn + num,
        sampling=msgspec.structs.replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - num),
        oldest_version=oldest,
        state=None,
    )


def _global(member: _Member, state: int) -> int:
    """A state's id as the worker knows it: states are of one engine, and each numbers its own."""
    return member.number << _LOCAL_BITS | state


def _local(state: int) -> int:
    return state & (1 << _LOCAL_BITS) - 1
