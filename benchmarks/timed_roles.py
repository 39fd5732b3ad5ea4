"""One run in virtual time: real controller, ledger, rollout worker, engine loop and trainer loop; timed stand-ins for two things.

    forward pass    `TimedEngine`: a token for each of at most N running sequences every `token_s` seconds, their lengths given; who
                    starts when, and what new weights do, as in `engines/embedded`
    training step   `TimedTrainer` makes none, and what the trainer says next is said `step_s` seconds later (`StepsTakeTime`)

Scores, weight transfer, ledger and messages take no time here: each has a benchmark of its own, or adds what it takes to both sides.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from free_roles import NoWeights
from virtual_time import run_virtually

from slipstream.config import Config
from slipstream.controller.controller import Controller, open_controller
from slipstream.controller.run_folder import RunFolder
from slipstream.engines.embedded.client import InProcessClient
from slipstream.engines.embedded.loop import run_engine
from slipstream.launch.page import NullProgress
from slipstream.models.tiny import END, make_tokenizer
from slipstream.protocols import Manifest
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.loop import run_trainer
from slipstream.types import Batch, Frame, GenerateRequest, Group, Score, StopReason
from slipstream.weight_sync.slots import SlotBroker, slots_for

ROWS = [{"prompt": f"number {n}", "answer": ""} for n in range(64)]
MEMORY = Path("/dev/shm")  # the ledger's fsync costs no virtual time, but much real time


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to; times in virtual seconds."""

    step_ends: list[float]
    trainer_idle: float  # share of the time since the first batch
    slots_full: float  # mean share of engine slots that held a sequence, up to the end of the last generation
    trained_samples: int
    trained_tokens: int
    masked_tokens: int  # too old
    staleness: Counter[int]  # of trained tokens

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]


def play(config: Config, lengths: np.ndarray, token_s: float, step_s: float) -> Outcome:
    """Run to the last step. `lengths`: int[groups, G] tokens of each rollout, in the order in which groups are drawn."""
    base = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="overlap-", dir=base) as folder:
        return run_virtually(_Run(config, lengths, token_s, step_s).play(RunFolder.create("overlap", folder)))


class _Run:
    def __init__(self, config: Config, lengths: np.ndarray, token_s: float, step_s: float):
        self._config, self._token_s, self._step_s = config, token_s, step_s
        self._engine = TimedEngine(config.engine.slots, lengths)
        self._step_ends: list[float] = []

    async def play(self, folder: RunFolder) -> Outcome:
        loop = asyncio.get_running_loop()
        controller = open_controller(
            folder,
            self._config,
            rows=ROWS,
            data_fingerprint="numbers",
            broker=SlotBroker(slots_for(1)),
            observer=SimpleNamespace(step=lambda *a: self._step_ends.append(loop.time()), evaluation=None, note=lambda text: None),
            clock=SimpleNamespace(now=loop.time),
        )
        try:
            await self._until_trained(controller, folder)
        finally:
            controller.close()
        totals = controller.core.state.totals
        return Outcome(
            step_ends=self._step_ends,
            trainer_idle=totals.trainer_wait_s / totals.trainer_active_s,
            slots_full=self._engine.tokens / (self._engine.ticks * self._config.engine.slots),
            trained_samples=totals.trained_samples,
            trained_tokens=totals.trained_tokens,
            masked_tokens=totals.masked_tokens,
            staleness=totals.staleness,
        )

    async def _until_trained(self, controller: Controller, folder: RunFolder) -> None:
        """The roles as tasks of this loop; the error of the first that fails."""
        wake, page = asyncio.Event(), NullProgress()
        client: Any = InProcessClient(self._engine, on_submit=wake.set)  # type: ignore[arg-type]
        worker = RolloutWorker(controller, client, make_tokenizer(), self._config, [Nought()], max_context=4096)
        trainer: Any = TimedTrainer(self._config)

        async def send_frame(frame: Frame) -> None:
            await asyncio.sleep(self._token_s)
            client.feed(frame)

        async with asyncio.TaskGroup() as roles:
            engine: Any = self._engine
            engine_task = roles.create_task(run_engine(engine, controller, NoWeights(), send_frame, wake, page))
            worker_task = roles.create_task(worker.run())
            await run_trainer(trainer, StepsTakeTime(controller, self._step_s), Packs(), folder.checkpoints, page)  # type: ignore[arg-type]
            await worker_task
            engine_task.cancel()


# ---- stand-ins -------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Sequence:
    handle: int
    request: GenerateRequest
    left: int  # tokens


class TimedEngine:
    """What `run_engine` and `InProcessClient` use of `EmbeddedEngine`, with interrupt = "in_flight": sequences go on under new weights."""

    engine_id = "engine-0"

    def __init__(self, slots: int, lengths: np.ndarray):
        self.version, self.ticks, self.tokens = (0, -1), 0, 0
        self._slots, self._lengths = slots, lengths
        self._waiting: dict[int, _Sequence] = {}  # by handle: in order of submission
        self._running: dict[int, _Sequence] = {}
        self._next_handle = 0
        self._end = make_tokenizer().convert_tokens_to_ids(END)

    def submit(self, request: GenerateRequest) -> int:
        handle = self._next_handle
        self._next_handle += 1
        length = int(self._lengths[request.group_id, request.sample]) - request.num_sampled
        self._waiting[handle] = _Sequence(handle, request, length)
        return handle

    def cancel(self, handle: int) -> None:
        self._waiting.pop(handle, None)
        self._running.pop(handle, None)

    def free(self, state: int) -> None: ...

    def may_adopt(self) -> bool:
        return True

    def set_version(self, incarnation: int, version: int, checksum: str) -> None:
        self.version = (incarnation, version)

    def has_work(self) -> bool:
        return bool(self._running) or any(self._ready())

    def tick(self) -> Frame:
        """Fill free slots, then one token for each that runs."""
        for sequence in list(self._ready())[: self._slots - len(self._running)]:
            self._running[sequence.handle] = self._waiting.pop(sequence.handle)
        handles, tokens, finished = [], [], []
        for sequence in list(self._running.values()):
            sequence.left -= 1
            handles.append(sequence.handle)
            tokens.append(0 if sequence.left else self._end)
            if not sequence.left:
                finished.append((sequence.handle, StopReason.STOP))
                del self._running[sequence.handle]
        self.ticks += 1
        self.tokens += len(handles)
        return Frame(
            tick=self.ticks,
            engine_id=self.engine_id,
            incarnation=self.version[0],
            version=self.version[1],
            handles=np.array(handles, np.int32),
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(handles), -1.0, np.float32),
            finished=tuple(finished),
        )

    def _ready(self) -> Iterator[_Sequence]:
        return (s for s in self._waiting.values() if s.request.min_version <= self.version[1])


class Nought:
    """A scorer that takes no time."""

    name, weight = "nought", 1.0

    async def score(self, group: Group) -> list[Score]:
        return [Score(name=self.name, value=float(rollout.sample % 2)) for rollout in group.rollouts]

    async def close(self) -> None: ...


class TimedTrainer:
    """What `run_trainer` and `write_checkpoint` use of `Trainer`."""

    def __init__(self, config: Config):
        self.config, self.step, self.skipped_in_a_row = config, 0, 0
        self.model = torch.nn.Linear(1, 1)
        self.optimizer, self.adapter = SimpleNamespace(state_tensors=lambda: {"moment": torch.zeros(1)}), None

    @property
    def version(self) -> int:
        return self.step

    def train_step(self, batch: Batch) -> Any:
        self.step += 1
        return SimpleNamespace(skipped=None, metrics={})

    def numerics(self) -> dict[str, str]:
        return {}


class StepsTakeTime:
    """The controller as the trainer sees it. A step takes its time between the batch and what is said next."""

    def __init__(self, controller: Controller, step_s: float):
        self._controller, self._step_s, self._owed_s = controller, step_s, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    async def get_batch(self, step: int) -> Batch | None:
        batch = await self._controller.get_batch(step)
        self._owed_s = self._step_s
        return batch

    async def begin_write(self) -> int:
        await self._step()
        return await self._controller.begin_write()

    async def finish_step(self, report: Any) -> None:
        await self._step()  # of a version that is not published
        await self._controller.finish_step(report)

    async def _step(self) -> None:
        owed, self._owed_s = self._owed_s, 0.0
        if owed:
            await asyncio.sleep(owed)


class Packs:
    """A publisher of nothing."""

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        return Manifest(incarnation=incarnation, version=version, checksum=f"{incarnation}.{version}", total_bytes=0, entries=())
