"""Going on with a run: after a crash at any call, from a damaged checkpoint, deterministically, and back on purpose."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from controller_fakes import (
    Crash,
    Dying,
    Notes,
    Roles,
    abandon,
    account_of,
    chunk_of,
    config,
    end_of,
    group_of,
    make_step,
    manifest,
    publish,
    serve_engine,
    start,
    write_checkpoint,
)

from slipstream.controller.admission import worst_staleness
from slipstream.controller.controller import open_controller
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder
from slipstream.errors import CheckpointError, ResumeError, WeightSyncError
from slipstream.types import GroupStatus, StopReason
from slipstream.weight_sync.slots import SlotBroker


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("t", tmp_path / "run")


def run(main):
    return asyncio.run(asyncio.wait_for(main, 60))


async def live(folder, settings, when=None, observer=None, outcome=lambda task: {}) -> tuple[object, Roles]:
    """One incarnation: to the end, or until it dies (see Dying)."""
    controller = start(folder, settings, observer)
    roles = Roles(Dying(controller, when) if when else controller, outcome, record=True)
    try:
        await roles.run()
    except ExceptionGroup as errors:
        assert errors.subgroup(Crash) is not None, errors
        abandon(controller)
    else:
        controller.close()
    return controller, roles


def flaky(task):
    """Some groups fail once, some for good, some are flat."""
    n = task.group_id % 7
    return {"error": "deadline: slow"} if (n == 3 and task.attempt == 0) or n == 5 else {"rewards": (1.0, 1.0)} if n == 6 else {}


@pytest.mark.parametrize("calls", [*range(1, 40, 3), 47, 58, 66, 75, 83, 95])
def test_a_crash_in_any_call_loses_no_group_and_trains_none_twice(folder, calls):
    async def main():
        settings = config(buffer={"filter_zero_variance": True, "window": 2})
        first, before = await live(folder, settings, calls, outcome=flaky)
        recorded = {s: tuple(m.group_id for m in b.members) for s, b in first.core.state.batches.items()}
        second, after = await live(folder, settings, outcome=flaky)
        assert second.incarnation == 2 and second.core.finished
        for step, ids in before.trained.items():
            if step >= second.start_step:
                assert after.trained[step] == ids == recorded[step], "trained again in recorded order with recorded groups"
        account = account_of(folder)
        trained = [g for step in sorted(account.batches) for g in account.batches[step]]
        assert len(trained) == len(set(trained)) == 12
        assert second.core.state.totals.trained_groups == 12
        assert max(second.core.state.totals.staleness) <= worst_staleness(1, 2, 2)

    run(main())


def test_two_crashes_and_a_finished_group_keeps_its_place(folder):
    async def main():
        settings = config()
        await live(folder, settings, 40)
        await live(folder, settings, 25)
        third, _ = await live(folder, settings)
        assert third.incarnation == 3 and third.core.finished
        assert account_of(folder).counts["trained"] == 12

    run(main())


def test_running_groups_go_on_from_their_recorded_prefixes_once_their_permits_allow(folder):
    async def main():
        first = start(folder, config())
        await publish(first, 0)
        await serve_engine(first)
        for step in (0, 1):
            await make_step(first, step)
        context = await first.checkpoint_context()
        await first.commit_checkpoint(".tmp-2", write_checkpoint(folder.checkpoints / ".tmp-2", 2, *context))
        await make_step(first, 2)  # recorded and trained, but after the checkpoint
        task, other = (await first.admit(2)).assignments
        chunks = [chunk_of(r) for r in group_of(task, 2, 1).rollouts]
        await first.progress(chunks)
        await first.progress(chunks)  # sent again after a lost answer
        assert first.core.ledger.count("prefixes") == 1, "one row for both chunks"
        await first.checkpoint_context()  # on disk now, like all that came before
        abandon(first)

        second = start(folder, config())
        assert second.start_step == 2
        await publish(second, 2)
        again, fresh = (await second.admit(4)).assignments
        assert (again.group_id, fresh.group_id) == (task.group_id, other.group_id)
        assert [(p.sample, len(p.token_ids), p.spans[0].incarnation) for p in again.prefixes] == [(0, 1, 1), (1, 1, 1)]
        assert fresh.prefixes == ()
        assert again.min_version == 2 + 2 // 2 - 1, "batch 2 is ahead of it once more"
        await serve_engine(second)
        batch = await second.get_batch(2)
        assert [g.group_id for g in batch.groups] == [4, 5]
        abandon(second)

    run(main())


def test_an_end_that_is_told_again_after_every_crash_is_recorded_once(folder):
    """A worker that goes on from a rollout which has ended, but whose group has not, says again that it has."""

    async def main():
        first = start(folder, config())
        await publish(first, 0)
        await serve_engine(first)
        task = (await first.admit(1)).assignments[0]
        rollout = group_of(task, 0, 1).rollouts[0]
        end = end_of(rollout, StopReason.STOP)
        await first.progress([chunk_of(rollout)])
        await first.progress([end])
        await first.checkpoint_context()  # on disk now, like all that came before
        abandon(first)
        for _ in range(2):
            controller = start(folder, config())
            await publish(controller, 0)
            (again, *_) = (await controller.admit(1)).assignments
            assert [(p.sample, p.stop_reason) for p in again.prefixes] == [(0, StopReason.STOP)]
            await controller.progress([end])
            assert controller.core.ledger.count("prefixes") == 2
            abandon(controller)

    run(main())


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["lost", "durable"])
def test_tokens_are_on_disk_soon_and_a_crash_before_costs_those_tokens_and_nothing_else(folder, monkeypatch, seconds):
    monkeypatch.setattr("slipstream.controller.controller.COMMIT_WITHIN_S", 0.1)

    async def main():
        first = start(folder, config())
        await publish(first, 0)
        await serve_engine(first)
        task, other = (await first.admit(2)).assignments
        chunks = [chunk_of(r) for r in group_of(task, 0, 1).rollouts]
        await first.progress(chunks[:1])
        await first.finish_group(group_of(other, 0, 1))  # durable, and with it all that came before
        await first.progress(chunks[1:])
        await asyncio.sleep(seconds)
        abandon(first)

        second = start(folder, config())
        await publish(second, 0)
        (again,) = (await second.admit(1)).assignments
        assert again.group_id == task.group_id and second.core.state.live[other.group_id].status is GroupStatus.FINISHED
        assert [p.sample for p in again.prefixes] == ([0, 1] if seconds else [0])
        await second.progress(chunks)  # those that were lost are sampled again; the rest is known
        await second.checkpoint_context()
        abandon(second)

        third = start(folder, config())
        await publish(third, 0)
        assert [p.sample for p in (await third.admit(1)).assignments[0].prefixes] == [0, 1]
        abandon(third)

    run(main())


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(folder):
    async def main():
        settings = config()
        await live(folder, settings)
        damage(folder.checkpoints / "step-6" / "model.bin")
        observer = Notes()
        second = start(folder, settings, observer)
        assert second.start_step == 4 and second.start.folder == folder.checkpoints / "step-4"
        assert "step-6 is refused" in observer.notes[0] and "model.bin" in observer.notes[0]
        assert (folder.checkpoints / "refused-6").is_dir()
        roles = Roles(second)
        assert await roles.run() == "finished"
        assert sorted(roles.trained) == [4, 5], "with the groups recorded the first time"
        second.close()
        assert account_of(folder).counts == {"trained": 12}
        assert (folder.checkpoints / "step-6").is_dir()

    run(main())


def test_a_damaged_first_checkpoint_falls_back_to_the_initial_model(folder):
    """While fewer checkpoints exist than are kept, the groups of the first batches are still there."""

    async def main():
        settings = config(checkpoint={"every": 4, "keep": 2})
        first = start(folder, settings)
        await publish(first, 0)
        await serve_engine(first)
        for step in range(4):
            await make_step(first, step)
        context = await first.checkpoint_context()
        await first.commit_checkpoint(".tmp-4", write_checkpoint(folder.checkpoints / ".tmp-4", 4, *context))
        abandon(first)
        damage(folder.checkpoints / "step-4" / "model.bin")
        second, roles = await live(folder, settings)
        assert second.start_step == 0 and sorted(roles.trained) == [0, 1, 2, 3, 4, 5]
        assert account_of(folder).counts == {"trained": 12}

    run(main())


def test_without_any_usable_checkpoint_the_run_says_which_were_refused(folder):
    async def main():
        settings = config()
        await live(folder, settings)
        for step in (4, 6):
            damage(folder.checkpoints / f"step-{step}" / "model.bin")
        with pytest.raises(CheckpointError, match=r"step-6.*step-4"):
            start(folder, settings)
        with pytest.raises(CheckpointError, match="only refused-4, refused-6"):
            start(folder, settings)

    run(main())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ledger_seq": 10**6}, "needs event 1000000 of the ledger"),
        ({"run_id": "another"}, "belongs to run another"),
    ],
)
def test_a_checkpoint_that_the_ledger_does_not_reach_or_of_another_run_is_refused(folder, change, why):
    async def main():
        settings = config(checkpoint={"every": 100})
        first, _ = await live(folder, settings, 60)
        of = {"run_id": first.core.state.run_id, "incarnation": 1, "ledger_seq": 20} | change
        write_checkpoint(folder.checkpoints / "step-1", 1, **of)
        observer = Notes()
        second = start(folder, settings, observer)
        assert second.start_step == 0 and why in observer.notes[0]
        second.close()

    run(main())


def test_a_checkpoint_whose_index_row_was_not_written_counts(folder, monkeypatch):
    """Killed between the rename and the event: the rename is the commit point."""

    async def main():
        settings = config()
        controller = start(folder, settings)

        def die(*_):
            raise Crash

        monkeypatch.setattr(controller.core, "checkpoint_committed", die)
        with pytest.raises(ExceptionGroup):
            await Roles(controller).run()
        abandon(controller)
        second = start(folder, settings)
        assert second.start_step == 2
        assert [p.step for p in second.core.state.checkpoints] == [2]
        assert await Roles(second).run() == "finished"
        second.close()
        assert account_of(folder).counts == {"trained": 12}

    run(main())


def test_half_written_and_half_deleted_folders_are_swept(folder):
    for name in (".tmp-3", ".old-1"):
        (folder.checkpoints / name).mkdir()
    start(folder, config()).close()
    assert list(folder.checkpoints.iterdir()) == []


def test_start_weights_other_than_the_checkpoints_are_refused(folder):
    async def main():
        await live(folder, config(), 80)
        second = start(folder, config())
        assert second.start_step > 0
        other = msgspec.structs.replace(manifest(2, second.start_step), checksum="f" * 32)
        with pytest.raises(WeightSyncError, match="the trainer starts from weights ffff"):
            await second.publish(await second.begin_write(), other)
        second.close()

    run(main())


def test_changed_data_or_group_size_is_refused_with_both_values(folder):
    start(folder, config()).close()
    with pytest.raises(ResumeError, match=r"rollout.group_size was 2 and is now 4"):
        start(folder, config(rollout={"group_size": 4}))
    with pytest.raises(ResumeError, match=r"data was 'd' and is now 'other'"):
        open_controller(folder, config(), rows=[{}], data_fingerprint="other", broker=SlotBroker(), observer=Notes())
    start(folder, config(trainer={"steps": 9})).close()  # the lock is free again, and more steps are welcome


def test_a_finished_run_is_extended_by_more_steps(folder):
    async def main():
        await live(folder, config())
        longer, roles = await live(folder, config(trainer={"steps": 8}))
        assert sorted(roles.trained) == [6, 7] and longer.start_step == 6
        assert account_of(folder).counts == {"trained": 16}
        results = longer.core.state.evaluations.results
        assert [r.due for r in results] == [0, 3, 6, 8]

    run(main())


def test_a_deterministic_resume_generates_everything_after_the_checkpoint_again(folder):
    async def main():
        settings = config(run={"deterministic": True})
        first, before = await live(folder, settings, lambda c: c.core.state.step == 3 and c.core.state.next_draw == 10)
        state_at_crash = first.core.state
        second = start(folder, settings)
        state = second.core.state
        assert second.start.kind == "deterministic_resume" and second.start_step == 2 < state_at_crash.step
        assert state.next_batch == 2 and state.next_draw < state_at_crash.next_draw, "as of the checkpoint: the cursor too"
        roles = Roles(second, record=True)
        assert await roles.run() == "finished"
        second.close()
        for step, ids in before.trained.items():
            if step >= 2:
                assert roles.trained[step] == ids, "the same draws have the same numbers"
        account = account_of(folder)
        assert account.counts == {"trained": 12} and sorted(account.places) == list(range(12))
        with LedgerReader.open(folder.ledger) as reader:
            ranges = reader.live_ranges()
            assert len(ranges) == 2 and ranges[0][1] < ranges[1][0] - 1, "what the dead incarnation wrote later no longer counts"

    run(main())


def test_a_deterministic_resume_without_a_checkpoint_starts_over(folder):
    async def main():
        settings = config(run={"deterministic": True}, checkpoint={"every": 100})
        await live(folder, settings, 40)
        second, roles = await live(folder, settings)
        assert second.start.kind == "deterministic_resume" and second.start_step == 0
        assert [t.group_id for t in roles.assigned] == list(range(12))
        assert account_of(folder).counts == {"trained": 12}

    run(main())


def test_a_rewind_drops_what_came_after_and_draws_its_prompts_again(folder):
    async def main():
        settings = config()
        await live(folder, settings)
        rows = {g: p.row for g, p in account_of(folder).places.items()}
        second = start(folder, settings, rewind=4)
        assert second.start.kind == "rewind" and second.start_step == 4
        assert not (folder.checkpoints / "step-6").exists() and (folder.checkpoints / "rewound-6").is_dir()
        roles = Roles(second)
        assert await roles.run() == "finished"
        second.close()
        account = account_of(folder)
        assert account.counts == {"trained": 12, "dropped: rewound": 4}
        gone = [g for g, p in account.places.items() if p.status is GroupStatus.DROPPED]
        again = [t.group_id for t in roles.assigned]
        assert sorted(gone) == [8, 9, 10, 11] and again == [12, 13, 14, 15]
        assert [account.places[g].row for g in again] == [rows[g] for g in gone]
        assert second.core.state.totals.trained_groups == 12

    run(main())


def test_a_rewind_to_the_initial_model(folder):
    async def main():
        settings = config(checkpoint={"every": 100})
        await live(folder, settings, 60)
        drawn = len(account_of(folder).places)
        second = start(folder, settings, rewind=0)
        roles = Roles(second)
        await roles.run()
        second.close()
        account = account_of(folder)
        assert account.counts == {"trained": 12, "dropped: rewound": drawn}
        assert [account.places[drawn + i].row for i in range(drawn)] == [account.places[i].row for i in range(drawn)]

    run(main())


def test_a_rewind_to_the_initial_model_when_the_first_groups_are_gone(folder):
    async def main():
        first, _ = await live(folder, config(), outcome=flaky)
        drawn, generated = first.core.state.next_draw, first.core.state.totals.generated_tokens
        assert 0 not in first.core.state.batches, "covered by the checkpoints that are kept"
        second = start(folder, config(), rewind=0)
        totals = second.core.state.totals
        assert (totals.trained_groups, totals.trained_samples, totals.trained_tokens, sum(totals.staleness.values())) == (0, 0, 0, 0)
        assert totals.generated_tokens == generated == sum(totals.wasted_tokens.values())
        assert account_of(folder).counts == {"dropped: rewound": 12, "dropped: failed": drawn - 12}
        roles = Roles(second)
        assert await roles.run() == "finished"
        second.close()
        account = account_of(folder)
        assert account.counts == {"trained": 12, "dropped: rewound": 12, "dropped: failed": drawn - 12}
        assert [t.row for t in roles.assigned][:4] == [{"question": account.places[g].row} for g in range(4)], "drawn from the beginning"
        third, _ = await live(folder, config(trainer={"steps": 7}))
        assert third.start_step == 6 and third.core.finished

    run(main())


def test_a_deterministic_resume_goes_on_from_a_rewind_that_was_made_since_its_checkpoint(folder):
    async def main():
        settings = config(run={"deterministic": True})
        await live(folder, settings)
        second = start(folder, settings, rewind=4)
        with pytest.raises(ExceptionGroup):
            await Roles(Dying(second, 12)).run()
        abandon(second)
        third, roles = await live(folder, settings)
        assert third.start.kind == "deterministic_resume" and third.start_step == 4
        assert [t.group_id for t in roles.assigned] == [12, 13, 14, 15], "the rewind stands"
        assert account_of(folder).counts == {"trained": 12, "dropped: rewound": 4}

    run(main())


def test_a_deterministic_resume_says_what_keeps_it_from_being_exact(folder):
    async def main():
        settings, notes = config(run={"deterministic": True}), {}
        for number, torch in enumerate(("2.13.0", "2.13.0", "2.14.0")):
            notes[number] = Notes()
            start(folder, settings, notes[number], fingerprint={"torch": torch, "dtype": "float32"}).close()
        said = {number: [n for n in each.notes if "bit-exact" in n] for number, each in notes.items()}
        assert said == {0: [], 1: [], 2: ["the resumed run cannot be bit-exact: torch was 2.13.0, is 2.14.0"]}
        loose = Notes()
        start(folder, config(), loose, fingerprint={"torch": "2.15.0"}).close()
        assert not [n for n in loose.notes if "bit-exact" in n], "only a deterministic run promises it"

    run(main())


def test_a_rewind_names_the_checkpoints_there_are(folder):
    async def main():
        await live(folder, config())
        with pytest.raises(ResumeError, match=r"no checkpoint of step 3 .* there are 0, 4, 6"):
            start(folder, config(), rewind=3)

    run(main())


def test_a_resume_after_a_rewind_and_a_crash(folder):
    async def main():
        settings = config()
        await live(folder, settings)
        second = start(folder, settings, rewind=4)
        with pytest.raises(ExceptionGroup):
            await Roles(Dying(second, 20)).run()
        abandon(second)
        third, _ = await live(folder, settings)
        assert third.start.kind == "resume" and third.start_step == 4
        counts = account_of(folder).counts
        assert counts["trained"] == 12 and counts["dropped: rewound"] == 4

    run(main())


def test_evaluations_of_versions_that_did_not_survive_no_longer_count(folder):
    async def main():
        settings = config(checkpoint={"every": 2}, evaluation={"every": 1})
        first, _ = await live(folder, settings, lambda c: c.core.state.evaluations.handled.get(3) is not None)
        assert first.core.state.evaluations.results[-1].version == 3
        second = start(folder, settings)
        assert second.start_step == 2
        assert second.core.state.evaluations.results[-1].version <= 2
        assert max(second.core.state.evaluations.handled) <= 2
        assert any(r.version == 3 for r in second.core.ledger.evaluations()), "the record stays"
        second.close()

    run(main())
