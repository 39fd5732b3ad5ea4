"""The controller's calls over a Unix socket: `serve` them here, `connect` to them there. Other protocols travel alike: `logprob_socket.py`.

    caller ──► call(id, method) + arguments ──► controller
    caller ◄── result(id) + value, or error(id, class, message) ◄── controller

Calls are in flight side by side, so a long poll (`admit`, `get_batch`, `next_weights`) holds up nothing. The table of methods, their
argument and result types comes from the signatures of the protocol. An error of slipstream's vocabulary is raised at the caller as
the same class. A slow answer and a dead peer are different things: quick calls have a deadline, long polls end only with their
answer or with the peer. A peer that dies, even by kill -9, closes its socket, and every pending call raises PeerLost that names it.

Who may connect is whoever may enter the private directory (0700) that holds the socket.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import msgspec

from slipstream import errors
from slipstream.deadlines import COMMIT_CHECKPOINT_S
from slipstream.errors import DeadlineExceeded, PeerLost, RoleFailed, SlipstreamError
from slipstream.launch.framing import Link
from slipstream.protocols import ControllerAPI
from slipstream.types import decode, encode

LONG_POLLS = frozenset({"admit", "get_batch", "next_engines", "next_weights", "weights_taken"})  # wait for something to happen: no deadline
CALL_DEADLINE_S = 60.0
DEADLINES_S = {"commit_checkpoint": COMMIT_CHECKPOINT_S}
KEPT_ANSWERS = frozenset({"admit"})  # not idempotent: an answer that crosses a cancellation is given to the next call
MAX_IN_FLIGHT = 256  # calls of one peer served at once; beyond, its socket is not read
CLOSE_DEADLINE_S = 10.0


class _Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    role: str
    pid: int


class _Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    id: int
    method: str


class _Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    id: int


class _Result(msgspec.Struct, tag="result", array_like=True, frozen=True):
    id: int


class _Error(msgspec.Struct, tag="error", array_like=True, frozen=True):
    id: int
    kind: str  # class name in slipstream.errors
    message: str
    role: str = ""  # of a RoleFailed


class _Cancelled(msgspec.Struct, tag="cancelled", array_like=True, frozen=True):
    id: int


class Failure(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """What a role says of its own end, before it exits."""

    kind: str  # class name of the error
    message: str
    traceback: str


_header_encoder = msgspec.msgpack.Encoder()
_to_controller = msgspec.msgpack.Decoder(_Hello | _Call | _Cancel | Failure)
_to_caller = msgspec.msgpack.Decoder(_Result | _Error | _Cancelled)
_HELLO_ID = 0  # the answer to hello carries this id


class Method(NamedTuple):
    signature: inspect.Signature
    arguments: Any  # tuple[...] of the argument types
    result: Any
    deadline_s: float  # infinite for long polls


def method_table(protocol: type, deadlines_s: Mapping[str, float]) -> dict[str, Method]:
    """The protocol's coroutine methods by name. `deadlines_s` holds those that are not CALL_DEADLINE_S; infinite: a long poll."""
    table = {}
    for name, function in vars(protocol).items():
        if name.startswith("_") or not inspect.iscoroutinefunction(function):
            continue
        hints = get_type_hints(function)
        result = hints.pop("return")
        arguments = tuple[tuple(hints.values())]
        table[name] = Method(inspect.signature(function), arguments, result, deadlines_s.get(name, CALL_DEADLINE_S))
    return table


METHODS = method_table(ControllerAPI, dict.fromkeys(LONG_POLLS, math.inf) | DEADLINES_S)


# ---- the serving side -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Peer:
    """A role that has said hello."""

    role: str
    pid: int


class Server:
    """Serves one object's methods to the roles that connect: those of `ControllerAPI`, or of another table.

    `on_failed(role, failure)` is told what a role reports of its own end. `name` is how errors name the role that serves.
    """

    def __init__(
        self,
        api: Any,
        on_failed: Callable[[str, Failure], None] = lambda role, failure: None,
        *,
        methods: Mapping[str, Method] = METHODS,
        name: str = "controller",
    ):
        self._api, self._methods, self._name = api, methods, name
        self._on_failed = on_failed
        self._sessions: set[_Session] = set()
        self._server: asyncio.Server | None = None

    @property
    def peers(self) -> dict[str, Peer]:
        """Who is connected, by role."""
        return {session.peer.role: session.peer for session in self._sessions if session.peer}

    async def start(self, at: str | socket.socket) -> None:
        """Listen at a path, or on a socket that listens already."""
        place: dict[str, Any] = {"path": at} if isinstance(at, str) else {"sock": at}
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Session(self).link, **place)

    def drop(self, role: str, cause: str) -> None:
        """This role is gone: nothing that it still asked for happens. Nothing where its connection has ended already."""
        for session in list(self._sessions):
            if session.peer is not None and session.peer.role == role:
                session.drop(cause)

    async def close(self) -> None:
        """Take no more calls, let the quick ones end, end the long polls, close the connections."""
        if self._server is not None:
            self._server.close()
        sessions = list(self._sessions)
        await asyncio.gather(*(session.close() for session in sessions))


class _Session:
    """One connected role."""

    def __init__(self, server: Server):
        self.peer: Peer | None = None
        self.link = Link("a role that has not said hello", self._frame, self._lost)
        self._server = server
        self._tasks: dict[int, tuple[str, asyncio.Task[None]]] = {}  # call id -> method, task
        self._paused = False
        server._sessions.add(self)

    def _frame(self, header: bytes, body: bytes) -> None:
        message = _to_controller.decode(header)
        if isinstance(message, _Hello):
            self._hello(message)
        elif self.peer is None:
            raise ValueError("it did not say hello")
        elif isinstance(message, _Call):
            self._call(message, body)
        elif isinstance(message, Failure):
            self._server._on_failed(self.peer.role, message)
        else:
            self._cancel(message.id)

    def _hello(self, hello: _Hello) -> None:
        other = self._server.peers.get(hello.role)
        if other is not None:
            text = f"the role {hello.role} is taken by process {other.pid}"
            self.link.send_now(_header_encoder.encode(_Error(_HELLO_ID, "PeerLost", text)))
            self.link.close()
            return
        self.peer = Peer(hello.role, hello.pid)
        self.link.peer = f"{hello.role} (pid {hello.pid})"
        self.link.send_now(_header_encoder.encode(_Result(_HELLO_ID)))

    def _call(self, call: _Call, body: bytes) -> None:
        if call.method not in self._server._methods or call.id in self._tasks:
            raise ValueError(f"call {call.id} of {call.method}: no such method, or the id is in use")
        task = asyncio.create_task(self._answer(call, body), name=f"{self.link.peer}: {call.method}")
        self._tasks[call.id] = (call.method, task)
        task.add_done_callback(lambda _: self._done(call.id))
        if len(self._tasks) >= MAX_IN_FLIGHT:
            self._paused = True
            self.link.pause_reading()

    async def _answer(self, call: _Call, body: bytes) -> None:
        method = self._server._methods[call.method]
        try:
            arguments = decode(body, method.arguments)
            value = encode(await getattr(self._server._api, call.method)(*arguments))
            header = _Result(call.id)
        except asyncio.CancelledError:
            header, value = _Cancelled(call.id), b""
        except Exception as error:
            header, value = _error(call.id, error, self._server._name), b""
        if self.link.lost is None:
            self.link.send_now(_header_encoder.encode(header), value)

    def _cancel(self, call_id: int) -> None:
        if call_id in self._tasks:  # else its answer is on its way already
            self._tasks[call_id][1].cancel()

    def _done(self, call_id: int) -> None:
        _, task = self._tasks.pop(call_id)
        if task.cancelled():  # before its first step, so it could not say so itself
            if self.link.lost is None:
                self.link.send_now(_header_encoder.encode(_Cancelled(call_id)))
        elif task.exception() is not None:
            self.link.abort(f"its call could not be answered: {task.exception()}")
        if self._paused and len(self._tasks) < MAX_IN_FLIGHT // 2:
            self._paused = False
            self.link.resume_reading()

    def _lost(self, error: PeerLost) -> None:
        self._server._sessions.discard(self)
        self._end_long_polls()

    def _end_long_polls(self) -> None:
        """Nobody waits for these answers. What changes the ledger (the quick calls) is left to finish."""
        for method, task in self._tasks.values():
            if method in LONG_POLLS:
                task.cancel()

    def drop(self, cause: str) -> None:
        self._end_long_polls()
        self.link.abort(cause)

    async def close(self) -> None:
        self._end_long_polls()
        tasks = [task for _, task in self._tasks.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_DEADLINE_S)
            for task in late:
                task.cancel()
        self.link.close()
        await self.link.wait_closed()


async def serve(
    api: ControllerAPI,
    path: str,
    *,
    on_failed: Callable[[str, Failure], None] = lambda role, failure: None,
) -> Server:
    """Serve `api` on a socket at `path` until `close`."""
    server = Server(api, on_failed)
    await server.start(path)
    return server


# ---- the caller's side ---------------------------------------------------------------------------------------------------------


class Remote:
    """A serving role seen from a caller: `call` by name, under the deadlines of the table."""

    def __init__(self, peer: str, methods: Mapping[str, Method] = METHODS):
        self._methods = methods
        self.link = Link(peer, self._frame, self._lost)
        self._pending: dict[int, asyncio.Future[bytes | None]] = {}  # None = cancelled
        self._crossed: dict[str, list[asyncio.Future[bytes | None]]] = {}  # method -> cancelled calls that may still be answered
        self._last_id = _HELLO_ID

    async def connect(self, path: str, role: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Connect to `path` and say who this is, answered within `deadline_s`. PeerLost where nobody listens or the role is taken."""
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self.link, path)
        except OSError as error:
            raise PeerLost(f"{self.link.peer} does not listen at {path}: {error.strerror or error}") from error
        await self._ask(_HELLO_ID, _Hello(role, os.getpid()), b"", deadline_s, "hello")

    def failed(self, error: BaseException) -> None:
        """Report this role's own error, before it exits. Nothing where the controller is gone."""
        text = "".join(traceback.format_exception(error))
        failure = Failure(type(error).__name__, str(error)[:100_000], text[-500_000:])
        if self.link.lost is None:
            self.link.send_now(_header_encoder.encode(failure))

    async def close(self) -> None:
        """Close once everything said has been sent."""
        self.link.close()
        await self.link.wait_closed()

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the peer's method. Raises what it raises; PeerLost; DeadlineExceeded for a call without an answer in its time."""
        method = self._methods[name]
        arguments = method.signature.bind(None, *args, **kwargs).args[1:] if kwargs else args  # to bind takes as long as to send
        answer = await self._crossing_answer(name)
        if answer is None:
            self._last_id += 1
            answer = await self._ask(self._last_id, _Call(self._last_id, name), encode(arguments), method.deadline_s, name)
        return decode(answer, method.result)

    async def _ask(self, call_id: int, header: msgspec.Struct, body: bytes, deadline_s: float, what: str) -> bytes:
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            await self.link.send(_header_encoder.encode(header), body)
            waited_for = asyncio.shield(future) if what in KEPT_ANSWERS else future  # its answer may still be wanted
            answer = await within(waited_for, deadline_s, f"{self.link.peer} to answer {what}")
        except (asyncio.CancelledError, DeadlineExceeded):
            self._call_off(call_id, what, future)
            raise
        except BaseException:
            self._pending.pop(call_id, None)
            raise
        if answer is None:
            raise PeerLost(f"{self.link.peer} ended {what}: it is closing")
        return answer

    def _call_off(self, call_id: int, method: str, future: asyncio.Future[bytes | None]) -> None:
        """Our caller waits no longer: tell the peer. It answers in any case, which may be with what it had just decided."""
        if self.link.lost is not None:
            return
        if method in KEPT_ANSWERS:
            self._crossed.setdefault(method, []).append(future)
        elif not future.done():
            future.cancel()
        self.link.send_now(_header_encoder.encode(_Cancel(call_id)))

    async def _crossing_answer(self, method: str) -> bytes | None:
        """What the controller answered to a cancelled call of this method while the cancellation was on its way; None: nothing."""
        crossed = self._crossed.get(method, [])
        while crossed:
            await asyncio.wait({crossed[0]})
            answer = crossed.pop(0).result()
            if answer is not None:
                return answer
        return None

    def _frame(self, header: bytes, body: bytes) -> None:
        message = _to_caller.decode(header)
        future = self._pending.pop(message.id, None)
        if future is None or future.done():
            return
        if isinstance(message, _Result):
            future.set_result(body)
        elif isinstance(message, _Cancelled):
            future.set_result(None)
        else:
            future.set_exception(_raised(message))

    def _lost(self, error: PeerLost) -> None:
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(PeerLost(*error.args))
        for future in itertools.chain(*self._crossed.values()):
            future.exception()  # looked at here, since it may be that nobody asks again


class RemoteController(Remote, ControllerAPI):
    """`protocols.ControllerAPI` over a connection; `_remote` makes its methods from that protocol's, below."""


def _remote(name: str) -> Callable[..., Any]:
    async def method(self: RemoteController, *args: Any, **kwargs: Any) -> Any:
        return await self.call(name, *args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(ControllerAPI, name).__doc__
    return method


for _name in METHODS:
    setattr(RemoteController, _name, _remote(_name))


async def connect(path: str, role: str, *, peer: str = "the controller") -> RemoteController:
    """Connect to the controller at `path` as `role`. PeerLost where nobody listens there or the role is taken."""
    controller = RemoteController(peer)  # pyright: ignore[reportAbstractUsage]  # its methods are set above, from the table
    await controller.connect(path, role)
    return controller


# ---- pieces --------------------------------------------------------------------------------------------------------------------


async def within(future: asyncio.Future[Any], deadline_s: float, what: str) -> Any:
    """The future's result. DeadlineExceeded after `deadline_s` seconds, in which time that our own loop was blocked does not count:
    a trainer comes back from a long step to an answer that has been lying in the socket for minutes."""
    if math.isinf(deadline_s):
        return await future
    loop = asyncio.get_running_loop()

    def tick(seconds_left: int) -> None:
        nonlocal timer
        if seconds_left > 0:
            timer = loop.call_later(1.0, tick, seconds_left - 1)
        elif not future.done():
            future.set_exception(DeadlineExceeded(f"waited {deadline_s:.0f} s for {what}"))

    timer = loop.call_later(1.0, tick, math.ceil(deadline_s) - 1)
    try:
        return await future  # and not `asyncio.wait`, which costs a caller more
    finally:
        timer.cancel()


def _error(call_id: int, error: Exception, role: str = "controller") -> _Error:
    """Errors of the vocabulary travel as themselves; any other is a bug there, and travels with its traceback."""
    if isinstance(error, SlipstreamError):
        return _Error(call_id, type(error).__name__, str(error)[:100_000], getattr(error, "role", ""))
    text = "".join(traceback.format_exception(error))[-100_000:]
    return _Error(call_id, "RoleFailed", f"the {role} failed: {type(error).__name__}: {error}\n{text}", role)


def _raised(message: _Error) -> SlipstreamError:
    kind = getattr(errors, message.kind, SlipstreamError)
    if kind is RoleFailed:
        return RoleFailed(message.role, message.message)
    return kind(message.message) if issubclass(kind, SlipstreamError) else SlipstreamError(message.message)
