"""How a command reaches a run that trains: a Unix socket in the run's private directory (0700), whose path stands in the run folder.

    slipstream engines ... FOLDER ──► FOLDER/control.path ──► socket ──► EngineControl

The socket is not in the run folder itself: its path may be longer than a socket's address can be, and its disk a network's.
Who may connect is whoever may enter the private directory: the person who started the run, and nobody else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from slipstream.deadlines import LOAD_S, START_S
from slipstream.errors import PeerLost, SlipstreamError
from slipstream.launch.wire import Remote, Server, method_table
from slipstream.types import Record

PATH_FILE = "control.path"
_SOCKET = "control.sock"
_ADD_S = START_S + LOAD_S + 120.0  # an added engine loads its model first


class EngineFacts(Record, kw_only=True, frozen=True):
    """What is told of an engine whose process runs."""

    engine_id: str
    version: int | None  # confirmed; -1: none yet; None: not in service (it starts)
    version_s: float  # since it confirmed that version
    restarts: int  # in this incarnation


class EngineControl(Protocol):
    """What a person may ask of a run's engines. Answers are one sentence; what cannot be done raises SlipstreamError."""

    async def list_engines(self) -> list[EngineFacts]: ...

    async def add_engine(self, url: str) -> str:
        """Start one more, and wait until it is in service. `url`: of a vLLM server that runs already; "" for one of the run's own."""
        ...

    async def drop_engine(self, engine_id: str) -> str:
        """End this one; what it was generating goes on elsewhere."""
        ...


METHODS = method_table(EngineControl, {"add_engine": _ADD_S})


@contextlib.asynccontextmanager
async def serving(control: EngineControl, socket_folder: str, run_folder: Path) -> AsyncIterator[None]:
    """Take commands while this is entered."""
    server, place = Server(control, methods=METHODS, name="launcher"), os.path.join(socket_folder, _SOCKET)
    await server.start(place)
    record = run_folder / PATH_FILE
    record.write_text(place)
    try:
        yield
    finally:
        record.unlink(missing_ok=True)
        await server.close()


async def ask(run_folder: Path, method: str, *arguments: Any) -> Any:
    """Call this method of the run that trains in this folder; SlipstreamError where none does, and what the call raises."""
    remote = Remote("the run", METHODS)
    try:
        await remote.connect((run_folder / PATH_FILE).read_text(), f"command {os.getpid()}")
    except (FileNotFoundError, PeerLost):
        raise SlipstreamError(
            f'{run_folder}: no run trains here now with launch = "local" and engines of its own (experiments share one); this command is '
            f"for one that does (start it with `slipstream train --resume {run_folder}`)"
        ) from None
    try:
        return await remote.call(method, *arguments)
    finally:
        await remote.close()
