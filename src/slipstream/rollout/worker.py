"""The rollout worker: takes groups and evaluations from the controller, runs them on the engines, scores them, hands them back.

    loop            consumes                      produces              waits for                    unblocked by
    admit_groups    Work.assignments              a task per group      room for a group             a rollout that leaves the engine
                                                                        controller.admit(room)       the gate opens, or the run stops
    take_orders     Work.evaluation, Work.stop,   an evaluation task,   controller.admit(0)          an evaluation is due, a group was
                    Work.cancel                   a cancelled group                                  dropped, or the run stops
    recorder        sampled tokens                controller.progress   64 tokens or the end of one  engine frames
    a group         its assignment                finish_group          engine, environments,        frames, replies, scores;
                                                                        scorers, logprob stage       each with a deadline
    an evaluation   its EvalTask                  finish_evaluation or  the same                     the same; its engine's death
                                                  evaluation_lost

All are tasks of one TaskGroup: the first that fails ends the run with its own error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.config.settings import Config
from slipstream.environments import make_environment as environment_from_settings
from slipstream.errors import PeerLost
from slipstream.protocols import ControllerAPI, EngineClient, Environment, LogprobClient, Progress, Scorer
from slipstream.rollout.activity import WatchedCalls
from slipstream.rollout.evaluation import run_evaluation
from slipstream.rollout.external import ExternalCalls, FreeCalls
from slipstream.rollout.group import GroupRunner
from slipstream.rollout.prefixes import PrefixRecorder
from slipstream.rollout.rendering import Renderer
from slipstream.rollout.rollout import RolloutRunner
from slipstream.scoring.score import close_scorers, start_scorers
from slipstream.types import Assignment, EvalTask, Group, Sampling, Work

GroupKey = tuple[int, int]  # (group_id, attempt)

LOOK_AHEAD_GROUPS = 1  # admitted beyond the engine's slots, so that a slot that comes free finds a request waiting


class RolloutWorker:
    """Runs groups until the controller or `stop` ends it; `run` may be called again after that.

    controller, engine: clients of the other roles. tokenizer: as transformers gives it, with a chat template. scorers: see
    `scoring.scorers.make_scorers`; `close` closes them. max_context: tokens of prompt and completion that the engine can hold. logprobs:
    the logprob stage, of runs whose loss needs frozen models. external: how scorers and environments are called (TickedCalls in
    deterministic runs). progress: where the worker says what it owes. stop_token_ids: the model's own, added to those of its
    tokenizer and chat template. make_environment: row to environment, by the settings by default. engine_slots: sequences that
    run at a time now, where that changes (then call `engines_changed`).
    """

    def __init__(
        self,
        controller: ControllerAPI,
        engine: EngineClient,
        tokenizer: Any,
        config: Config,
        scorers: Sequence[Scorer],
        *,
        max_context: int,
        logprobs: LogprobClient | None = None,
        external: ExternalCalls | None = None,
        progress: Progress | None = None,
        seed: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        make_environment: Callable[[dict[str, Any]], Environment] | None = None,
        engine_slots: Callable[[], int] | None = None,
    ):
        self._controller, self._engine, self._config, self._scorers = controller, engine, config, list(scorers)
        self._engine_slots = engine_slots or (lambda: config.engine.slots)
        self._renderer = Renderer(tokenizer, max_context)
        self._logprobs = logprobs
        self.stop_token_ids = tuple(sorted({*stop_token_ids, *self._renderer.stop_token_ids()}))
        self._recorder = PrefixRecorder(controller)
        calls = external or FreeCalls()
        if progress is not None:
            calls = WatchedCalls(calls, progress, _longest_call_s(config))
        self._calls = calls
        rollouts = RolloutRunner(
            engine,
            self._renderer,
            config,
            calls,
            make_environment or (lambda row: environment_from_settings(config, row)),
            self._recorder,
            stop_token_ids=self.stop_token_ids,
            seed=config.run.seed if seed is None else seed,
        )
        self._groups = GroupRunner(rollouts, self._scorers, calls, deterministic=config.run.deterministic)
        self._begin()
        self._stopped.set()

    async def run(self) -> None:
        """Work until stopped. Raises the error of whatever task failed first; ConfigError for a reward that does not load."""
        self._begin()
        failed: BaseException | None = None
        try:
            await self._calls.run(("rewards", 0, 0, "loading", 0, 0), start_scorers(self._scorers))
            await self._work()
        except BaseExceptionGroup as errors:
            failed = _own_error(errors)
        finally:
            self._stopped.set()
        if failed is not None:
            raise failed

    async def stop(self, grace_s: float) -> None:
        """Admit nothing more; let what runs go on for `grace_s` seconds; then cancel it and record its tokens. Returns when `run` does."""
        self._grace_s = grace_s
        self._stopping.set()
        await self._stopped.wait()  # bounded: the grace, one call to the controller, and clean-ups with deadlines

    def engines_changed(self) -> None:
        """There are more engine slots than before, or fewer."""
        self._room_changed.set()

    async def close(self) -> None:
        """Close the scorers."""
        await close_scorers(self._scorers)

    # ---- the loops

    def _begin(self) -> None:
        self._stopping, self._stopped, self._room_changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._grace_s = self._config.run.stop_grace_s
        self._running: dict[GroupKey, asyncio.Task[None]] = {}
        self._num_sequences: dict[GroupKey, int] = {}  # rollouts that hold, or wait for, an engine slot
        self._sum_sequences = 0  # over all groups
        self._dropped: set[GroupKey] = set()  # cancelled by the controller, not ended yet
        self._evaluations: set[asyncio.Task[None]] = set()
        self._pinning = asyncio.Lock()
        self._recorder.reset()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            recorder = tasks.create_task(self._recorder.run(), name="record prefixes")
            loops = [
                tasks.create_task(self._admit_groups(), name="admit groups"),
                tasks.create_task(self._take_orders(), name="take orders"),
            ]
            await self._stopping.wait()  # set by `stop` or by an order; a failed task cancels this wait
            await _cancel(loops)
            await self._end_running()
            self._recorder.stop()
            await asyncio.wait({recorder})
            await self._recorder.flush()

    async def _admit_groups(self) -> None:
        while not self._stopping.is_set():
            while (room := self._room()) < 1:
                self._room_changed.clear()
                await self._room_changed.wait()
            self._take(await self._controller.admit(room))

    async def _take_orders(self) -> None:
        while not self._stopping.is_set():
            self._take(await self._controller.admit(0))

    async def _end_running(self) -> None:
        """Give what runs its grace, then cancel it."""
        running = [*self._running.values(), *self._evaluations]
        if running and self._grace_s > 0:
            await asyncio.wait(running, timeout=self._grace_s)
        await _cancel(running)

    def _room(self) -> int:
        """Groups that may start: enough to fill the free engine slots, and a few more."""
        size = self._config.rollout.num_samples
        free = self._engine_slots() + LOOK_AHEAD_GROUPS * size - self._sum_sequences
        return -(-free // size)

    def _take(self, work: Work) -> None:
        for key in work.cancel:
            self._drop_group(key)
        for assignment in work.assignments:
            self._start_group(assignment)
        if work.evaluation is not None:
            task = self._tasks.create_task(self._evaluate(work.evaluation), name=f"evaluation {work.evaluation.number}")
            self._evaluations.add(task)
            task.add_done_callback(self._evaluations.discard)
        if work.stop:
            self._stopping.set()

    def _start_group(self, assignment: Assignment) -> None:
        key = (assignment.group_id, assignment.attempt)

        def ended(task: asyncio.Task[None]) -> None:
            del self._running[key]
            self._sum_sequences -= self._num_sequences.pop(key)
            if key in self._dropped:
                self._dropped.remove(key)
                self._recorder.forget_group(assignment.group_id)
            self._room_changed.set()

        self._num_sequences[key] = self._config.rollout.num_samples
        self._sum_sequences += self._config.rollout.num_samples
        self._running[key] = self._tasks.create_task(self._run_group(assignment), name=f"group {assignment.group_id}")
        self._running[key].add_done_callback(ended)

    def _drop_group(self, key: GroupKey) -> None:
        """The controller has dropped the group: its requests leave the engine at once, and nothing more is said of it."""
        if key in self._running:
            self._dropped.add(key)
            self._running[key].cancel()

    # ---- what they start

    async def _run_group(self, assignment: Assignment) -> None:
        key = (assignment.group_id, assignment.attempt)
        group = Group(
            group_id=assignment.group_id,
            attempt=assignment.attempt,
            draw=assignment.draw,
            row=assignment.row,
            min_version=assignment.min_version,
        )
        rollout = self._config.rollout
        group = await self._groups.run(
            group,
            rollout.num_samples,
            _sampling(self._config),
            assignment.prefixes,
            lambda: self._free_sequence(key),
            needed=rollout.group_size,
            retries=assignment.retries,
        )
        await self._recorder.close_group(group.group_id)
        if self._logprobs is not None:
            group = await self._logprobs.annotate(group)
        await self._controller.finish_group(group)

    async def _evaluate(self, task: EvalTask) -> None:
        async with self._pinning:  # one at a time: the engine has one copy; bounded by evaluation.timeout_s
            result = None
            try:
                result = await run_evaluation(task, self._engine, self._groups, self._config)
            except* PeerLost:
                await self._controller.evaluation_lost(task.number)  # raises, too, where it is the controller that was lost
            if result is not None:
                await self._controller.finish_evaluation(result)

    def _free_sequence(self, key: GroupKey) -> None:
        self._num_sequences[key] -= 1
        self._sum_sequences -= 1
        self._room_changed.set()


def _sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_strings=tuple(rollout.stop),
    )


def _longest_call_s(config: Config) -> float:
    """The longest deadline of one call to a scorer or an environment."""
    return max(config.rollout.timeout_s, *(reward.timeout_s for reward in config.reward), 30.0)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _own_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: the first one, lost peers last, since those are mostly a symptom."""
    leaves: list[BaseException] = []
    todo: list[BaseException] = [errors]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo[:0] = error.exceptions
        else:
            leaves.append(error)
    return next((error for error in leaves if not isinstance(error, PeerLost)), leaves[0])
