"""The step line's numbers, computed by hand."""

from __future__ import annotations

import msgspec
import pytest
from controller_fakes import rollout

from slipstream.controller.metrics_line import reward_stats
from slipstream.types import Draw, Group, Score


def group(number: int, *rewards_and_scores: tuple[float, tuple[Score, ...]]) -> Group:
    rollouts = tuple(
        msgspec.structs.replace(rollout(number, sample, 0, 1, reward, 0, None), scores=scores)
        for sample, (reward, scores) in enumerate(rewards_and_scores)
    )
    return Group(group_id=number, draw=Draw(number=number, row=0, epoch=0, dataset="d"), row={}, rollouts=rollouts)


def test_scores_and_their_parts_are_averaged_where_they_apply():
    right, style = "right", "style"
    groups = (
        group(
            0,
            (1.0, (Score(name=right, value=1.0, parts={"digits": 3.0}), Score(name=style, value=None))),
            (0.0, (Score(name=right, value=0.0, parts={"digits": 1.0, "sign": -1.0}), Score(name=style, value=0.5))),
        ),
        group(1, (1.0, (Score(name=right, value=1.0, parts={"digits": 5.0}),)), (1.0, (Score(name=right, value=1.0),))),
    )
    assert reward_stats(groups) == {
        "reward_mean": 0.75,
        "reward_std": pytest.approx(0.1875**0.5),
        "reward/right": 0.75,
        "reward/right/digits": 3.0,
        "reward/right/sign": -1.0,
        "reward/style": 0.5,
        "zero_variance_fraction": 0.5,
    }
