"""The controller without waiting: every call answers at once, or says None for "not yet". `controller.Controller` adds the waiting.

    call               consumes                    produces                              None until
    admit              slots, permits, due evals   assignments, an evaluation order      a slot frees, a permit is met, an eval is due
    finish_group       a scored group              FINISHED, a retry, FILTERED, DROPPED
    try_batch          P pullable groups           batch s, recorded                     the window holds P finished groups
    publish            a complete weight slot      version v
    finish_step        a step report               T + 1, a metric line
    try_weights        the newest version          a lease                               something newer is published
    confirm_weights    a lease                     free slots, due evaluations

Each change is an event: applied to the state, appended to the ledger. `commit` makes everything so far durable and then tells the observer;
a caller commits before it lets an answer out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.config.settings import Config
from slipstream.controller import admission, buffer
from slipstream.controller import events as ev
from slipstream.controller.cursor import Cursor
from slipstream.controller.evaluations import choose, evaluation_line, mean, pending, rewards_of
from slipstream.controller.ledger import Ledger
from slipstream.controller.metrics_line import run_totals, step_line
from slipstream.controller.state import RunState, apply
from slipstream.controller.timing import StepTimes
from slipstream.controller.versions import Broker, check_manifest, check_report
from slipstream.errors import CheckpointError, LedgerError, RunFailed, SlipstreamError, WeightSyncError
from slipstream.protocols import CheckpointManifest, Clock, Manifest, Observer, WeightsOffer
from slipstream.types import (
    Assignment,
    Batch,
    Draw,
    EngineReport,
    EvalResult,
    EvalTask,
    Group,
    GroupStatus,
    PrefixChunk,
    StepReport,
    Work,
)

UNFIT_CAUSES = ("prompt does not fit",)  # failures that another attempt cannot change


class ControllerCore:
    """Admission, buffer, versions, evaluations and the ledger of one incarnation, synchronously."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        state: RunState,
        rows: Sequence[dict[str, Any]],
        eval_rows: Sequence[dict[str, Any]],
        data_fingerprint: str,
        broker: Broker,
        observer: Observer,
        clock: Clock,
        start_checksum: str | None = None,
    ):
        self.config, self.ledger, self.state = config, ledger, state
        self.broker, self.observer, self.clock = broker, observer, clock
        self._rows, self._data_fingerprint = rows, data_fingerprint
        self._eval_rows = tuple(eval_rows)[: config.evaluation.limit]
        self._cursor = Cursor(len(rows), config.run.seed)
        self._start_checksum = start_checksum  # of the checkpoint that the trainer must start from
        self.error: BaseException | None = None
        self._torn = False  # the ledger missed an event
        self.times = StepTimes()
        self._started_at = clock.now()
        self._unassigned = sorted(g.group_id for g in state.live.values() if g.status is GroupStatus.RUNNING)
        self._running_since: dict[int, float] = {}  # handed-out groups -> when
        self._ended_samples: dict[int, set[int]] = {}  # handed-out groups -> samples whose generation has ended
        self._groups: dict[int, Group] = {}  # finished groups in memory; after a resume they are read from the ledger when needed
        self._batches: dict[int, Batch] = {}  # handed to the trainer, not finished
        self._points: dict[int, ev.Point] = {}  # ledger_seq -> where the draws stood when a checkpoint asked
        self._sync_s: list[float] = []  # of confirmations since the last step
        self._generated_before = state.totals.generated_tokens
        self._flat_steps = 0  # steps in a row whose groups all had zero variance
        self._outbox: list[Callable[[], None]] = []  # what the observer is told once it is durable

    # -- what the run knows of itself

    @property
    def steps(self) -> int:
        return self.config.trainer.steps

    @property
    def bound(self) -> int:
        return admission.worst_staleness(self.state.max_staleness, self.state.groups_per_step, self.state.window)

    @property
    def trained(self) -> bool:
        return self.state.step >= self.steps

    @property
    def finished(self) -> bool:
        """Every step is made and the last version is evaluated."""
        evaluations = self.state.evaluations
        evaluated = not self._eval_rows or (self.steps in evaluations.handled and evaluations.running is None)
        return self.trained and (evaluated or self.state.step > self.steps)

    @property
    def stopping(self) -> bool:
        return self.state.stop_reason is not None

    def totals(self) -> dict[str, Any]:
        return run_totals(self.state)

    # -- durability

    def commit(self) -> None:
        """Make all events durable, then tell the observer what happened."""
        if self._torn:
            self.check()
        with self._tearing():
            self.ledger.commit()
        told, self._outbox = self._outbox, []
        for tell in told:
            tell()

    def fail(self, error: BaseException) -> None:
        """The run ends with this error; the first one counts."""
        self.error = self.error or error

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _record(self, event: ev.Event, *data: Group | PrefixChunk | EvalResult) -> None:
        """Apply the event and append it with the data that belongs to it."""
        self.state = apply(self.state, event)
        with self._tearing():
            self.ledger.append(event, self.state.incarnation)
            for record in data:
                self.ledger.put(record, self.state.incarnation)

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """A ledger that cannot take an event is behind the state from then on: nothing more may be written, the run ends."""
        try:
            yield
        except BaseException as error:
            self._torn = True
            self.fail(error)
            raise

    def close(self) -> None:
        """Close the ledger; what could not be written whole is left out whole."""
        if self._torn:
            self.ledger.abandon()
        else:
            self.commit()
        self.ledger.close()

    # -- rollout worker

    def admit(self, room: int) -> Work | None:
        """Work for a worker that has room for so many groups; None while there is none."""
        self.check()
        if self.stopping or self.finished:
            return Work(stop=True)
        evaluation = self._order_evaluation()
        assignments = self._hand_out(room)
        if evaluation is None and not assignments:
            return None
        return Work(assignments=tuple(assignments), evaluation=evaluation)

    @property
    def gate(self) -> int:
        """New groups that may be admitted now."""
        state = self.state
        needed = admission.still_needed(self.steps, state.next_batch, state.groups_per_step, len(state.live))
        return min(needed, admission.free_slots(state.slots_taken, state.max_staleness, state.groups_per_step))

    def _hand_out(self, room: int) -> list[Assignment]:
        """Groups to be tried again or to go on come first, in order, as far as their permits allow; then new draws through the gate.

        A permit above the newest finished version cannot be met by any engine yet: such a group waits here, where no deadline of its runs.
        """
        out: list[Assignment] = []
        while len(out) < room and self._unassigned and self.state.permit(self._unassigned[0]) <= self.state.step:
            out.append(self._assignment(self._unassigned.pop(0)))
        for _ in range(min(room - len(out), self.gate)):
            out.append(self._assignment(self._draw()))
        if out:
            self.times.admitted(self.clock.now())
        return out

    def _draw(self) -> int:
        state = self.state
        group_id = state.next_draw
        position = state.redraw[0] if state.redraw else state.position
        row, epoch = self._cursor.row_at(position)
        permit = admission.permit(state.step, state.pulled + len(state.live), state.max_staleness, state.groups_per_step)
        self._record(ev.Admitted(group_id=group_id, row=row, epoch=epoch, position=position, min_version=max(0, permit), bound=self.bound))
        return group_id

    def _assignment(self, group_id: int) -> Assignment:
        group = self.state.live[group_id]
        self._running_since[group_id] = self.clock.now()
        return Assignment(
            group_id=group_id,
            attempt=group.attempt,
            draw=Draw(number=group_id, row=group.row, epoch=group.epoch, dataset=self._data_fingerprint),
            row=self._rows[group.row],
            min_version=max(0, self.state.permit(group_id)),
            prefixes=self.ledger.prefixes(group_id, group.attempt) if group.prefix_tokens else (),
        )

    def reassign_running(self) -> None:
        """The worker is gone, or starts anew at a canonical point: hand every running group out again, with its recorded prefix.

        A running evaluation is ordered again from its beginning.
        """
        self._unassigned = sorted(g.group_id for g in self.state.live.values() if g.status is GroupStatus.RUNNING)
        self._running_since.clear()
        self._ended_samples.clear()
        if self.state.evaluations.running is not None:
            self._record(ev.EvaluationAborted(number=self.state.evaluations.running.number))

    def measure_idle(self) -> None:
        """Note how many engine slots are free behind the closed gate from now on; call after every change."""
        free = 0.0
        if self._running_since or self._unassigned or self.state.next_draw:
            closed = self.gate == 0 and not self.finished
            slots, size = self.config.engine.slots, self.state.group_size
            active = size * len(self._running_since) - sum(map(len, self._ended_samples.values()))
            free = max(0, slots - active) / slots if closed else 0.0
        if free != self.times.rollout_idle.level:
            self.times.rollout_idle.set(self.clock.now(), free)

    def progress(self, chunks: Sequence[PrefixChunk]) -> None:
        """Record chunks; what is known already, or belongs to an attempt that is over, is left out."""
        self.check()
        fresh: list[PrefixChunk] = []
        lengths: dict[tuple[int, int], int] = {}
        for chunk in sorted(chunks, key=lambda c: (c.group_id, c.sample, c.start)):
            group = self.state.live.get(chunk.group_id)
            if group is None or group.status is not GroupStatus.RUNNING or group.attempt != chunk.attempt:
                continue
            key = (chunk.group_id, chunk.sample)
            length = lengths.get(key, group.prefix_tokens.get(chunk.sample, 0))
            if chunk.start + len(chunk.token_ids) > length or (chunk.start == length and chunk.stop_reason is not None):
                fresh.append(chunk)
                lengths[key] = chunk.start + len(chunk.token_ids)
        if not fresh:
            return
        facts = tuple((c.group_id, c.sample, c.attempt, c.start, len(c.token_ids)) for c in fresh)
        self._record(ev.PrefixesRecorded(chunks=facts), *fresh)
        for chunk in fresh:
            if chunk.stop_reason is not None and chunk.group_id in self._running_since:
                self._ended_samples.setdefault(chunk.group_id, set()).add(chunk.sample)

    def finish_group(self, group: Group) -> None:
        """Take in a group that has run. A second report of the same attempt changes nothing."""
        self.check()
        live = self.state.live.get(group.group_id)
        if group.group_id >= self.state.next_draw:
            raise LedgerError(f"group {group.group_id} was never drawn")
        if live is None or live.status is not GroupStatus.RUNNING or group.attempt < live.attempt:
            return
        if group.draw.row != live.row:
            raise LedgerError(f"group {group.group_id} comes back with row {group.draw.row}, drawn was row {live.row}")
        self._running_since.pop(group.group_id, None)
        self._ended_samples.pop(group.group_id, None)
        if group.group_id in self._unassigned:
            self._unassigned.remove(group.group_id)
        failure, tokens = buffer.failure_of(group), buffer.num_sampled_tokens(group)
        facts: dict[str, Any] = {"group_id": group.group_id, "attempt": group.attempt, "num_tokens": tokens}
        if failure is not None:
            self._attempt_failed(failure, facts)
        elif problem := buffer.bad_data(group, self.state.group_size, self.state.newest_version):
            self.observer.note(f"group {group.group_id} was dropped: bad data: {problem}")
            self._record(ev.Dropped(reason="bad data", cause=f"bad data: {problem}", **facts))
        elif self.config.buffer.filter_zero_variance and buffer.has_zero_variance(group.rewards):
            self._record(ev.Filtered(reason="zero variance", rewards=tuple(group.rewards), **facts))
        else:
            versions = [s.version for r in group.rollouts for s in r.spans]
            oldest, newest = min(versions, default=-1), max(versions, default=-1)
            finished = ev.GroupFinished(rewards=tuple(group.rewards), oldest_version=oldest, newest_version=newest, **facts)
            self._record(finished, group)
            self._groups[group.group_id] = group
        self._check_barren()

    def _attempt_failed(self, cause: str, facts: dict[str, Any]) -> None:
        if cause.startswith(UNFIT_CAUSES):
            self.observer.note(f"group {facts['group_id']} is skipped: {cause}")
            self._record(ev.Dropped(reason=cause.split(":")[0], cause=cause, **facts))
        elif facts["attempt"] + 1 < self.config.rollout.max_attempts:
            self._record(ev.AttemptFailed(cause=cause, **facts))
            insort(self._unassigned, facts["group_id"])
        else:
            self._record(ev.Dropped(reason="failed", cause=cause, **facts))

    def _check_barren(self) -> None:
        """End a run that gets nowhere, with the first cause."""
        state = self.state
        cause = state.first_barren_cause
        if state.barren_in_a_row >= state.groups_per_step and not state.productive:
            self.fail(RunFailed(f"every group of the first step failed ({state.barren_in_a_row} groups). The first: {cause}"))
        elif state.barren_in_a_row >= self.config.buffer.max_barren_groups:
            self.fail(
                RunFailed(
                    f"the last {state.barren_in_a_row} groups all failed or were filtered (buffer.max_barren_groups = "
                    f"{self.config.buffer.max_barren_groups}). The first: {cause}"
                )
            )

    # -- evaluation

    def _order_evaluation(self) -> EvalTask | None:
        state, settings = self.state, self.config.evaluation
        evaluations = state.evaluations
        if not self._eval_rows or evaluations.running is not None:
            return None
        confirmed = max(state.engines.values(), default=-1)
        due, obsolete = choose(pending(evaluations.handled, confirmed, settings.every, self.steps))
        for old in obsolete:
            self._record(ev.EvaluationSkipped(due=old, reason=f"version {due} became due before an evaluation could start"))
            self.observer.note(f"the evaluation of version {old} is skipped: version {due} became due before it could start")
        if due is None:
            return None
        self._record(ev.EvaluationOrdered(number=evaluations.num_ordered, due=due))
        return EvalTask(
            number=evaluations.num_ordered - 1,
            due_version=due,
            rows=self._eval_rows,
            samples=settings.samples,
            temperature=settings.temperature,
        )

    def finish_evaluation(self, result: EvalResult) -> None:
        """Take in an evaluation; one that is not the running one (ordered before a restart, or reported twice) changes nothing."""
        self.check()
        running = self.state.evaluations.running
        if running is None or running.number != result.number:
            return
        published = self.ledger.version_checksum(result.incarnation, result.version)
        if published != result.checksum:
            raise WeightSyncError(
                f"evaluation {result.number} ran on version {result.incarnation}.{result.version} with checksum {result.checksum}, "
                f"published was {published}"
            )
        line = evaluation_line(result, running.due, self.config.evaluation.samples)
        self._record(
            ev.EvaluationFinished(
                number=result.number,
                due=running.due,
                incarnation=result.incarnation,
                version=result.version,
                checksum=result.checksum,
                reward=mean(rewards_of(result)),
                num_failed=line["failed"],
                duration_s=result.duration_s,
                engine_s=result.engine_s,
            ),
            result,
        )
        self._outbox.append(lambda: self.observer.evaluation(line, result))

    # -- trainer

    def no_batch(self, step: int) -> bool:
        """No batch comes for this step any more: the run is at its end or asked to stop."""
        return step >= self.steps or self.stopping

    def try_batch(self, step: int) -> Batch | None:
        """Batch `step`: recorded when it is asked for first, equal every time; None while too few groups may be pulled."""
        self.check()
        if step in self._batches:
            return self._batches[step]
        if step > self.state.next_batch:
            raise LedgerError(f"the trainer asks for batch {step}, but batch {self.state.next_batch} is next")
        batch = self._recorded_batch(step) if step < self.state.next_batch else self._new_batch(step)
        if batch is not None:
            self._batches[step] = batch
        return batch

    def _new_batch(self, step: int) -> Batch | None:
        ids = self.state.next_pull()
        if ids is None:
            return None
        live = [self.state.live[i] for i in ids]
        groups = [self._group(g.group_id, g.attempt) for g in live]
        batch, record = self._make_batch(step, groups, [g.bound for g in live])
        self._record(record)
        self._warn_if_flat(step, groups)
        return batch

    def _recorded_batch(self, step: int) -> Batch:
        """After a resume: the same groups in the same order."""
        recorded = self.state.batches.get(step)
        if recorded is None:
            raise LedgerError(f"batch {step} is trained and covered by every kept checkpoint; its groups are gone")
        groups = [self._group(m.group_id, m.attempt) for m in recorded.members]
        batch, record = self._make_batch(step, groups, [m.bound for m in recorded.members])
        if record != recorded.record:
            raise LedgerError(f"batch {step} does not come out as it was recorded: {record} instead of {recorded.record}")
        return batch

    def _make_batch(self, step: int, groups: list[Group], bounds: list[int]) -> tuple[Batch, ev.BatchRecorded]:
        return buffer.make_batch(step, groups, bounds, self.state.max_staleness, self.config.buffer.on_stale)

    def _group(self, group_id: int, attempt: int) -> Group:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = self.ledger.group(group_id, attempt)
        return group

    def _warn_if_flat(self, step: int, groups: list[Group]) -> None:
        """Say that a whole step has nothing to learn from: the first time in a row, then ever more rarely."""
        if not all(buffer.has_zero_variance(g.rewards) for g in groups):
            self._flat_steps = 0
            return
        self._flat_steps += 1
        if self._flat_steps & (self._flat_steps - 1) == 0:
            rewards = sorted({r for g in groups for r in g.rewards})
            again = f" ({self._flat_steps} steps in a row)" if self._flat_steps > 1 else ""
            shown = ", ".join(f"{r:g}" for r in rewards[:4]) + (", ..." if len(rewards) > 4 else "")
            self.observer.note(
                f"step {step}: in every group all rewards are equal ({shown}), so there is nothing to learn from{again}; "
                "is the task too hard or too easy, or the reward constant?"
            )

    def begin_write(self) -> int:
        self.check()
        return self.broker.begin_write()

    def publish(self, slot: int, manifest: Manifest) -> None:
        self.check()
        check_manifest(self.state, manifest, self._start_checksum)
        self._record(ev.VersionPublished(version=manifest.version, checksum=manifest.checksum))
        self.broker.publish(slot, manifest)

    def finish_step(self, report: StepReport) -> None:
        """Step s is made. A second report of it changes nothing."""
        self.check()
        if report.step < self.state.step:
            return
        batch, now = self._batches.get(report.step), self.clock.now()
        if batch is None:
            raise LedgerError(f"step {report.step} finished, but its batch was not handed out in this incarnation")
        finished = ev.StepFinished(
            step=report.step,
            version=report.version,
            checksum=report.checksum,
            skipped=report.skipped,
            step_s=report.step_s,
            **self.times.take(now),
        )
        self._record(finished)
        del self._batches[report.step]
        for group in batch.groups:
            self._groups.pop(group.group_id, None)
        self._report_step(report, finished, batch, now)
        if self.state.skipped_in_a_row >= self.config.trainer.max_skipped_steps:
            self.fail(RunFailed(f"the last {self.state.skipped_in_a_row} updates were skipped; the newest: {report.skipped}"))

    def _report_step(self, report: StepReport, finished: ev.StepFinished, batch: Batch, now: float) -> None:
        generated = self.state.totals.generated_tokens
        line = step_line(
            report,
            finished,
            self.state.batches[report.step].record,
            batch.groups,
            self.state,
            time_s=now - self._started_at,
            generated_tokens=generated - self._generated_before,
            weight_sync_s=sum(self._sync_s) / len(self._sync_s) if self._sync_s else None,
        )
        self._generated_before = generated
        self._sync_s.clear()
        self._outbox.append(lambda: self.observer.step(line, batch.groups))

    def checkpoint_context(self) -> tuple[str, int, int]:
        """(run_id, incarnation, ledger_seq) that a checkpoint taken now names."""
        self.check()
        seq = self.ledger.last_seq
        self._points[seq] = self.state.point(seq)
        while len(self._points) > 4:
            del self._points[next(iter(self._points))]
        return self.state.run_id, self.state.incarnation, seq

    def check_checkpoint(self, manifest: CheckpointManifest) -> None:
        """Refuse a checkpoint that is not of this incarnation and of the newest finished step."""
        self.check()
        state = self.state
        given = (manifest.run_id, manifest.incarnation, manifest.step)
        if given != (state.run_id, state.incarnation, state.step) or manifest.ledger_seq not in self._points:
            raise CheckpointError(
                f"a checkpoint of run {manifest.run_id}, incarnation {manifest.incarnation}, step {manifest.step}, event "
                f"{manifest.ledger_seq} cannot be committed in run {state.run_id}, incarnation {state.incarnation}, step {state.step}: "
                "it must be taken at the newest finished step, with the context asked for just before"
            )
        published = state.published.get(manifest.step)
        if published is not None and published != manifest.weights_checksum:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} holds weights {manifest.weights_checksum}, published were {published}"
            )

    def checkpoint_committed(self, manifest: CheckpointManifest) -> list[int]:
        """Index a checkpoint whose folder is in place; the steps of those that are no longer kept."""
        before = {p.step for p in self.state.checkpoints}
        kept = sorted(before | {manifest.step})[-self.config.checkpoint.keep :]
        point = self._points.pop(manifest.ledger_seq)
        self._record(ev.CheckpointCommitted(point=point, weights_checksum=manifest.weights_checksum, kept=tuple(kept)))
        return sorted(before - set(kept))

    def prune(self) -> int:
        """Delete group data that the oldest kept checkpoint covers; call when its event is durable."""
        if self.config.ledger.keep == "all" or not self.state.checkpoints:
            return 0
        return self.ledger.prune(self.state.checkpoints[0].watermark)

    # -- engines

    def try_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer | None:
        """Lease weights newer than the engine's; None while there are none. An engine's first call puts it in service."""
        self.check()
        known = self.state.engines.get(engine_id)
        if known is None or (known >= 0 and version < 0):
            self._record(ev.EngineAdded(engine_id=engine_id))
        return self.broker.lease(engine_id, incarnation, version)

    def confirm_weights(self, slot: int, report: EngineReport) -> None:
        self.check()
        self.broker.give_back(report.engine_id, slot)
        check_report(self.state, report)
        self._record(ev.EngineConfirmed(engine_id=report.engine_id, version=report.version, checksum=report.checksum, sync_s=report.sync_s))
        self._sync_s.append(report.sync_s)

    def engine_gone(self, engine_id: str, reason: str = "") -> None:
        self.broker.drop_engine(engine_id)
        if engine_id in self.state.engines:
            self._record(ev.EngineRemoved(engine_id=engine_id, reason=reason))

    # -- the end

    def request_stop(self, reason: str = "") -> None:
        """Admission stops and the trainer gets no further batch; what runs may finish or be saved."""
        if not self.stopping and not isinstance(self.error, SlipstreamError):
            self._record(ev.StopRequested(reason=reason))

    # -- for errors that name what is waited for

    def why_no_batch(self, step: int) -> str:
        """What batch `step` waits for, in words."""
        state, now = self.state, self.clock.now()
        text = f"batch {step} has {state.num_finished} of {state.groups_per_step} groups"
        if self._running_since:
            oldest = min(self._running_since)
            text += (
                f"; {len(self._running_since)} are running, the oldest is group {oldest} (attempt {state.live[oldest].attempt}, "
                f"for {now - self._running_since[oldest]:.0f} s)"
            )
        if self._unassigned:
            first = self._unassigned[0]
            text += f"; {len(self._unassigned)} wait to be handed out, group {first} for version {state.permit(first)} or a free worker"
        if not state.live:
            text += "; none is admitted: " + self.why_no_work()
        return text

    def why_no_work(self) -> str:
        """Why a worker gets nothing, in words."""
        state = self.state
        slots = admission.num_slots(state.max_staleness, state.groups_per_step)
        engines = ", ".join(f"{name} at version {v}" for name, v in sorted(state.engines.items())) or "no engine in service"
        return f"{state.slots_taken} of {slots} slots are taken, {state.step} of {self.steps} steps are made, {engines}"
