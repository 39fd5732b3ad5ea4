"""The process that a reward function runs in: `python -m slipstream.scoring.child`, started by `process.py`.

Its socket is file descriptor 0. The main thread runs the function (so that functions may use signal.alarm); a second thread reads, so
that the end of the parent is seen while a function runs: then the whole process group is killed, what the function forked included.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading

from slipstream.errors import SlipstreamError
from slipstream.scoring.builtin import BUILTIN_REWARDS
from slipstream.scoring.frames import HEADER_BYTES, ChildCall, ChildReply, ChildSetup, frame, frame_length
from slipstream.scoring.functions import RewardFunction
from slipstream.scoring.loading import load_function
from slipstream.types import decode, encode

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve one function until the parent closes the socket."""
    _die_with_parent()
    connection = _take_socket()
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(connection, messages), name="reader", daemon=True).start()
    setup = decode(messages.get(), ChildSetup)
    try:
        reward = _load(setup)
    except BaseException as error:
        text = str(error) if isinstance(error, SlipstreamError) else f"reward {setup.name!r}: {type(error).__name__}: {error}"
        _reply(connection, ChildReply(failure=text))
        return
    _reply(connection, ChildReply())
    pid = os.getpid()
    with asyncio.Runner() as runner:
        while True:
            call = decode(messages.get(), ChildCall)
            reply = _score(runner, reward, call)
            if os.getpid() != pid:  # a copy that the function forked and that came back: it has nothing to say
                os._exit(0)
            _reply(connection, reply)


def _take_socket() -> socket.socket:
    """Descriptor 0 as a socket; the function's own stdin is empty. Copies of this process cannot speak on it."""
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.register_at_fork(after_in_child=connection.close)
    return connection


def _load(setup: ChildSetup) -> RewardFunction:
    sys.path.extend(entry for entry in setup.import_path if entry not in sys.path)
    function = BUILTIN_REWARDS.get(setup.function) or load_function(setup.function)
    return RewardFunction(function, setup.name, setup.weight, setup.options)


def _score(runner: asyncio.Runner, reward: RewardFunction, call: ChildCall) -> ChildReply:
    try:
        return ChildReply(scores=runner.run(reward.call(call.group)))
    except SlipstreamError as error:
        return ChildReply(failure=str(error))
    except BaseException as error:  # SystemExit, KeyboardInterrupt: the function's doing, not an order to this process
        return ChildReply(failure=f"reward {reward.name!r} raised {type(error).__name__}: {error}")


def _reply(connection: socket.socket, reply: ChildReply) -> None:
    connection.sendall(frame(encode(reply)))


def _read_messages(connection: socket.socket, messages: queue.SimpleQueue[bytes]) -> None:
    """Hand on each message; at the end of the stream, kill this process and everything it started."""
    with contextlib.suppress(OSError):
        while header := _read_exactly(connection, HEADER_BYTES):
            messages.put(_read_exactly(connection, frame_length(header)))
    os.killpg(0, signal.SIGKILL)  # this process leads its own group (process.py)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or none at the end of the stream."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _die_with_parent() -> None:
    """Linux: the kernel kills this process when its parent ends, also while a function holds the interpreter lock."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
