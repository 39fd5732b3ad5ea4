"""Which engine takes which request."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engines import dispatch
from slipstream.engines.dispatch import Dispatcher
from slipstream.types import GenerateRequest, Purpose, Sampling


def request(group: int = 0, sample: int = 0, min_version: int = 0) -> GenerateRequest:
    return GenerateRequest(
        group_id=group,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=Purpose.TRAIN,
        token_ids=np.zeros(1, np.int32),
        prompt_length=1,
        num_sampled=0,
        sampling=Sampling(),
        stop_token_ids=(),
        min_version=min_version,
    )


def engines(*versions: int, slots: int = 4, ahead: int = 2) -> Dispatcher:
    """Engines 0, 1, ... at these versions."""
    made = Dispatcher(slots, ahead)
    for number, version in enumerate(versions):
        made.join(number, version)
    return made


def test_groups_spread_and_siblings_stay_together() -> None:
    d = engines(0, 0)
    assert [d.take(request(group, sample)) for group in (0, 1) for sample in range(3)] == [0, 0, 0, 1, 1, 1]


def test_a_sibling_that_finds_its_home_full_takes_a_free_slot_elsewhere() -> None:
    d = engines(0, 0)
    assert [d.take(request(0, sample)) for sample in range(6)] == [0, 0, 0, 0, 1, 1]


def test_a_later_turn_goes_where_its_rollout_ran_and_not_where_its_siblings_went_since() -> None:
    d = engines(0, 0)
    assert [d.take(request(0, sample)) for sample in range(5)] == [0, 0, 0, 0, 1]
    d.ended(0)
    assert d.take(request(0, 2)) == 0
    d.ended(1)
    assert d.take(request(0, 4)) == 1


def test_queues_are_short_and_the_rest_waits() -> None:
    d = engines(0, 0)
    taken = [d.take(request(sample=sample)) for sample in range(20)]
    assert [taken.count(engine) for engine in (0, 1, None)] == [6, 6, 8] and d.full
    d.ended(1)
    assert not d.full and d.take(request(group=9)) == 1


def test_a_version_that_only_one_engine_has() -> None:
    d = engines(3, 4)
    assert [d.take(request(group, min_version=4)) for group in range(7)] == [1, 1, 1, 1, 1, 1, None]  # engine 0 would keep it waiting
    assert d.take(request(min_version=3)) == 0
    assert d.choose(request(min_version=5)) is None  # whichever confirms it first shall have it
    d.confirmed(0, 5)
    assert d.choose(request(min_version=5)) == 0


def test_an_engine_that_is_alone_takes_what_it_cannot_start_yet() -> None:
    d = engines(-1)
    assert d.take(request(min_version=2)) == 0
    d.join(1, -1)
    assert d.choose(request(min_version=2)) is None


def test_a_state_brings_its_rollout_back_even_to_a_full_engine_unless_that_is_behind() -> None:
    d = engines(3, 4, slots=1, ahead=0)
    assert d.take(request(0)) == 0 and d.take(request(1)) == 1 and d.full
    assert d.choose(request(2), holder=0) == 0
    assert d.choose(request(2, min_version=4), holder=0) is None
    d.leave(0)
    assert d.choose(request(2), holder=0) is None
    d.ended(1)
    assert d.choose(request(2), holder=0) == 1


def test_homes_are_bounded_and_an_engine_that_left_is_nobodys() -> None:
    d = engines(0, 0, slots=10**6)
    for group in range(dispatch.MAX_HOMES + 5):
        d.take(request(group))
    assert len(d._homes) == dispatch.MAX_HOMES
    d.leave(0)
    d.ended(0)  # of what it was given
    assert {d.take(request(group)) for group in range(100)} == {1}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nobody_is_passed_over_and_no_engine_is_overrun(data: st.DataObject) -> None:
    slots, ahead = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2))
    d, running, next_number = Dispatcher(slots, ahead), {}, 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["join", "leave", "confirm", "end", "take", "take", "take"]))
        if what == "join":
            d.join(next_number, data.draw(st.integers(-1, 4)))
            running[next_number], next_number = 0, next_number + 1
        elif what == "take":
            wanted = request(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4)))
            able = [e for e, load in d.engines.items() if load.version >= wanted.min_version or len(d.engines) == 1]
            given_to = d.take(wanted)
            if given_to is None:
                assert all(running[e] >= slots + ahead for e in able), "one could have started it"
            else:
                assert given_to in able and running[given_to] < slots + ahead
                assert running[given_to] < slots or all(running[e] >= slots for e in able), "another had a free slot"
                running[given_to] += 1
        elif running:
            engine = data.draw(st.sampled_from(sorted(running)))
            if what == "leave":
                d.leave(engine)
                del running[engine]
            elif what == "confirm":
                d.confirmed(engine, d.engines[engine].version + 1)
            elif running[engine]:
                d.ended(engine)
                running[engine] -= 1
    assert {e: load.running for e, load in d.engines.items()} == running
