"""Words between the two ends of transport `collective`: JSON objects, one a line, over a Unix socket in a private directory. No torch.

Blocking, for a thread of its own at either end. The other end's death is seen at once, as the end of the stream.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.errors import DeadlineExceeded, PeerLost

T = TypeVar("T")


def socket_in(folder: str) -> str:
    return str(Path(folder) / "weights.sock")


class Line:
    """One end of a connection; `peer` is how errors name the other."""

    def __init__(self, connection: socket.socket, peer: str):
        self.peer = peer
        self._socket = connection
        self._stream = connection.makefile("rb")

    @classmethod
    def to(cls, folder: str, peer: str) -> Line:
        """Connect to who listens in that folder. PeerLost where nobody does."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(socket_in(folder))
        except OSError as error:
            connection.close()
            raise PeerLost(f"{peer} cannot be reached: {error.strerror or error}") from error
        return cls(connection, peer)

    def say(self, message: msgspec.Struct) -> None:
        """PeerLost where the other end is gone."""
        try:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise PeerLost(f"{self.peer} was lost: {error.strerror or error}") from error

    def hear(self, kind: type[T], deadline_s: float | None) -> T | None:
        """What the other end says next; None where it has ended. DeadlineExceeded after `deadline_s`; without one as long as it lives."""
        self._socket.settimeout(deadline_s)
        try:
            line = self._stream.readline()
        except TimeoutError:
            raise DeadlineExceeded(f"waited {deadline_s:.0f} s for a word of {self.peer}") from None
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
        return msgspec.json.decode(line, type=kind) if line.endswith(b"\n") else None

    def end(self) -> None:
        """From another thread: whoever reads here is at the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._stream.close()
        self._socket.close()
