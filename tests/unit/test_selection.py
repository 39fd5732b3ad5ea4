"""Which rollouts of an oversampled group are kept, and what becomes of the others."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import numpy as np
import pytest
from controller_fakes import Notes, Roles, config, publish, rollout, serve_engine, start
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.controller.accounts import check_accounts
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder
from slipstream.controller.selection import penalty, select
from slipstream.errors import RunFailed
from slipstream.scoring.score import score_group
from slipstream.types import Assignment, Draw, Group, Rollout, Score, StopReason, Turn


def group_of_rewards(rewards, group_id: int = 0, penalties=None, failed=(), attempt: int = 0) -> Group:
    rollouts = []
    for sample, reward in enumerate(rewards):
        error = "deadline: too slow" if sample in failed else None
        made = rollout(group_id, sample, 0, 1, reward, attempt, error)
        parts = {} if penalties is None else {"penalty": penalties[sample]}
        rollouts.append(msgspec.structs.replace(made, scores=(Score(name="s", value=reward, parts=parts),)))
    draw = Draw(number=group_id, row=0, epoch=0, dataset="d")
    return Group(group_id=group_id, attempt=attempt, draw=draw, row={}, rollouts=tuple(rollouts))


def kept(group: Group, keep: int, how: str = "uniform", seed: int = 0) -> list[int]:
    """The samples that are kept; the others must be what is left out."""
    chosen, others = select(group, keep, how, seed)
    samples = [r.sample for r in chosen.rollouts]
    assert samples == sorted(set(samples)) and len(samples) == keep
    assert sorted([*samples, *(r.sample for r in others)]) == [r.sample for r in group.rollouts]
    return samples


# ---- uniform -----------------------------------------------------------------------------------------------------------------


def test_a_uniform_draw_takes_every_sample_and_every_pair_equally_often():
    draws = [tuple(kept(group_of_rewards([0.0, 1.0, 0.0, 1.0], g), 2)) for g in range(3000)]
    pairs = Counter(draws)
    assert len(pairs) == 6
    assert all(abs(count - 500) < 5 * (500 * 5 / 6) ** 0.5 for count in pairs.values()), pairs


def test_a_draw_is_a_function_of_seed_group_attempt_and_sample_alone():
    first = [kept(group_of_rewards([0.0] * 8, g), 4) for g in range(50)]
    assert first == [kept(group_of_rewards(np.linspace(0, 1, 8).tolist(), g), 4) for g in range(50)], "rewards do not matter"
    assert first != [kept(group_of_rewards([0.0] * 8, g), 4, seed=1) for g in range(50)]
    assert first != [kept(group_of_rewards([0.0] * 8, g, attempt=1), 4) for g in range(50)]
    assert kept(group_of_rewards([0.0] * 4, 0), 2) == [0, 3], "the same on every machine and in every version"


def test_a_group_without_more_rollouts_is_forwarded_unchanged():
    group = group_of_rewards([0.0, 1.0])
    assert select(group, 2, "uniform", 0) == (group, ()) and select(group, 2, "uniform", 0)[0] is group


@pytest.mark.parametrize("how", ["uniform", "roc"])
def test_failed_rollouts_are_never_selected(how):
    for g in range(50):
        assert not {1, 4} & set(kept(group_of_rewards([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], g, failed=(1, 4)), 3, how))
    with pytest.raises(ValueError, match="4 usable rollouts, 5 are to be kept"):
        select(group_of_rewards([1.0] * 6, failed=(1, 4)), 5, how, 0)


# ---- resample on correct -----------------------------------------------------------------------------------------------------


def test_the_positives_with_the_least_penalty_and_a_draw_of_the_negatives_are_kept():
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    penalties = [0.3, 0.0, 0.0, 9.0, 0.1, 0.0, 0.2, 0.0]
    draws = [kept(group_of_rewards(rewards, g, penalties), 4, "roc") for g in range(600)]
    assert all(set(d) & {0, 2, 4, 6} == {2, 4} for d in draws)
    negatives = Counter(s for d in draws for s in d if s % 2)
    assert set(negatives) == {1, 3, 5, 7} and all(240 < count < 360 for count in negatives.values()), "penalties of negatives do not matter"


@pytest.mark.parametrize(
    ("positives", "negatives", "keep", "kept_positives"),
    [(6, 10, 8, 3), (12, 4, 8, 6), (1, 15, 8, 1), (15, 1, 8, 7), (16, 0, 8, 8), (0, 16, 8, 0), (1, 7, 2, 1), (7, 1, 2, 1)],
)
def test_each_side_keeps_its_share_and_at_least_one(positives, negatives, keep, kept_positives):
    group = group_of_rewards([1.0] * positives + [-1.0] * negatives)
    assert sum(s < positives for s in kept(group, keep, "roc")) == kept_positives


def test_positives_are_above_the_middle_of_the_rewards_or_above_0_where_all_are_equal():
    assert 4 in kept(group_of_rewards([0.2, 0.3, 0.3, 0.2, 0.9], penalties=[0, 0, 0, 0, 5]), 2, "roc"), "the only one above 0.55"
    clean_last = [3.0, 2.0, 1.0, 0.0]
    assert kept(group_of_rewards([0.5] * 4, penalties=clean_last), 2, "roc") == [2, 3], "all correct: the cleanest"
    draws = {tuple(kept(group_of_rewards([0.0] * 4, g, penalties=clean_last), 2, "roc")) for g in range(60)}
    assert len(draws) == 6, "none correct: any"


def test_equal_penalties_are_drawn():
    assert len({tuple(kept(group_of_rewards([1.0] * 4, g), 2, "roc")) for g in range(60)}) == 6


def test_what_speaks_against_a_correct_rollout():
    made = group_of_rewards([1.0]).rollouts[0]
    turn = lambda role, **more: Turn(start=0, end=1, role=role, **more)  # noqa: E731
    tools = (turn("assistant"), turn("tool", error=True), turn("assistant", truncated=True), turn("tool"), turn("tool"), turn("tool"))
    reported = (Score(name="a", value=1.0, parts={"penalty": 0.5, "digits": 7.0}), Score(name="b", value=None, parts={"penalty": 0.125}))
    assert penalty(made) == 0.0
    assert penalty(msgspec.structs.replace(made, scores=reported)) == 0.625
    assert penalty(msgspec.structs.replace(made, stop_reason=StopReason.LENGTH)) == 1.0
    assert penalty(msgspec.structs.replace(made, stop_reason=StopReason.STOP, turns=tools)) == 0.25


@settings(max_examples=300, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=12),
    data=st.data(),
    how=st.sampled_from(["uniform", "roc"]),
    seed=st.integers(0, 3),
)
def test_every_selection_keeps_what_it_promises(rewards, data, how, seed):
    failed = data.draw(st.sets(st.integers(0, len(rewards) - 1), max_size=len(rewards) - 2))
    penalties = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(rewards), max_size=len(rewards)))
    group = group_of_rewards(rewards, seed, penalties, failed)
    good = [s for s in range(len(rewards)) if s not in failed]
    keep = data.draw(st.integers(2, len(good)))
    chosen = kept(group, keep, how, seed)
    assert not set(chosen) & failed and chosen == kept(group, keep, how, seed)
    if how == "roc" and len({rewards[s] for s in good}) > 1:
        assert len({rewards[s] for s in chosen}) > 1, "what differed in reward still does"
        middle = (min(rewards[s] for s in good) + max(rewards[s] for s in good)) / 2
        inside = [penalties[s] for s in chosen if rewards[s] > middle]
        outside = [penalties[s] for s in good if s not in chosen and rewards[s] > middle]
        assert not outside or max(inside) <= min(outside), "no cleaner positive was left out"


# ---- scoring -----------------------------------------------------------------------------------------------------------------


class Lengths:
    """A scorer that says how many rollouts it was shown."""

    name, weight = "lengths", 1.0

    async def score(self, group: Group) -> list[Score]:
        return [Score(name=self.name, value=float(len(group.rollouts))) for _ in group.rollouts]

    async def close(self) -> None: ...


def test_finished_rollouts_are_scored_when_there_are_enough_of_them():
    group = group_of_rewards([0.0] * 4, failed=(1,))
    unscored = msgspec.structs.replace(group, rollouts=tuple(msgspec.structs.replace(r, reward=None, scores=()) for r in group.rollouts))
    scored = asyncio.run(score_group(unscored, [Lengths()], needed=3))
    assert [r.reward for r in scored.rollouts] == [3.0, None, 3.0, 3.0] and [r.sample for r in scored.rollouts] == [0, 1, 2, 3]
    assert asyncio.run(score_group(unscored, [Lengths()], needed=4)) is unscored
    assert asyncio.run(score_group(unscored, [Lengths()])) is unscored, "by default all are needed"


# ---- the controller ----------------------------------------------------------------------------------------------------------


def finished(task: Assignment, version: int, incarnation: int, rewards, failed=(), penalties=None) -> Group:
    made = group_of_rewards(rewards, task.group_id, penalties, failed, task.attempt)

    def sampled_by_them(r: Rollout) -> Rollout:
        spans = tuple(msgspec.structs.replace(s, version=version, incarnation=incarnation) for s in r.spans)
        return msgspec.structs.replace(r, spans=spans)

    rollouts = tuple(sampled_by_them(r) for r in made.rollouts)
    return msgspec.structs.replace(made, draw=task.draw, row=task.row, min_version=task.min_version, rollouts=rollouts)


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def test_the_kept_rollouts_are_the_group_from_then_on_and_the_others_are_waste_by_cause(folder):
    async def main():
        observer = Notes()
        settings = config(rollout={"oversample": 5, "selection": "roc"}, buffer={"max_staleness": 0, "filter_zero_variance": True})
        controller = start(folder, settings, observer)
        await publish(controller, 0)
        await serve_engine(controller)
        core = controller.core
        one, two = (await controller.admit(2)).assignments
        await controller.finish_group(finished(one, 0, 1, [1.0, 1.0, 0.0, 0.0, 0.0], failed=(2,), penalties=[1, 0, 0, 0, 0]))
        assert core.state.totals.wasted_tokens == {"not selected": 4, "failed": 2} and core.state.totals.failures == {"deadline": 1}
        recorded = core.ledger.group(one.group_id, 0)
        samples = [r.sample for r in recorded.rollouts]
        assert samples in ([1, 3], [1, 4]) and recorded.rewards == [1.0, 0.0]
        assert core.state.live[one.group_id].num_tokens == 4, "of those kept: what a rewind would waste"

        await controller.finish_group(finished(two, 0, 1, [1.0] * 5))
        assert core.state.totals.filtered == 1 and two.group_id not in core.state.live
        assert core.state.totals.wasted_tokens == {"not selected": 4 + 6, "failed": 2, "filtered": 4}
        (three,) = (await controller.admit(2)).assignments
        await controller.finish_group(finished(three, 0, 1, [1.0, 0.0, 0.0, 0.0, 0.0], failed=(0, 1, 2, 3)))
        assert core.state.live[three.group_id].attempt == 1, "one rollout is not enough"
        assert core.state.totals.wasted_tokens["failed"] == 2 + 10 and core.state.totals.failures == {"deadline": 2}
        (again,) = (await controller.admit(2)).assignments
        await controller.finish_group(finished(again, 0, 1, [1.0, 0.0, 0.0, 0.0, 0.0]))
        batch = await controller.get_batch(0)
        assert batch is not None and [len(g.rollouts) for g in batch.groups] == [2, 2] and batch.num_loss_tokens == 8
        totals = core.state.totals
        assert totals.generated_tokens == 4 * 10 == sum(totals.wasted_tokens.values()) + batch.num_loss_tokens
        controller.close()
        with LedgerReader.open(folder.ledger) as reader:
            assert check_accounts(reader).wasted_tokens == totals.wasted_tokens

    run(main())


def test_a_batch_comes_out_equal_after_a_resume(folder):
    async def main():
        settings = config(rollout={"oversample": 4}, buffer={"max_staleness": 0})
        controller = start(folder, settings)
        await publish(controller, 0)
        await serve_engine(controller)
        for task in (await controller.admit(2)).assignments:
            await controller.finish_group(finished(task, 0, 1, [0.0, 1.0, 0.0, 1.0]))
        before = await controller.get_batch(0)
        controller.close()
        again = start(folder, settings)
        await publish(again, 0)
        await serve_engine(again)
        after = await again.get_batch(0)
        assert [[r.sample for r in g.rollouts] for g in after.groups] == [[r.sample for r in g.rollouts] for g in before.groups]
        again.close()

    run(main())


@pytest.mark.parametrize("selection", ["uniform", "roc"])
@pytest.mark.parametrize("seed", range(4))
def test_filters_and_failures_never_close_the_gate_for_good(folder, selection, seed):
    """Most groups fail or are filtered; every step gets its groups all the same, and every group is accounted for."""

    draw = np.random.default_rng(seed)

    class Unlucky(Roles):
        def group(self, task: Assignment) -> Group:
            failed = set(np.flatnonzero(draw.random(6) < 0.5).tolist())
            rewards = (draw.random(6) < 0.25).astype(float).tolist()
            return finished(task, self.version, self.c.incarnation, rewards, failed)

    async def main():
        settings = config(
            rollout={"group_size": 3, "oversample": 6, "selection": selection, "max_attempts": 2},
            buffer={"max_staleness": 2, "window": 3, "filter_zero_variance": True, "max_barren_groups": 500},
            trainer={"steps": 12},
        )
        controller = start(folder, settings)
        assert await Unlucky(controller).run() == "finished"
        totals = controller.core.state.totals
        controller.close()
        assert totals.filtered > 5 and totals.wasted_tokens["not selected"] and totals.failures["deadline"] > 20
        with LedgerReader.open(folder.ledger) as reader:
            assert check_accounts(reader).counts["trained"] == 24

    run(main())


def test_a_run_in_which_too_few_rollouts_ever_finish_ends_with_the_cause(folder):
    async def main():
        controller = start(folder, config(rollout={"oversample": 4, "max_attempts": 1}, buffer={"max_staleness": 0}))
        await publish(controller, 0)
        await serve_engine(controller)
        for task in (await controller.admit(2)).assignments:
            await controller.finish_group(finished(task, 0, 1, [0.0] * 4, failed=(0, 1, 2)))
        with pytest.raises(RunFailed, match=r"every group of the first step failed \(2 groups\).*deadline: too slow"):
            await controller.get_batch(0)
        controller.close()

    run(main())
