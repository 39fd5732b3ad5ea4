"""An engine in a process of its own, seen from a rollout worker: the same calls as in one process, over one connection.

    worker ──► generate(id) + request, cancel(id), save(id, key), free(state), pin(id), unpin(id) ──► engine
    worker ◄── accepted(id, handle), answer(id), error(id) ◄── engine
    worker ◄── frame + what one tick produced ◄── engine

One frame a tick for all requests together, so the cost does not grow with messages per token. The engine waits before its next tick while
the worker leaves more than a megabyte unread: a slow worker slows the engine down, and neither fills its memory.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from slipstream import errors
from slipstream.engines.frames import FrameRouter
from slipstream.errors import PeerLost, SlipstreamError
from slipstream.launch.framing import Link
from slipstream.launch.wire import within
from slipstream.protocols import EngineClient, Generation
from slipstream.types import Frame, GenerateRequest, RequestKey, decode, encode

PIN_DEADLINE_S = 300.0  # the engine answers between two ticks, and copies its weights
CONNECT_DEADLINE_S = 60.0


class Engine(Protocol):
    """What the server asks of an engine; all of it quick, between two ticks."""

    def submit(self, request: GenerateRequest) -> int: ...

    def cancel(self, handle: int) -> None: ...

    def handle(self, key: RequestKey) -> int | None: ...

    def save(self, handle: int) -> int | None: ...

    def free(self, state: int) -> None: ...

    def free_all_states(self) -> None: ...

    def pin(self) -> tuple[int, int, str]: ...

    def unpin(self) -> float: ...


class _Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    id: int


class _Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    id: int


class _Save(msgspec.Struct, tag="save", array_like=True, frozen=True):
    id: int
    key: RequestKey


class _Free(msgspec.Struct, tag="free", array_like=True, frozen=True):
    state: int


class _Pin(msgspec.Struct, tag="pin", array_like=True, frozen=True):
    id: int


class _Unpin(msgspec.Struct, tag="unpin", array_like=True, frozen=True):
    id: int


class _Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    id: int
    handle: int


class _Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    id: int


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    """The body of the answer to `_Save`."""

    state: int | None


class _Error(msgspec.Struct, tag="error", array_like=True, frozen=True):
    id: int
    kind: str
    message: str


class _Frame(msgspec.Struct, tag="frame", array_like=True, frozen=True):
    """The body is a `types.Frame`."""


_encode_header = msgspec.msgpack.Encoder().encode
_to_engine = msgspec.msgpack.Decoder(_Generate | _Cancel | _Save | _Free | _Pin | _Unpin)
_to_worker = msgspec.msgpack.Decoder(_Accepted | _Answer | _Error | _Frame)


# ---- the engine's side ---------------------------------------------------------------------------------------------------------


class EngineServer:
    """Serves one engine to one rollout worker. `wake` is called after every call that may give the engine something to do."""

    def __init__(self, engine: Engine, wake: Callable[[], None] = lambda: None):
        self._engine = engine
        self._wake = wake
        self._link: Link | None = None
        self._handles: dict[int, int] = {}  # request id -> handle, of generations that have not ended
        self._ids: dict[int, int] = {}  # and back
        self._pinned = False
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(self._connect, path)

    async def send_frame(self, frame: Frame) -> None:
        """Give the worker what a tick produced; waits while it has not read what it was given before. Nothing without a worker."""
        for handle, _ in frame.finished:
            self._handles.pop(self._ids.pop(handle, -1), None)
        if self._link is not None:
            try:
                await self._link.send(_encode_header(_Frame()), encode(frame))
            except PeerLost:
                pass  # `_lost` has called its requests off

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._link is not None:
            self._link.close()
            await self._link.wait_closed()

    def _connect(self) -> Link:
        if self._link is not None:
            return Link("a second rollout worker", lambda header, body: _refuse(), lambda error: None)
        self._link = Link("the rollout worker", self._frame, self._lost)
        return self._link

    def _frame(self, header: bytes, body: bytes) -> None:
        message = _to_engine.decode(header)
        link = self._link
        assert link is not None
        if isinstance(message, _Cancel):
            self._cancel(message.id)
            return
        if isinstance(message, _Free):
            self._engine.free(message.state)
            return
        try:
            answer, value = self._answer(message, body)
        except Exception as error:
            answer, value = _Error(message.id, type(error).__name__, str(error)), b""
        link.send_now(_encode_header(answer), value)
        self._wake()

    def _answer(self, message: _Generate | _Save | _Pin | _Unpin, body: bytes) -> tuple[msgspec.Struct, bytes]:
        if isinstance(message, _Generate):
            handle = self._engine.submit(decode(body, GenerateRequest))
            if handle not in self._ids:  # else it is asked for twice; the first asking owns it
                self._handles[message.id], self._ids[handle] = handle, message.id
            return _Accepted(message.id, handle), b""
        if isinstance(message, _Save):
            handle = self._engine.handle(message.key)
            return _Answer(message.id), encode(_Saved(None if handle is None else self._engine.save(handle)))
        if isinstance(message, _Pin):
            self._pinned = True
            return _Answer(message.id), encode(self._engine.pin())
        self._pinned = False
        return _Answer(message.id), encode(self._engine.unpin())

    def _cancel(self, request_id: int) -> None:
        handle = self._handles.pop(request_id, None)
        if handle is not None:
            del self._ids[handle]
            self._engine.cancel(handle)
            self._wake()

    def _lost(self, error: PeerLost) -> None:
        """Nobody reads any more: free what the worker's requests hold. A worker that comes back asks anew."""
        self._link = None
        for request_id in list(self._handles):
            self._cancel(request_id)
        self._engine.free_all_states()
        if self._pinned:
            self._pinned = False
            self._engine.unpin()
        self._wake()


def _refuse() -> None:
    raise ValueError("this engine serves another rollout worker")


def socket_path(folder: str, engine_id: str) -> str:
    """Where the engine of this id is served."""
    return os.path.join(folder, f"{engine_id}.sock")


async def serve(engine: Engine, path: str, wake: Callable[[], None] = lambda: None) -> EngineServer:
    """Serve `engine` on a socket at `path` until `close`."""
    server = EngineServer(engine, wake)
    await server.start(path)
    return server


# ---- the worker's side ---------------------------------------------------------------------------------------------------------


class RemoteEngine(EngineClient):
    """`protocols.EngineClient` over a connection."""

    def __init__(self, peer: str):
        self.link = Link(peer, self._frame, self._lost)
        self._router = FrameRouter(self._free)
        self._opening: dict[int, tuple[Generation, asyncio.Future[int]]] = {}  # generate: waits for its handle
        self._asking: dict[int, asyncio.Future[bytes]] = {}  # save, pin and unpin
        self._ended: dict[int, asyncio.Future[None]] = {}  # handle -> end of the generation
        self._ids = itertools.count(1)

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        """Fill `into` until the request ends; the deadline is the caller's, of the whole rollout. Raises PeerLost when the engine dies."""
        request_id = next(self._ids)
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._opening[request_id] = (into, accepted)
        handle = None
        try:
            await self.link.send(_encode_header(_Generate(request_id)), encode(request))
            handle = await accepted
            await self._ended[handle]
        except BaseException:
            if into.state is not None:  # nobody goes on from it
                self._free(into.state)
            raise
        finally:
            self._opening.pop(request_id, None)
            if handle is None and accepted.done() and not accepted.cancelled() and accepted.exception() is None:
                handle = accepted.result()  # it came in while we were being cancelled
            if handle is not None:
                self._router.close(handle)
                self._ended.pop(handle, None)
            if into.stop_reason is None and self.link.lost is None:
                self.link.send_now(_encode_header(_Cancel(request_id)))

    async def save(self, key: RequestKey) -> int | None:
        return decode(await self._ask(_Save(next(self._ids), key), "save a state"), _Saved).state

    async def free(self, state: int) -> None:
        await self.link.send(_encode_header(_Free(state)))

    async def pin(self) -> tuple[int, int, str]:
        return decode(await self._ask(_Pin(next(self._ids)), "pin its weights"), tuple[int, int, str])

    async def unpin(self) -> float:
        return decode(await self._ask(_Unpin(next(self._ids)), "unpin its weights"), float)

    async def close(self) -> None:
        self.link.close()
        await self.link.wait_closed()

    async def _ask(self, message: _Save | _Pin | _Unpin, what: str) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asking[message.id] = future
        try:
            await self.link.send(_encode_header(message))
            return await within(future, PIN_DEADLINE_S, f"{self.link.peer} to {what}")
        finally:
            self._asking.pop(message.id, None)

    def _free(self, state: int) -> None:
        if self.link.lost is None:
            self.link.send_now(_encode_header(_Free(state)))

    def _frame(self, header: bytes, body: bytes) -> None:
        """A handle is opened here, not in `generate`, because the frame that names it may be the next thing in the same read."""
        message = _to_worker.decode(header)
        if isinstance(message, _Frame):
            self._router.feed(decode(body, Frame))
        elif isinstance(message, _Accepted):
            self._accept(message)
        elif isinstance(message, _Answer):
            _resolve(self._asking.get(message.id), body)
        else:
            error = _raised(message)
            _reject(self._asking.get(message.id), error)
            _reject(self._opening.get(message.id, (None, None))[1], error)

    def _accept(self, message: _Accepted) -> None:
        into, accepted = self._opening.pop(message.id, (None, None))
        if into is None or accepted is None or accepted.done():
            return
        try:
            self._ended[message.handle] = self._router.open(message.handle, into)
        except ValueError as error:
            accepted.set_exception(error)
        else:
            accepted.set_result(message.handle)

    def _lost(self, error: PeerLost) -> None:
        for future in self._asking.values():
            _reject(future, error)
        for _, future in self._opening.values():
            _reject(future, error)
        self._router.fail(error)


async def connect(path: str, *, peer: str = "the engine") -> RemoteEngine:
    """Connect to the engine at `path`. PeerLost where nobody listens there."""
    engine = RemoteEngine(peer)
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            await asyncio.get_running_loop().create_unix_connection(lambda: engine.link, path)
    except OSError as error:
        raise PeerLost(f"{peer} does not listen at {path}: {error.strerror or error}") from error
    return engine


# ---- pieces --------------------------------------------------------------------------------------------------------------------


def _resolve(future: asyncio.Future[Any] | None, value: Any) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any] | None, error: BaseException) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


def _raised(message: _Error) -> Exception:
    """The engine's error again; one that is not of the vocabulary is a request the engine cannot take."""
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, SlipstreamError) and kind is not errors.RoleFailed:
        return kind(message.message)
    return ValueError(f"the engine refuses the request: {message.kind}: {message.message}")
