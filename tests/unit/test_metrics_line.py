"""The step line's numbers, computed by hand."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from controller_fakes import Notes, checksum, config, group_of, make_step, publish, rollout, serve_engine, start

from slipstream.controller.metrics_line import reward_stats, version_spreads
from slipstream.controller.run_folder import RunFolder
from slipstream.types import Draw, Group, Rollout, Score, Span, StepReport

TOLD = ("filtered_groups", "dropped_groups/", "wasted_tokens/", "failures/")


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


def sampled_by(*spans: tuple[int, int], masked: tuple[int, ...] = (), interrupts: int = 0) -> Rollout:
    """A rollout of one given token, then (tokens, version) stretches; tokens at `masked` are not trained."""
    at, made = 1, []
    for tokens, version in spans:
        made.append(Span(at, at + tokens, 1, version, "e0"))
        at += tokens
    mask = np.arange(at) > 0
    mask[list(masked)] = False
    fields = {"token_ids": np.ones(at, np.int32), "logprobs": np.full(at, -1.0, np.float32), "loss_mask": mask, "spans": tuple(made)}
    return msgspec.structs.replace(rollout(0, 0, 0, 1, 1.0), **fields, interrupts=interrupts)


def of(*rollouts: Rollout) -> Group:
    return msgspec.structs.replace(group(0), rollouts=rollouts)


def test_version_spreads_are_of_trained_tokens():
    groups = (
        of(sampled_by((2, 3), (2, 5)), sampled_by((4, 4))),  # 2 and 0; within the group 3 to 5
        of(sampled_by((1, 1), (3, 6), masked=(1,)), sampled_by((2, 7), masked=(1, 2))),  # the old token and the second are not trained
        of(sampled_by((1, 9), masked=(1,))),
    )
    assert version_spreads(groups) == {
        "version_spread_mean": pytest.approx(2 / 3),
        "version_spread_max": 2,
        "group_version_spread_mean": 1.0,
    }
    assert version_spreads(groups[2:]) == {"version_spread_mean": None, "version_spread_max": None, "group_version_spread_mean": None}


def test_a_line_tells_what_happened_since_the_one_before(tmp_path):
    """Failures, waste and drops are told once, whatever the totals are; a resume starts from the totals it finds."""

    async def main():
        folder, observer = RunFolder.create("t", tmp_path / "run"), Notes()
        settings = config(buffer={"max_staleness": 0, "filter_zero_variance": True}, rollout={"max_attempts": 2})
        controller = start(folder, settings, observer)
        await publish(controller, 0)
        await serve_engine(controller)

        async def step(number: int, *outcomes: dict) -> dict:
            outcomes_left = list(outcomes)
            while outcomes_left:
                for task in (await controller.admit(1)).assignments:
                    await controller.finish_group(group_of(task, number, controller.incarnation, **outcomes_left.pop(0)))
            await make_step(controller, number)
            return {key: value for key, value in observer.steps[-1][0].items() if key.startswith(TOLD)}

        failed, flat = {"error": "deadline: too slow"}, {"rewards": (1.0, 1.0)}
        lost = {"dropped_groups/failed": 1, "wasted_tokens/failed": 8, "failures/deadline": 2}
        assert await step(0, failed, failed, flat) == {"filtered_groups": 1, "wasted_tokens/filtered": 4} | lost
        assert await step(1) == {"filtered_groups": 0}
        assert await step(2, failed, {}) == {"filtered_groups": 0, "wasted_tokens/failed": 4, "failures/deadline": 1}
        controller.close()
        controller = start(folder, settings, observer)
        await publish(controller, 0)
        await serve_engine(controller)
        assert controller.core.state.totals.failures == {"deadline": 3}
        assert await step(0) == {"filtered_groups": 0}, "the step is trained again; nothing has failed since"
        controller.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_interrupts_are_counted_over_the_batch(tmp_path):
    async def main():
        observer = Notes()
        controller = start(RunFolder.create("t", tmp_path / "run"), config(buffer={"max_staleness": 0}), observer)
        await publish(controller, 0)
        await serve_engine(controller)
        for number, task in enumerate((await controller.admit(2)).assignments):
            made = group_of(task, 0, 1)
            counts = (3, 0) if number == 0 else (1, 0)
            stopped = tuple(msgspec.structs.replace(r, interrupts=n) for r, n in zip(made.rollouts, counts, strict=True))
            await controller.finish_group(msgspec.structs.replace(made, rollouts=stopped))
        await controller.get_batch(0)
        await publish(controller, 1)
        await controller.finish_step(StepReport(step=0, version=1, checksum=checksum(1, 1)))
        line = observer.steps[-1][0]
        assert (line["interrupts"], line["interrupted_fraction"]) == (4, 0.5)
        controller.close()

    asyncio.run(asyncio.wait_for(main(), 60))
