"""The asynchronous controller with fake roles: a whole run, what ends one, what is refused, who waits for what."""

from __future__ import annotations

import asyncio
import contextlib
import math

import numpy as np
import pytest
from controller_fakes import Notes, Roles, checksum, chunk_of, config, end_of, group_of, make_step, manifest, publish, serve_engine, start

from slipstream import deadlines
from slipstream.controller.accounts import check_accounts
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder
from slipstream.errors import DeadlineExceeded, LedgerError, RunFailed, RunFolderError, StalenessError, WeightSyncError
from slipstream.launch import wire
from slipstream.observe.summary import summarize
from slipstream.protocols import EngineInService
from slipstream.types import EngineReport, EvalItem, EvalResult, StepReport, StopReason


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def evaluated(number: int, version: int) -> EvalResult:
    item = EvalItem(row=0, rewards=(1.0,), completions=("a",), num_tokens=(1,))
    return EvalResult(number=number, incarnation=1, version=version, checksum=checksum(1, version), items=(item,), duration_s=1.0)


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_a_run_from_the_first_admission_to_the_last_evaluation(folder):
    async def main():
        observer = Notes()
        controller = start(folder, config(), observer)
        assert await Roles(controller).run() == "finished"
        totals = summarize(controller.core.state, controller.core.config, "", 0.0)
        controller.close()
        assert [line["step"] for line, _ in observer.steps] == list(range(6))
        assert [line["step"] for line in observer.evaluations] == [0, 3, 6]
        assert totals["trained_samples"] == 24 and totals["staleness_max"] <= 1
        assert totals["eval_reward_first"] == totals["eval_reward_last"] == 0.5
        assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step-4", "step-6"]
        with LedgerReader.open(folder.ledger) as reader:
            account = check_accounts(reader)
            assert account.counts == {"trained": 12}
            assert not any(reader.has_group(g) for step in range(4) for g in account.batches[step]), "covered by the oldest checkpoint"
            assert all(reader.has_group(g) for step in (4, 5) for g in account.batches[step])

    run(main())


def test_ledger_keep_all_keeps_every_group(folder):
    async def main():
        controller = start(folder, config(ledger={"keep": "all"}))
        await Roles(controller, record=True).run()
        assert all(controller.core.ledger.has_group(g) for g in range(12))
        assert controller.core.ledger.count("prefixes") == 12, "a row per group and event"
        controller.close()

    run(main())


def test_an_end_that_is_reported_again_does_not_touch_what_was_recorded_with_it(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        await serve_engine(controller)
        (task, _) = (await controller.admit(2)).assignments
        rollouts = group_of(task, 0, 1).rollouts
        first, second = map(chunk_of, rollouts)
        end = end_of(rollouts[0], StopReason.LENGTH)
        await controller.progress([first])
        await controller.progress([end, second])
        await controller.progress([end, second])  # sent again after a lost answer
        controller.reassign_running()
        (again, *_) = (await controller.admit(2)).assignments
        assert [(p.sample, len(p.token_ids), p.stop_reason) for p in again.prefixes] == [(0, 1, StopReason.LENGTH), (1, 1, None)]
        controller.close()

    run(main())


def test_recorded_tokens_move_the_deadline_of_a_batch_that_they_do_not_wake(folder):
    async def main():
        controller = start(folder, config(), stall_timeout_s=0.5)
        await publish(controller, 0)
        await serve_engine(controller)
        (task, _) = (await controller.admit(2)).assignments
        batch = asyncio.create_task(controller.get_batch(0))
        await asyncio.sleep(0.1)
        before = asyncio.get_running_loop().time()
        await controller.progress([chunk_of(group_of(task, 0, 1).rollouts[0])])
        with pytest.raises(DeadlineExceeded, match="no group made progress"):
            await batch
        assert asyncio.get_running_loop().time() - before >= 0.5
        controller.close()

    run(main())


def test_near_the_end_only_what_the_remaining_steps_can_use_is_admitted(folder):
    async def main():
        controller = start(folder, config(buffer={"max_staleness": 3}, trainer={"steps": 3}))
        roles = Roles(controller)
        await roles.run()
        assert len(roles.assigned) == 6 and controller.core.state.next_draw == 6
        controller.close()

    run(main())


def test_a_batch_is_durable_before_it_is_handed_out_and_equal_when_asked_again(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        await serve_engine(controller)
        work = await controller.admit(2)
        for task in work.assignments:
            await controller.finish_group(group_of(task, 0, 1))
            await controller.finish_group(group_of(task, 0, 1))  # a second report changes nothing
        batch = await controller.get_batch(0)
        with LedgerReader.open(folder.ledger) as reader:
            assert reader.batch(0).group_ids == tuple(g.group_id for g in batch.groups) == (0, 1)
        assert await controller.get_batch(0) is batch
        with pytest.raises(LedgerError, match="asks for batch 5, but batch 1 is next"):
            await controller.get_batch(5)
        controller.close()

    run(main())


def test_a_failed_rollout_fails_its_group_which_is_tried_again_in_its_place(folder):
    async def main():
        controller = start(folder, config(rollout={"max_attempts": 3}))
        fails = {0: 2, 3: 99}  # group -> attempts that fail
        outcome = lambda task: {"error": "deadline: too slow"} if task.attempt < fails.get(task.group_id, 0) else {}  # noqa: E731
        roles = Roles(controller, outcome)
        await roles.run()
        controller.close()
        assert [t.attempt for t in roles.assigned if t.group_id == 0] == [0, 1, 2]
        assert 0 in roles.trained[0], "it kept its place"
        with LedgerReader.open(folder.ledger) as reader:
            account = check_accounts(reader)
        assert account.counts == {"trained": 12, "dropped: failed": 1}
        assert account.places[3].attempts == 3 and account.wasted_tokens["failed"] == 5 * 4
        assert controller.core.state.totals.failures == {"deadline": 5}

    run(main())


def test_a_prompt_that_does_not_fit_is_skipped_at_once_and_said(folder):
    async def main():
        observer = Notes()
        controller = start(folder, config(), observer)
        outcome = lambda task: {"error": "prompt does not fit: 900 tokens"} if task.group_id == 1 else {}  # noqa: E731
        roles = Roles(controller, outcome)
        await roles.run()
        assert [t.attempt for t in roles.assigned if t.group_id == 1] == [0]
        assert controller.core.state.totals.dropped == {"prompt does not fit": 1}
        assert any("900 tokens" in text for text in observer.notes)
        controller.close()

    run(main())


def test_zero_variance_groups_are_filtered_and_refilled_if_asked(folder):
    async def main():
        controller = start(folder, config(buffer={"filter_zero_variance": True}))
        await Roles(controller, lambda task: {"rewards": (1.0, 1.0)} if task.group_id % 3 == 0 else {}).run()
        assert controller.core.state.totals.filtered == 6
        assert controller.core.state.totals.trained_groups == 12
        controller.close()

    run(main())


def test_a_step_without_anything_to_learn_from_is_said_ever_more_rarely(folder):
    async def main():
        observer = Notes()
        controller = start(folder, config(), observer)
        await Roles(controller, lambda task: {"rewards": (1.0, 1.0)}).run()
        said = [text for text in observer.notes if "so they teach nothing" in text]
        assert [text.split(":")[0] for text in said] == ["step 0", "step 1", "step 3"]
        controller.close()

    run(main())


def test_a_run_whose_first_groups_all_fail_ends_with_the_first_cause(folder):
    async def main():
        controller = start(folder, config())
        with pytest.raises(ExceptionGroup) as caught:
            await Roles(controller, lambda task: {"error": f"reward raised: bug {task.group_id}"}).run()
        failed = caught.value.subgroup(RunFailed)
        assert failed is not None and "bug 0" in str(failed.exceptions[0])
        controller.close()

    run(main())


def test_a_run_whose_groups_are_all_filtered_ends(folder):
    async def main():
        controller = start(folder, config(buffer={"filter_zero_variance": True, "max_barren_groups": 5}))
        with pytest.raises(ExceptionGroup) as caught:
            await Roles(controller, lambda task: {"rewards": (0.0, 0.0)} if task.group_id > 3 else {}).run()
        failed = caught.value.subgroup(RunFailed)
        assert failed is not None and "the last 5 groups" in str(failed.exceptions[0]) and "group 4" in str(failed.exceptions[0])
        controller.close()

    run(main())


def test_too_many_skipped_updates_end_the_run(folder):
    async def main():
        controller = start(folder, config(trainer={"max_skipped_steps": 2}))
        await publish(controller, 0)
        await serve_engine(controller)
        await make_step(controller, 0, skipped="non-finite loss")
        with contextlib.suppress(RunFailed):
            await make_step(controller, 1, skipped="non-finite loss")
        with pytest.raises(RunFailed, match="the last 2 updates were skipped; the newest: non-finite loss"):
            await controller.get_batch(2)
        assert controller.core.state.totals.trained_samples == 0 and controller.core.state.step == 2
        controller.close()

    run(main())


def _nan(group):
    group.rollouts[0].logprobs[1] = np.nan


def _positive(group):
    group.rollouts[1].logprobs[2] = 0.5


def _prompt_trained(group):
    group.rollouts[0].loss_mask[0] = True


@pytest.mark.parametrize(
    ("spoil", "version", "reward", "why"),
    [
        (_nan, 0, 0.0, "logprob nan"),
        (_positive, 0, 0.0, "positive logprob 0.5"),
        (_prompt_trained, 0, 0.0, "did not sample"),
        (lambda g: None, 1, 0.0, "token of version 1.1, newest is 1.0"),
        (lambda g: None, 0, float("nan"), "reward nan"),
    ],
)
def test_a_group_with_bad_data_is_dropped_with_that_cause(folder, spoil, version, reward, why):
    async def main():
        observer = Notes()
        controller = start(folder, config(), observer)
        await publish(controller, 0)
        work = await controller.admit(2)
        group = group_of(work.assignments[0], version, 1, rewards=(0.5, reward))
        spoil(group)
        await controller.finish_group(group)
        assert controller.core.state.totals.dropped == {"bad data": 1}
        assert why in observer.notes[-1]
        controller.close()

    run(main())


def test_a_token_older_than_the_bound_never_reaches_the_trainer(folder):
    async def main():
        controller = start(folder, config(buffer={"max_staleness": 0}))
        await publish(controller, 0)
        await serve_engine(controller)
        for step in (0, 1):
            for task in (await controller.admit(2)).assignments:
                await controller.finish_group(group_of(task, 0, 1))  # at step 1 an engine that ignores its permit
            if step == 1:
                with pytest.raises(StalenessError, match=r"version 1\.0 .* at step 1: staleness 1, allowed are 0 to 0"):
                    await controller.get_batch(1)
                break
            await controller.get_batch(step)
            await publish(controller, 1)
            await controller.finish_step(StepReport(step=0, version=1, checksum=checksum(1, 1)))
            await serve_engine(controller)
        controller.close()

    run(main())


def test_stale_tokens_of_a_wide_window_leave_the_loss_mask(folder):
    async def main():
        controller = start(folder, config(buffer={"max_staleness": 1, "window": 2}, trainer={"groups_per_step": 1}))
        batch = await late_group(controller)
        assert batch.groups[0].group_id == 1 and batch.num_loss_tokens == 0
        assert not any(r.loss_mask.any() for r in batch.groups[0].rollouts)
        assert controller.core.state.batches[2].record.num_masked_tokens == 4
        controller.close()

    run(main())


async def late_group(controller):
    """The worst case of S = 1, P = 1, W = 2: group 1 starts on version 0 when a batch is trained, and is passed once. Batch 2."""
    await publish(controller, 0)
    await serve_engine(controller)
    (first,) = (await controller.admit(1)).assignments
    await controller.finish_group(group_of(first, 0, 1))
    await train(controller, 0)
    (late,) = (await controller.admit(1)).assignments  # the engine has not confirmed version 1 yet
    await serve_engine(controller)
    (passing,) = (await controller.admit(1)).assignments
    await controller.finish_group(group_of(passing, 1, 1))
    batch = await train(controller, 1)
    assert batch.groups[0].group_id == passing.group_id == 2
    await controller.finish_group(group_of(late, 0, 1, rewards=(0.0, 0.5)))
    return await controller.get_batch(2)


async def train(controller, step):
    batch = await controller.get_batch(step)
    await publish(controller, step + 1)
    await controller.finish_step(StepReport(step=step, version=step + 1, checksum=checksum(1, step + 1)))
    return batch


def test_reports_that_do_not_match_what_was_published_are_refused(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        for wrong, why in (
            ({"checksum": "f" * 32}, "other bytes"),
            ({"version": 3}, "not among"),
            ({"incarnation": 7}, "incarnation 1"),
        ):
            offer = await controller.next_weights("e0", 1, -1)
            right = {"engine_id": "e0", "incarnation": 1, "version": 0, "checksum": checksum(1, 0)}
            with pytest.raises(WeightSyncError, match=why):
                await controller.confirm_weights(offer.slot, EngineReport(**right | wrong))
        assert controller.core.state.engines == {"e0": -1}
        with pytest.raises(WeightSyncError, match="dead run"):
            await controller.publish(await controller.begin_write(), manifest(9, 1))
        controller.close()

    run(main())


def test_a_stalled_batch_names_the_group_it_waits_for(folder):
    async def main():
        controller = start(folder, config(), stall_timeout_s=0.05)
        await publish(controller, 0)
        await serve_engine(controller)
        await controller.admit(2)
        with pytest.raises(DeadlineExceeded, match=r"batch 0 has 0 of 2 groups; 2 are running, the oldest is group 0 \(attempt 0"):
            await controller.get_batch(0)
        controller.close()

    run(main())


def test_a_batch_is_not_late_while_no_engine_has_weights(folder):
    async def main():
        controller = start(folder, config(), stall_timeout_s=0.0)
        controller._quiet_s = 0.05  # the deadline that counts until then
        await publish(controller, 0)
        await controller.admit(2)
        await controller.next_weights("e0", 1, -1)
        with pytest.raises(DeadlineExceeded, match="no engine came into service with weights: batch 0 has 0 of 2 groups"):
            await controller.get_batch(0)
        controller.close()

    run(main())


def test_who_waits_for_another_gives_up_after_it():
    assert wire.METHODS["commit_checkpoint"].deadline_s < deadlines.CHECKPOINT_S
    assert math.isinf(wire.METHODS["get_batch"].deadline_s) and math.isinf(wire.METHODS["next_weights"].deadline_s)


def test_an_engine_that_is_gone_gives_its_lease_to_the_next_one(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        await controller.next_weights("e0", 1, -1)
        with pytest.raises(WeightSyncError, match="3 slots serve 1 engine"):
            await controller.next_weights("e1", 1, -1)
        controller.engine_gone("e0", "it died")
        assert "e0" not in controller.core.state.engines
        assert (await controller.next_weights("e1", 1, -1)).manifest.version == 0
        controller.close()

    run(main())


def test_whoever_follows_the_engines_hears_of_every_change_of_them(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)

        async def heard(known):
            async with asyncio.timeout(5):
                return await controller.next_engines(known)

        waiting = asyncio.create_task(heard({}))
        offer = await controller.next_weights("e0", 1, -1)
        engines = await waiting
        assert engines == {"e0": EngineInService(starts=1, version=-1)}
        waiting = asyncio.create_task(heard(engines))
        await asyncio.sleep(0)
        manifest = offer.manifest
        report = EngineReport(engine_id="e0", incarnation=1, version=0, checksum=manifest.checksum)
        await controller.confirm_weights(offer.slot, report)
        engines = await waiting
        assert engines == {"e0": EngineInService(starts=1, version=0)}
        waiting = asyncio.create_task(heard(engines))
        await asyncio.sleep(0)
        controller.engine_gone("e0", "it died")
        await controller.next_weights("e0", 1, -1)  # and is back, before anybody has looked
        assert await waiting == {"e0": EngineInService(starts=2, version=-1)}
        controller.close()

    run(main())


def test_an_evaluation_whose_engine_died_is_ordered_again_and_one_of_an_older_version_does_not_count(folder):
    async def main():
        controller = start(folder, config(evaluation={"every": 1}))
        await publish(controller, 0)
        await serve_engine(controller)
        first = (await controller.admit(0)).evaluation
        await controller.evaluation_lost(first.number + 7)  # none of ours
        assert controller.core.state.evaluations.running.number == first.number
        await controller.evaluation_lost(first.number)
        again = (await controller.admit(0)).evaluation
        assert again.number == first.number + 1
        await controller.finish_evaluation(evaluated(again.number, version=-1))
        third = (await controller.admit(0)).evaluation
        assert third.number == again.number + 1
        await controller.finish_evaluation(evaluated(third.number, version=0))
        assert controller.core.state.evaluations.handled == {0: 0}
        controller.close()

    run(main())


def test_a_stop_lets_everyone_leave(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        work = await controller.admit(2)
        waiting = asyncio.create_task(controller.get_batch(0))
        await asyncio.sleep(0)
        controller.request_stop("Ctrl-C")
        assert await waiting is None
        assert (await controller.admit(1)).stop
        assert await controller.wait_finished() == "stopped"
        await controller.finish_group(group_of(work.assignments[0], 0, 1))  # what runs may still finish
        assert controller.core.state.num_finished == 1
        controller.close()

    run(main())


def test_the_trainers_weights_are_needed_until_the_run_is_over_and_every_engine_in_service_has_the_last(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        await serve_engine(controller)
        await controller.next_weights("e1", 1, -1)
        taken = asyncio.create_task(controller.weights_taken())
        await asyncio.sleep(0)
        controller.request_stop("Ctrl-C")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taken.done(), "an engine has not got its weights yet"
        controller.engine_gone("e1", "it died")
        async with asyncio.timeout(5):
            await taken
        controller.close()

    run(main())


def test_a_failure_wakes_everyone_who_waits_and_meets_everyone_who_asks(folder):
    async def main():
        controller = start(folder, config())
        await publish(controller, 0)
        await controller.next_weights("e0", 1, -1)
        calls = [controller.get_batch(0), controller.wait_finished(), controller.next_weights("e1", 1, 0)]
        waiting = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        controller.fail(RunFailed("the engine died"))
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, RunFailed)
        with pytest.raises(RunFailed, match="the engine died"):
            await controller.admit(1)
        controller.close()

    run(main())


def test_the_evaluation_of_the_start_is_never_of_another_version(folder):
    async def main():
        observer = Notes()
        controller = start(folder, config(evaluation={"every": 1}, trainer={"steps": 4}), observer)
        await publish(controller, 0)
        await serve_engine(controller)
        first = (await controller.admit(0)).evaluation
        assert controller.core.state.evaluations.running.due == 0 and len(first.rows) == 2
        for step in range(3):
            await make_step(controller, step)
        controller.reassign_running()  # the worker was restarted: what it had begun starts over
        again = (await controller.admit(0)).evaluation
        assert again.number == 1
        assert controller.core.state.evaluations.running.due == 3
        assert controller.core.state.evaluations.handled == {0: -1, 1: -1, 2: -1}
        assert "the evaluation of version 0 is skipped: it had not ended" in "".join(observer.notes)
        assert summarize(controller.core.state, config(), "", 1.0)["eval_reward_first"] is None
        controller.close()

    run(main())


def test_a_full_disk_ends_the_run_with_that_error_and_leaves_a_whole_ledger(folder):
    async def main():
        controller = start(folder, config())
        ledger = controller.core.ledger
        ledger._write(f"PRAGMA max_page_count = {ledger._one('PRAGMA page_count') + 4}")
        with pytest.raises(ExceptionGroup) as caught:
            await Roles(controller).run()
        assert caught.value.subgroup(RunFolderError) is not None and "disk is full" in repr(caught.value.exceptions)
        with pytest.raises(RunFolderError, match="disk is full"):
            await controller.admit(1)
        drawn = controller.core.state.next_draw
        controller.close()
        with LedgerReader.open(folder.ledger) as reader:
            account = check_accounts(reader)
        assert 0 < len(account.places) <= drawn

    run(main())
