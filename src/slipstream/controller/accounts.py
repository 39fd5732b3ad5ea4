"""Where every group went, told group by group from the log: the proof of promise 1, apart from the state's counters.

`RunState` keeps what is in flight and counts the rest; here nothing is summed up or forgotten, so the two can be held against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.controller import events as ev
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.state import RunState, fold
from slipstream.controller.totals import INTERRUPTED, REWOUND, SKIPPED, STALE
from slipstream.errors import LedgerError
from slipstream.types import GroupStatus


@dataclass(slots=True)
class Place:
    """One group's way through the run."""

    row: int
    status: GroupStatus = GroupStatus.RUNNING
    reason: str = ""  # of a filtered or dropped one
    step: int | None = None  # of its batch
    attempts: int = 1
    num_tokens: int = 0  # sampled in all attempts


@dataclass(slots=True)
class Account:
    """Every group in exactly one place."""

    places: dict[int, Place] = field(default_factory=dict)  # by group id
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step -> group ids in pull order, of the surviving run
    staleness: Counter[int] = field(default_factory=Counter)  # staleness -> trained tokens
    wasted_tokens: Counter[str] = field(default_factory=Counter)  # cause -> tokens that no step trained

    @property
    def counts(self) -> dict[str, int]:
        """Groups by place, with the reason: {"trained": 40, "dropped: failed": 2, ...}."""
        out: Counter[str] = Counter()
        for place in self.places.values():
            out[f"{place.status}: {place.reason}" if place.reason else str(place.status)] += 1
        return dict(out)


def check_accounts(reader: LedgerReader) -> Account:
    """The account of a ledger; LedgerError names the groups that are lost, in two places, or trained twice (none, by promise 1)."""
    events = [event for *_, event in reader.live_events()]
    account, state = tell(events), fold(events)
    wrong = _missing(account, state) + _disagreements(account, state)
    if wrong:
        raise LedgerError(f"{reader.path}: the accounts do not close: " + "; ".join(wrong))
    return account


def tell(events: Iterable[ev.Event]) -> Account:
    """The account of these events; LedgerError for a group that is put where it cannot be."""
    account, step = Account(), 0
    records: dict[int, ev.BatchRecorded] = {}
    finished: dict[int, int] = {}  # finished step -> 1, or 0 where its update was skipped
    for event in events:
        match event:
            case ev.RunStarted(kind=kind, from_step=from_step) if kind != "fresh":
                for late in [s for s in finished if s >= from_step]:
                    _count(account, records[late], finished.pop(late), -1)
                _go_back(account, from_step, rewind=kind == "rewind")
                step = from_step
            case ev.Admitted(group_id=group_id, row=row):
                if group_id in account.places:
                    raise LedgerError(f"group {group_id} was drawn twice")
                account.places[group_id] = Place(row)
            case ev.GroupFinished():
                _move(account, event.group_id, GroupStatus.RUNNING, GroupStatus.FINISHED, tokens=event.num_tokens)
                _leave_out(account, event.left_out)
            case ev.AttemptFailed():
                _move(account, event.group_id, GroupStatus.RUNNING, GroupStatus.RUNNING, tokens=event.num_tokens).attempts += 1
                account.wasted_tokens["failed"] += event.num_tokens
            case ev.Filtered():
                _move(account, event.group_id, GroupStatus.RUNNING, GroupStatus.FILTERED, event.reason, event.num_tokens)
                account.wasted_tokens["filtered"] += event.num_tokens - _leave_out(account, event.left_out)
            case ev.SampleInterrupted():
                _move(account, event.group_id, GroupStatus.RUNNING, GroupStatus.RUNNING, tokens=event.num_tokens)
                account.wasted_tokens[INTERRUPTED] += event.num_tokens
            case ev.Dropped():
                late = event.reason == STALE  # the tokens of a finished one are counted already
                was = GroupStatus.FINISHED if late else GroupStatus.RUNNING
                _move(account, event.group_id, was, GroupStatus.DROPPED, event.reason, 0 if late else event.num_tokens)
                account.wasted_tokens[event.reason] += event.num_tokens
            case ev.BatchRecorded():
                for group_id in event.group_ids:
                    _move(account, group_id, GroupStatus.FINISHED, GroupStatus.BATCHED).step = event.step
                account.batches[event.step], records[event.step] = event.group_ids, event
            case ev.StepFinished():
                if event.step != step:
                    raise LedgerError(f"step {event.step} finished, step {step} was next")
                for group_id in account.batches[event.step]:
                    _move(account, group_id, GroupStatus.BATCHED, GroupStatus.TRAINED)
                finished[event.step] = int(event.skipped is None)
                _count(account, records[event.step], finished[event.step], +1)
                step += 1
    return account


def _move(account: Account, group_id: int, was: GroupStatus, now: GroupStatus, reason: str = "", tokens: int = 0) -> Place:
    place = account.places.get(group_id)
    if place is None or place.status is not was:
        raise LedgerError(f"group {group_id} becomes {now}, but is {place.status if place else 'unknown'}")
    place.status, place.reason = now, reason
    place.num_tokens += tokens
    return place


def _count(account: Account, record: ev.BatchRecorded, trained: int, sign: int) -> None:
    """Add a finished batch to the account, or take it out again. Rollouts that left its groups are waste, and all of a skipped update."""
    account.wasted_tokens[STALE] += sign * record.dropped.tokens
    if not trained:
        account.wasted_tokens[SKIPPED] += sign * (record.num_loss_tokens + record.num_masked_tokens)
    for staleness, tokens in record.staleness:
        account.staleness[staleness] += sign * trained * tokens


def _leave_out(account: Account, left_out: ev.LeftOut | None) -> int:
    """Waste of a selection; its tokens."""
    account.wasted_tokens.update(left_out.tokens if left_out else {})
    return left_out.num_tokens if left_out else 0


def _go_back(account: Account, from_step: int, *, rewind: bool) -> None:
    for step in [s for s in account.batches if s >= from_step]:
        for group_id in account.batches[step]:
            account.places[group_id].status = GroupStatus.BATCHED
        if rewind:
            del account.batches[step]
    if rewind:
        for place in account.places.values():
            late = place.status is GroupStatus.BATCHED and place.step is not None and place.step >= from_step
            if late or place.status in (GroupStatus.RUNNING, GroupStatus.FINISHED):
                place.status, place.reason = GroupStatus.DROPPED, REWOUND


def _missing(account: Account, state: RunState) -> list[str]:
    lost = sorted(set(range(state.next_draw)) ^ set(account.places))
    return [f"groups {lost[:10]} are lost or were never drawn"] if lost else []


def _disagreements(account: Account, state: RunState) -> list[str]:
    """Where the group-by-group account and the state's counters differ."""
    counted: Counter[GroupStatus] = Counter(p.status for p in account.places.values())
    finished = state.num_finished
    expected = {
        GroupStatus.TRAINED: state.totals.trained_groups,
        GroupStatus.FILTERED: state.totals.filtered,
        GroupStatus.DROPPED: sum(state.totals.dropped.values()),
        GroupStatus.BATCHED: state.pulled,
        GroupStatus.FINISHED: finished,
        GroupStatus.RUNNING: len(state.live) - finished,
    }
    wrong = [f"{counted[s]} groups are {s}, counted are {n}" for s, n in expected.items() if counted[s] != n]
    if +account.staleness != +state.totals.staleness:
        wrong.append(f"staleness of trained tokens is {dict(+account.staleness)}, counted is {dict(+state.totals.staleness)}")
    return wrong
