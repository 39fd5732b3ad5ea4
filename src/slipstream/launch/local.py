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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.frozen_models import stage_models
from slipstream.deadlines import CHECKPOINT_S
from slipstream.errors import DeadlineExceeded, SlipstreamError
from slipstream.launch import logprob_socket
from slipstream.launch.context import OpenRun
from slipstream.launch.control import serving
from slipstream.launch.engines import ENGINES, Engines
from slipstream.launch.framing import private_directory
from slipstream.launch.page import NullProgress, Page
from slipstream.launch.processes import ChildSpec, Lifeline
from slipstream.launch.role import context_options, controller_socket
from slipstream.launch.supervisor import Supervisor
from slipstream.launch.together import together
from slipstream.launch.wire import Failure, serve
from slipstream.weight_sync.memory import MemoryFile, weight_slots

ROLES = (*ENGINES, "trainer", "rollout", logprob_socket.ROLE)  # of engines as many as run, of the last one where the settings ask for it
LEAVE_MARGIN_S = 120.0  # beyond the grace: rewards under way, the last prefixes


async def run_local(runs: Sequence[OpenRun], log: Path, rewards: Sequence[Callable[..., Any]]) -> None:
    """Run to the end, or raise the error of the role that ended it. `log` is the folder of the roles' logs.

    Several runs are experiments: each has its controller and its sockets here, and every process plays its role in all of them.
    """
    with ExitStack() as held:
        runs = [run.placed(held.enter_context(private_directory())) for run in runs]
        slots = [held.enter_context(weight_slots(run.config.weight_sync.transport, run.controller.core.broker.num_slots)) for run in runs]
        local = LocalRun(runs, slots, log)
        try:
            async with AsyncExitStack() as served:
                for run in runs:
                    server = await serve(run.controller, controller_socket(run.context.sockets), on_failed=partial(local.report, run))
                    served.push_async_callback(server.close)
                    local.engines.servers.append(server)
                served.push_async_callback(local.supervisor.stop)
                if len(runs) == 1:
                    await served.enter_async_context(serving(local.engines, runs[0].context.sockets, runs[0].context.run_folder))
                await local.run(rewards)
        finally:
            local.close()


class LocalRun:
    """The processes of one run, or of several experiments, and what they inherit."""

    def __init__(self, runs: Sequence[OpenRun], slots: Sequence[Sequence[MemoryFile]], log: Path):
        self._runs, self._slots, self._log = runs, slots, log
        self._config = runs[0].config  # of what all have in common: launcher, engine, trainer's threads
        self._lifeline = Lifeline()
        self._page_memory = MemoryFile.create("page")
        self.engines = Engines(self._config, [run.controller for run in runs], self._start_engine)
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
        await self._start("trainer", self._config.trainer.threads)
        with ExitStack() as held:
            listeners = {
                number: held.enter_context(logprob_socket.listen(run.context.sockets)).fileno()
                for number, run in enumerate(self._runs)
                if stage_models(run.config)
            }
            if listeners:
                await self._start(logprob_socket.ROLE, logprob_socket.THREADS, listeners)
        if rewards:
            self._own_worker = asyncio.create_task(self._work_here(rewards), name="rollout worker")
        else:
            await self._start("rollout", 1)
        watch = asyncio.create_task(self.supervisor.watch(), name="supervisor")
        try:
            await self._while_watched(watch, together(run.finished() for run in self._runs))
            await self._while_watched(watch, self._left())
        except BaseException as error:
            for run in self._runs:
                run.controller.fail(error)
            if isinstance(error, SlipstreamError):
                for run in self._runs:
                    run.controller.core.check()  # the first error counts: a role may have failed with the controller's own
            raise
        finally:
            tasks = [task for task in (watch, self._own_worker) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, run: OpenRun, role: str, failure: Failure) -> None:
        """A role says why it is about to end, and in which run."""
        self.supervisor.report(role, msgspec.structs.replace(failure, message=f"{run.context.where}{failure.message}"))

    async def _start_engine(self, engine_id: str, url: str, again: bool) -> None:
        options = {"url": url} | ({"again": "yes"} if again else {}) if url else {}
        await self._start(engine_id, self._config.engine.threads, options=options)

    async def _start(
        self, role: str, threads: int, listeners: Mapping[int, int] | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        """Start the role's process, for all runs, or for those that have a listener."""
        first, *others = [
            ChildSpec(
                role=role,
                roles=ROLES,
                run_folder=str(run.context.run_folder),
                threads=threads,
                socket_folder=run.context.sockets,
                lifeline=self._lifeline.read_end,
                page=self._page_memory.fileno(),
                slots=tuple(slot.fileno() for slot in self._slots[number]),
                listener=None if listeners is None else listeners[number],
                options=context_options(run.context) | dict(options or {}),
            )
            for number, run in enumerate(self._runs)
            if listeners is None or number in listeners
        ]
        await self.supervisor.start(msgspec.structs.replace(first, others=tuple(others)), self._log / f"{role}.log")

    async def _work_here(self, rewards: Sequence[Callable[..., Any]]) -> None:
        """The rollout worker in this process, for rewards that only exist here."""
        from slipstream.launch.assemble_worker import run_rollout_worker
        from slipstream.scoring.scorers import make_scorers

        async def work(run: OpenRun) -> None:
            scorers = make_scorers(run.config.reward, rewards)
            with run.context.named_errors():
                await run_rollout_worker(run.context, run.controller, scorers, run.context.sockets, NullProgress())

        await together(work(run) for run in self._runs)

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
        step_s = sum(run.config.trainer.step_timeout_s for run in self._runs)  # they take turns
        grace_s = max(run.config.run.stop_grace_s for run in self._runs)
        await _within("trainer", self.supervisor.left("trainer"), step_s + len(self._runs) * CHECKPOINT_S)
        worker = self.supervisor.left("rollout") if self._own_worker is None else asyncio.shield(self._own_worker)
        await _within("rollout worker", worker, grace_s + LEAVE_MARGIN_S)

    def _may_leave(self, role: str) -> bool:
        """Whether a role that exits with 0 has nothing left to do."""
        cores = [run.controller.core for run in self._runs]
        return all(core.stopping or (core.trained if role == "trainer" else core.finished) for core in cores)

    def close(self) -> None:
        self._lifeline.close()
        self._page_memory.close()


async def _within(role: str, leaves: Awaitable[None], limit_s: float) -> None:
    try:
        await asyncio.wait_for(leaves, limit_s)
    except TimeoutError:
        raise DeadlineExceeded(f"the {role} did not leave within {limit_s:.0f} s of the run's end") from None
