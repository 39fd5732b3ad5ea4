"""Where groups enter and come back: draws through the gate, permits, recorded prefixes, retries, filters, cancellations, and runs that get
nowhere.

With interrupt = "barrier" generation and new weights take turns: no group is handed out that needs newer weights than every engine holds,
and `core` offers weights only while `round_over`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from slipstream.config.settings import Config
from slipstream.controller import admission, buffer, selection
from slipstream.controller import events as ev
from slipstream.controller.cursor import Cursor
from slipstream.controller.journal import Journal
from slipstream.controller.run_state import LiveGroup, RunState
from slipstream.controller.stale import oldest_trained
from slipstream.controller.timing import StepTimes
from slipstream.controller.totals import CANCELLED, INTERRUPTED, short_cause
from slipstream.errors import LedgerError, RunFailed
from slipstream.protocols import Clock
from slipstream.types import Assignment, Draw, Group, GroupStatus, SealedChunk

_PLACE = attrgetter("group_id", "sample", "start")
UNFIT_CAUSES = ("prompt does not fit", "bad prompt", "chat template")  # failures that another attempt cannot change


class Intake:
    """The rollout workers' side of the controller. `keep` takes a finished group into the buffer's memory."""

    def __init__(
        self,
        journal: Journal,
        config: Config,
        rows: Sequence[dict[str, Any]],
        data_fingerprint: str,
        clock: Clock,
        times: StepTimes,
        keep: Callable[[Group], None],
    ):
        self._journal, self._config, self._rows, self._clock, self._times, self._keep = journal, config, rows, clock, times, keep
        self._data_fingerprint = data_fingerprint
        self._cursor = Cursor(len(rows), config.run.seed)
        self._unassigned: list[int] = []  # running groups that no worker has, ascending
        self._running_since: dict[int, float] = {}  # handed-out groups -> when
        self._ended_samples: dict[int, set[int]] = {}  # handed-out groups -> samples whose generation has ended
        self._num_ended = 0  # of all those groups together
        self._cancelled: list[tuple[int, int]] = []  # (group_id, attempt) that a worker still runs and has not been told of
        self._taking_weights: set[str] = set()  # engines between two versions
        self.reassign_running()

    @property
    def _state(self) -> RunState:
        return self._journal.state

    @property
    def may_hand_out(self) -> bool:
        """Whether some group, one that comes back or a new one, may run now."""
        return self._may_go_on or self.gate > 0

    @property
    def _may_go_on(self) -> bool:
        """Whether the first group that no worker has may run on some engine."""
        return bool(self._unassigned) and self._may_run(self._unassigned[0])

    def _may_run(self, group_id: int) -> bool:
        """A group waits here, where no deadline of its runs, while no engine can have the version of its permit: it is not published, or
        under a barrier no engine takes weights while groups are out."""
        barrier = self._config.rollout.interrupt == "barrier"
        newest = (-1 if self._taking_weights else self._state.confirmed) if barrier else self._state.newest
        return max(0, self._state.permit(group_id)) <= newest

    @property
    def gate(self) -> int:
        """New groups that may be admitted now; the first of them may run on some engine."""
        state = self._state
        needed = admission.still_needed(self._config.trainer.steps, state.next_batch, state.groups_per_step, len(state.live))
        free = min(needed, admission.free_slots(state.slots_taken, state.num_slots))
        return free if free and self._may_run(state.next_draw) else 0

    @property
    def round_over(self) -> bool:
        """interrupt = "barrier": nothing runs, and nothing can on the weights there are. Also while no worker has asked since the start or
        since it stopped: what it will be given runs on the newest weights, after a resume as in a run that only paused."""
        return not self._running_since and (self._at_rest or not self.may_hand_out)

    def takes_weights(self, engine_id: str, now: bool) -> None:
        """The engine is between two versions, or (with now = False) holds one again, or is gone."""
        (self._taking_weights.add if now else self._taking_weights.discard)(engine_id)

    def hand_out(self, room: int) -> list[Assignment]:
        """Groups to be tried again or to go on come first, in order, as far as their permits allow; then new draws through the gate."""
        out: list[Assignment] = []
        while len(out) < room and self._may_go_on:
            out.append(self._assignment(self._unassigned.pop(0)))
        while len(out) < room and self.gate > 0:
            out.append(self._assignment(self._draw()))
        if out:
            self._at_rest = False
            self._times.admitted(self._clock.now())
        return out

    def cancellations(self) -> tuple[tuple[int, int], ...]:
        """(group_id, attempt) of running groups that were dropped since the last call: the worker ends them."""
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    def _draw(self) -> int:
        state = self._state
        group_id = state.next_draw
        position = state.redraw[0] if state.redraw else state.position
        row, epoch = self._cursor.row_at(position)
        permit = max(0, state.permit(group_id))
        drawn = ev.Admitted(group_id=group_id, row=row, epoch=epoch, position=position, min_version=permit, bound=state.bound)
        self._journal.record(drawn)
        return group_id

    def _assignment(self, group_id: int) -> Assignment:
        group = self._state.live[group_id]
        self._running_since[group_id] = self._clock.now()
        prefixes = self._journal.ledger.prefixes(group_id, group.attempt_of) if group.prefix_tokens else ()
        for prefix in prefixes:
            if prefix.stop_reason is not None:  # recorded: the worker that goes on says so once more
                self._note_end(group_id, prefix.sample)
        return Assignment(
            group_id=group_id,
            attempt=group.attempt,
            draw=Draw(number=group_id, row=group.row, epoch=group.epoch, dataset=self._data_fingerprint),
            row=self._rows[group.row],
            min_version=max(0, self._state.permit(group_id)),
            prefixes=prefixes,
            retries=dict(group.retries),
        )

    def reassign_running(self) -> None:
        """Hand every running group out again, with its recorded prefix: no worker has any."""
        self._unassigned = sorted(g.group_id for g in self._state.live.values() if g.status is GroupStatus.RUNNING)
        self._running_since.clear()
        self._ended_samples.clear()
        self._num_ended = 0
        self._cancelled.clear()
        self._at_rest = True

    def free_engine_slots(self) -> float:
        """The share of engine slots that stand free behind the closed gate."""
        slots = self._config.engine.slots * max(1, len(self._state.engines))
        active = self._config.rollout.num_samples * len(self._running_since) - self._num_ended
        if active >= slots or self.gate > 0 or not self._state.next_draw:
            return 0.0
        return (slots - active) / slots

    def progress(self, chunks: Sequence[SealedChunk]) -> None:
        """Record chunks; what is known already, or belongs to an attempt that is over, is left out."""
        fresh: list[SealedChunk] = []
        facts: list[tuple[int, int, int, int, int, int]] = []
        lengths: dict[tuple[int, int], int] = {}
        live = self._state.live
        for chunk in sorted(chunks, key=_PLACE):
            group_id, sample, start, num_tokens = chunk.group_id, chunk.sample, chunk.start, chunk.num_tokens
            group = live.get(group_id)
            if group is None or group.status is not GroupStatus.RUNNING or group.attempt_of(sample) != chunk.attempt:
                continue
            length = lengths.get((group_id, sample))
            if length is None:
                length = group.prefix_tokens.get(sample, 0)
            end = start + num_tokens
            if end == 0:
                if chunk.ended:
                    self._note_end(group_id, sample)  # nothing to go on from, so nothing to record
            elif end > length or (start == length and chunk.ended and not self._has_ended(group_id, sample)):
                fresh.append(chunk)
                facts.append((group_id, sample, chunk.attempt, start, num_tokens, chunk.oldest_version))
                lengths[group_id, sample] = end
        if not fresh:
            return
        self._journal.record(ev.PrefixesRecorded(chunks=tuple(facts)), fresh)
        for chunk in fresh:
            if chunk.ended:
                self._note_end(chunk.group_id, chunk.sample)

    def _has_ended(self, group_id: int, sample: int) -> bool:
        return sample in self._ended_samples.get(group_id, ())

    def _note_end(self, group_id: int, sample: int) -> None:
        if group_id in self._running_since:
            ended = self._ended_samples.setdefault(group_id, set())
            self._num_ended += sample not in ended
            ended.add(sample)

    def interrupted(self, group_id: int, sample: int, attempt: int, num_tokens: int) -> bool:
        """New weights stopped a rollout: whether it may start anew. A second report of the same attempt gets the same answer."""
        group = self._state.live.get(group_id)
        if group is None or group.status is not GroupStatus.RUNNING or attempt < group.attempt:
            return False
        if attempt < group.attempt_of(sample):
            return True
        if group.retries.get(sample, 0) >= self._config.rollout.max_interrupts:
            return False
        self._journal.record(ev.SampleInterrupted(group_id=group_id, sample=sample, attempt=attempt, num_tokens=num_tokens))
        return True

    def cancel_stale(self) -> None:
        """Drop the running groups that no batch can train within max_staleness any more (on_stale = "cancel_early").

        A recorded token is as old as its version says, and the earliest step that can train its group is the next batch's. Tokens that are
        not recorded yet (up to a chunk, and all of rollouts with several turns) prove nothing: a group may be dropped later than it could
        be, but never while it could still be consumed in bound. Its place and slot are free at once.
        """
        state = self._state
        oldest_useful = state.next_batch - state.max_staleness
        for group in [g for g in state.live.values() if g.status is GroupStatus.RUNNING and g.prefix_versions]:
            if (oldest := min(group.prefix_versions.values())) < oldest_useful:
                self._cancel(group, oldest)

    def _cancel(self, group: LiveGroup, oldest: int) -> None:
        num_tokens = sum(group.prefix_tokens.values())
        dropped = ev.Dropped(
            group_id=group.group_id,
            attempt=group.attempt,
            reason=CANCELLED,
            cause=f"a token of version {oldest} cannot be trained before step {self._state.next_batch}",
            num_tokens=num_tokens,
            lost=ev.Tally(rollouts=self._config.rollout.num_samples, tokens=num_tokens),
        )
        self._journal.record(dropped)
        if group.group_id in self._running_since:
            self._cancelled.append((group.group_id, group.attempt))
        self._forget(group.group_id)

    def _forget(self, group_id: int) -> None:
        """The group does not run any more."""
        self._running_since.pop(group_id, None)
        self._num_ended -= len(self._ended_samples.pop(group_id, ()))
        if group_id in self._unassigned:
            self._unassigned.remove(group_id)

    def finish_group(self, group: Group) -> None:
        """Take in a group that has run. A second report of the same attempt changes nothing."""
        live = self._state.live.get(group.group_id)
        if group.group_id >= self._state.next_draw:
            raise LedgerError(f"group {group.group_id} was never drawn")
        if live is None or live.status is not GroupStatus.RUNNING or group.attempt < live.attempt:
            return
        if group.draw.row != live.row:
            raise LedgerError(f"group {group.group_id} comes back with row {group.draw.row}, drawn was row {live.row}")
        self._forget(group.group_id)
        facts: dict[str, Any] = {"group_id": group.group_id, "attempt": group.attempt, "num_tokens": buffer.num_sampled_tokens(group)}
        failure = buffer.failure_of(group, self._state.group_size)
        if failure is not None:
            self._attempt_failed(failure, facts)
        else:
            self._take(group, facts)
        self._check_barren()

    def _take(self, group: Group, facts: dict[str, Any]) -> None:
        """A group with enough usable rollouts: select those that are kept; then it is bad data, filtered, or finished."""
        rollout = self._config.rollout
        group, others = selection.select(group, self._state.group_size, rollout.selection, self._config.run.seed)
        left_out = buffer.left_out(others)
        if problem := buffer.bad_data(group, self._state.group_size, self._state.newest_version, rollout.num_samples):
            self._journal.observer.note(f"group {group.group_id} was dropped: bad data: {problem}")
            self._journal.record(ev.Dropped(reason="bad data", cause=f"bad data: {problem}", **facts))
        elif self._config.buffer.filter_zero_variance and buffer.has_zero_variance(group.rewards):
            self._journal.record(ev.Filtered(reason="zero variance", rewards=tuple(group.rewards), left_out=left_out, **facts))
        else:
            oldest = oldest_trained(group)
            newest = max((s.version for r in group.rollouts for s in r.spans), default=-1)
            seen = {
                "rewards": tuple(group.rewards),
                "oldest_version": -1 if oldest is None else oldest,
                "newest_version": newest,
                "left_out": left_out,
            }
            self._journal.record(ev.GroupFinished(**seen, **facts), group)
            self._keep(group)

    def _attempt_failed(self, cause: str, facts: dict[str, Any]) -> None:
        if cause.startswith(UNFIT_CAUSES):
            self._journal.observer.note(f"group {facts['group_id']} is skipped: {cause}")
            self._journal.record(ev.Dropped(reason=cause.split(":")[0], cause=cause, **facts))
        elif short_cause(cause) == INTERRUPTED:
            self._journal.record(ev.Dropped(reason=INTERRUPTED, cause=cause, **facts))
        elif self._state.live[facts["group_id"]].failures + 1 < self._config.rollout.max_attempts:
            self._journal.record(ev.AttemptFailed(cause=cause, **facts))
            insort(self._unassigned, facts["group_id"])
        else:
            self._journal.record(ev.Dropped(reason="failed", cause=cause, **facts))

    def _check_barren(self) -> None:
        """End a run that gets nowhere, with the first cause."""
        state = self._state
        cause = state.first_barren_cause
        if state.barren_in_a_row >= state.groups_per_step and not state.productive:
            self._journal.fail(RunFailed(f"every group of the first step failed ({state.barren_in_a_row} groups). The first: {cause}"))
        elif state.barren_in_a_row >= self._config.buffer.max_barren_groups:
            self._journal.fail(
                RunFailed(
                    f"the last {state.barren_in_a_row} groups all failed or were filtered (buffer.max_barren_groups = "
                    f"{self._config.buffer.max_barren_groups}). The first: {cause}"
                )
            )

    def describe(self) -> str:
        """What is running and what waits for a worker, in words."""
        parts = []
        if self._running_since:
            oldest = min(self._running_since)
            parts.append(
                f"{len(self._running_since)} are running, the oldest is group {oldest} (attempt {self._state.live[oldest].attempt}, "
                f"for {self._clock.now() - self._running_since[oldest]:.0f} s)"
            )
        if self._unassigned:
            first = self._unassigned[0]
            wanted = self._state.permit(first)
            parts.append(f"{len(self._unassigned)} wait to be handed out, group {first} for version {wanted} or a free worker")
        return "; ".join(parts)
