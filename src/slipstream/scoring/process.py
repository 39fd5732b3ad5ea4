"""A reward function in child processes that can be killed: nothing that it does can hang, crash or exit the run.

Each child is a plain Python process with an environment of its own (a few variables such as PATH and HOME, no secrets), leader of its
own process group. It serves one call at a time. A call past its deadline ends the child's whole group with SIGKILL, and the next call
gets a new child. This contains accidents; it is no sandbox for hostile code, which may leave the process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from slipstream.errors import ConfigError, ScoringDeadline, ScoringError
from slipstream.scoring.frames import HEADER_BYTES, ChildCall, ChildReply, ChildSetup, frame, frame_length
from slipstream.types import Group, Score, decode, encode

NUM_CHILDREN = 2
START_TIMEOUT_S = 120.0  # the function's own imports included (torch takes a while)
EXIT_TIMEOUT_S = 2.0

# What a child sees of this process's environment.
_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ")
_PASSED_ON += ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


class ProcessScorer:
    """Scores with a function that is named in the run file, in at most `num_children` processes.

    >>> scorer = ProcessScorer("rewards.py:score", name="score", timeout_s=30)
    """

    def __init__(
        self,
        function: str,
        *,
        name: str,
        weight: float = 1.0,
        options: dict[str, Any] | None = None,
        timeout_s: float = 30.0,
        num_children: int = NUM_CHILDREN,
    ):
        self.name, self.weight, self.timeout_s = name, weight, timeout_s
        self._setup = ChildSetup(
            function=function, name=name, weight=weight, options=dict(options or {}), import_path=[p for p in sys.path if p]
        )
        self._turns = asyncio.Semaphore(num_children)
        self._idle: list[_Child] = []

    async def start(self) -> None:
        """Start one child, so that a function which does not import is known before anything is generated: ConfigError."""
        if not self._idle:
            self._idle.append(await _Child.start(self._setup))

    async def score(self, group: Group) -> list[Score]:
        """One score per rollout, in order. ScoringError (ScoringDeadline past the deadline) with the function's own traceback."""
        async with self._turns:  # each holder is bounded by its deadline
            child = self._idle.pop() if self._idle else await _Child.start(self._setup)
            healthy = False
            try:
                scores = await child.call(group, self.timeout_s)
                healthy = True
            except _FunctionFailed as error:
                healthy = True
                raise ScoringError(str(error)) from None
            finally:
                if healthy:
                    self._idle.append(child)
                else:
                    await child.end()
            if len(scores) != len(group.rollouts):
                raise ScoringError(f"reward {self.name!r}: {len(scores)} scores for {len(group.rollouts)} rollouts")
            return scores

    async def close(self) -> None:
        """End the children and whatever they started."""
        children, self._idle = self._idle, []
        for child in children:
            child.kill()
        for child in children:
            await child.end()


class _FunctionFailed(Exception):
    """The function failed and the child lives on."""


class _Child:
    """One process and the socket to it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._name, self._process, self._reader, self._writer = name, process, reader, writer
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watcher = threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), name=f"watch {name}", daemon=True)
        self._watcher.start()

    @classmethod
    async def start(cls, setup: ChildSetup) -> _Child:
        """A child that has loaded the function; ConfigError if it cannot."""
        ours, process = _spawn()
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**20)
        child = cls(setup.name, process, reader, writer)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await child._ask(encode(setup))
        except TimeoutError:
            await child.end()
            raise ConfigError(f"reward {setup.name!r}: loading {setup.function} took longer than {START_TIMEOUT_S:g} s") from None
        except ScoringError as error:
            raise ConfigError(f"{error} while it was loading {setup.function}") from error
        except asyncio.CancelledError:
            await child.end()
            raise
        if reply.failure is not None:
            await child.end()
            raise ConfigError(reply.failure)
        return child

    async def call(self, group: Group, timeout_s: float) -> list[Score]:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._ask(encode(ChildCall(group=group)))
        except TimeoutError:
            raise ScoringDeadline(f"reward {self._name!r} did not answer within {timeout_s:g} s (killed)") from None
        if reply.failure is not None:
            raise _FunctionFailed(reply.failure)
        return reply.scores

    async def _ask(self, record: bytes) -> ChildReply:
        """Send a record and read the reply; ScoringError if the process ends first.

        The process is watched beside the socket: what it forked may hold the socket open after it.
        """
        answer = asyncio.ensure_future(self._exchange(record))
        try:
            await asyncio.wait({answer, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and answer.exception() is None:
                return answer.result()
            code = await self._exit_code()
            raise ScoringError(f"reward {self._name!r} ended its process ({_describe(code)})")
        finally:
            answer.cancel()

    async def _exchange(self, record: bytes) -> ChildReply:
        self._writer.write(frame(record))
        await self._writer.drain()
        header = await self._reader.readexactly(HEADER_BYTES)
        return decode(await self._reader.readexactly(frame_length(header)), ChildReply)

    async def _exit_code(self) -> int:
        """The exit code of a process whose socket is closed or that has ended; it is killed if it lingers."""
        await asyncio.wait({self._exited}, timeout=EXIT_TIMEOUT_S)
        self.kill()
        return await self._exited

    def kill(self) -> None:
        """End the process, and what it left in its group, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()

    async def end(self) -> None:
        """Kill the process and wait for its end; SIGKILL cannot be ignored, so the deadline is a formality."""
        self.kill()
        await asyncio.wait({self._exited}, timeout=EXIT_TIMEOUT_S)
        if self._exited.done():
            self._watcher.join()  # it has nothing left to do but return

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self._exited.done():
            self._exited.set_result(code)


def _spawn() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A child process and our end of the socket to it (its end is its descriptor 0)."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.scoring.child"],
            stdin=theirs.fileno(),
            stdout=2,  # what the function prints goes where errors go
            env=_environment(),
            start_new_session=True,
        )
    return ours, process


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
