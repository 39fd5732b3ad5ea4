"""The controller without waiting: every call answers at once, or says None for "not yet". `controller.Controller` adds the waiting.

    call               consumes                    produces                              None until
    admit              slots, permits, due evals   assignments, an evaluation order,     a slot frees, a permit is met, an eval is due,
                                                   cancellations                         a running group is dropped
    interrupted        a rollout's tokens          whether it starts anew
    finish_group       a scored group              FINISHED, a retry, FILTERED, DROPPED
    try_batch          P pullable groups           batch s, recorded; DROPPED (stale)    the window holds P finished groups
    publish            a complete weight slot      version v
    finish_step        a step report               T + 1, a metric line
    try_weights        the newest version          a lease                               something newer is published; under a barrier
                                                                                         also: the round is over
    confirm_weights    a lease                     free slots, due evaluations

Each change is an event: applied to the state, appended to the ledger. `commit` makes everything so far durable and then tells the observer;
what has to be durable before an answer leaves is for `Controller` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.config.arithmetic import lowest_staleness
from slipstream.config.settings import Config
from slipstream.controller import admission
from slipstream.controller import events as ev
from slipstream.controller.delivery import Delivery
from slipstream.controller.engine_times import EngineTimes
from slipstream.controller.evaluations import EvaluationDesk
from slipstream.controller.intake import Intake
from slipstream.controller.journal import Journal
from slipstream.controller.ledger import Ledger
from slipstream.controller.state import RunState
from slipstream.controller.thresholds import Thresholds
from slipstream.controller.timing import StepTimes
from slipstream.controller.versions import Broker, check_manifest, check_report
from slipstream.errors import CheckpointError
from slipstream.protocols import CheckpointManifest, Clock, EngineInService, Manifest, Observer, WeightsOffer
from slipstream.types import Batch, EngineReport, EvalResult, Group, SealedChunk, StepReport, Work


class ControllerCore:
    """Intake, delivery, evaluations and versions of one incarnation, over one journal; synchronous."""

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
        self.config, self.ledger, self.broker, self.observer, self.clock = config, ledger, broker, observer, clock
        self.journal, self.times, self.engine_times = Journal(ledger, state, observer), StepTimes(), EngineTimes(clock)
        self.delivery = Delivery(self.journal, config, clock, self.times, self.engine_times)
        self.intake = Intake(self.journal, config, rows, data_fingerprint, clock, self.times, self.delivery.keep)
        self.evaluations = EvaluationDesk(self.journal, config, eval_rows)
        self.thresholds = Thresholds(self.journal, config.threshold, config.trainer.steps, self.lower_max_staleness)
        self._start_checksum = start_checksum  # of the checkpoint that the trainer must start from
        self._points: dict[int, ev.Point] = {}  # ledger_seq -> where the draws stood when a checkpoint asked

    # -- what the run knows of itself

    @property
    def state(self) -> RunState:
        return self.journal.state

    @property
    def trained(self) -> bool:
        """Every step is made."""
        return self.state.step >= self.config.trainer.steps

    @property
    def finished(self) -> bool:
        """Every step is made and the last version is evaluated."""
        return self.trained and (self.evaluations.settled or self.state.step > self.config.trainer.steps)

    @property
    def weights_taken(self) -> bool:
        """The run is over, and no engine in service is behind the newest version."""
        newest = max(self.state.published, default=-1)
        return (self.finished or self.stopping) and all(version >= newest for version in self.state.engines.values())

    @property
    def serving(self) -> bool:
        """Some engine is in service and holds weights of this incarnation."""
        return max(self.state.engines.values(), default=-1) >= 0

    @property
    def _behind_barrier(self) -> bool:
        return self.config.rollout.interrupt == "barrier"

    @property
    def stopping(self) -> bool:
        return self.state.stop_reason is not None

    def measure_idle(self) -> None:
        """Note how many engine slots are free behind the closed gate from now on; call after every change."""
        free = 0.0 if self.finished else self.intake.free_engine_slots()
        if free != self.times.rollout_idle.level:
            self.times.rollout_idle.set(self.clock.now(), free)

    # -- durability and the end

    def commit(self) -> None:
        """Make all events durable, then tell the observer what happened."""
        self.journal.commit()

    def fail(self, error: BaseException) -> None:
        """The run ends with this error; the first one counts."""
        self.journal.fail(error)

    def check(self) -> None:
        """Raise the error that ends the run, if there is one."""
        self.journal.check()

    def close(self) -> None:
        self.journal.close()

    def request_stop(self, reason: str = "") -> None:
        """Admission stops and the trainer gets no further batch; what runs may finish or be saved."""
        if not self.stopping and self.journal.error is None:
            self.journal.record(ev.StopRequested(reason=reason))

    def lower_max_staleness(self, reason: str) -> bool:
        """Allow one version less from now on, as a recorded event; False where it is at its lowest.

        Groups admitted before are held to the bound that was derived then; their permits and what happens to them when they are stale go by
        the new number.
        """
        state = self.state
        lower = state.max_staleness - 1
        if lower < lowest_staleness(self.config):
            return False
        window = admission.clipped_window(state.window, lower, state.groups_per_step)
        changes = {"buffer.max_staleness": lower, "buffer.window": window}
        self.journal.record(ev.SettingsChanged(changes=changes, reason=reason))
        self._give_up_stale()
        return True

    def _give_up_stale(self) -> None:
        """on_stale = "cancel_early": what no batch can train within max_staleness any more gives up its slot now."""
        if self.config.buffer.on_stale == "cancel_early":
            self.delivery.drop_stale()
            self.intake.cancel_stale()

    # -- rollout worker

    def admit(self, room: int) -> Work | None:
        """Work for a worker that has room for so many groups; None while there is none."""
        self.check()
        if self.stopping or self.finished:
            return Work(stop=True)
        evaluation = self.evaluations.order()
        assignments = self.intake.hand_out(room)
        cancel = self.intake.cancellations()
        if evaluation is None and not assignments and not cancel:
            return None
        return Work(assignments=tuple(assignments), evaluation=evaluation, cancel=cancel)

    def progress(self, chunks: Sequence[SealedChunk]) -> None:
        self.check()
        self.intake.progress(chunks)
        self._give_up_stale()

    def interrupted(self, group_id: int, sample: int, attempt: int, num_tokens: int) -> bool:
        self.check()
        return self.intake.interrupted(group_id, sample, attempt, num_tokens)

    def finish_group(self, group: Group) -> None:
        self.check()
        self.intake.finish_group(group)
        self._give_up_stale()

    def finish_evaluation(self, result: EvalResult) -> None:
        self.check()
        self.evaluations.finish(result)

    def evaluation_lost(self, number: int) -> None:
        self.check()
        self.evaluations.lost(number)

    def reassign_running(self) -> None:
        """The worker is gone, or starts anew at a canonical point: its groups are handed out again, its evaluation is ordered again."""
        self.intake.reassign_running()
        self.evaluations.abort()

    # -- trainer

    def no_batch(self, step: int) -> bool:
        """No batch comes for this step any more: the run is at its end or asked to stop."""
        return step >= self.config.trainer.steps or self.stopping

    def try_batch(self, step: int) -> Batch | None:
        """Batch `step`; None until P groups may be pulled. Stale groups may be dropped in either case, which frees their slots."""
        self.check()
        batch = self.delivery.try_batch(step)
        if batch is not None:
            self._give_up_stale()
        return batch

    def finish_step(self, report: StepReport) -> None:
        self.check()
        line = self.delivery.finish_step(report)
        if line is not None:
            self.thresholds.look(line)

    def begin_write(self) -> int:
        self.check()
        return self.broker.begin_write()

    def publish(self, slot: int, manifest: Manifest) -> None:
        self.check()
        check_manifest(self.state, manifest, self._start_checksum)
        self.journal.record(ev.VersionPublished(version=manifest.version, checksum=manifest.checksum))
        self.broker.publish(slot, manifest)

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
        # While fewer checkpoints exist than are kept, the one before the first is the initial model: starting over needs every group.
        covers = kept[0] if len(kept) == self.config.checkpoint.keep else 0
        self.journal.record(
            ev.CheckpointCommitted(point=point, weights_checksum=manifest.weights_checksum, kept=tuple(kept), covers=covers)
        )
        return sorted(before - set(kept))

    def prune(self) -> int:
        """Delete group data that no kept checkpoint, nor starting over, needs; call when the checkpoint's event is durable."""
        if self.config.ledger.keep == "all" or len(self.state.checkpoints) < self.config.checkpoint.keep:
            return 0
        return self.ledger.prune(self.state.checkpoints[0].watermark)

    # -- engines

    def try_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer | None:
        """Lease weights newer than the engine's; None while there are none. An engine's first call puts it in service.

        With interrupt = "barrier" they come only between two rounds of generation; the first ones at once.
        """
        self.check()
        known = self.state.engines.get(engine_id)
        if known is None or (known >= 0 and version < 0):
            self.journal.record(ev.EngineAdded(engine_id=engine_id))
        if self._behind_barrier and self.state.engines[engine_id] >= 0 and not (self.intake.round_over or self.stopping):
            return None
        offer = self.broker.lease(engine_id, incarnation, version)
        self.intake.takes_weights(engine_id, offer is not None)
        return offer

    def confirm_weights(self, slot: int, report: EngineReport) -> None:
        self.check()
        self.broker.give_back(report.engine_id, slot)
        check_report(self.state, report)
        confirmed = ev.EngineConfirmed(engine_id=report.engine_id, version=report.version, checksum=report.checksum, sync_s=report.sync_s)
        self.journal.record(confirmed)
        self.intake.takes_weights(report.engine_id, False)
        self.delivery.synced(report.sync_s, bool(report.repaired))
        if report.repaired:
            self.observer.note(f"engine {report.engine_id} took version {report.version} whole, not what had changed: {report.repaired}")
        self.engine_times.confirmed(report.engine_id)

    def in_service(self) -> dict[str, EngineInService]:
        self.check()
        starts = self.state.engine_starts
        return {engine_id: EngineInService(starts=starts[engine_id], version=v) for engine_id, v in self.state.engines.items()}

    def engine_gone(self, engine_id: str, reason: str = "") -> None:
        self.broker.drop_engine(engine_id)
        self.intake.takes_weights(engine_id, False)
        self.engine_times.gone(engine_id)
        if engine_id in self.state.engines and self.journal.error is None:
            self.journal.record(ev.EngineRemoved(engine_id=engine_id, reason=reason))

    # -- for errors that name what is waited for

    def why_no_batch(self, step: int) -> str:
        """What batch `step` waits for, in words."""
        state = self.state
        text = f"batch {step} has {state.num_finished} of {state.groups_per_step} groups"
        running = self.intake.describe()
        if running:
            text += "; " + running
        return text if state.live else f"{text}; none is admitted: {self.why_no_work()}"

    def why_no_work(self) -> str:
        """Why a worker gets nothing, in words."""
        state = self.state
        engines = ", ".join(f"{name} at version {v}" for name, v in sorted(state.engines.items())) or "no engine in service"
        slots = f"{state.slots_taken} of {state.num_slots} slots are taken"
        held = self._behind_barrier and not self.intake.round_over and state.newest > state.confirmed
        barrier = f"; the barrier holds version {state.newest} back until this round has ended: {self.intake.describe()}" if held else ""
        return f"{slots}, {state.step} of {self.config.trainer.steps} steps are made, {engines}{barrier}"
