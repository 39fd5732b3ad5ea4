"""The controller as the other roles see it: `ControllerCore` plus waiting and durability.

    loop of a role      waits in                  unblocked by
    rollout worker      admit                     finish_group (a retry), get_batch, progress (stale groups give up slots, cancellations),
                                                  publish (permits), confirm_weights (slots, evaluations), finish_step, stop
                        next_engines              confirm_weights, engine_gone
    trainer             get_batch                 finish_group, stop
                        weights_taken             confirm_weights, engine_gone, finish_evaluation, stop
    engine              next_weights              publish; under a barrier also finish_group, get_batch: the round is over
    launcher            wait_finished             finish_step, finish_evaluation, stop, fail

There is one event loop, and all state changes happen in it. A change wakes everyone who waits; each looks again and goes back to sleep if
it still has to. What would be lost for good, or was promised (scores, batches, steps, evaluations, thrown-away attempts) is durable before
its call returns. Draws, versions, confirmations and the tokens of running rollouts become durable with the next such call, at the latest
after COMMIT_WITHIN_S: the log loses only a suffix, so nothing durable ever rests on what is not; a crash that loses draws or versions also
ends everyone who knew of them, and tokens are sampled again. What falls due in one turn of the loop is one commit.
Every wait has a deadline that moves on with progress, and names what it waits for when it passes.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slipstream import deadlines
from slipstream.beside import beside
from slipstream.config import Config
from slipstream.controller import checkpoints
from slipstream.controller import events as ev
from slipstream.controller.core import ControllerCore
from slipstream.controller.ledger import Ledger
from slipstream.controller.recovery import Identity, Start, start_run
from slipstream.controller.run_folder import RunFolder
from slipstream.controller.timing import MonotonicClock
from slipstream.controller.versions import Broker
from slipstream.errors import CheckpointError, DeadlineExceeded
from slipstream.protocols import CheckpointManifest, Clock, EngineInService, Manifest, Observer, WeightsOffer
from slipstream.types import Batch, EngineReport, EvalResult, Group, SealedChunk, StepReport, Work

T = TypeVar("T")
MARGIN_S = 60.0
COMMIT_WITHIN_S = 1.0  # of what nobody waits for: about as long as a rollout takes for the chunk of tokens that a crash costs it anyway


def open_controller(
    folder: RunFolder,
    config: Config,
    *,
    rows: Sequence[dict[str, Any]],
    eval_rows: Sequence[dict[str, Any]] = (),
    data_fingerprint: str,
    eval_fingerprint: str = "",
    broker: Broker,
    observer: Observer,
    clock: Clock | None = None,
    fingerprint: dict[str, str] | None = None,
    code_version: str = "",
    rewind: int | None = None,
    stall_timeout_s: float | None = None,
    num_together: int = 1,
) -> Controller:
    """Lock the run folder, recover what it holds (or start afresh where its ledger is empty), and write the new incarnation.

    `fingerprint`: numerics of this machine. `stall_timeout_s`: how long a batch may be waited for without any group making progress; by
    default the deadlines of a rollout and its rewards, and a margin. `num_together`: runs whose roles take turns in the same processes, so
    that each may be waited for so many times as long. Raises RunFolderError, LedgerError, ResumeError, CheckpointError.
    """
    folder.lock()
    ledger = None
    try:
        ledger = Ledger.open(folder.ledger)
        identity = Identity(data_fingerprint, eval_fingerprint, code_version, fingerprint or {})
        state, start = start_run(ledger, folder.checkpoints, config, identity, rewind)
        core = ControllerCore(
            config,
            ledger,
            state,
            rows,
            eval_rows,
            data_fingerprint,
            broker,
            observer,
            clock or MonotonicClock(),
            start.manifest.weights_checksum if start.manifest else None,
        )
    except BaseException:
        if ledger is not None:
            ledger.abandon()
            ledger.close()
        folder.release()
        raise
    for text in start.notes:
        observer.note(text)
    return Controller(core, folder, start, stall_timeout_s, num_together)


class Controller:
    """`protocols.ControllerAPI`, for one event loop."""

    def __init__(self, core: ControllerCore, folder: RunFolder, start: Start, stall_timeout_s: float | None = None, num_together: int = 1):
        self.core, self.folder, self.start = core, folder, start
        settings = core.config
        rewards_s = max((r.timeout_s for r in settings.reward), default=0.0)
        self._stall_s = (
            stall_timeout_s if stall_timeout_s is not None else num_together * (settings.rollout.timeout_s + rewards_s) + MARGIN_S
        )
        turn_s = max(settings.trainer.step_timeout_s, settings.evaluation.timeout_s, deadlines.LOAD_S, deadlines.CHECKPOINT_S)
        self._quiet_s = MARGIN_S + max(self._stall_s, num_together * turn_s)
        self._changed = asyncio.Event()
        self._woken_at = self._moved_at = -math.inf  # loop time of the last change of any kind, and of one that brings a batch nearer
        self._commit: asyncio.Future[None] | None = None
        self._later: asyncio.TimerHandle | None = None

    # -- what the launcher asks

    @property
    def incarnation(self) -> int:
        return self.core.state.incarnation

    @property
    def start_step(self) -> int:
        """Batches finished when this incarnation started; the trainer publishes its start weights as this version."""
        return self.start.step

    async def wait_finished(self) -> str:
        """How the run ended, "finished" or "stopped"; raises the error that ends the run."""

        def ended() -> str | None:
            self.core.check()
            return "finished" if self.core.finished else "stopped" if self.core.stopping else None

        return await self._wait(ended, lambda: f"the run does not end: {self.core.why_no_work()}", self._quiet_s)

    def settings_changed(self, changes: dict[str, Any], reason: str) -> None:
        """Record settings that are not those the run had so far: what a replay must know."""
        self.core.journal.record(ev.SettingsChanged(changes=changes, reason=reason))
        self._commit_later()

    def request_stop(self, reason: str = "") -> None:
        """First Ctrl-C: no more admissions, no further batch, workers are told to leave. Returns at once."""
        self.core.request_stop(reason)
        self._commit_soon()
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the run: everyone who waits, and everyone who asks from now on, gets this error. The first one counts."""
        self.core.fail(error)
        self.wake()

    async def changed(self) -> None:
        """Wait for the next change. No deadline of its own: the caller has one."""
        await self._changed.wait()

    def reassign_running(self) -> None:
        """The worker is gone or starts anew: hand running groups out again with their recorded prefixes, order its evaluation again."""
        self.core.reassign_running()
        self._commit_soon()
        self.wake()

    def engine_gone(self, engine_id: str, reason: str = "") -> None:
        """The engine is out of service: slots no longer wait for it, its lease ends."""
        self.core.engine_gone(engine_id, reason)
        self._commit_soon()
        self.wake()

    def wake(self) -> None:
        """Let everyone who waits look again; for changes made outside, such as a broker that lets a version go."""
        self._woken_at = asyncio.get_running_loop().time()
        self.core.measure_idle()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Commit, close the ledger, give the folder back."""
        if self._later is not None:
            self._later.cancel()
        try:
            self.core.close()
        finally:
            self.folder.release()

    # -- rollout worker

    async def admit(self, room: int) -> Work:
        work = await self._wait(
            lambda: self.core.admit(room),
            lambda: f"a rollout worker with room for {room} groups gets no work: {self.core.why_no_work()}",
            self._quiet_s,
        )
        self.core.measure_idle()
        self._commit_later()
        return work

    async def progress(self, chunks: list[SealedChunk]) -> None:
        """Of what is new here nobody waits for tokens, neither to be read nor to be durable; only for the slots of groups that they showed
        to be too old."""
        num_live = len(self.core.state.live)
        self.core.progress(chunks)
        self._moved_at = self._woken_at = asyncio.get_running_loop().time()
        if len(self.core.state.live) < num_live:
            self.wake()
        elif any(chunk.ended for chunk in chunks):
            self.core.measure_idle()
        self._commit_later()

    async def interrupted(self, group_id: int, sample: int, attempt: int, num_tokens: int) -> bool:
        again = self.core.interrupted(group_id, sample, attempt, num_tokens)
        await self._groups_moved()
        return again

    async def finish_group(self, group: Group) -> None:
        self.core.finish_group(group)
        await self._groups_moved()

    async def finish_evaluation(self, result: EvalResult) -> None:
        self.core.finish_evaluation(result)
        self.wake()
        await self._durable()

    async def evaluation_lost(self, number: int) -> None:
        self.core.evaluation_lost(number)
        self.wake()
        await self._durable()

    async def next_engines(self, known: dict[str, EngineInService]) -> dict[str, EngineInService]:
        def others() -> dict[str, EngineInService] | None:
            engines = self.core.in_service()
            return None if engines == known else engines

        return await self._wait(others, lambda: f"no engine came, left or took new weights: {self.core.why_no_work()}", self._quiet_s)

    async def note(self, text: str) -> None:
        self.core.observer.note(text)

    async def _groups_moved(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()
        self.wake()
        await self._durable()

    # -- trainer

    async def get_batch(self, step: int) -> Batch | None:
        core = self.core
        asked_at = core.clock.now()

        def batch_or_end() -> tuple[Batch | None] | None:
            core.check()
            if core.no_batch(step):
                return (None,)
            seq = core.ledger.last_seq
            batch = core.try_batch(step)
            if batch is None and core.ledger.last_seq > seq:  # stale groups were dropped: their slots are free
                self.wake()
                self._commit_later()
            return None if batch is None else (batch,)

        # A batch is not late while no engine can work on it: one that loads its model has that role's own deadline.
        await self._wait(
            lambda: core.serving or batch_or_end() is not None or None,
            lambda: f"no engine came into service with weights: {core.why_no_batch(step)}",
            self._quiet_s,
        )
        (batch,) = await self._wait(
            batch_or_end, lambda: f"no group made progress: {core.why_no_batch(step)}", self._stall_s, lambda: self._moved_at
        )
        if batch is not None:
            now = core.clock.now()
            core.times.batch_arrived(now, now - asked_at)
            self.wake()
            await self._durable()
        return batch

    async def begin_write(self) -> int:
        return self.core.begin_write()

    async def publish(self, slot: int, manifest: Manifest) -> None:
        self.core.publish(slot, manifest)
        self.wake()
        self._commit_later()

    async def finish_step(self, report: StepReport) -> None:
        self.core.finish_step(report)
        self.wake()
        await self._durable()

    async def checkpoint_context(self) -> tuple[str, int, int]:
        context = self.core.checkpoint_context()
        await self._durable()
        return context

    async def commit_checkpoint(self, temporary: str, manifest: CheckpointManifest) -> None:
        core, folder = self.core, self.folder.checkpoints
        if Path(temporary).name != temporary or not temporary.startswith(".tmp-"):
            raise CheckpointError(f"{temporary!r} is not a temporary checkpoint folder; it must be named .tmp-<step>")
        if any(p.step == manifest.step for p in core.state.checkpoints):  # committed before: by a retry, or where the run went on from
            shutil.rmtree(folder / temporary, ignore_errors=True)
            return
        core.check_checkpoint(manifest)
        await self._durable()
        await self._blocking(checkpoints.verify, folder / temporary, manifest)
        await self._blocking(checkpoints.install, folder, temporary, manifest.step)
        gone = core.checkpoint_committed(manifest)
        self.wake()
        await self._durable()
        await self._blocking(checkpoints.discard, folder, gone)
        core.prune()

    async def weights_taken(self) -> None:
        core = self.core
        await self._wait(lambda: core.weights_taken or None, lambda: f"engines lack the last weights: {core.why_no_work()}", self._quiet_s)

    async def _blocking(self, call: Callable[..., Any], *args: Any) -> None:
        """Long file work: beside the loop, except inline, where nothing may depend on how long a thread takes."""
        if self.core.config.launch == "inline":
            call(*args)
        else:
            await beside(call, *args)

    # -- engine

    async def next_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer:
        core = self.core

        def owed_since() -> float:  # nothing once the run has ended; its engine may stay, for other runs
            return asyncio.get_running_loop().time() if core.finished or core.stopping else self._woken_at

        offer = await self._wait(
            lambda: core.try_weights(engine_id, incarnation, version),
            lambda: f"engine {engine_id} at version {version} gets no newer weights: {core.why_no_work()}",
            self._quiet_s,
            owed_since,
        )
        self._commit_later()
        return offer

    async def confirm_weights(self, slot: int, report: EngineReport) -> None:
        self.core.confirm_weights(slot, report)
        self.wake()
        self._commit_later()

    # -- waiting and durability

    async def _wait(
        self, ready: Callable[[], T | None], reason: Callable[[], str], timeout_s: float, progress: Callable[[], float] | None = None
    ) -> T:
        """What `ready` gives once it is not None, asked again after every change; DeadlineExceeded when no progress comes for so long.

        `progress`: the loop time of the last one, by default of any change. The deadline is moved when it passes, not at every change.
        """
        progress = progress or (lambda: self._woken_at)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    while (result := ready()) is None:
                        await self._changed.wait()
                    return result
            except TimeoutError:
                if not limit.expired():
                    raise  # of `ready`: the error that ends the run may be a deadline's, too
                if progress() + timeout_s <= deadline:
                    raise DeadlineExceeded(f"waited {timeout_s:.0f} s: {reason()}") from None
                deadline = progress() + timeout_s

    async def _durable(self) -> None:
        """Return when every event so far is on disk."""
        await asyncio.shield(self._commit_soon())

    def _commit_later(self) -> None:
        if self._later is None and self._commit is None:
            self._later = asyncio.get_running_loop().call_later(COMMIT_WITHIN_S, self._commit_soon)

    def _commit_soon(self) -> asyncio.Future[None]:
        """One commit for all changes of this turn of the loop."""
        if self._commit is None:
            loop = asyncio.get_running_loop()
            self._commit = loop.create_future()
            loop.call_soon(self._commit_now, self._commit)
        return self._commit

    def _commit_now(self, future: asyncio.Future[None]) -> None:
        self._commit = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        try:
            self.core.commit()
        except BaseException as error:
            self.fail(error)
            future.set_exception(self.core.journal.error or error)  # whoever waits for the commit raises it, and so does everyone later
            future.exception()  # seen, also where nobody waits
            if not isinstance(error, Exception):  # out of an observer: raised here, once
                raise
        else:
            future.set_result(None)
