"""A trainer and an engine in processes of their own, with the real controller and its ledger between them, and each sync timed.

    this process      controller: real | rollout worker: `free_roles.Groups`, so that there is a batch for each version, and
      │               `weight_sync_decoding.Decoding`, which has the engine decode
      ├─ trainer      `weight_sync_roles.py`: a version per batch, when `Pair.one_sync` asks for it
      └─ engine-0     `weight_sync_roles.py`; with `engine.type = "vllm"` the shipped role and the server that it starts

Started as the local launcher starts its roles: one thread each, memory files inherited, everything else over sockets.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from free_roles import ENGINE_ID, Groups, open_run
from turns import tree_of
from weight_sync_decoding import Decoding

from slipstream.config.settings import Config
from slipstream.controller.controller import Controller
from slipstream.launch.context import RunContext
from slipstream.launch.engine_socket import RemoteEngine, connect, socket_path
from slipstream.launch.page import Page
from slipstream.launch.processes import ChildSpec, Lifeline, RoleProcess, spawn
from slipstream.launch.role import context_options, controller_socket
from slipstream.launch.wire import Server, serve
from slipstream.protocols import Manifest
from slipstream.types import Batch, EngineReport
from slipstream.weight_sync.memory import MemoryFile

T = TypeVar("T")
ROLES = (ENGINE_ID, "trainer")
DEADLINE_S = 240.0  # for the next thing to happen, imports, model and a server's start included


@dataclass(frozen=True, slots=True)
class Sync:
    """One version's way. Seconds; `stall_s` as the engine reports it, the others as the controller sees the calls."""

    trainer_s: float  # begin_write to publish: the trainer's stall
    engine_s: float  # publish to confirm_weights
    stall_s: float

    @property
    def total_s(self) -> float:
        return self.trainer_s + self.engine_s


class Watched:
    """The controller as the two roles call it: notes when they do, and lets the trainer make a version only when `one_sync` asks."""

    def __init__(self, controller: Controller):
        self._controller = controller
        self._asked = asyncio.Semaphore(0)
        self.synced: asyncio.Queue[Sync] = asyncio.Queue()
        self._began = self._published = 0.0
        self.num_bytes = self.num_read = 0
        self.slot, self.newest = 0, (0, 0)  # the slot that holds the newest version, and that: incarnation, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    async def one_sync(self) -> Sync:
        """Let the trainer make a step; the sync of its version."""
        self._asked.release()
        return await self.synced.get()

    async def get_batch(self, step: int) -> Batch | None:
        await self._asked.acquire()
        return await self._controller.get_batch(step)

    async def begin_write(self) -> int:
        self._began = time.perf_counter()
        return await self._controller.begin_write()

    async def publish(self, slot: int, manifest: Manifest) -> None:
        self._published, self.num_bytes, self.slot = time.perf_counter(), manifest.total_bytes, slot
        self.num_read = manifest.deltas[-1].num_bytes if manifest.deltas else manifest.total_bytes
        self.newest = manifest.incarnation, manifest.version
        await self._controller.publish(slot, manifest)

    async def confirm_weights(self, slot: int, report: EngineReport) -> None:
        await self._controller.confirm_weights(slot, report)
        now = time.perf_counter()
        self.synced.put_nowait(Sync(self._published - self._began, now - self._published, report.sync_s))


class Pair:
    """`options` are those of `weight_sync_roles.Case`; `folder` becomes the run's, `sockets` is a private directory."""

    def __init__(self, config: Config, options: dict[str, str], folder: Path, sockets: str):
        self._sockets = sockets
        self._lifeline, self._page = Lifeline(), MemoryFile.create("page")
        Page(self._page, ROLES)
        self._run = open_run(folder, config)
        run_id, incarnation, _ = self._run.core.checkpoint_context()
        self._context = RunContext(config, folder, folder, incarnation, 0, run_id, sockets)
        self._options = context_options(self._context) | options
        self._worker = Groups(self._run, config, mean_tokens=16)
        self._working: asyncio.Task[None] | None = None
        self.slots = [MemoryFile.create(f"weights-{i}") for i in range(self._run.core.broker.num_slots)]
        if self._context.weights is not None:
            self._context.weights.prepare()
        self._buffers: dict[int, np.ndarray] = {}
        self.controller = Watched(self._run)
        self._server: Server | None = None
        self._processes: list[RoleProcess] = []
        self._engine: RemoteEngine | None = None

    async def start(self) -> None:
        api: Any = self.controller
        self._server = await serve(api, controller_socket(self._sockets))
        folder, own = self._context.run_folder, [sys.executable, str(Path(__file__).with_name("weight_sync_roles.py"))]
        for role in ROLES:
            spec = ChildSpec(
                role=role,
                roles=ROLES,
                run_folder=str(folder),
                threads=1,
                socket_folder=self._sockets,
                lifeline=self._lifeline.read_end,
                page=self._page.fileno(),
                slots=tuple(slot.fileno() for slot in self.slots),
                options=self._options,
            )
            shipped = role == ENGINE_ID and self._context.config.engine.type == "vllm"
            self._processes.append(await spawn(spec, folder / "log" / f"{role}.log", None if shipped else own))

    async def start_weights(self) -> Sync:
        """The sync of version 0, for which the trainer is not asked; then batches are made."""
        sync = await self.wait(self.controller.synced.get())
        self._working = asyncio.create_task(self._worker.run(), name="groups")
        return sync

    async def one_sync(self) -> Sync:
        return await self.wait(self.controller.one_sync())

    async def decoding(self) -> Decoding:
        """What has the engine decode. Await it within `wait`."""
        self._engine = await connect(socket_path(self._sockets, ENGINE_ID))
        return Decoding(self._engine)

    async def wait(self, awaited: Awaitable[T] | Coroutine[Any, Any, T]) -> T:
        """What is awaited; RuntimeError with a process's last lines where that ends first, TimeoutError after DEADLINE_S."""
        task = asyncio.ensure_future(awaited)
        ends = [asyncio.ensure_future(process.process.wait()) for process in self._processes]
        try:
            await asyncio.wait({task, *ends}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            for process, end in zip(self._processes, ends, strict=True):
                if end.done():
                    raise RuntimeError(f"the {process.role} ended with {process.exit_code}:\n{process.last_lines()}")
            if not task.done():
                raise TimeoutError(f"nothing happened for {DEADLINE_S:.0f} s")
            return task.result()
        finally:
            for future in (task, *ends):
                future.cancel()

    def source_and_target(self) -> tuple[np.ndarray, np.ndarray]:
        """The slot of the newest version, and the one that the trainer will write next: nobody uses either while both roles rest."""
        num_bytes, following = self.controller.num_bytes, self._run.core.begin_write()
        return self.slots[self.controller.slot].map()[:num_bytes], self.slots[following].map(writable=True)[:num_bytes]

    def newest_and_spare(self) -> tuple[Path, Path]:
        """With transport `files`: the file of the newest version, and a name beside it that nobody uses."""
        assert self._context.weights is not None
        return self._context.weights.file(*self.controller.newest), self._context.weights.path / "spare"

    def buffer(self, number: int = 0, num_bytes: int | None = None) -> np.ndarray:
        """Memory for as many bytes as a version has, or for so many, every page of it used before; another one for each number."""
        if number not in self._buffers:
            self._buffers[number] = np.ones(num_bytes or self.controller.num_bytes, np.uint8)
        return self._buffers[number]

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        for process in self._processes:
            process.signal_group(9)
            await process.process.wait()
        if self._server is not None:
            await self._server.close()
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        self._run.close()
        self._lifeline.close()
        for memory in (self._page, *self.slots):
            memory.close()

    def memory_gib(self) -> float:
        """Of all processes, shared memory once. Linux only: 0 elsewhere."""
        if not Path("/proc/self/smaps_rollup").exists():
            return 0.0
        lines = [line for pid in tree_of(os.getpid()) for line in _rollup(pid)]
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**20


def _rollup(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return []
