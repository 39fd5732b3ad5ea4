"""Advantages against the oracle, and their corner cases."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.trainer.advantages import ESTIMATORS, group_mean, group_mean_std

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "losses.json").read_text())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_oracle(estimator):
    case = next(c for c in ORACLE["cases"] if c["id"] == f"advantage/{estimator}")
    found = ESTIMATORS[estimator](case["params"]["rewards"], case["params"]["group"])
    assert np.abs(found - np.array(case["advantages"])).max() < 1e-6


def test_equal_rewards_give_exactly_zero():
    rewards = [0.1] * 3
    assert np.mean(rewards) != 0.1  # so the formula alone would give a rounding error over 1e-6
    assert group_mean_std(rewards, [0] * 3).tolist() == [0.0] * 3


def test_agents_of_a_group_have_their_own_baseline():
    keys = [(0, "buyer"), (0, "buyer"), (0, "seller"), (0, "seller")]
    assert group_mean([1.0, 0.0, 10.0, 20.0], keys).tolist() == [0.5, -0.5, -5.0, 5.0]


def test_rewards_that_do_not_apply_take_no_part():
    assert group_mean([1.0, None, 0.0], [0, 0, 0]).tolist() == [0.5, 0.0, -0.5]
    assert group_mean_std([None, None], [0, 0]).tolist() == [0.0, 0.0]


def test_interleaved_groups():
    found = group_mean([1.0, 5.0, 3.0, 7.0], ["a", "b", "a", "b"])
    assert found.tolist() == [-1.0, -1.0, 1.0, 1.0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="rollout 1 of 'a'"):
        group_mean([0.0, reward], ["a", "a"])
