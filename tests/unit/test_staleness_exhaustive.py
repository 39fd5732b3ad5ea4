"""The derived bound is exact: a search over every interleaving of small cases, with the controller's own admission functions.

One engine, since a second one adds nothing without a restart: the gate waits for the slowest. A state is (places, T, E): for each group
from the oldest unpulled one on the version it started with (or None once it is pulled), batches trained, version the engine confirmed.
Weights are published after every k-th batch.
Groups start as soon as they are admitted (older tokens are worse), and the adversary decides which are finished when a batch is formed,
when the engine syncs and when the step ends.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.controller import admission

SHAPES = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1), (1, 3), (2, 2)]
CASES = [(S, P, W) for S, P in SHAPES for W in range(1, (S + 1) * P + 1)]


def worst_over_all_schedules(S: int, P: int, W: int, last_step: int, k: int = 1) -> int:
    return search(S, P, W, last_step, k)[0]


def search(S: int, P: int, W: int, last_step: int, k: int = 1) -> tuple[int, int]:
    """(the worst staleness, the most batches trained) over all schedules."""
    worst = most = 0
    seen: set[tuple] = set()
    todo: list[tuple] = [((), None, 0, 0)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        places, batch, T, E = state
        most = max(most, T)
        if batch is not None:
            worst = max(worst, T - min(batch))
        if T < last_step:
            todo.extend(successors(places, batch, T, E, S, P, W, k))
    return worst, most


def successors(places, batch, T, E, S, P, W, k):
    """`batch`: first versions of the groups on the trainer, None while it waits for one."""
    unpulled = [i for i, first in enumerate(places) if first is not None]
    pulled = 0 if batch is None else len(batch)
    taken = admission.slots_taken(len(unpulled), pulled, (T - E) * P)
    if admission.free_slots(taken, admission.num_slots(S, P)):
        # Without restarts and resumes the permit never holds anything back: the gate has already waited.
        assert admission.permit(T, pulled + len(unpulled), S, P) <= E
        yield (*places, E), batch, T, E
    newest = T - T % k
    if E < newest:
        yield places, batch, T, newest
    if batch is not None:
        yield places, None, T + 1, E
        return
    for finished in combinations(unpulled, P):
        ids = admission.pull(range(len(places)), lambda i: places[i] is None, list(finished), W, P)
        if ids is None:
            continue
        left = [None if i in ids else first for i, first in enumerate(places)]
        while left and left[0] is None:
            left.pop(0)
        yield tuple(left), tuple(sorted(places[i] for i in ids)), T, E


@pytest.mark.parametrize(("S", "P", "W"), CASES)
def test_the_worst_schedule_is_exactly_as_stale_as_derived(S, P, W):
    claimed = admission.worst_staleness(S, P, W)
    assert claimed == (0 if S == 0 else S + -(-(W - 1) // P))
    assert worst_over_all_schedules(S, P, W, last_step=2 * S + 3) == claimed


@pytest.mark.parametrize(("S", "P", "W", "k"), [(1, 1, 1, 2), (1, 2, 2, 2), (2, 1, 2, 2), (2, 1, 3, 3), (2, 2, 3, 3), (1, 3, 4, 2)])
def test_weights_every_few_steps_keep_the_bound_and_get_on_up_to_one_more_than_max_staleness(S, P, W, k):
    worst, most = search(S, P, W, last_step=2 * S + 3, k=k)
    assert most == 2 * S + 3
    assert S <= worst <= admission.worst_staleness(S, P, W)
    assert search(S, P, W, last_step=2 * S + 3, k=S + 2)[1] == S + 1, "all slots wait for a version that is never made"


def test_the_search_sees_a_slot_that_is_freed_early(monkeypatch):
    monkeypatch.setattr(admission, "slots_taken", lambda unpulled, pulled, unconfirmed: unpulled + pulled)
    monkeypatch.setattr(admission, "permit", lambda *_: 0)
    assert [worst_over_all_schedules(1, 1, 1, last_step=n) for n in (3, 4, 5, 6)] == [2, 3, 4, 5]  # no bound


def test_the_search_sees_a_window_that_slides(monkeypatch):
    def sliding(places, pulled, finished, window, groups_per_step):
        unpulled = [g for g in places if not pulled(g)]
        batch: list[int] = []
        while len(batch) < groups_per_step:
            ready = [g for g in [g for g in unpulled if g not in batch][:window] if g in finished]
            if not ready:
                return None
            batch.append(ready[0])
        return batch

    monkeypatch.setattr(admission, "pull", sliding)
    assert admission.worst_staleness(1, 1, 2) == 2
    assert [worst_over_all_schedules(1, 1, 2, last_step=n) for n in (3, 4, 5, 6)] == [2, 3, 4, 5]  # no bound


@pytest.mark.parametrize(("S", "P"), [(0, 1), (0, 8), (1, 1), (1, 4), (3, 8), (2, 3)])
def test_the_default_window_fits_the_slots(S, P):
    window = admission.default_window(S, P)
    assert 1 <= window <= admission.num_slots(S, P)
    assert window == 1 if S == 0 else window <= max(1, 0.3 * (S + 1) * P)


def pull_by_its_definition(places, pulled, finished, window, groups_per_step):
    """Group by group: the oldest finished one among the places that the window shows now."""
    batch: list[int] = []
    left = [g for g in places if not pulled(g)]
    while len(batch) < groups_per_step:
        anchor = places.index(left[0]) if left else len(places)
        shown = places[anchor:] if window is None else places[anchor : anchor + window]
        ready = [g for g in shown if g in finished and g in left]
        if not ready:
            return None
        batch.append(ready[0])
        left.remove(ready[0])
    return batch


@given(
    st.lists(st.sampled_from(["running", "finished", "pulled"]), max_size=14),
    st.sampled_from([None, 1, 2, 3, 5, 8]),
    st.integers(1, 4),
    st.integers(0, 30),
)
def test_a_pull_is_what_its_definition_says(statuses, window, groups_per_step, first):
    while statuses and statuses[0] == "pulled":
        statuses.pop(0)
    places = [first + 2 * i for i in range(len(statuses))]
    where = dict(zip(places, statuses, strict=True))
    finished = [g for g in places if where[g] == "finished"]
    asked = (places, lambda g: where[g] == "pulled", finished, window, groups_per_step)
    assert admission.pull(*asked) == pull_by_its_definition(*asked)
