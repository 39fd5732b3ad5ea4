"""The inline launcher: every role in this process and thread, scheduled by engine ticks. For tests, debuggers, Macs, exact runs.

    controller ◄── direct calls ── worker, trainer (tasks of one event loop)         engine: ticked by `InlineRun.turn`

With `run.deterministic` a checkpoint is a canonical point: a running evaluation ends first, the worker is stopped with its prefixes
recorded, and running groups are handed out again with those, so the uninterrupted run goes through exactly what a resume goes through.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from slipstream.controller.controller import Controller
from slipstream.engines.embedded.client import InProcessClient
from slipstream.errors import DeadlineExceeded
from slipstream.launch.assemble import ENGINE_ID, Load, build_engine, build_logprobs, build_trainer
from slipstream.launch.assemble_weights import build_reader
from slipstream.launch.assemble_worker import build_worker
from slipstream.launch.context import OpenRun, RunContext
from slipstream.launch.framing import private_directory
from slipstream.launch.page import NullProgress
from slipstream.launch.scheduler import run_until_blocked, settle
from slipstream.models.loading import load_model, load_tokenizer
from slipstream.models.one_base import OneBase
from slipstream.protocols import CheckpointManifest, Scorer, WeightsOffer
from slipstream.rollout.external import TickedCalls
from slipstream.rollout.worker import RolloutWorker
from slipstream.scoring.scorers import make_scorers
from slipstream.trainer.loop import run_trainer
from slipstream.types import EngineReport
from slipstream.weight_sync.lag import LagBroker
from slipstream.weight_sync.memory import MemoryFile, weight_slots

BLOCKED_DEADLINE_S = 900.0  # nothing can run and no outside call is out: only the controller's own deadlines can end this wait


async def run_inline(runs: Sequence[OpenRun], rewards: Sequence[Callable[..., Any]]) -> None:
    """Run to the end, or raise the error of the role that ended it. `rewards` are callables besides those of the settings.

    Several runs are experiments: they take turns, over one copy of the model in their engines and one in their trainers.
    """
    engines, trainers = (OneBase(), OneBase()) if len(runs) > 1 else (load_model, load_model)
    with ExitStack() as held:
        held.enter_context(_threads(runs[0].context.config.engine.threads))
        runs = [held.enter_context(_with_sockets(run)) for run in runs]
        slots = [held.enter_context(weight_slots(run.config.weight_sync.transport, run.controller.core.broker.num_slots)) for run in runs]
        inline: list[InlineRun] = []
        try:
            for run, its_slots in zip(runs, slots, strict=True):
                inline.append(InlineRun(run.context, run.controller, its_slots, load_engine=engines, load_trainer=trainers))
            await take_turns(inline, rewards)
        finally:
            for run in inline:
                await run.close()


async def take_turns(runs: Sequence[InlineRun], rewards: Sequence[Callable[..., Any]]) -> None:
    """A turn of each run, in their order, again and again until all have ended. What a run does in its turns the others do not touch."""
    for run in runs:
        with run.context.named_errors():
            await run.start(make_scorers(run.context.config.reward, rewards))
    going = list(runs)
    while going:
        waits = []
        for run in going:
            with run.context.named_errors():
                waits.append(await run.turn())
        if all(waits):
            await _first_of(going, [task for tasks in waits for task in tasks])
        for run in [run for run in going if run.ended]:
            with run.context.named_errors():
                await run.result()
            going.remove(run)


async def _first_of(runs: Sequence[InlineRun], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Nothing can run now: a deadline (a stop's grace, a stalled batch) must pass, or a role is just leaving."""
    done, _ = await asyncio.wait(tasks, timeout=BLOCKED_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        raise DeadlineExceeded(f"nothing could run for {BLOCKED_DEADLINE_S:.0f} s: {'; '.join(run.why_no_batch for run in runs)}")


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
def _with_sockets(run: OpenRun) -> Iterator[OpenRun]:
    """The run with a private directory for sockets, where the transport has some also within one process."""
    if run.config.weight_sync.transport != "collective":
        yield run
        return
    with private_directory() as folder:
        yield run.placed(folder)


class InlineRun:
    """The roles of one run and the turn that drives them."""

    def __init__(
        self,
        context: RunContext,
        controller: Controller,
        slots: Sequence[MemoryFile],
        *,
        load_engine: Load = load_model,
        load_trainer: Load = load_model,
    ):
        self.context, self._controller = context, controller
        self._outside = TickedCalls()
        self._engine = build_engine(context.config, load=load_engine)
        self._weights = build_reader(context, self._engine.weights, self._engine.engine_id, slots)
        self._client = InProcessClient(self._engine)
        self._trainer, self._publisher = build_trainer(context, slots, load_trainer)
        self._logprobs = build_logprobs(context.config)
        self._worker: RolloutWorker | None = None
        self._trainer_task: asyncio.Task[None] | None = None
        self._worker_task: asyncio.Task[None] | None = None
        self._offer: asyncio.Task[WeightsOffer] | None = None
        self._changed: asyncio.Task[None] | None = None

    async def start(self, scorers: Sequence[Scorer]) -> None:
        """Start trainer and worker; from here on the run goes on by its turns."""
        model = load_tokenizer(self.context.config.model)
        self._worker = await build_worker(
            self.context, self._controller, self._client, scorers, model, logprobs=self._logprobs, external=self._outside
        )
        api: Any = _CanonicalPoints(self) if self.context.config.run.deterministic else self._controller
        self._trainer_task = asyncio.create_task(
            run_trainer(self._trainer, api, self._publisher, self.context.checkpoints, NullProgress()), name="trainer"
        )

    @property
    def ended(self) -> bool:
        """Trainer and worker have left."""
        tasks = (self._trainer_task, self._worker_task)
        return all(task is not None and task.done() for task in tasks)

    async def result(self) -> None:
        """Of a run that has ended: nothing, or the error of the role that ended it."""
        assert self._trainer_task is not None and self._worker_task is not None, "it has ended"
        await asyncio.gather(self._trainer_task, self._worker_task)

    @property
    def why_no_batch(self) -> str:
        return self._controller.core.why_no_batch(self._trainer.step)

    async def turn(self) -> tuple[asyncio.Task[None], ...]:
        """Settle, adopt, tick: see `scheduler`. Nothing where it went on; else what it waits for: tasks, the first of which to end may let
        it go on."""
        if self._changed is not None:
            self._changed.cancel()
        await settle(self._outside)
        self._raise_failure()
        if await self._adopt():
            return ()
        if self._worker_task is None and self._worker is not None:  # at the start and after a canonical point: weights come first
            self._worker_task = asyncio.create_task(self._worker.run(), name="rollout worker")
            return ()
        if self._engine.has_work():
            self._client.feed(self._engine.tick())
            return ()
        if self._release_lagging():
            return ()
        tasks = [task for task in (self._trainer_task, self._worker_task) if task is not None and not task.done()]
        if not tasks:
            return ()
        self._changed = asyncio.create_task(self._controller.changed(), name="inline: controller changed")  # from now on, not from the wait
        return (*tasks, self._changed)

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
        checksum = self._weights(offer)
        self._engine.set_version(manifest.incarnation, manifest.version, checksum)
        report = EngineReport(
            engine_id=ENGINE_ID,
            incarnation=manifest.incarnation,
            version=manifest.version,
            checksum=checksum,
            repaired=self._weights.refused,
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
        held = (self._worker_task, self._trainer_task, self._offer, self._changed)
        tasks: list[asyncio.Task[Any]] = [task for task in held if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()
        self._weights.close()
        self._publisher.close()


class _CanonicalPoints:
    """The controller as the trainer of a deterministic run sees it: a checkpoint begins by bringing everything else to rest.

    Once the run is to stop, evaluation and worker come to another rest, at a moment that no schedule knows. What would be saved then is
    thrown away: the run goes on from the checkpoint before.
    """

    def __init__(self, run: InlineRun):
        self._run, self._controller = run, run._controller
        self._at_rest = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    async def checkpoint_context(self) -> tuple[str, int, int]:
        await self._run.evaluation_ended()
        await self._run.outside(("", "checkpoint"), self._run.pause_worker())
        self._at_rest = not self._controller.core.stopping
        return await self._controller.checkpoint_context()

    async def commit_checkpoint(self, temporary: str, manifest: CheckpointManifest) -> None:
        if self._at_rest:
            await self._controller.commit_checkpoint(temporary, manifest)
        else:
            shutil.rmtree(self._run.context.checkpoints / temporary)
