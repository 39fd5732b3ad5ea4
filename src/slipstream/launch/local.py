"""The local launcher: one process per role on this machine. This process is controller and supervisor, and imports no torch.

    this process      controller (asyncio), supervisor            ◄── signals
      ├─ engine-0 ..  forward passes                              each child: own process group, own log, threads per role,
      ├─ trainer      optimizer steps                             a lifeline to this process, a record on the progress page
      ├─ logprobs     forward passes of frozen models, where the loss asks for them
      └─ rollout      rollout worker  (in this process where reward callables are given: they cannot travel)

An engine that dies or hangs is started anew and comes back into service with the current weights. Any other role that does, or an engine
that does so too often, ends the run with its own cause (`supervisor.decide`). Nothing is left running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from slipstream.config.frozen_models import stage_models
from slipstream.controller.controller import Controller
from slipstream.deadlines import CHECKPOINT_S
from slipstream.errors import DeadlineExceeded, SlipstreamError
from slipstream.launch import logprob_socket
from slipstream.launch.context import RunContext
from slipstream.launch.control import serving
from slipstream.launch.engines import ENGINES, Engines
from slipstream.launch.framing import private_directory
from slipstream.launch.page import NullProgress, Page
from slipstream.launch.processes import ChildSpec, Lifeline
from slipstream.launch.role import context_options, controller_socket
from slipstream.launch.supervisor import Supervisor
from slipstream.launch.wire import serve
from slipstream.weight_sync.memory import MemoryFile, weight_slots

ROLES = (*ENGINES, "trainer", "rollout", logprob_socket.ROLE)  # of engines as many as run, of the last one where the settings ask for it
LEAVE_MARGIN_S = 120.0  # beyond the grace: rewards under way, the last prefixes


async def run_local(context: RunContext, controller: Controller, rewards: Sequence[Callable[..., Any]]) -> None:
    """Run to the end, or raise the error of the role that ended it."""
    transport, num_slots = context.config.weight_sync.transport, controller.core.broker.num_slots
    with private_directory() as folder, weight_slots(transport, num_slots) as slots:
        run = LocalRun(context, controller, folder, slots)
        try:
            server = run.engines.server = await serve(controller, controller_socket(folder), on_failed=run.supervisor.report)
            try:
                async with serving(run.engines, folder, context.run_folder):
                    await run.run(rewards)
            finally:
                await run.supervisor.stop()
                await server.close()
        finally:
            run.close()


class LocalRun:
    """The processes of one run, and what they inherit."""

    def __init__(self, context: RunContext, controller: Controller, socket_folder: str, slots: Sequence[MemoryFile]):
        self._context, self._controller, self._folder = context, controller, socket_folder
        self._lifeline = Lifeline()
        self._page_memory = MemoryFile.create("page")
        self._slots = slots
        self.engines = Engines(context.config, controller, self._start_engine)
        self.supervisor = Supervisor(
            Page(self._page_memory, ROLES),
            may_leave=self._may_leave,
            max_restarts=self.engines.max_restarts,
            expendable=self.engines.expendable,
            gone=self.engines.gone,
            start_anew=self.engines.start_anew,
            given_up=self.engines.given_up,
        )
        self.engines.supervisor = self.supervisor
        self._own_worker: asyncio.Task[None] | None = None

    async def run(self, rewards: Sequence[Callable[..., Any]]) -> None:
        """Start the roles, wait for the end of the run, and let them leave."""
        await self.engines.start()
        await self._start("trainer", self._context.config.trainer.threads)
        if stage_models(self._context.config):
            with logprob_socket.listen(self._folder) as listener:
                await self._start(logprob_socket.ROLE, logprob_socket.THREADS, listener.fileno())
        if rewards:
            self._own_worker = asyncio.create_task(self._work_here(rewards), name="rollout worker")
        else:
            await self._start("rollout", 1)
        watch = asyncio.create_task(self.supervisor.watch(), name="supervisor")
        try:
            await self._while_watched(watch, self._controller.wait_finished())
            await self._while_watched(watch, self._left())
        except BaseException as error:
            self._controller.fail(error)
            if isinstance(error, SlipstreamError):
                self._controller.core.check()  # the first error counts: a role may have failed with the controller's own
            raise
        finally:
            tasks = [task for task in (watch, self._own_worker) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_engine(self, engine_id: str) -> None:
        await self._start(engine_id, self._context.config.engine.threads)

    async def _start(self, role: str, threads: int, listener: int | None = None) -> None:
        spec = ChildSpec(
            role=role,
            roles=ROLES,
            run_folder=str(self._context.run_folder),
            threads=threads,
            socket_folder=self._folder,
            lifeline=self._lifeline.read_end,
            page=self._page_memory.fileno(),
            slots=tuple(slot.fileno() for slot in self._slots),
            listener=listener,
            options=context_options(self._context),
        )
        await self.supervisor.start(spec, self._context.run_folder / "log" / f"{role}.log")

    async def _work_here(self, rewards: Sequence[Callable[..., Any]]) -> None:
        """The rollout worker in this process, for rewards that only exist here."""
        from slipstream.launch.assemble_worker import run_rollout_worker
        from slipstream.scoring.scorers import make_scorers

        scorers = make_scorers(self._context.config.reward, rewards)
        await run_rollout_worker(self._context, self._controller, scorers, self._folder, NullProgress())

    async def _while_watched(self, watch: asyncio.Task[Any], awaited: Coroutine[Any, Any, Any]) -> None:
        """Wait for `awaited`, unless a role, or the worker in this process, fails first."""
        task = asyncio.create_task(awaited, name="local: the run's end")
        waiting = {task, watch, *([self._own_worker] if self._own_worker and not self._own_worker.done() else [])}
        try:
            while not task.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    ended.result()  # raises: the supervisor's finding, the worker's error, the controller's error
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _left(self) -> None:
        """Wait until trainer and worker have saved what they hold and left."""
        settings = self._context.config
        await _within("trainer", self.supervisor.left("trainer"), settings.trainer.step_timeout_s + CHECKPOINT_S)
        worker = self.supervisor.left("rollout") if self._own_worker is None else asyncio.shield(self._own_worker)
        await _within("rollout worker", worker, settings.run.stop_grace_s + LEAVE_MARGIN_S)

    def _may_leave(self, role: str) -> bool:
        """Whether a role that exits with 0 has nothing left to do."""
        core = self._controller.core
        return core.stopping or (core.trained if role == "trainer" else core.finished)

    def close(self) -> None:
        self._lifeline.close()
        self._page_memory.close()


async def _within(role: str, leaves: Awaitable[None], limit_s: float) -> None:
    try:
        await asyncio.wait_for(leaves, limit_s)
    except TimeoutError:
        raise DeadlineExceeded(f"the {role} did not leave within {limit_s:.0f} s of the run's end") from None
