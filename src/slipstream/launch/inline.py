"""The inline launcher: every role in this process and thread, scheduled by engine ticks. For tests, debuggers, Macs, exact runs.

    controller ◄── direct calls ── worker, trainer (tasks of one event loop)         engine: ticked by `InlineRun._turn`

With `run.deterministic` a checkpoint is a canonical point: a running evaluation ends first, the worker is stopped with its prefixes
recorded, and running groups are handed out again with those, so the uninterrupted run goes through exactly what a resume goes through.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.controller.controller import Controller
from slipstream.engines.embedded.client import InProcessClient
from slipstream.errors import DeadlineExceeded
from slipstream.launch.assemble import ENGINE_ID, build_engine, build_logprobs, build_trainer, build_weights
from slipstream.launch.assemble_worker import build_worker
from slipstream.launch.context import RunContext
from slipstream.launch.framing import private_directory
from slipstream.launch.page import NullProgress
from slipstream.launch.scheduler import run_until_blocked, settle
from slipstream.models.loading import load_tokenizer
from slipstream.protocols import Scorer, WeightsOffer
from slipstream.rollout.external import TickedCalls
from slipstream.rollout.worker import RolloutWorker
from slipstream.scoring.scorers import make_scorers
from slipstream.trainer.loop import run_trainer
from slipstream.types import EngineReport
from slipstream.weight_sync.collective import close_transport
from slipstream.weight_sync.delta import refused_by
from slipstream.weight_sync.lag import LagBroker
from slipstream.weight_sync.memory import MemoryFile, weight_slots

BLOCKED_DEADLINE_S = 900.0  # nothing can run and no outside call is out: only the controller's own deadlines can end this wait


async def run_inline(context: RunContext, controller: Controller, rewards: Sequence[Callable[..., Any]]) -> None:
    """Run to the end, or raise the error of the role that ended it. `rewards` are callables besides those of the settings."""
    config = context.config
    scorers = make_scorers(config.reward, rewards)
    transport, num_slots = config.weight_sync.transport, controller.core.broker.num_slots
    with _threads(config.engine.threads), weight_slots(transport, num_slots) as slots, _with_sockets(context) as placed:
        run = InlineRun(placed, controller, slots)
        try:
            await run.run(scorers)
        finally:
            await run.close()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """The engine's thread count for everything but the trainer's steps, which set their own and give this one back.

    torch's own default is the number of cores, and with it the bits of a result would depend on the machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _with_sockets(context: RunContext) -> Iterator[RunContext]:
    """The context with a private directory for sockets, where the transport has some also within one process."""
    if context.config.weight_sync.transport != "collective":
        yield context
        return
    with private_directory() as folder:
        yield dataclasses.replace(context, sockets=folder)


class InlineRun:
    """The roles of one run and the turn that drives them."""

    def __init__(self, context: RunContext, controller: Controller, slots: Sequence[MemoryFile]):
        self._context, self._controller = context, controller
        self._outside = TickedCalls()
        self._engine = build_engine(context.config)
        self._load_weights = build_weights(context, self._engine, slots)
        self._client = InProcessClient(self._engine)
        self._trainer, self._publisher = build_trainer(context, slots)
        self._logprobs = build_logprobs(context.config)
        self._worker: RolloutWorker | None = None
        self._trainer_task: asyncio.Task[None] | None = None
        self._worker_task: asyncio.Task[None] | None = None
        self._offer: asyncio.Task[WeightsOffer] | None = None

    async def run(self, scorers: Sequence[Scorer]) -> None:
        """Turns until trainer and worker have left."""
        model = load_tokenizer(self._context.config.model)
        self._worker = await build_worker(
            self._context, self._controller, self._client, scorers, model, logprobs=self._logprobs, external=self._outside
        )
        api: Any = _CanonicalPoints(self) if self._context.config.run.deterministic else self._controller
        self._trainer_task = asyncio.create_task(
            run_trainer(self._trainer, api, self._publisher, self._context.checkpoints, NullProgress()), name="trainer"
        )
        while not self._trainer_task.done() or self._worker_task is None or not self._worker_task.done():
            await self._turn()
        await asyncio.gather(self._trainer_task, self._worker_task)

    async def _turn(self) -> None:
        """Settle, adopt, tick: see `scheduler`."""
        await settle(self._outside)
        self._raise_failure()
        if await self._adopt():
            return
        if self._worker_task is None and self._worker is not None:  # at the start and after a canonical point: weights come first
            self._worker_task = asyncio.create_task(self._worker.run(), name="rollout worker")
            return
        if self._engine.has_work():
            self._client.feed(self._engine.tick())
        elif not self._release_lagging():
            await self._wait()

    async def _adopt(self) -> bool:
        """Take the weights on offer, if there are any and the engine may."""
        if self._offer is None:
            self._offer = asyncio.create_task(self._controller.next_weights(ENGINE_ID, *self._engine.version), name="engine: next weights")
            await run_until_blocked()
        if not self._offer.done():
            return False
        offer = self._offer.result()
        if not self._engine.may_adopt():
            return False
        self._offer = None
        manifest = offer.manifest
        checksum = self._load_weights(offer)
        self._engine.set_version(manifest.incarnation, manifest.version, checksum)
        report = EngineReport(
            engine_id=ENGINE_ID,
            incarnation=manifest.incarnation,
            version=manifest.version,
            checksum=checksum,
            repaired=refused_by(self._load_weights),
        )
        await self._controller.confirm_weights(offer.slot, report)
        return True

    def _release_lagging(self) -> bool:
        """With `weight_sync.lag`: the engine has run dry behind the gate, so it may take the next version."""
        broker = self._controller.core.broker
        if not isinstance(broker, LagBroker) or not broker.release_next():
            return False
        self._controller.wake()
        return True

    async def _wait(self) -> None:
        """Nothing can run now: a deadline (a stop's grace, a stalled batch) must pass, or a role is just leaving."""
        tasks = [task for task in (self._trainer_task, self._worker_task) if task is not None and not task.done()]
        if not tasks:
            return
        changed = asyncio.create_task(self._controller.changed(), name="inline: controller changed")
        try:
            done, _ = await asyncio.wait([*tasks, changed], timeout=BLOCKED_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if not done:
            raise DeadlineExceeded(
                f"nothing could run for {BLOCKED_DEADLINE_S:.0f} s: {self._controller.core.why_no_batch(self._trainer.step)}"
            )

    def _raise_failure(self) -> None:
        for task in (self._trainer_task, self._worker_task):
            if task is not None and task.done() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]

    async def evaluation_ended(self) -> None:
        """Wait while an evaluation runs: started again later, it would be of another version. `evaluation.timeout_s` bounds it."""
        core = self._controller.core
        while core.state.evaluations.running is not None and not core.stopping:
            await self._controller.changed()

    async def pause_worker(self) -> None:
        """Stop the worker with its prefixes recorded; the next turns start it again with what the controller hands out."""
        if self._worker_task is None or self._worker is None:
            return
        await self._worker.stop(0.0)
        await self._worker_task
        self._worker_task = None
        self._controller.reassign_running()

    async def outside(self, key: tuple[Any, ...], awaitable: Any) -> Any:
        return await self._outside.run(key, awaitable)

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [task for task in (self._worker_task, self._trainer_task, self._offer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()
        close_transport(self._load_weights, self._publisher)


class _CanonicalPoints:
    """The controller as the trainer of a deterministic run sees it: a checkpoint begins by bringing everything else to rest."""

    def __init__(self, run: InlineRun):
        self._run, self._controller = run, run._controller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    async def checkpoint_context(self) -> tuple[str, int, int]:
        await self._run.evaluation_ended()
        await self._run.outside(("", "checkpoint"), self._run.pause_worker())
        return await self._controller.checkpoint_context()
