"""Mean, interval and pass@k against closed forms and brute force."""

import itertools

import pytest

from slipstream.observe.statistics import mean_interval, pass_at_k, pass_at_ks


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_one(n, c):
    outcomes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="needs at least 5 samples, there are 4"):
        pass_at_k(4, 1, 5)


def test_pass_at_ks_takes_powers_of_two_and_all_samples():
    items = [[1.0, 0.0, 0.0], [1.0, 1.0, None]]
    assert list(pass_at_ks(items)) == [1, 2, 3]
    assert pass_at_ks(items)[3] == 1.0 and pass_at_ks(items)[1] == pytest.approx(0.5)
    assert pass_at_ks([]) == {}


def test_wilson_interval_of_zero_or_one_outcomes():
    interval = mean_interval([[1.0]] * 8 + [[0.0]] * 2)
    assert interval.mean == pytest.approx(0.8)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_all_right_is_not_certain():
    interval = mean_interval([[1.0]] * 20)
    assert interval.mean == 1.0 and interval.high == 1.0 and interval.low == pytest.approx(0.8389, abs=1e-4)


def test_samples_of_one_item_count_once():
    """Eight equal answers per item say no more of the items than one."""
    once = mean_interval([[0.2], [0.6], [0.7]])
    assert mean_interval([[0.2] * 8, [0.6] * 8, [0.7] * 8]) == once
    assert once.mean == pytest.approx(0.5)


def test_what_has_no_reward_is_left_out_not_zero():
    assert mean_interval([[1.0, None], [None, None]]).mean == 1.0
    assert mean_interval([[None]]).mean is None
