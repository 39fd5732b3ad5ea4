"""Fakes that the controller's tests share: settings, records, and roles that ask what the real ones ask without doing any work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.checkpoint_files import describe_files, write_bytes, write_manifest
from slipstream.config import Config
from slipstream.controller.accounts import Account, check_accounts
from slipstream.controller.controller import Controller, open_controller
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder
from slipstream.protocols import CheckpointManifest, Manifest
from slipstream.types import (
    Assignment,
    Batch,
    EngineReport,
    EvalItem,
    EvalResult,
    Group,
    PrefixChunk,
    Rollout,
    RolloutStatus,
    SealedChunk,
    Span,
    StepReport,
    StopReason,
    seal,
)
from slipstream.weight_sync.slots import SlotBroker


class Notes:
    """An observer that remembers."""

    def __init__(self):
        self.steps, self.evaluations, self.notes = [], [], []

    def step(self, line, groups):
        self.steps.append((line, groups))

    def evaluation(self, line, result):
        self.evaluations.append(line)

    def note(self, text):
        self.notes.append(text)


def config(**tables) -> Config:
    base = {
        "launch": "inline",
        "rollout": {"group_size": 2},
        "trainer": {"steps": 6, "groups_per_step": 2},
        "buffer": {"max_staleness": 1, "window": 1},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 2, "keep": 2},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table if isinstance(table, dict) else table
    return Config.model_validate(base)


def checksum(incarnation: int, version: int) -> str:
    """Training is exact here: a version made again has the same bytes."""
    return f"{version:032x}"


def manifest(incarnation: int, version: int) -> Manifest:
    return Manifest(incarnation=incarnation, version=version, checksum=checksum(incarnation, version), total_bytes=0, entries=())


def rollout(
    group_id: int, sample: int, version: int, incarnation: int, reward: float, attempt: int = 0, error: str | None = None
) -> Rollout:
    status = RolloutStatus.FINISHED if error is None else RolloutStatus.FAILED
    return Rollout(
        group_id=group_id,
        sample=sample,
        attempt=attempt,
        status=status,
        error=error,
        prompt_length=1,
        token_ids=np.array([1, 2, 3], np.int32),
        logprobs=np.array([0, -1, -2], np.float32),
        loss_mask=np.array([False, True, True]),
        spans=(Span(1, 3, incarnation, version, "e0"),),
        reward=None if error else reward,
    )


def group_of(task: Assignment, version: int, incarnation: int, rewards=(0.0, 1.0), error: str | None = None) -> Group:
    rollouts = tuple(rollout(task.group_id, i, version, incarnation, r, task.attempt, error) for i, r in enumerate(rewards))
    return Group(
        group_id=task.group_id, attempt=task.attempt, draw=task.draw, row=task.row, rollouts=rollouts, min_version=task.min_version
    )


class Crash(Exception):
    """The controller's process is gone."""


class Dying:
    """A controller that dies in the middle of a call: the call may have changed things, its answer never leaves.

    `when`: the number of the call, or what must be true of the controller.
    """

    def __init__(self, controller: Controller, when: int | Callable[[Controller], bool]):
        self._controller, self._when, self._calls, self._dead = controller, when, 0, False

    def __getattr__(self, name: str):
        attribute = getattr(self._controller, name)
        if not asyncio.iscoroutinefunction(attribute) or name == "wait_finished":
            return attribute

        async def call(*arguments):
            self._calls += 1
            now = self._calls == self._when if isinstance(self._when, int) else self._when(self._controller)
            if now and not self._dead:
                self._dead = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(attribute(*arguments), 0.01)
            if self._dead:
                raise Crash(name)
            return await attribute(*arguments)

        return call


def abandon(controller: Controller) -> None:
    """What kill -9 leaves: uncommitted events are lost, the kernel gives the lock back."""
    controller.core.ledger.abandon()
    controller.core.ledger.close()
    controller.folder.release()


def chunk_of(rollout: Rollout, **changes: Any) -> SealedChunk:
    """The first sampled token of a rollout; or, with other fields, another chunk of it."""
    span = rollout.spans[0]
    chunk = PrefixChunk(
        group_id=rollout.group_id,
        sample=rollout.sample,
        attempt=rollout.attempt,
        prompt_length=1,
        start=0,
        token_ids=rollout.token_ids[1:2],
        logprobs=rollout.logprobs[1:2],
        spans=(Span(1, 2, span.incarnation, span.version, span.engine_id),),
    )
    return seal(msgspec.structs.replace(chunk, **changes))


def end_of(rollout: Rollout, stop_reason: StopReason) -> SealedChunk:
    """That the rollout has ended after that token."""
    nothing = {"token_ids": rollout.token_ids[:0], "logprobs": rollout.logprobs[:0], "spans": ()}
    return chunk_of(rollout, start=1, stop_reason=stop_reason, **nothing)


async def serve_engine(controller: Controller) -> int:
    """An engine that takes the newest weights once; its version."""
    offer = await controller.next_weights("e0", controller.incarnation, controller.core.state.engines.get("e0", -1))
    made = offer.manifest
    report = EngineReport(engine_id="e0", incarnation=made.incarnation, version=made.version, checksum=made.checksum)
    await controller.confirm_weights(offer.slot, report)
    return made.version


async def publish(controller: Controller, version: int) -> None:
    await controller.publish(await controller.begin_write(), manifest(controller.incarnation, version))


async def make_step(controller: Controller, step: int, **report: Any) -> Batch | None:
    """Admit what the gate lets through, finish it, train batch `step`, sync. Version 0 must be there."""
    for task in (await controller.admit(2)).assignments:
        await controller.finish_group(group_of(task, step, controller.incarnation))
    batch = await train(controller, step, **report)
    await serve_engine(controller)
    return batch


async def train(controller: Controller, step: int, **report: Any) -> Batch | None:
    """Batch `step`, its version published and its step reported. No engine takes it yet."""
    batch = await controller.get_batch(step)
    await publish(controller, step + 1)
    await controller.finish_step(StepReport(step=step, version=step + 1, checksum=checksum(controller.incarnation, step + 1), **report))
    return batch


class Roles:
    """A worker, an engine and a trainer that do what the real ones ask of the controller, without doing any work.

    `outcome(assignment)` -> the keywords of `group_of` for a group; `record` makes the worker record one token before it finishes a group.
    """

    def __init__(self, controller: Any, outcome: Callable[[Assignment], dict] = lambda task: {}, record: bool = False):
        self.c, self.outcome, self.record = controller, outcome, record
        self.version = -1
        self.swapped = asyncio.Event()
        self.trained: dict[int, tuple[int, ...]] = {}  # step -> group ids, as this trainer got them
        self.assigned: list[Assignment] = []

    async def run(self) -> str:
        async with asyncio.TaskGroup() as tasks:
            engine = tasks.create_task(self.engine())
            tasks.create_task(self.worker())
            tasks.create_task(self.trainer())
            ended = await self.c.wait_finished()
            engine.cancel()
        return ended

    async def engine(self) -> None:
        while True:
            offer = await self.c.next_weights("e0", self.c.incarnation, self.version)
            self.version = offer.manifest.version
            self.swapped.set()
            report = EngineReport(engine_id="e0", incarnation=self.c.incarnation, version=self.version, checksum=offer.manifest.checksum)
            await self.c.confirm_weights(offer.slot, report)

    async def worker(self) -> None:
        while True:
            work = await self.c.admit(2)
            if work.evaluation is not None:
                items = tuple(
                    EvalItem(row=i, rewards=(0.5,), completions=("x",), num_tokens=(2,)) for i in range(len(work.evaluation.rows))
                )
                name = (self.c.incarnation, self.version)
                await self.c.finish_evaluation(
                    EvalResult(
                        number=work.evaluation.number,
                        incarnation=name[0],
                        version=name[1],
                        checksum=checksum(*name),
                        items=items,
                        duration_s=0.1,
                    )
                )
            for task in work.assignments:
                while self.version < task.min_version:
                    self.swapped.clear()
                    await self.swapped.wait()
                self.assigned.append(task)
                group = self.group(task)
                if self.record and not task.prefixes:
                    await self.c.progress([chunk_of(r) for r in group.rollouts])
                await self.c.finish_group(group)
            if work.stop:
                return

    def group(self, task: Assignment) -> Group:
        """What comes of this order."""
        return group_of(task, self.version, self.c.incarnation, **self.outcome(task))

    async def trainer(self) -> None:
        step = self.c.start_step
        await self.publish(step)
        while (batch := await self.c.get_batch(step)) is not None:
            assert batch.step == step
            self.trained[step] = tuple(g.group_id for g in batch.groups)
            await self.publish(step + 1)
            await self.c.finish_step(StepReport(step=step, version=step + 1, checksum=checksum(self.c.incarnation, step + 1)))
            step += 1
            if step % self.c.core.config.checkpoint.every == 0:
                await self.checkpoint(step)

    async def publish(self, version: int) -> None:
        slot = await self.c.begin_write()
        await self.c.publish(slot, manifest(self.c.incarnation, version))

    async def checkpoint(self, step: int) -> None:
        folder = self.c.folder.checkpoints / f".tmp-{step}"
        await self.c.commit_checkpoint(folder.name, write_checkpoint(folder, step, *await self.c.checkpoint_context()))


def write_checkpoint(folder: Path, step: int, run_id: str, incarnation: int, ledger_seq: int) -> CheckpointManifest:
    """A whole checkpoint folder without a model in it."""
    folder.mkdir()
    write_bytes(folder / "model.bin", b"%d" % step * 100)
    manifest = CheckpointManifest(
        run_id=run_id,
        incarnation=incarnation,
        step=step,
        ledger_seq=ledger_seq,
        weights_checksum=checksum(incarnation, step),
        files=describe_files(folder),
    )
    write_manifest(folder, manifest)
    return manifest


def start(folder: RunFolder, settings: Config, observer: Notes | None = None, **more) -> Controller:
    rows = [{"question": i} for i in range(5)]
    return open_controller(
        folder,
        settings,
        rows=rows,
        eval_rows=rows[:2],
        data_fingerprint="d",
        broker=SlotBroker(),
        observer=observer or Notes(),
        **more,
    )


def account_of(folder: RunFolder) -> Account:
    """Where every group of the run went, checked."""
    with LedgerReader.open(folder.ledger) as reader:
        return check_accounts(reader)
