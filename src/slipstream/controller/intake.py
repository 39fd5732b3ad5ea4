"""Where groups enter and come back: draws through the gate, permits, recorded prefixes, retries, filters, and runs that get nowhere."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.config.settings import Config
from slipstream.controller import admission, buffer, selection
from slipstream.controller import events as ev
from slipstream.controller.cursor import Cursor
from slipstream.controller.journal import Journal
from slipstream.controller.state import RunState
from slipstream.controller.timing import StepTimes
from slipstream.errors import LedgerError, RunFailed
from slipstream.protocols import Clock
from slipstream.types import Assignment, Draw, Group, GroupStatus, PrefixChunk

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
        self.reassign_running()

    @property
    def _state(self) -> RunState:
        return self._journal.state

    @property
    def _bound(self) -> int:
        return admission.worst_staleness(self._state.max_staleness, self._state.groups_per_step, self._state.window)

    @property
    def _may_go_on(self) -> bool:
        """Whether the first group that no worker has may run on some engine."""
        return bool(self._unassigned) and self._state.permit(self._unassigned[0]) <= self._state.step

    @property
    def gate(self) -> int:
        """New groups that may be admitted now."""
        state = self._state
        needed = admission.still_needed(self._config.trainer.steps, state.next_batch, state.groups_per_step, len(state.live))
        return min(needed, admission.free_slots(state.slots_taken, state.max_staleness, state.groups_per_step))

    def hand_out(self, room: int) -> list[Assignment]:
        """Groups to be tried again or to go on come first, in order, as far as their permits allow; then new draws through the gate.

        A permit above the newest finished version cannot be met by any engine yet: such a group waits here, where no deadline of its runs.
        """
        out: list[Assignment] = []
        while len(out) < room and self._may_go_on:
            out.append(self._assignment(self._unassigned.pop(0)))
        for _ in range(min(room - len(out), self.gate)):
            out.append(self._assignment(self._draw()))
        if out:
            self._times.admitted(self._clock.now())
        return out

    def _draw(self) -> int:
        state = self._state
        group_id = state.next_draw
        position = state.redraw[0] if state.redraw else state.position
        row, epoch = self._cursor.row_at(position)
        permit = admission.permit(state.step, state.pulled + len(state.live), state.max_staleness, state.groups_per_step)
        drawn = ev.Admitted(group_id=group_id, row=row, epoch=epoch, position=position, min_version=max(0, permit), bound=self._bound)
        self._journal.record(drawn)
        return group_id

    def _assignment(self, group_id: int) -> Assignment:
        group = self._state.live[group_id]
        self._running_since[group_id] = self._clock.now()
        return Assignment(
            group_id=group_id,
            attempt=group.attempt,
            draw=Draw(number=group_id, row=group.row, epoch=group.epoch, dataset=self._data_fingerprint),
            row=self._rows[group.row],
            min_version=max(0, self._state.permit(group_id)),
            prefixes=self._journal.ledger.prefixes(group_id, group.attempt) if group.prefix_tokens else (),
        )

    def reassign_running(self) -> None:
        """Hand every running group out again, with its recorded prefix."""
        self._unassigned = sorted(g.group_id for g in self._state.live.values() if g.status is GroupStatus.RUNNING)
        self._running_since.clear()
        self._ended_samples.clear()

    def free_engine_slots(self) -> float:
        """The share of engine slots that stand free behind the closed gate."""
        if self.gate > 0 or not self._state.next_draw:
            return 0.0
        slots = self._config.engine.slots
        active = self._config.rollout.num_samples * len(self._running_since) - sum(map(len, self._ended_samples.values()))
        return max(0, slots - active) / slots

    def progress(self, chunks: Sequence[PrefixChunk]) -> None:
        """Record chunks; what is known already, or belongs to an attempt that is over, is left out."""
        fresh: list[PrefixChunk] = []
        lengths: dict[tuple[int, int], int] = {}
        for chunk in sorted(chunks, key=lambda c: (c.group_id, c.sample, c.start)):
            group = self._state.live.get(chunk.group_id)
            if group is None or group.status is not GroupStatus.RUNNING or group.attempt != chunk.attempt:
                continue
            key = (chunk.group_id, chunk.sample)
            length = lengths.get(key, group.prefix_tokens.get(chunk.sample, 0))
            end = chunk.start + len(chunk.token_ids)
            if end == 0:
                self._note_end(chunk)  # nothing to go on from, so nothing to record
            elif end > length or (chunk.start == length and chunk.stop_reason is not None):
                fresh.append(chunk)
                lengths[key] = end
        if not fresh:
            return
        facts = tuple((c.group_id, c.sample, c.attempt, c.start, len(c.token_ids)) for c in fresh)
        self._journal.record(ev.PrefixesRecorded(chunks=facts), *fresh)
        for chunk in fresh:
            self._note_end(chunk)

    def _note_end(self, chunk: PrefixChunk) -> None:
        if chunk.stop_reason is not None and chunk.group_id in self._running_since:
            self._ended_samples.setdefault(chunk.group_id, set()).add(chunk.sample)

    def finish_group(self, group: Group) -> None:
        """Take in a group that has run. A second report of the same attempt changes nothing."""
        live = self._state.live.get(group.group_id)
        if group.group_id >= self._state.next_draw:
            raise LedgerError(f"group {group.group_id} was never drawn")
        if live is None or live.status is not GroupStatus.RUNNING or group.attempt < live.attempt:
            return
        if group.draw.row != live.row:
            raise LedgerError(f"group {group.group_id} comes back with row {group.draw.row}, drawn was row {live.row}")
        self._running_since.pop(group.group_id, None)
        self._ended_samples.pop(group.group_id, None)
        if group.group_id in self._unassigned:
            self._unassigned.remove(group.group_id)
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
            versions = [s.version for r in group.rollouts for s in r.spans]
            oldest, newest = min(versions, default=-1), max(versions, default=-1)
            seen = {"rewards": tuple(group.rewards), "oldest_version": oldest, "newest_version": newest, "left_out": left_out}
            self._journal.record(ev.GroupFinished(**seen, **facts), group)
            self._keep(group)

    def _attempt_failed(self, cause: str, facts: dict[str, Any]) -> None:
        if cause.startswith(UNFIT_CAUSES):
            self._journal.observer.note(f"group {facts['group_id']} is skipped: {cause}")
            self._journal.record(ev.Dropped(reason=cause.split(":")[0], cause=cause, **facts))
        elif facts["attempt"] + 1 < self._config.rollout.max_attempts:
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
