"""Rollouts of a run that learns from a teacher alone, and where the logprob stage stands in a group's life."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
from rollout_fakes import FakeController, FakeEngine, assignment, config, finished_group
from test_rollout_worker import make_worker, run_groups, say

from slipstream.config.settings import RewardSettings
from slipstream.scoring.score import score_group
from slipstream.scoring.scorers import make_scorers
from slipstream.types import EvalTask, Group, Purpose, RolloutStatus


class Stage:
    """Marks the rollouts that have a reward already, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[Group] = []

    async def annotate(self, group: Group) -> Group:
        self.seen.append(group)
        await asyncio.sleep(0)
        rewards = {r.sample: np.float32(r.reward or 0) for r in group.rollouts}
        marked = tuple(msgspec.structs.replace(r, arrays={"mark": np.array([rewards[r.sample]])}) for r in group.rollouts)
        return msgspec.structs.replace(group, rollouts=marked)


def test_the_stage_reads_a_group_once_it_is_scored_and_before_it_is_handed_back():
    stage = Stage()
    controller, _ = run_groups(FakeEngine(say("ok", "no")), config(), [assignment(n) for n in range(3)], logprobs=stage)
    assert sorted(group.group_id for group in stage.seen) == [0, 1, 2]
    assert [[r.arrays["mark"].tolist() for r in group.rollouts] for group in controller.groups] == [[[1.0], [0.0]]] * 3


def test_evaluations_are_not_read_by_the_stage():
    async def main():
        task = EvalTask(number=1, rows=({"prompt": "hi", "answer": "ok"},), samples=1, temperature=0.0)
        controller, stage = FakeController(evaluations=[task]), Stage()
        worker = make_worker(controller, FakeEngine(say("ok")), config(), logprobs=stage)
        running = asyncio.create_task(worker.run())
        await controller.until(lambda: controller.results)
        await controller.stop()
        await running
        assert controller.results[0].items[0].rewards == (1.0,) and not stage.seen

    asyncio.run(main())


def scored(group: Group, *rewards: RewardSettings) -> Group:
    return asyncio.run(score_group(group, make_scorers(rewards)))


def evaluated(group: Group) -> Group:
    rollouts = tuple(msgspec.structs.replace(r, purpose=Purpose.EVAL) for r in group.rollouts)
    return msgspec.structs.replace(group, purpose=Purpose.EVAL, rollouts=rollouts)


def test_without_any_reward_a_finished_rollout_has_reward_zero_and_a_failed_one_has_none():
    group = finished_group(["a", "b"])
    failed = msgspec.structs.replace(group.rollouts[1], status=RolloutStatus.FAILED, error="deadline: late")
    out = scored(msgspec.structs.replace(group, rollouts=(group.rollouts[0], failed)))
    assert [r.reward for r in out.rollouts] == [0.0, None]
    assert out.rollouts[0].status.ok and out.rollouts[1] is failed


def test_without_any_reward_an_evaluation_has_none():
    assert [r.reward for r in scored(evaluated(finished_group(["a"]))).rollouts] == [None]


def test_rewards_of_weight_zero_count_in_evaluations_alone():
    measured = [RewardSettings(function="exact", weight=0.0), RewardSettings(function="number", weight=0.0)]
    group = finished_group(["7", "8"], {"answer": "7"})
    trained, held_out = scored(group, *measured), scored(evaluated(group), *measured)
    assert [r.reward for r in trained.rollouts] == [0.0, 0.0]
    assert [[s.value for s in r.scores] for r in trained.rollouts] == [[1.0, 1.0], [0.0, 0.0]]
    assert [r.reward for r in held_out.rollouts] == [2.0, 0.0]
    weighted = scored(evaluated(group), measured[0], RewardSettings(function="number", weight=3.0))
    assert [r.reward for r in weighted.rollouts] == [3.0, 0.0], "one reward with a weight makes the others count for nothing"
