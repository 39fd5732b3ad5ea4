"""The reducer: whatever happens in whatever order, the accounts close; what is not legal changes nothing; memory stays flat."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.controller import events as ev
from slipstream.controller.accounts import tell
from slipstream.controller.state import RunState, apply, fold
from slipstream.errors import LedgerError
from slipstream.types import GroupStatus

START = ev.RunStarted(
    run_id="r",
    incarnation=1,
    kind="fresh",
    max_staleness=1,
    groups_per_step=2,
    window=2,
    group_size=2,
    seed=0,
    data_fingerprint="d",
)


def restart(state: RunState, kind: str, step: int, **more) -> ev.RunStarted:
    point = next((p for p in state.checkpoints if p.step == step), None)
    return msgspec.structs.replace(START, kind=kind, incarnation=state.incarnation + 1, from_step=step, point=point, **more)


def batch_of(state: RunState, ids, dropped: int = 0) -> ev.BatchRecorded:
    return ev.BatchRecorded(
        step=state.next_batch,
        group_ids=tuple(ids),
        num_loss_tokens=4,
        num_samples=2,
        num_several_versions=1,
        staleness=((0, 3), (1, 1)),
        kept=ev.Tally(2, 4, 2, 1.0),
        dropped=ev.Tally(dropped, 3 * dropped, dropped, 0.5 * dropped),
    )


def possible(state: RunState, a: int, b: int) -> list[ev.Event]:
    """Events, legal and illegal, that the numbers a and b pick."""
    group = a % (state.next_draw + 2)
    attempt = state.live[group].attempt if group in state.live else b % 2
    of_sample = state.live[group].attempt_of(b % 2) if group in state.live else b % 2
    facts = {"group_id": group, "attempt": attempt, "num_tokens": b}
    late = {"num_tokens": state.live[group].num_tokens} if group in state.live and b % 3 else {}
    finished = [g for g, v in state.live.items() if v.status is GroupStatus.FINISHED]
    position = state.redraw[0] if state.redraw else state.position
    newest = max(state.published, default=state.step - 1)
    inc, saved = state.incarnation, tuple(p.step for p in state.checkpoints)
    return [
        ev.Admitted(group_id=state.next_draw + (a % 5 == 0), row=0, epoch=0, position=position, min_version=0, bound=2),
        ev.GroupFinished(**facts, rewards=(0.0, 1.0), oldest_version=0, newest_version=0),
        ev.AttemptFailed(**facts, cause="deadline: slow"),
        ev.Filtered(**facts, reason="zero variance"),
        ev.Dropped(**facts, reason="failed", cause="broke"),
        ev.PrefixesRecorded(chunks=((group, b % 2, of_sample, a % 3, b % 4, 0),)),
        batch_of(state, finished[: 1 + a % 2], dropped=b % 3),
        ev.VersionPublished(version=(due := state.step + bool(state.published)) + (b % 7 == 0), checksum=f"{inc}.{due}"),
        ev.StepFinished(
            step=state.step,
            version=state.step + 1,
            checksum=f"{inc}.{state.step + 1}" if state.step + 1 in state.published or b % 5 == 0 else "",
            skipped="nan" if b % 4 == 0 else None,
            active_s=1.0,
        ),
        ev.EngineAdded(engine_id=f"e{a % 2}"),
        ev.EngineRemoved(engine_id=f"e{a % 2}"),
        ev.EngineConfirmed(engine_id=f"e{a % 2}", version=newest, checksum=f"{inc}.{newest}"),
        ev.CheckpointCommitted(point=state.point(100 + a), kept=(*saved[-1:], state.step), covers=(*saved[-1:], state.step)[0]),
        restart(state, "resume", saved[-1] if saved else 0, kept=saved),
        restart(state, "rewind", saved[0] if saved else 0, kept=saved),
        ev.EvaluationOrdered(number=state.evaluations.num_ordered, due=a % 9),
        ev.EvaluationSkipped(due=a % 9),
        ev.EvaluationAborted(number=b % 3),
        ev.StopRequested(reason="x"),
        ev.SampleInterrupted(group_id=group, sample=b % 2, attempt=of_sample, num_tokens=b),
        ev.Dropped(**(facts | late), reason=("stale", "cancelled")[b % 2], lost=ev.Tally(2, b, a % 3, 0.5)),
        ev.SettingsChanged(changes={"buffer.max_staleness": a % 3, "buffer.window": (1, 2, None)[a % 3]}),
    ]


def check_invariants(state: RunState, history: list[ev.Event]) -> None:
    account = tell(history)
    by_status = {s: [g for g, p in account.places.items() if p.status is s] for s in GroupStatus}
    assert sorted(account.places) == list(range(state.next_draw)), "every draw is in one place"
    assert len(by_status[GroupStatus.TRAINED]) == state.totals.trained_groups
    assert len(by_status[GroupStatus.FILTERED]) == state.totals.filtered
    assert len(by_status[GroupStatus.DROPPED]) == sum(state.totals.dropped.values())
    assert sorted(by_status[GroupStatus.RUNNING] + by_status[GroupStatus.FINISHED]) == sorted(state.live) == state.order
    assert len(by_status[GroupStatus.BATCHED]) == state.pulled
    assert state.slots_taken >= len(state.live) + state.pulled
    assert set(state.places) - state.passed == set(state.live) and (not state.places or state.places[0] in state.live)
    assert +account.staleness == +state.totals.staleness
    wasted = +account.wasted_tokens
    assert wasted == Counter({c: n for c, n in state.totals.wasted_tokens.items() if n > 0 and c != "rewound"})
    assert state.step <= state.next_batch
    assert all(s in state.batches for s in range(state.step, state.next_batch))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 21), st.integers(0, 60), st.integers(0, 20)), max_size=120))
def test_any_order_of_events_keeps_the_accounts_closed(choices):
    """Choices are biased towards legal events by trying the picked kind first; illegal ones must change nothing."""
    state, history = apply(RunState(), START), [START]
    for kind, a, b in choices:
        event = possible(state, a, b)[kind]
        before = copy.deepcopy(state)
        try:
            state = apply(state, event)
        except LedgerError:
            assert state == before, f"{event} was refused, but changed the state"
            continue
        history.append(event)
    check_invariants(state, history)
    assert fold(history) == state, "the state is a function of its events"
    decoded = [ev.decode_event(ev.encode_event(event)) for event in history]
    assert decoded == history


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_long_plausible_histories_keep_the_accounts_closed(seed):
    """Mostly legal histories, deep enough to train, checkpoint, crash and rewind."""
    r = random.Random(seed)
    state, history = apply(RunState(), START), [START]
    weights = [6, 6, 1, 1, 1, 1, 4, 3, 4, 1, 0.3, 2, 0.5, 0.15, 0.05, 0.3, 0.2, 0.2, 0.02, 0.5, 0.5, 0.1]
    for _ in range(250):
        event = r.choices(possible(state, r.randrange(61), r.randrange(21)), weights)[0]
        try:
            state = apply(state, event)
        except LedgerError:
            continue
        history.append(event)
    check_invariants(state, history)
    assert fold(history) == state


def trained(state: RunState, ids, skipped: str | None = None) -> RunState:
    """Admit, finish, batch and train these groups."""
    events = []
    for g in ids:
        events += [
            ev.Admitted(group_id=g, row=0, epoch=0, position=g, min_version=0, bound=1),
            ev.GroupFinished(group_id=g, attempt=0, rewards=(0.0,), oldest_version=0, newest_version=0, num_tokens=1),
        ]
    state = fold(events, state)
    state = apply(state, batch_of(state, ids))
    if not state.published:
        state = fold([ev.VersionPublished(version=state.step, checksum="x")], state)
    version = state.step + 1
    return fold(
        [
            ev.VersionPublished(version=version, checksum="x"),
            ev.StepFinished(step=state.step, version=version, checksum="x", skipped=skipped),
        ],
        state,
    )


def test_a_group_is_not_trained_twice():
    state = trained(apply(RunState(), START), [0, 1])
    with pytest.raises(LedgerError, match="group 1 cannot go into batch 1: it is in batch 0"):
        apply(state, batch_of(state, [1]))
    with pytest.raises(LedgerError, match="step 0 finished, but step 1 is next"):
        apply(state, ev.StepFinished(step=0, version=1, checksum="x"))


def test_a_slot_is_held_until_every_engine_has_confirmed():
    state = fold([ev.EngineAdded(engine_id="a"), ev.EngineAdded(engine_id="b")], apply(RunState(), START))
    state = trained(state, [0, 1])
    assert state.slots_taken == 2, "trained, but on no engine"
    state = apply(state, ev.EngineConfirmed(engine_id="a", version=1, checksum="x"))
    assert state.slots_taken == 2, "the slower engine counts"
    assert apply(copy.deepcopy(state), ev.EngineRemoved(engine_id="b")).slots_taken == 0
    assert apply(state, ev.EngineConfirmed(engine_id="b", version=1, checksum="x")).slots_taken == 0


def test_a_skipped_update_is_a_version_and_frees_its_slots():
    state = fold([ev.EngineAdded(engine_id="a")], apply(RunState(), START))
    state = trained(state, [0, 1], skipped="nan")
    state = apply(state, ev.EngineConfirmed(engine_id="a", version=1, checksum="x"))
    assert state.step == 1 and state.slots_taken == 0


def test_tokens_of_a_skipped_update_are_waste_until_it_is_made_again():
    state = trained(apply(RunState(), START), [0, 1], skipped="nan")
    assert (state.totals.trained_groups, state.totals.trained_tokens) == (2, 0)
    assert state.totals.wasted_tokens["skipped"] == state.batches[0].record.num_loss_tokens == 4
    state = apply(state, restart(state, "resume", 0))
    assert not +state.totals.wasted_tokens, "its batch is trained again"


def test_a_rewind_wastes_what_running_groups_have_sampled_too():
    state = finished_batch(apply(RunState(), START), 0)
    state = apply(state, ev.Admitted(group_id=2, row=0, epoch=0, position=2, min_version=0, bound=1))
    state = fold([ev.PrefixesRecorded(chunks=((2, 0, 0, 0, 5, 0), (2, 1, 0, 0, 4, 0)))], state)
    state = apply(state, restart(state, "rewind", 0))
    assert state.totals.dropped == {"rewound": 3} and state.totals.wasted_tokens == {"rewound": 1 + 1 + 5 + 4}
    assert state.totals.generated_tokens == 11


def test_a_lowered_limit_closes_the_gate_and_leaves_admitted_groups_their_bound():
    state = fold([ev.Admitted(group_id=g, row=0, epoch=0, position=g, min_version=0, bound=2) for g in range(4)], apply(RunState(), START))
    assert state.slots_taken == 4 and state.permit(3) == 0 + 3 // 2 - 1
    state = apply(state, ev.SettingsChanged(changes={"buffer.max_staleness": 0, "buffer.window": 1}, reason="collapse"))
    assert (state.max_staleness, state.lowered, state.num_slots, state.bound) == (0, 1, 2, 0)
    assert state.permit(3) == 1, "groups that have not started yet start later"
    assert {g.bound for g in state.live.values()} == {2}, "what may have started under the old limit is held to that one"


def test_an_event_costs_the_same_after_a_hundred_thousand_groups():
    def block(state: RunState, num_steps: int) -> tuple[RunState, float]:
        started = time.process_time()
        for _ in range(num_steps):
            state = trained(state, range(state.next_draw, state.next_draw + 50))
            version = state.step
            state = fold([ev.EngineConfirmed(engine_id="a", version=version, checksum="x")], state)
            if version % 10 == 0:
                state = apply(state, ev.CheckpointCommitted(point=state.point(version), kept=(version - 10, version), covers=version - 10))
        return state, time.process_time() - started

    state = fold([ev.EngineAdded(engine_id="a")], apply(RunState(), msgspec.structs.replace(START, groups_per_step=50)))
    state, first = block(state, 200)
    state, _ = block(state, 1600)
    state, last = block(state, 200)
    assert state.next_draw == 100_000 and state.totals.trained_groups == 100_000
    assert last < 3 * first + 0.2
    assert len(state.live) + len(state.places) + len(state.passed) + len(state.unconfirmed) == 0
    assert len(state.batches) <= 20 and len(state.published) <= 3 and len(state.checkpoints) == 2


def test_without_a_window_nobody_counts_the_places_that_were_passed():
    state = apply(RunState(), msgspec.structs.replace(START, window=None, max_groups=9))
    assert (state.num_slots, state.bound, state.permit(0)) == (9, None, -1)
    state = apply(state, ev.Admitted(group_id=0, row=0, epoch=0, position=0, min_version=0, bound=None))
    for g in range(1, 9, 2):
        state = trained(state, [g, g + 1])
    assert state.places == [0] and not state.passed, "the slow group is the only place"
    assert state.permit(0) == state.step - 1, "it may be trained next: only what is pulled must train before it"


def test_what_a_rollout_that_starts_anew_leaves_behind():
    state = fold([ev.Admitted(group_id=0, row=0, epoch=0, position=0, min_version=0, bound=1)], apply(RunState(), START))
    chunks = ((0, 0, 0, 0, 5, 3), (0, 1, 0, 0, 4, 2))
    state = fold(
        [ev.PrefixesRecorded(chunks=chunks), ev.SampleInterrupted(group_id=0, sample=1, attempt=0, num_tokens=6)],
        state,
    )
    group = state.live[0]
    assert (group.attempt, group.attempt_of(0), group.attempt_of(1)) == (0, 0, 1)
    assert group.prefix_tokens == {0: 5} and group.prefix_versions == {0: 3}, "its sibling keeps its tokens"
    assert state.totals.wasted_tokens == {"interrupted": 6}
    with pytest.raises(LedgerError, match="attempt 0 of group 0 sample 1, which is at attempt 1"):
        apply(state, ev.PrefixesRecorded(chunks=((0, 1, 0, 0, 1, 2),)))
    state = fold([ev.PrefixesRecorded(chunks=((0, 1, 1, 0, 2, 4),)), ev.AttemptFailed(group_id=0, attempt=0, cause="x")], state)
    assert (group.attempt, group.failures, group.retries) == (2, 1, {}), "above every attempt that was used"


def test_versions_may_be_left_out():
    state = fold([ev.EngineAdded(engine_id="a"), ev.VersionPublished(version=0, checksum="0")], apply(RunState(), START))
    state = apply(state, ev.EngineConfirmed(engine_id="a", version=0, checksum="0"))
    for step in (0, 1):
        state = finished_batch(state, 2 * step)
        with pytest.raises(LedgerError, match="was not published"):
            apply(state, ev.StepFinished(step=step, version=step + 1, checksum="x"))
        state = apply(state, ev.StepFinished(step=step, version=step + 1, checksum=""))
    assert state.slots_taken == 4 and state.newest == 0, "no engine can have what was not published"
    with pytest.raises(LedgerError, match="version 2 was published after 2 steps, but only 3 can be"):
        apply(state, ev.VersionPublished(version=2, checksum="2"))
    state = finished_batch(state, 4)
    state = fold([ev.VersionPublished(version=3, checksum="3"), ev.StepFinished(step=2, version=3, checksum="3")], state)
    assert apply(state, ev.EngineConfirmed(engine_id="a", version=3, checksum="3")).slots_taken == 0


def finished_batch(state: RunState, first: int) -> RunState:
    for g in (first, first + 1):
        facts = {"group_id": g, "attempt": 0, "rewards": (0.0,), "oldest_version": 0, "newest_version": 0, "num_tokens": 1}
        state = fold([ev.Admitted(group_id=g, row=0, epoch=0, position=g, min_version=0, bound=1), ev.GroupFinished(**facts)], state)
    return apply(state, batch_of(state, [first, first + 1]))


def test_rollouts_that_left_their_groups_are_waste_of_the_batches_that_survive():
    state = finished_batch(apply(RunState(), START), 0)
    record = msgspec.structs.replace(state.batches[0].record, dropped=ev.Tally(2, 7, 1, 0.5))
    state.batches[0].record = record
    state = fold([ev.VersionPublished(version=0, checksum="0"), ev.StepFinished(step=0, version=1, checksum="")], state)
    totals = state.totals
    assert totals.wasted_tokens == {"stale": 7} and totals.stale.mean_tokens == 3.5 and totals.stale.mean_reward == 0.5
    assert totals.trained.mean_tokens == 2.0
    state = apply(state, restart(state, "resume", 0))
    assert not +state.totals.wasted_tokens and state.totals.stale == state.totals.trained == ev.Tally(), "it is to be trained again"
