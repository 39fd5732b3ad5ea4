"""Gates at the controller: rollouts that start anew, barrier, versions that are not published, ready first, less staleness."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from controller_fakes import (
    Notes,
    Roles,
    abandon,
    account_of,
    checksum,
    chunk_of,
    config,
    group_of,
    make_step,
    publish,
    serve_engine,
    start,
    train,
)

from slipstream.controller import events as ev
from slipstream.controller.run_folder import RunFolder
from slipstream.errors import LedgerError
from slipstream.launch import wire
from slipstream.types import StepReport


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


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
        await controller.checkpoint_context()  # on disk now, like all that came before
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
        reason = controller.core.why_no_work()
        assert "the barrier holds version 1 back" in reason and "the oldest is group 3" in reason
        await controller.finish_group(group_of(tasks[3], 0, 1, error="it broke"))
        await turns()
        assert not offer.done(), "it is to be tried again, and can be on the version there is"
        (again,) = (await controller.admit(4)).assignments
        await controller.finish_group(group_of(again, 0, 1))
        assert (await offer).manifest.version == 1
        assert "barrier" not in controller.core.why_no_work()
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
