"""What the controller knows of a run: the fold of its events, as a value. The rules that change it are in `state`.

Memory holds the groups that are in flight and the batches that a kept checkpoint may still need; what is final is a counter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from slipstream.controller import admission
from slipstream.controller import events as ev
from slipstream.controller.totals import Totals
from slipstream.errors import LedgerError
from slipstream.types import GroupStatus


def refuse_unless(condition: bool, text: str) -> None:
    """An event that is not legal here: LedgerError."""
    if not condition:
        raise LedgerError(text)


@dataclass(slots=True)
class LiveGroup:
    """A group that is running or finished and not yet pulled."""

    group_id: int
    row: int
    epoch: int
    position: int
    bound: int | None  # worst staleness derived at admission; None: there is none
    min_version: int
    status: GroupStatus = GroupStatus.RUNNING
    attempt: int = 0
    failures: int = 0  # attempts that failed
    retries: dict[int, int] = field(default_factory=dict)  # sample -> times it was started anew in this attempt
    num_tokens: int = 0  # of the finished attempt's rollouts, of those kept where they were oversampled
    prefix_tokens: dict[int, int] = field(default_factory=dict)  # sample -> recorded tokens of this attempt
    prefix_versions: dict[int, int] = field(default_factory=dict)  # sample -> oldest version among them
    oldest_version: int = -1  # of the finished attempt's trained tokens; -1: there are none

    def attempt_of(self, sample: int) -> int:
        """The attempt of one rollout: the group's, and one more each time it was started anew."""
        return self.attempt + self.retries.get(sample, 0)


@dataclass(slots=True, frozen=True)
class Member:
    """A group of a recorded batch."""

    group_id: int
    attempt: int
    row: int
    epoch: int
    position: int
    bound: int | None
    num_tokens: int


@dataclass(slots=True)
class RecordedBatch:
    members: tuple[Member, ...]
    record: ev.BatchRecorded
    skipped: bool = False  # of a finished one: its update was not applied


@dataclass(slots=True)
class Evaluations:
    """Which evaluations were due and what became of them."""

    num_ordered: int = 0
    num_skipped: int = 0
    running: ev.EvaluationOrdered | None = None
    handled: dict[int, int] = field(default_factory=dict)  # due version -> version evaluated, -1 skipped
    results: list[ev.EvaluationFinished] = field(default_factory=list)  # of surviving versions, oldest first
    engine_s: float = 0.0


@dataclass(slots=True)
class RunState:
    run_id: str = ""
    incarnation: int = 0
    max_staleness: int = 0  # S
    groups_per_step: int = 1  # P
    window: int | None = 1  # W; None: unbounded
    max_groups: int = 0  # in flight without a window
    lowered: int = 0  # S is so much below the setting, by thresholds
    group_size: int = 1  # G

    next_draw: int = 0  # = the next group id
    position: int = 0  # of the next draw in the seeded order, when nothing is to be drawn again
    redraw: deque[int] = field(default_factory=deque)  # positions of rewound groups, drawn first

    step: int = 0  # T: batches finished
    next_batch: int = 0  # batches recorded
    live: dict[int, LiveGroup] = field(default_factory=dict)  # unpulled, in order of group id
    order: list[int] = field(default_factory=list)  # ids of `live`, ascending: the places of what is unpulled
    places: list[int] = field(default_factory=list)  # ids from the oldest unpulled group on, pulled ones included
    passed: set[int] = field(default_factory=set)  # pulled groups among `places`
    finished: list[int] = field(default_factory=list)  # ids of the finished ones of `live`, ascending
    batches: dict[int, RecordedBatch] = field(default_factory=dict)  # that a kept checkpoint, or starting over, may still need
    unconfirmed: deque[tuple[int, int]] = field(default_factory=deque)  # (version, groups) trained, still holding slots

    published: dict[int, str] = field(default_factory=dict)  # version -> checksum, of this incarnation
    newest_version: dict[int, int] = field(default_factory=dict)  # incarnation -> newest version it ever published
    engines: dict[str, int] = field(default_factory=dict)  # in service -> version confirmed in this incarnation, -1 none
    engine_starts: dict[str, int] = field(default_factory=dict)  # how often each came into service in this incarnation
    checkpoints: list[ev.Point] = field(default_factory=list)  # kept, oldest first
    evaluations: Evaluations = field(default_factory=Evaluations)
    totals: Totals = field(default_factory=Totals)

    stop_reason: str | None = None
    skipped_in_a_row: int = 0
    threshold_counts: dict[str, int] = field(default_factory=dict)  # see `thresholds.judge`
    barren_in_a_row: int = 0  # groups that ended filtered or failed since the last one that finished, in this incarnation
    first_barren_cause: str = ""
    productive: bool = False  # some group has finished or was filtered in this incarnation

    # -- derived

    @property
    def pulled(self) -> int:
        """Groups in recorded batches that are not finished."""
        return sum(len(self.batches[s].members) for s in range(self.step, self.next_batch))

    @property
    def num_slots(self) -> int:
        """Groups in flight at most."""
        return self.max_groups if self.window is None else admission.num_slots(self.max_staleness, self.groups_per_step)

    @property
    def bound(self) -> int | None:
        """The worst staleness of what is admitted now; None: there is none."""
        return admission.worst_staleness(self.max_staleness, self.groups_per_step, self.window)

    @property
    def slots_taken(self) -> int:
        return admission.slots_taken(len(self.live), self.pulled, sum(count for _, count in self.unconfirmed))

    @property
    def confirmed(self) -> int:
        """The version that every engine in service holds at least; -1 while there is none."""
        return min(self.engines.values(), default=-1)

    @property
    def newest(self) -> int:
        """The newest version that engines can get, or will get when the start weights are published."""
        return max(self.published, default=self.step)

    @property
    def num_finished(self) -> int:
        """Finished groups in the buffer."""
        return len(self.finished)

    def ahead(self, group_id: int) -> int:
        """a: groups that must train before this one."""
        return self.pulled + (0 if self.window is None else bisect_left(self.order, group_id))

    def permit(self, group_id: int) -> int:
        return admission.permit(self.step, self.ahead(group_id), self.max_staleness, self.groups_per_step)

    def next_pull(self) -> list[int] | None:
        """The groups of the next batch, or None while it is not complete."""
        return admission.pull(self.places, self.passed.__contains__, self.finished, self.window, self.groups_per_step)

    def watermark(self) -> int:
        """Every group below is final and in no batch from `step` on."""
        ids = [m.group_id for s in range(self.step, self.next_batch) for m in self.batches[s].members]
        return min([self.next_draw, *self.order[:1], *ids])

    def point(self, ledger_seq: int) -> ev.Point:
        """Where the draws stand now, for a checkpoint."""
        return ev.Point(
            step=self.step,
            ledger_seq=ledger_seq,
            next_draw=self.next_draw,
            position=self.position,
            redraw=tuple(self.redraw),
            watermark=self.watermark(),
        )

    def running_group(self, group_id: int) -> LiveGroup:
        group = self.live.get(group_id)
        if group is None or group.status is not GroupStatus.RUNNING:
            raise LedgerError(f"group {group_id} is not running: {self.where(group_id)}")
        return group

    def where(self, group_id: int) -> str:
        """Where this group is, in words for an error."""
        if group_id >= self.next_draw or group_id < 0:
            return "it was never drawn"
        if group_id in self.live:
            return f"it is {self.live[group_id].status} (attempt {self.live[group_id].attempt})"
        for step, batch in self.batches.items():
            if any(m.group_id == group_id for m in batch.members):
                return f"it is in batch {step}"
        return "it is final"
