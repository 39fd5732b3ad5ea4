"""Advantages against the oracle, closed forms, and their corner cases; aggregation and overlong punishment."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.config.loss_tables import ADVANTAGES, AGGREGATIONS
from slipstream.trainer.advantages import (
    ESTIMATORS,
    group_mean,
    group_mean_std,
    group_mean_then_batch_whiten,
    leave_one_out,
    length_weighted_baseline,
    max_rl,
    overlong_penalty,
)
from slipstream.trainer.aggregation import token_weights

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "losses.json").read_text())
CASES = [case for case in ORACLE["cases"] if "advantages" in case]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["params"]["estimator"])
def test_oracle(case):
    params = case["params"]
    lengths = [params["response_length"]] * len(params["rewards"])
    found = ESTIMATORS[params["estimator"]](params["rewards"], params["group"], lengths)
    assert np.abs(found - np.array(case["advantages"])).max() < 1e-6


def test_every_estimator_is_in_the_table_and_all_but_max_rl_in_the_oracle():
    assert list(ESTIMATORS) == list(ADVANTAGES)
    assert {case["params"]["estimator"] for case in CASES} == set(ESTIMATORS) - {"max_rl"}


def test_equal_rewards_give_exactly_zero():
    rewards = [0.1] * 3
    assert np.mean(rewards) != 0.1  # so the formula alone would give a rounding error over 1e-6
    for name, estimate in ESTIMATORS.items():
        assert estimate(rewards, [0] * 3, [5, 1, 2]).tolist() == [0.0] * 3, name


def test_agents_of_a_group_have_their_own_baseline():
    keys = [(0, "buyer"), (0, "buyer"), (0, "seller"), (0, "seller")]
    assert group_mean([1.0, 0.0, 10.0, 20.0], keys).tolist() == [0.5, -0.5, -5.0, 5.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_that_do_not_apply_take_no_part(name):
    estimate = ESTIMATORS[name]
    found = estimate([1.0, None, 0.0], [0, 0, 0], [2, 9, 4])
    alone = estimate([1.0, 0.0], [0, 0], [2, 4])
    assert found[1] == 0.0 and found[[0, 2]].tolist() == alone.tolist()
    assert estimate([None, None], [0, 0], [1, 1]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"group_mean_then_batch_whiten"}))
def test_a_rollout_alone_keeps_its_reward(name):
    found = ESTIMATORS[name]([3.0, 1.0, 0.0], ["a", "b", "b"], [2, 2, 2])
    assert found[0] == pytest.approx(3.0, abs=1e-5)


def test_interleaved_groups():
    found = group_mean([1.0, 5.0, 3.0, 7.0], ["a", "b", "a", "b"])
    assert found.tolist() == [-1.0, -1.0, 1.0, 1.0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_reward_that_is_not_finite_is_refused(name, reward):
    with pytest.raises(ValueError, match="rollout 1 of 'a'"):
        ESTIMATORS[name]([0.0, reward], ["a", "a"], [1, 1])


def test_leave_one_out_is_the_distance_to_the_others():
    rewards = np.array([0.0, 1.0, 0.5, 0.25])
    expected = [r - (rewards.sum() - r) / 3 for r in rewards]
    assert leave_one_out(rewards.tolist(), [0] * 4) == pytest.approx(expected)


def test_whitening_is_over_tokens():
    """By the definition: every token carries its rollout's centred reward."""
    rewards, keys, lengths = [1.0, 0.0, 0.25, 1.0, 0.5], ["a", "a", "b", "b", "b"], [3, 1, 0, 5, 2]
    centred = group_mean(rewards, keys)
    tokens = np.repeat(centred, lengths)
    expected = (centred - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    assert group_mean_then_batch_whiten(rewards, keys, lengths) == pytest.approx(expected)
    assert group_mean_then_batch_whiten([1.0, 1.0], ["a", "a"], [4, 4]).tolist() == [0.0, 0.0]
    assert group_mean_then_batch_whiten([1.0, 0.0], ["a", "a"], [1, 0]).tolist() == [0.5, -0.5]  # one token has no variance


def test_whitening_compares_groups_of_one_with_each_other():
    assert group_mean_then_batch_whiten([1.0, 0.0], ["a", "b"], [2, 2]) == pytest.approx([0.8660, -0.8660], abs=1e-4)


def test_the_length_weighted_baseline_follows_the_long_rollouts():
    rewards, lengths = [1.0, 0.0, 0.0], [8, 1, 1]
    assert length_weighted_baseline(rewards, [0] * 3, lengths) == pytest.approx([0.2, -0.8, -0.8])
    assert length_weighted_baseline(rewards, [0] * 3, [0, 0, 0]) == pytest.approx(group_mean(rewards, [0] * 3))


def test_max_rl_divides_by_the_success_rate():
    assert max_rl([1.0, 1.0, 0.0, 0.0], [0] * 4).tolist() == [1.0, 1.0, -1.0, -1.0]
    assert max_rl([0.0, 0.0], [0, 0]).tolist() == [0.0, 0.0]
    assert max_rl([1.0, -1.0], [0, 0]).tolist() == [0.0, 0.0]  # mean 0
    assert max_rl([1.0, -3.0], [0, 0]).tolist() == [0.0, 0.0]  # below 0 the sign would turn


def test_group_mean_std_is_group_mean_over_the_deviation():
    rewards = [0.3, 0.9, 0.0]
    assert group_mean_std(rewards, [0] * 3) == pytest.approx(group_mean(rewards, [0] * 3) / (np.std(rewards, ddof=1) + 1e-6))


def test_overlong_punishment():
    lengths = [0, 5, 6, 7, 8, 9, 10, 12]
    found = overlong_penalty(lengths, longest=10, overlong_tokens=4)
    assert found.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


# ---- aggregation -------------------------------------------------------------------------------------------------------------------


def test_aggregations_by_their_definitions():
    lengths, losses = np.array([3, 0, 1]), [np.array([1.0, 2.0, 6.0]), np.array([]), np.array([5.0])]
    expected = {
        "token_mean": 14.0 / 4,
        "sequence_mean_of_token_mean": (3.0 + 5.0) / 2,
        "sequence_mean_of_token_sum_over_max_length": (9.0 / 10 + 0 + 5.0 / 10) / 3,
    }
    assert expected.keys() == AGGREGATIONS.keys()
    for name, value in expected.items():
        weights = token_weights(name, lengths, longest=10)
        assert sum(w * loss.sum() for w, loss in zip(weights, losses, strict=True)) == pytest.approx(value), name
        assert weights[1] == 0.0


def test_a_batch_without_a_trained_token_has_no_weight():
    for name in AGGREGATIONS:
        assert token_weights(name, np.array([0, 0]), 8).tolist() == [0.0, 0.0]


def test_an_unknown_aggregation_is_an_error():
    with pytest.raises(ValueError, match="no aggregation 'mean'"):
        token_weights("mean", np.array([1]), 8)
