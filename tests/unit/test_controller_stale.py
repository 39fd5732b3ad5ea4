"""What becomes of stale data: masked, weighed less, dropped, cancelled while it runs."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from controller_fakes import (
    Notes,
    abandon,
    account_of,
    checksum,
    chunk_of,
    config,
    group_of,
    publish,
    rollout,
    serve_engine,
    start,
    train,
)

from slipstream.controller import stale
from slipstream.controller.events import StaleRule, Tally
from slipstream.controller.run_folder import RunFolder
from slipstream.types import Draw, Group, Span, StepReport

ONE = {"trainer": {"groups_per_step": 1}}
LATE = ONE | {"buffer": {"max_staleness": 1, "window": 2}}  # with these `late_group` makes a group that is too old


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


# ---- stale data ----------------------------------------------------------------------------------------------------------------


def three(*versions: tuple[int, ...], rewards=(0.0, 1.0, 0.5)) -> Group:
    """Rollouts whose tokens (after one of the prompt) were sampled by these versions."""
    rollouts = []
    for i, (made, reward) in enumerate(zip(versions, rewards, strict=True)):
        mask = np.array([False] + [True] * len(made))
        spans = tuple(Span(at, at + 1, 1, v, "e") for at, v in enumerate(made, 1))
        whole = {
            "token_ids": np.ones(len(mask), np.int32),
            "logprobs": np.full(len(mask), -1, np.float32),
            "loss_mask": mask,
            "spans": spans,
        }
        rollouts.append(msgspec.structs.replace(rollout(0, i, 0, 1, reward), **whole))
    return Group(group_id=0, draw=Draw(number=0, row=0, epoch=0, dataset="d"), row={}, rollouts=tuple(rollouts))


MIXED = ((5, 6, 7), (7, 7), (6, 7))  # at step 8 with limit 1 the excess of each token is ((2, 1, 0), (0, 0), (1, 0))


@pytest.mark.parametrize(
    ("level", "trained", "weights"),
    [
        ("token", [[False, False, True], [True, True], [False, True]], [[0.25, 0.5, 1], None, [0.5, 1]]),
        ("rollout", [[False] * 3, [True] * 2, [False] * 2], [[0.25] * 3, None, [0.5] * 2]),
        ("group", [[False] * 3, [False] * 2, [False] * 2], [[0.25] * 3, [0.25] * 2, [0.25] * 2]),
    ],
)
def test_tokens_are_masked_or_weighed_less_by_their_own_age_or_that_of_the_oldest_beside_them(level, trained, weights):
    group = three(*MIXED)
    masked = stale.treat(group, 8, StaleRule("mask_tokens", level, 1))
    assert [r.loss_mask[1:].tolist() for r in masked.group.rollouts] == trained
    assert masked.num_masked == sum(not t for row in trained for t in row)
    weighed = stale.treat(group, 8, StaleRule("down_weight", level, 1, 0.5))
    assert weighed.num_down_weighted == masked.num_masked and weighed.num_masked == 0
    for made, was, expected in zip(weighed.group.rollouts, group.rollouts, weights, strict=True):
        assert made.loss_mask is was.loss_mask
        if expected is None:
            assert made is was, "nothing is written where every weight is 1"
        else:
            assert made.arrays["loss_weight"].dtype == np.float32
            assert made.arrays["loss_weight"].tolist() == [1.0, *expected], "the prompt is not trained anyway"


@pytest.mark.parametrize("rule", ["mask_tokens", "down_weight", "drop", "cancel_early", "keep"])
def test_a_group_that_is_young_enough_is_forwarded_as_it_is(rule):
    group = three((7, 8), (7,), (8,))
    assert stale.treat(group, 8, StaleRule(rule, "group", 1, 0.5)).group is group


def test_a_token_that_is_not_trained_makes_nothing_stale():
    group = three(*MIXED)
    group.rollouts[0].loss_mask[1:3] = False  # the old tokens of the first
    group.rollouts[2].loss_mask[1] = False
    assert stale.oldest_trained(group) == 7
    assert stale.treat(group, 8, StaleRule("drop", "group", 1)).group is group


@pytest.mark.parametrize(
    ("versions", "rewards", "left"),
    [
        (MIXED, (0.0, 1.0, 0.5), None),  # one is left
        (((5,), (7,), (7,)), (0.0, 1.0, 0.5), [1, 2]),
        (((5,), (7,), (7,)), (0.0, 1.0, 1.0), None),  # those that are left do not differ any more
        (((5,), (7,), (7,)), (1.0, 1.0, 1.0), [1, 2]),  # they never did: that is for the filter to judge
    ],
)
def test_stale_rollouts_leave_their_group(versions, rewards, left):
    treated = stale.treat(three(*versions, rewards=rewards), 8, StaleRule("drop", "rollout", 1))
    assert (None if treated.group is None else [r.sample for r in treated.group.rollouts]) == left
    assert len(treated.dropped) == (0 if left is None else 1)


def test_means_of_what_was_dropped_are_over_rollouts():
    tally = stale.tally(three(*MIXED).rollouts).plus(Tally(1, 13))  # one that was cancelled, without a reward
    assert (tally.mean_tokens, tally.mean_reward) == (20 / 4, 0.5)
    assert Tally().mean_tokens is None and Tally().mean_reward is None


async def late_group(controller):
    """The worst case of S = 1, P = 1, W = 2: group 1 starts on version 0 while a trained batch holds a slot, and is passed once. It has
    run, and batch 2 is next."""
    await publish(controller, 0)
    await serve_engine(controller)
    (first,) = (await controller.admit(1)).assignments
    await controller.finish_group(group_of(first, 0, 1))
    await train(controller, 0)
    (late,) = (await controller.admit(1)).assignments
    await serve_engine(controller)
    (passing,) = (await controller.admit(1)).assignments
    await controller.finish_group(group_of(passing, 1, 1))
    await train(controller, 1)
    await controller.finish_group(group_of(late, 0, 1, rewards=(0.0, 0.5)))


def test_a_stale_group_is_dropped_when_its_batch_is_formed_and_another_prompt_takes_its_slot(folder):
    async def main():
        observer = Notes()
        controller = start(folder, config(**LATE | {"buffer": LATE["buffer"] | {"on_stale": "drop"}}), observer)
        await late_group(controller)
        state = controller.core.state
        assert state.num_finished == 1 and state.slots_taken == 2, "it is there, beside the batch that no engine has confirmed"
        worker = asyncio.create_task(controller.admit(1))
        trainer = asyncio.create_task(controller.get_batch(2))
        (other,) = (await worker).assignments  # woken by the drop
        assert other.group_id == 3 and other.min_version == 1 and not trainer.done()
        await controller.finish_group(group_of(other, 1, 1))
        assert [g.group_id for g in (await trainer).groups] == [3]
        totals = controller.core.state.totals
        assert totals.dropped == {"stale": 1} and totals.wasted_tokens == {"stale": 4} and totals.failures == {}
        assert (totals.stale, totals.trained) == (Tally(2, 4, 2, 0.5), Tally(4, 8, 4, 2.0))
        await publish(controller, 3)
        await controller.finish_step(StepReport(step=2, version=3, checksum=checksum(1, 3)))
        line = observer.steps[2][0]
        assert line["dropped_groups/stale"] == 1 and line["stale_dropped_reward_mean"] == 0.25 and line["stale_trained_reward_mean"] == 0.5
        controller.close()
        assert account_of(folder).counts == {"trained": 3, "dropped: stale": 1}

    run(main())


def test_a_group_without_its_stale_rollouts_comes_out_equal_after_a_crash_even_under_another_limit(folder):
    async def main():
        wide = {"max_staleness": 1, "window": 4, "on_stale": "drop", "stale_level": "rollout"}
        settings = config(buffer=wide, trainer={"groups_per_step": 2}, rollout={"group_size": 3})
        controller = start(folder, settings)
        await publish(controller, 0)
        await serve_engine(controller)
        late, *others = (await controller.admit(3)).assignments
        for task in others:
            await controller.finish_group(group_of(task, 0, 1, rewards=(0.0, 1.0, 0.5)))
        await train(controller, 0)
        await serve_engine(controller)
        (other,) = (await controller.admit(1)).assignments
        await controller.finish_group(group_of(other, 1, 1, rewards=(0.0, 1.0, 0.5)))
        early = group_of(late, 1, 1, rewards=(0.0, 1.0, 0.5))  # two of its rollouts lived to see version 1, one started before
        old = msgspec.structs.replace(early.rollouts[0], spans=(Span(1, 3, 1, -0, "e0"),))
        await controller.finish_group(msgspec.structs.replace(early, rollouts=(old, *early.rollouts[1:])))
        assert controller.core.lower_max_staleness("first")  # to 0: what is of version 0 is too old for step 1
        before = await controller.get_batch(1)
        assert [[r.sample for r in g.rollouts] for g in before.groups] == [[1, 2], [0, 1, 2]]
        record = controller.core.state.batches[1].record
        assert record.dropped == Tally(1, 2, 1, 0.0) and record.kept == Tally(5, 10, 5, 3.0) and record.rule.limit == 0
        abandon(controller)
        again = start(folder, settings)
        assert again.start_step == 0 and (again.core.state.max_staleness, again.core.state.lowered) == (0, 1), "it stays lowered"
        await publish(again, 0)
        assert [g.group_id for g in (await train_again(again, 0)).groups] == [1, 2]
        repeated = await again.get_batch(1)
        assert [[r.sample for r in g.rollouts] for g in repeated.groups] == [[1, 2], [0, 1, 2]]
        again.close()

    run(main())


async def train_again(controller, step):
    batch = await train(controller, step)
    await serve_engine(controller)
    return batch


def test_a_stale_group_keeps_its_slot_no_longer_than_it_takes_to_know(folder):
    """cancel_early: the finished group is dropped as soon as the batch before is formed, not when the trainer asks for the next one."""

    async def main():
        controller = start(folder, config(**LATE | {"buffer": LATE["buffer"] | {"on_stale": "cancel_early"}}))
        await late_group(controller)
        assert controller.core.state.totals.dropped == {"stale": 1} and controller.core.state.num_finished == 0
        controller.close()

    run(main())


# ---- cancel early --------------------------------------------------------------------------------------------------------------


def test_a_running_group_is_cancelled_once_no_batch_can_train_it_in_bound_and_not_before(folder):
    async def main():
        ready_first = {"max_staleness": 1, "window": "unbounded", "max_groups": 4, "on_stale": "cancel_early"}
        controller = start(folder, config(**ONE | {"buffer": ready_first, "trainer": {"groups_per_step": 1, "steps": 9}}))
        await publish(controller, 0)
        await serve_engine(controller)
        slow, unseen, *quick = (await controller.admit(4)).assignments
        await controller.progress([chunk_of(r) for r in group_of(slow, 0, 1).rollouts[:1]])
        for step, task in enumerate(quick):
            orders = asyncio.create_task(controller.admit(0))
            await asyncio.sleep(0)
            await controller.finish_group(group_of(task, step, 1))
            assert slow.group_id in controller.core.state.live, "batch 1 could still train version 0"
            await train(controller, step)
            await serve_engine(controller)
            if step == 0:
                assert not orders.done()
                orders.cancel()
        assert (await orders).cancel == ((slow.group_id, 0),), "batch 2 is next: version 0 is too old for it and for all that follow"
        state = controller.core.state
        assert state.totals.dropped == {"cancelled": 1} and state.totals.wasted_tokens == {"cancelled": 1}
        assert list(state.live) == [unseen.group_id], "of this one no token is known, so nothing is certain"
        assert state.slots_taken == 1, "the slot is free at once"
        await controller.progress([chunk_of(r) for r in group_of(unseen, 0, 1).rollouts])
        assert (await controller.admit(0)).cancel == ((unseen.group_id, 0),)
        await controller.finish_group(group_of(slow, 0, 1))  # it had just ended: too late
        await controller.progress([chunk_of(r) for r in group_of(slow, 0, 1).rollouts])
        assert not await controller.interrupted(slow.group_id, 0, 0, 3)
        assert not controller.core.state.live and controller.core.state.totals.stale == Tally(4, 3)
        controller.close()
        assert account_of(folder).counts == {"trained": 2, "dropped: cancelled": 2}

    run(main())


def test_a_group_that_waits_to_be_handed_out_again_is_cancelled_without_a_word(folder):
    async def main():
        ready_first = {"max_staleness": 1, "window": "unbounded", "max_groups": 4, "on_stale": "cancel_early"}
        settings = config(**ONE | {"buffer": ready_first, "trainer": {"groups_per_step": 1, "steps": 9}})
        controller = start(folder, settings)
        await publish(controller, 0)
        await serve_engine(controller)
        slow, *quick = (await controller.admit(3)).assignments
        await controller.progress([chunk_of(r) for r in group_of(slow, 0, 1).rollouts])
        controller.reassign_running()  # the worker is gone
        for step, task in enumerate(quick):
            await controller.finish_group(group_of(task, step, 1))
            await train(controller, step)
            await serve_engine(controller)
        work = await controller.admit(4)
        assert work.cancel == () and slow.group_id not in [t.group_id for t in work.assignments]
        assert controller.core.state.totals.dropped == {"cancelled": 1}
        controller.close()

    run(main())
