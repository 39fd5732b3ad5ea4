"""The overlap benchmark: its clock, its bounds in cases small enough to count by hand, and the real controller never beats them."""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from overlap import CUT, Setting, Shape, drawn_lengths, measure
from overlap_bounds import rates_bound, staleness_bound
from virtual_time import NothingLeft, run_virtually

MANY = 10**6  # slots
ROUNDING = 1e-9  # seconds


def alone(*seconds: float) -> np.ndarray:
    """Groups of one rollout each."""
    return np.array(seconds, float)[:, None]


# ---- the clock -------------------------------------------------------------------------------------------------------------------


def test_hours_pass_in_order_and_at_once():
    async def main():
        woken = []

        async def wait(hours):
            await asyncio.sleep(3600 * hours)
            woken.append((hours, asyncio.get_running_loop().time()))

        await asyncio.gather(*map(wait, (3, 1, 2)))
        return woken

    began = time.monotonic()
    assert run_virtually(main()) == [(1, 3600), (2, 7200), (3, 10800)]
    assert time.monotonic() - began < 5


def test_a_dead_end_is_an_error_and_not_a_wait():
    with pytest.raises(NothingLeft):
        run_virtually(asyncio.Event().wait())


# ---- bounds --------------------------------------------------------------------------------------------------------------------


def test_the_slower_side_sets_the_rate():
    equal = np.ones((6, 2))  # 3 steps of 2 groups of 2
    assert rates_bound(equal, 2, slots=4, step_s=5.0) == 1 + 3 * 5  # the trainer waits for the first batch alone
    assert rates_bound(equal, 2, slots=1, step_s=2.0) == 12 + 2  # the last step follows the last rollout


def test_a_synchronous_run_alternates():
    equal = np.ones((6, 2))
    assert staleness_bound(equal, 2, MANY, 1.0, max_staleness=0, window=1) == 3 * (1 + 1)
    assert staleness_bound(equal, 2, 2, 1.0, max_staleness=0, window=1) == 3 * (2 + 1)  # w = 2: two rollouts in each slot
    uneven = alone(1, 4, 2)
    assert staleness_bound(uneven, 1, MANY, 1.0, max_staleness=0, window=1) == 1 + 4 + 2 + 3


def test_a_straggler_holds_up_what_is_max_staleness_behind_it():
    # S = 2: groups 0, 1, 2 start at 0, group 3 at the end of step 0, which is 2.
    # Group 1 ends at 10: step 1 ends at 11, when group 4 starts.
    lengths = alone(1, 10, 1, 1, 1, 1)
    assert staleness_bound(lengths[:2], 1, MANY, 1.0, 2, window=1) == 11
    assert staleness_bound(lengths[:4], 1, MANY, 1.0, 2, window=1) == 13  # steps 2 and 3 find their groups ready
    assert staleness_bound(lengths, 1, MANY, 1.0, 2, window=1) == 15  # group 4 is ready at 12, group 5 at 13: they hold nobody up


def test_a_window_lets_one_group_pass_the_straggler():
    lengths = alone(1, 10, 1, 1)
    assert staleness_bound(lengths[:3], 1, MANY, 1.0, 2, window=1) == 12
    assert staleness_bound(lengths[:3], 1, MANY, 1.0, 2, window=2) == 11  # step 1 trains group 2, step 2 the straggler


def test_slots_bound_what_is_generated_since_an_earlier_admission():
    equal = np.ones((8, 4))
    # One slot: 4 s of work per group, admitted two steps ahead. S = 1, P = 1: never idle, so 32 s and the last step.
    assert staleness_bound(equal, 1, 1, 0.5, max_staleness=1, window=1) == 32 + 0.5


def test_lengths_are_cut_and_the_same_for_every_setting():
    shape = Shape("small", 4, 8, 32, 50)
    flat, wild = drawn_lengths(shape, 0.0, 32), drawn_lengths(shape, 1.5, 32)
    assert (flat == 32).all() and wild.max() == CUT * 32 and wild.min() >= 1
    assert np.array_equal(wild, drawn_lengths(shape, 1.5, 32))


# ---- the real controller ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "balance"),
    [
        (Shape("w = 1", 2, 2, 4, steps=8), 1.0),
        (Shape("slots to spare", 2, 2, 8, steps=8), 2.0),
        (Shape("few slots", 2, 2, 2, steps=8), 0.5),
        (Shape("windows wider than a batch", 4, 1, 2, steps=8), 1.0),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_no_run_beats_its_bounds(shape, balance):
    num_samples = shape.steps * shape.groups_per_step * shape.group_size
    for sigma in (0.0, 1.0):
        sync = measure(Setting(shape, sigma, 0, balance))
        assert set(sync.outcome.staleness) == {0}
        for stale in (0, 1, 3, 8, None):
            m = measure(Setting(shape, sigma, stale, balance))
            assert len(m.outcome.step_ends) == 8 and m.outcome.trained_samples == num_samples
            assert m.outcome.seconds > max(m.rates_s, m.staleness_s) - ROUNDING
            assert stale == 0 or m.outcome.seconds < sync.outcome.seconds


def test_a_synchronous_run_with_a_slot_for_each_rollout_takes_exactly_its_bound():
    """Nothing is added between the roles: at most a token's time per step, since weights and requests wait for the end of a tick."""
    shape = Shape("small", 2, 4, 8, steps=6)
    m = measure(Setting(shape, 1.0, 0))
    token_s = 1 / drawn_lengths(shape, 1.0, 32).mean()
    assert -ROUNDING < m.outcome.seconds - m.staleness_s <= 6 * token_s


def test_the_same_run_twice_is_the_same_run():
    setting = Setting(Shape("small", 2, 2, 4, steps=6), 1.0, 2)
    assert measure(setting).outcome == measure(setting).outcome
