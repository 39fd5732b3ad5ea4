"""The small parts: the order of rows, idle times, due evaluations, the metric line, the buffer's view of staleness."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter

import msgspec
import numpy as np
import pytest
from controller_fakes import Notes, Roles, checksum, config, group_of, make_step, publish, rollout, serve_engine, start

from slipstream.controller.buffer import bad_data, failure_of, has_zero_variance, make_batch
from slipstream.controller.cursor import Cursor
from slipstream.controller.evaluations import choose, evaluation_line, pending
from slipstream.controller.events import StaleRule
from slipstream.controller.metrics_line import staleness_stats
from slipstream.controller.run_folder import RunFolder
from slipstream.controller.timing import Meter, StepTimes
from slipstream.types import Draw, EvalItem, EvalResult, Group, PrefixChunk, Span, StepReport, StopReason, seal


def test_an_epoch_draws_every_row_once_and_the_order_is_a_function_of_the_seed():
    orders = [[Cursor(50, seed).row_at(p) for p in range(150)] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    for epoch in range(3):
        rows, epochs = zip(*orders[0][50 * epoch : 50 * (epoch + 1)], strict=True)
        assert sorted(rows) == list(range(50)) and set(epochs) == {epoch}
    assert orders[0][:50] != [(row, 0) for row, _ in orders[0][50:100]], "each epoch has its own order"
    jumps = Cursor(50, 3)
    assert [jumps.row_at(p) for p in (149, 0, 75, 149)] == [orders[0][p] for p in (149, 0, 75, 149)]
    assert Cursor(5, 0).row_at(0) == (3, 0), "the order is part of a run's identity: it may not change between releases"


def test_a_meter_integrates_its_level():
    meter = Meter()
    meter.set(10.0, 0.5)
    meter.set(14.0, 1.0)
    assert meter.take(15.0) == 3.0
    assert meter.take(17.0) == 2.0


def test_idle_is_measured_after_the_first_admission_and_the_first_batch():
    times = StepTimes()
    times.rollout_idle.set(0.0, 1.0)
    times.admitted(5.0)
    times.rollout_idle.set(6.0, 0.0)
    times.batch_arrived(8.0, waited_s=8.0)  # the first wait is the start of the run
    assert times.take(10.0) == {"active_s": 5.0, "rollout_idle_s": 1.0, "trainer_active_s": 2.0, "trainer_wait_s": 0.0}
    times.batch_arrived(13.0, waited_s=3.0)
    assert times.take(14.0) == {"active_s": 4.0, "rollout_idle_s": 0.0, "trainer_active_s": 4.0, "trainer_wait_s": 3.0}


@pytest.mark.parametrize(
    ("handled", "confirmed", "due", "chosen"),
    [
        ({}, -1, [], (None, [])),
        ({}, 0, [0], (0, [])),
        ({}, 7, [0], (None, [0])),
        ({}, 12, [0, 10], (10, [0])),
        ({}, 29, [0, 10, 20], (20, [0, 10])),
        ({0: 0}, 12, [10], (10, [])),
        ({0: 0}, 29, [10, 20], (20, [10])),
        ({0: 0, 10: -1, 20: 29}, 29, [], (None, [])),
        ({0: 0, 20: 20}, 35, [30, 35], (35, [30])),
        ({0: 0, 30: 35, 35: 35}, 35, [], (None, [])),
    ],
)
def test_due_evaluations(handled, confirmed, due, chosen):
    assert pending(handled, confirmed, every=10, steps=35) == due
    now, skipped = choose(due, confirmed)
    assert (now, list(skipped)) == chosen and all(skipped.values())


def test_the_evaluation_line_keeps_failures_apart_from_rewards():
    items = (
        EvalItem(row=0, rewards=(1.0, None), completions=("a", ""), num_tokens=(4, 0)),
        EvalItem(row=1, rewards=(0.0, 0.5), completions=("b", "c"), num_tokens=(2, 2)),
    )
    result = EvalResult(number=0, incarnation=2, version=7, checksum="x", items=items, duration_s=3.0, engine_s=1.0)
    line = evaluation_line(result, 6, 2)
    assert (line["step"], line["version"], line["incarnation"], line["failed"]) == (6, 7, 2, 1)
    assert line["eval_reward"] == 0.5 and line["completion_tokens_mean"] == 2.0
    empty = evaluation_line(EvalResult(number=0, incarnation=1, version=0, checksum="x", items=items[:0], duration_s=1.0), 0, 1)
    assert empty["eval_reward"] is None


def test_staleness_statistics_are_over_tokens():
    assert staleness_stats({}) == {"staleness_mean": None, "staleness_p99": None, "staleness_max": None}
    assert staleness_stats({0: 980, 1: 10, 4: 10})["staleness_p99"] == 1
    assert staleness_stats({0: 980, 1: 9, 4: 11})["staleness_p99"] == 4


def group_with(*spans: Span, length: int = 7) -> Group:
    mask = np.zeros(length, bool)
    for span in spans:
        mask[span.start : span.end] = True
    rollouts = tuple(
        msgspec.structs.replace(
            rollout(0, i, 0, 1, float(i)),
            token_ids=np.ones(length, np.int32),
            logprobs=np.full(length, -1, np.float32),
            loss_mask=mask,
            spans=spans,
        )
        for i in (0, 1)
    )
    return Group(group_id=0, draw=Draw(number=0, row=0, epoch=0, dataset="d"), row={}, rollouts=rollouts)


def test_a_batch_counts_its_tokens_by_staleness():
    group = group_with(Span(1, 3, 1, 3, "e"), Span(4, 7, 1, 5, "e"))  # token 3 was given by an environment
    batch, record = make_batch(5, [group], [2], StaleRule("mask_tokens", limit=2))
    assert record.staleness == ((0, 6), (2, 4)) and record.num_loss_tokens == batch.num_loss_tokens == 10
    assert (record.num_samples, record.num_several_versions, record.num_masked_tokens) == (2, 2, 0)
    assert batch.groups[0] is group, "forwarded unchanged"
    batch, record = make_batch(6, [group], [3], StaleRule("mask_tokens", limit=2))
    assert record.staleness == ((1, 6),) and record.num_masked_tokens == 4 and record.num_several_versions == 0
    assert batch.groups[0].rollouts[0].loss_mask.tolist() == [False] * 4 + [True] * 3
    kept, record = make_batch(6, [group], [3], StaleRule("keep", limit=2))
    assert record.staleness == ((1, 6), (3, 4)) and kept.num_loss_tokens == 10


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ((Span(1, 9, 1, 0, "e"),), r"span \[1, 9\)"),
        ((Span(1, 4, 1, 0, "e"), Span(3, 5, 1, 0, "e")), r"span \[3, 5\) after token 4"),
        ((Span(1, 4, 2, 0, "e"),), "version 2.0, newest is 2.None"),
    ],
)
def test_spans_that_cannot_be_are_bad_data(spans, why):
    problem = bad_data(group_with(*spans[:1], length=7) if len(spans) == 1 else group_with(*spans), 2, {1: 3})
    assert problem is not None and re.search(why, problem)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([0, -1, -2, -3, 0, 0, 0], None),
        ([np.nan, -1, -2, -3, 0, 0, np.nan], None),  # of tokens that were not sampled
        ([0, -1, np.nan, -3, 0, 0, 0], "teacher_logprobs nan"),
        ([0, -1, 0.5, -3, 0, 0, 0], "positive teacher_logprobs 0.5"),
        ([0, -1], r"teacher_logprobs of shape \(2,\) for 7 tokens"),
    ],
)
def test_logprobs_under_frozen_models_are_data_too(values, why):
    group = group_with(Span(1, 4, 1, 0, "e"), length=7)
    arrays = {"teacher_logprobs": np.array(values, dtype=np.float32), "other": np.array([np.nan])}
    group = msgspec.structs.replace(group, rollouts=tuple(msgspec.structs.replace(r, arrays=arrays) for r in group.rollouts))
    problem = bad_data(group, 2, {1: 3})
    assert problem is None if why is None else problem is not None and re.search(why, problem)


def test_a_group_misses_no_sample_and_has_a_reward():
    group = group_with(Span(1, 4, 1, 0, "e"))
    assert bad_data(group, 2, {1: 0}) is None and failure_of(group, 2) is None
    assert bad_data(group, 3, {1: 0}) == "samples [0, 1], expected 0 to 2"
    nothing = tuple(msgspec.structs.replace(r, reward=None) for r in group.rollouts)
    assert "no scorer was applicable" in (failure_of(msgspec.structs.replace(group, rollouts=nothing), 2) or "")
    assert has_zero_variance([0.5, 0.5]) and not has_zero_variance([0.5, 0.6]) and not has_zero_variance([])


class Ticks:
    """A clock that a test moves."""

    def __init__(self):
        self.time = 100.0

    def now(self) -> float:
        return self.time


def test_the_metric_line_of_a_step(tmp_path):
    async def main():
        observer, clock = Notes(), Ticks()
        controller = start(
            RunFolder.create("t", tmp_path / "run"), config(buffer={"max_staleness": 0}, engine={"slots": 8}), observer, clock=clock
        )
        await publish(controller, 0)
        await serve_engine(controller)
        for step in range(2):
            clock.time += 2.0
            await make_step(controller, step, step_s=1.5, metrics={"loss": 0.25, "reward_mean": 99.0})
        line, groups = observer.steps[1]
        assert [g.group_id for g in groups] == [2, 3]
        assert (line["step"], line["version"], line["incarnation"], line["time_s"]) == (1, 2, 1, 4.0)
        assert line["reward_mean"] == 0.5 and line["reward_std"] == 0.5, "counted here, whatever the trainer says"
        assert line["loss"] == 0.25 and line["step_s"] == 1.5 and line["skipped"] is None
        assert line["num_loss_tokens"] == 8 and line["trained_tokens_per_s"] == 4.0 and line["trained_samples_per_s"] == 2.0
        assert line["generated_tokens_per_s"] == 4.0 and line["completion_tokens_mean"] == 2.0
        assert (line["staleness_mean"], line["staleness_max"], line["staleness_bound"]) == (0.0, 0, 0)
        assert (line["buffer_groups"], line["slots_taken"], line["slots"]) == (0, 2, 2)
        assert line["rollout_idle_fraction"] == 0.0, "the time passed behind an open gate"
        totals = controller.core.state.totals
        assert totals.trained_samples / totals.active_s == 8 / 2.0
        controller.close()

    asyncio.run(main())


def over(group_id: int, sample: int) -> PrefixChunk:
    """What is told of the end of a rollout whose tokens are not recorded."""
    none = {"token_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), "spans": ()}
    return PrefixChunk(group_id=group_id, sample=sample, attempt=0, prompt_length=3, start=0, stop_reason=StopReason.STOP, **none)


def test_free_engine_slots_behind_the_closed_gate_are_idle(tmp_path):
    async def main():
        clock = Ticks()
        controller = start(RunFolder.create("t", tmp_path / "run"), config(buffer={"max_staleness": 0}, engine={"slots": 8}), clock=clock)
        await publish(controller, 0)
        await serve_engine(controller)
        await controller.admit(2)  # 2 groups x 2 rollouts on 8 slots: the gate is closed, half of the slots are free
        clock.time += 4.0
        assert controller.core.times.rollout_idle.take(clock.time) == 2.0
        await controller.progress([seal(over(group_id=0, sample=1))])
        clock.time += 8.0
        assert controller.core.times.rollout_idle.take(clock.time) == 5.0  # one rollout more has left the engine
        assert not controller.core.state.live[0].prefix_tokens, "there is nothing to go on from"
        controller.close()

    asyncio.run(main())


def test_a_trainer_that_waits_is_idle(tmp_path):
    async def main():
        observer, clock = Notes(), Ticks()
        controller = start(RunFolder.create("t", tmp_path / "run"), config(buffer={"max_staleness": 0}), observer, clock=clock)
        await publish(controller, 0)
        await serve_engine(controller)
        for step in range(2):
            asked = asyncio.create_task(controller.get_batch(step))
            await asyncio.sleep(0)
            clock.time += 3.0  # the groups take this long
            for task in (await controller.admit(2)).assignments:
                await controller.finish_group(group_of(task, step, 1))
            await asked
            clock.time += 1.0  # the step takes this long
            await publish(controller, step + 1)
            await controller.finish_step(StepReport(step=step, version=step + 1, checksum=checksum(1, step + 1)))
            await serve_engine(controller)
        assert [line["trainer_idle_fraction"] for line, _ in observer.steps] == [0.0, 0.75]
        totals = controller.core.state.totals
        assert totals.trainer_wait_s / totals.trainer_active_s == 3 / 5
        controller.close()

    asyncio.run(main())


def test_the_controller_imports_no_torch():
    code = (
        "import sys, slipstream.controller.controller, slipstream.controller.accounts; print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_draws_are_spread_over_the_rows(tmp_path):
    async def main():
        controller = start(RunFolder.create("t", tmp_path / "run"), config())
        roles = Roles(controller)
        await roles.run()
        rows = Counter(task.draw.row for task in roles.assigned)
        assert set(rows.values()) == {2, 3} and len(rows) == 5, "12 draws from 5 rows"
        assert all(task.row == {"question": task.draw.row} and task.draw.dataset == "d" for task in roles.assigned)
        controller.close()

    asyncio.run(main())
