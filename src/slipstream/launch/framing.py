"""Frames over a Unix socket: the one connection class under `wire.py` and `engine_socket.py`.

A frame is two little-endian uint32 (header bytes, body bytes), a msgpack header and a raw body. Frames are parsed as they arrive and
handed on in the same pass of the event loop: an engine whose loop gets one pass per tick would otherwise see a request ticks late.

A peer that closes, dies or breaks the framing is lost at once: everything that waits on the connection raises PeerLost with its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

from slipstream.errors import PeerLost, SlipstreamError

MAX_HEADER_BYTES = 2**20
MAX_BODY_BYTES = 2**30
_LENGTHS = struct.Struct("<II")
_HIGH_WATER_BYTES = 2**20  # unsent bytes above which `send` waits
_MAX_PATH_BYTES = 100  # what every system accepts in a socket's address (104 on macOS, 108 on Linux)


class Link(asyncio.Protocol):
    """One end of a connection. `on_frame(header, body)` is called for each frame, in order; `on_lost(error)` once, at the end."""

    def __init__(self, peer: str, on_frame: Callable[[bytes, bytes], None], on_lost: Callable[[PeerLost], None]):
        self.peer = peer  # how errors name the other end
        self.lost: PeerLost | None = None  # why nothing more can be sent
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._cause: str | None = None
        self._full = True  # not connected yet, or more than the high-water mark is unsent
        self._waiting: deque[asyncio.Future[None]] = deque()  # senders, until there is room
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- sending -----------------------------------------------------------------------------------------------------------

    async def send(self, header: bytes, body: bytes = b"") -> None:
        """Wait until the peer has taken most of what was sent before, then send. Raises PeerLost.

        There is no deadline here: a peer that lives and does not read is found by its own missed deadline on the progress page.
        """
        while self._full and self.lost is None:
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            await room
        self.send_now(header, body)

    def send_now(self, header: bytes, body: bytes = b"") -> None:
        """Send without waiting for room: for answers and small notices, whose number the caller bounds. Raises PeerLost."""
        if self.lost is not None:
            raise _again(self.lost)
        if len(header) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
            raise SlipstreamError(
                f"a message to {self.peer} has {len(header):,} + {len(body):,} bytes; {MAX_HEADER_BYTES:,} + {MAX_BODY_BYTES:,} are allowed"
            )
        assert self._transport is not None, "the link is not connected"
        self._transport.writelines([_LENGTHS.pack(len(header), len(body)), header, body])

    def close(self) -> None:
        """Close after what was sent has left. `on_lost` is still called."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, cause: str) -> None:
        """Close now, without sending the rest; the error says why."""
        self._cause = self._cause or cause
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._ended)

    # ---- receiving ---------------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Leave what the peer sends in the socket, so that the peer has to wait."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for header, body in self._frames():
                self._on_frame(header, body)
        except Exception as error:  # a frame that cannot be read leaves no way to find the next one
            self.abort(f"a message from it cannot be read: {type(error).__name__}: {error}")

    def _frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Take the complete frames off the front of what was received."""
        while len(self._received) >= _LENGTHS.size:
            header_bytes, body_bytes = _LENGTHS.unpack_from(self._received)
            if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
                raise ValueError(
                    f"{header_bytes:,} + {body_bytes:,} bytes announced, {MAX_HEADER_BYTES:,} + {MAX_BODY_BYTES:,} are allowed"
                )
            body_at = _LENGTHS.size + header_bytes
            end = body_at + body_bytes
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                header, body = bytes(view[_LENGTHS.size : body_at]), bytes(view[body_at:end])
            del self._received[:end]
            yield header, body

    # ---- asyncio's calls ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake_senders()

    def connection_lost(self, exc: Exception | None) -> None:
        cause = self._cause or (f"{type(exc).__name__}: {exc}" if exc else "it closed the connection")
        self.lost = PeerLost(f"{self.peer} was lost: {cause}")
        self._received.clear()
        self._wake_senders()
        if not self._ended.done():
            self._ended.set_result(None)
        self._on_lost(self.lost)

    def _wake_senders(self) -> None:
        while self._waiting:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)


def _again(error: PeerLost) -> PeerLost:
    """A new error with the same message: one exception object raised in many tasks would gather all their tracebacks."""
    return PeerLost(*error.args)


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """A new directory that only this user can enter, short enough for socket addresses; removed at the end with what is in it."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _MAX_PATH_BYTES - 40:
        base = "/tmp"
    path = tempfile.mkdtemp(prefix="slipstream-", dir=base)  # mode 0700
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
