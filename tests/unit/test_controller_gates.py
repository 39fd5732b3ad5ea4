"""Gates at the controller: ready first, stale data, cancellations, rollouts that start anew, barrier, versions that are not published."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from controller_fakes import Notes, Roles, abandon, checksum, chunk_of, config, group_of, make_step, publish, rollout, serve_engine, start

from slipstream.controller import events as ev
from slipstream.controller import stale
from slipstream.controller.accounts import check_accounts
from slipstream.controller.events import StaleRule, Tally
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder
from slipstream.errors import LedgerError
from slipstream.launch import wire
from slipstream.types import Draw, Group, Span, StepReport

ONE = {"trainer": {"groups_per_step": 1}}
LATE = ONE | {"buffer": {"max_staleness": 1, "window": 2}}  # with these `late_group` makes a group that is too old


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def account_of(folder):
    with LedgerReader.open(folder.ledger) as reader:
        return check_accounts(reader)


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


async def train(controller, step, **report):
    batch = await controller.get_batch(step)
    await publish(controller, step + 1)
    await controller.finish_step(StepReport(step=step, version=step + 1, checksum=checksum(1, step + 1), **report))
    return batch


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
    batch = await controller.get_batch(step)
    inc = controller.incarnation
    await publish(controller, step + 1)
    await controller.finish_step(StepReport(step=step, version=step + 1, checksum=checksum(inc, step + 1)))
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


# ---- rollouts that start anew --------------------------------------------------------------------------------------------------

RETRY = {"interrupt": "abort_retry", "max_interrupts": 2, "max_attempts": 3, "group_size": 2}


def test_a_rollout_that_starts_anew_loses_its_tokens_and_its_siblings_keep_theirs(folder):
    async def main():
        settings = config(rollout=RETRY)
        controller = start(folder, settings)
        await publish(controller, 0)
        task = (await controller.admit(1)).assignments[0]
        first, second = group_of(task, 0, 1).rollouts
        await controller.progress([chunk_of(first), chunk_of(second)])
        assert await controller.interrupted(0, 1, 0, 5)
        assert await controller.interrupted(0, 1, 0, 5), "asked again, answered again"
        assert controller.core.state.totals.wasted_tokens == {"interrupted": 5}
        anew = msgspec.structs.replace(second, attempt=1, token_ids=np.array([1, 9, 9], np.int32))
        await controller.progress([chunk_of(second), chunk_of(anew)])  # the first of these crossed the interrupt
        abandon(controller)

        controller = start(folder, settings)  # the run goes on from what was recorded
        await publish(controller, 0)
        task = (await controller.admit(1)).assignments[0]
        assert (task.attempt, task.retries) == (0, {1: 1})
        assert [(p.sample, p.attempt, p.token_ids.tolist()) for p in task.prefixes] == [(0, 0, [2]), (1, 1, [9])]
        with pytest.raises(LedgerError, match="attempt 4 of group 0 sample 1, which is at attempt 1"):
            await controller.interrupted(0, 1, 4, 1)
        assert await controller.interrupted(0, 1, 1, 2)
        assert not await controller.interrupted(0, 1, 2, 2), "max_interrupts = 2"
        assert await controller.interrupted(0, 0, 0, 2), "each rollout has its own count"
        await controller.finish_group(group_of(task, 0, 2, error="interrupted: 2 times, rollout.max_interrupts = 2"))
        state = controller.core.state
        assert state.totals.dropped == {"interrupted": 1} and state.totals.wasted_tokens == {"interrupted": 5 + 2 + 2 + 4}
        assert state.live.keys() == {1} or not state.live
        assert state.barren_in_a_row == 0, "new weights came meanwhile: the run gets on"
        controller.close()
        assert account_of(folder).wasted_tokens == {"interrupted": 13}

    run(main())


def test_an_attempt_that_fails_is_followed_by_one_above_all_that_its_rollouts_used(folder):
    async def main():
        controller = start(folder, config(rollout=RETRY))
        await publish(controller, 0)
        task = (await controller.admit(1)).assignments[0]
        seen = [task.attempt]
        for failures in (1, 2):
            assert await controller.interrupted(0, 0, task.attempt, 1)
            assert await controller.interrupted(0, 0, task.attempt + 1, 1)
            await controller.finish_group(group_of(task, 0, 1, error="deadline: too slow"))
            task = next(t for t in (await controller.admit(2)).assignments if t.group_id == 0)
            seen.append(task.attempt)
            assert task.retries == {} and controller.core.state.live[0].failures == failures
            assert not await controller.interrupted(0, 0, task.attempt - 1, 1), "an attempt that is over"
        assert seen == [0, 3, 6]
        await controller.finish_group(group_of(task, 0, 1, error="deadline: too slow"))
        assert controller.core.state.totals.dropped == {"failed": 1}, "max_attempts = 3 counts failures, whatever their numbers"
        controller.close()

    run(main())


def test_the_question_travels_over_the_socket():
    method = wire.METHODS["interrupted"]
    assert list(method.signature.parameters) == ["self", "group_id", "sample", "attempt", "num_tokens"]
    assert method.result is bool and method.deadline_s == wire.CALL_DEADLINE_S


# ---- barrier -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("S", "behind"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("trouble", ["none", "failures", "filter"])
def test_under_a_barrier_generation_and_training_take_turns(folder, S, behind, trouble):
    """max_staleness 0 is synchronous, 1 is double buffering: batch s is sampled by version max(0, s - 1) and by no other."""

    async def main():
        observer = Notes()
        settings = config(
            rollout={"interrupt": "barrier", "max_attempts": 3},
            buffer={"max_staleness": S, "filter_zero_variance": trouble == "filter"},
            trainer={"steps": 8},
        )
        controller = start(folder, settings, observer)
        flat = {"rewards": (1.0, 1.0)}
        outcomes = {
            "none": lambda task: {},
            "failures": lambda task: {"error": "it broke"} if task.group_id % 3 == 1 and task.attempt < 2 else {},
            "filter": lambda task: flat if task.group_id % 3 == 1 else {},
        }
        await Roles(controller, outcomes[trouble]).run()
        sampled = {line["step"]: {s.version for g in groups for r in g.rollouts for s in r.spans} for line, groups in observer.steps}
        assert sampled == {step: {max(0, step - behind)} for step in range(8)}
        controller.close()

    run(main())


async def turns():
    """Let everybody who can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_weights_wait_for_the_end_of_the_round_and_the_round_for_the_weights(folder):
    async def main():
        controller = start(folder, config(rollout={"interrupt": "barrier"}, trainer={"steps": 9}))
        await publish(controller, 0)
        assert not controller.core.intake.may_hand_out, "no engine has weights yet"
        await serve_engine(controller)
        tasks = (await controller.admit(4)).assignments
        for task in tasks[:3]:
            await controller.finish_group(group_of(task, 0, 1))
        await train(controller, 0)
        offer = asyncio.create_task(controller.next_weights("e0", 1, 0))
        await turns()
        assert not offer.done(), "group 3 still runs"
        await controller.finish_group(group_of(tasks[3], 0, 1, error="it broke"))
        await turns()
        assert not offer.done(), "it is to be tried again, and can be on the version there is"
        (again,) = (await controller.admit(4)).assignments
        await controller.finish_group(group_of(again, 0, 1))
        assert (await offer).manifest.version == 1
        asked = controller.core.admit(4)
        assert asked is None, "the engine is between two versions"
        controller.close()

    run(main())


def test_after_a_pause_the_newest_weights_come_first(folder):
    """A deterministic checkpoint pauses the worker; a resume from it starts on the newest weights, so the run that goes on does too."""

    async def main():
        controller = start(folder, config(rollout={"interrupt": "barrier"}, trainer={"steps": 9}))
        await publish(controller, 0)
        await serve_engine(controller)
        tasks = (await controller.admit(4)).assignments
        for task in tasks[:3]:
            await controller.finish_group(group_of(task, 0, 1))
        await train(controller, 0)
        controller.reassign_running()
        assert await serve_engine(controller) == 1
        assert (await controller.admit(4)).assignments[0].group_id == 3
        controller.close()

    run(main())


# ---- versions that are not published -------------------------------------------------------------------------------------------


def test_weights_every_second_step(folder):
    async def main():
        observer = Notes()
        controller = start(folder, config(weight_sync={"every": 2}, buffer={"max_staleness": 1}, evaluation={"every": 3}), observer)
        roles = EverySecond(controller)
        await roles.run()
        sampled = [{s.version for g in groups for r in g.rollouts for s in r.spans} for _, groups in observer.steps]
        assert sampled == [{0}, {0}, {2}, {2}, {4}, {4}], "(S + 1) P slots are two batches; the third waits for version 2"
        assert [line["step"] for line in observer.evaluations] == [0, 3, 6]
        assert [line["version"] for line in observer.evaluations] == [0, 4, 6], "what is due at 3 is evaluated at the next version"
        assert max(int(k) for k in controller.core.state.totals.staleness) == 1
        controller.close()

    run(main())


class EverySecond(Roles):
    async def trainer(self) -> None:
        step = self.c.start_step
        await self.publish(step)
        while await self.c.get_batch(step) is not None:
            even = step % 2 == 1
            if even:
                await self.publish(step + 1)
            name = checksum(self.c.incarnation, step + 1) if even else ""
            await self.c.finish_step(StepReport(step=step, version=step + 1, checksum=name))
            step += 1
            if step == 3:
                await self.checkpoint(step)


def test_a_resume_starts_from_a_version_that_was_never_published(folder):
    async def main():
        settings = config(weight_sync={"every": 2}, buffer={"max_staleness": 1})
        controller = start(folder, settings)
        await EverySecond(controller).run()
        controller.close()
        for step in folder.checkpoints.iterdir():
            assert step.name == "step-3"
        again = start(folder, config(weight_sync={"every": 2}, buffer={"max_staleness": 1}, trainer={"steps": 6}))
        assert again.start_step == 3
        await publish(again, 3)  # the checkpoint's bytes, or it is refused
        assert await serve_engine(again) == 3
        again.close()

    run(main())


# ---- without a window, and with less staleness ---------------------------------------------------------------------------------


def test_ready_first_trains_whatever_is_finished_and_holds_so_many_groups(folder):
    async def main():
        ready_first = {"max_staleness": 1, "window": "unbounded", "max_groups": 5}
        controller = start(folder, config(buffer=ready_first, trainer={"steps": 9}))
        await publish(controller, 0)
        await serve_engine(controller)
        tasks = (await controller.admit(9)).assignments
        assert len(tasks) == 5 and controller.core.admit(1) is None
        for task in tasks[3:]:
            await controller.finish_group(group_of(task, 0, 1))
        assert [g.group_id for g in (await train(controller, 0)).groups] == [3, 4]
        await serve_engine(controller)
        for step in range(1, 6):
            fresh = (await controller.admit(9)).assignments
            assert [t.min_version for t in fresh] == [step - 1] * 2, "only what is pulled must train before them"
            for task in fresh:
                await controller.finish_group(group_of(task, step, 1))
            await train(controller, step)
            await serve_engine(controller)
        await controller.finish_group(group_of(tasks[0], 0, 1))
        await controller.finish_group(group_of(tasks[2], 0, 1))
        batch = await controller.get_batch(6)
        assert [g.group_id for g in batch.groups] == [0, 2] and batch.num_loss_tokens == 0, "six versions old: masked, and no error"
        controller.close()

    run(main())


def test_less_staleness_from_now_on(folder):
    async def main():
        observer = Notes()
        settings = config(buffer={"max_staleness": 3, "window": 8}, trainer={"steps": 40}, weight_sync={"every": 2})
        controller = start(folder, settings, observer)
        core = controller.core
        await publish(controller, 0)
        await serve_engine(controller)
        assert (core.state.num_slots, core.state.window, core.state.bound) == (8, 8, 7)
        before = (await controller.admit(3)).assignments
        assert core.lower_max_staleness("kl_k3 is 2") and core.lower_max_staleness("kl_k3 is 3")
        assert (core.state.max_staleness, core.state.window, core.state.bound, core.state.num_slots) == (1, 4, 3, 4)
        assert not core.lower_max_staleness("again"), "weights every second step need 1"
        (after,) = (await controller.admit(9)).assignments
        assert [core.state.live[t.group_id].bound for t in (*before, after)] == [7, 7, 7, 3]
        assert controller.core.admit(9) is None, "four slots"
        recorded = [e for *_, e in core.ledger.live_events() if isinstance(e, ev.SettingsChanged)]
        assert [(e.changes, e.reason) for e in recorded] == [
            ({"buffer.max_staleness": 2, "buffer.window": 6}, "kl_k3 is 2"),
            ({"buffer.max_staleness": 1, "buffer.window": 4}, "kl_k3 is 3"),
        ]
        controller.close()
        again = start(folder, settings)
        assert (again.core.state.max_staleness, again.core.state.window, again.core.state.lowered) == (1, 4, 2)
        again.close()

    run(main())


def test_without_a_window_the_last_version_of_staleness_takes_the_disorder_with_it(folder):
    async def main():
        ready_first = {"max_staleness": 1, "window": "unbounded", "max_groups": 5}
        controller = start(folder, config(buffer=ready_first))
        assert controller.core.lower_max_staleness("x")
        state = controller.core.state
        assert (state.max_staleness, state.window, state.num_slots, state.bound) == (0, 1, 2, 0)
        await publish(controller, 0)
        await serve_engine(controller)
        await make_step(controller, 0)
        controller.close()

    run(main())
