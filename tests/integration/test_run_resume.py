"""Going on with a run, going back in it, extending it; what is refused; and errors of the caller's own functions, all in one process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from run_harness import Held, run, spread, step_lines, tables, told

from slipstream.cli.main import main
from slipstream.controller import events as ev
from slipstream.controller.controller import Controller
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_folder import RunFolder
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import ResumeError, RunFailed, RunFolderError
from slipstream.rollout.worker import RolloutWorker
from slipstream.run import Result
from slipstream.trainer.trainer import Trainer


class Stopped(Exception):
    pass


def test_a_finished_run_is_extended_and_a_second_resume_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(tables(folder))
    assert first.metrics["steps"] == 4
    extended = run(tables(folder, trainer={"steps": 6, "learning_rate": 1e-4}), resume=folder)
    again = run(tables(folder, trainer={"steps": 6}), resume=folder)
    story = told(folder)
    assert (extended.metrics["steps"], again.metrics["steps"]) == (6, 6) and again.metrics["incarnation"] == 3
    assert sorted(story.batches) == list(range(6))
    assert story.account.counts == {"trained": 6 * 2}
    assert [line["step"] for line in step_lines(folder)] == [0, 1, 2, 3, 4, 5], "a step was made twice"
    assert step_lines(folder)[-1]["learning_rate"] == pytest.approx(1e-4)
    with LedgerReader.open(folder / "ledger.sqlite") as reader:
        changes = [event.changes for *_, event in reader.live_events() if isinstance(event, ev.SettingsChanged)]
    assert changes == [{"trainer.steps": 6, "trainer.learning_rate": 1e-4}, {"trainer.learning_rate": 1e-3}]


def test_rewind_drops_what_came_after_and_draws_its_prompts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = tables(folder, trainer={"steps": 6}, checkpoint={"every": 2, "keep": 3})
    run(settings)
    before = told(folder)
    run(settings, resume=folder, rewind=2)
    after = told(folder)
    assert after.account.counts["trained"] == 12 and after.account.counts["dropped: rewound"] >= 8
    assert {s: after.batches[s] for s in (0, 1)} == {s: before.batches[s] for s in (0, 1)}
    old = {g for s in range(2, 6) for g in before.account.batches[s]}
    new = {g for s in range(2, 6) for g in after.account.batches[s]}
    assert not old & new, "a rewound group was trained"
    assert Counter(before.account.places[g].row for g in old) == Counter(after.account.places[g].row for g in new)
    with pytest.raises(ResumeError, match=r"no checkpoint of step 3 to rewind to; there are 0, 2, 4, 6"):
        run(settings, resume=folder, rewind=3)


def test_a_run_with_a_callable_goes_on_with_the_callable_and_says_so_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def fails(line: dict) -> None:
        if line["step"] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run(tables(folder), on_step=fails)
    assert main(["train", "--resume", str(folder)]) == 2
    assert "slipstream.train(" in (said := capsys.readouterr().err) and "reward" in said
    result = run(tables(folder), resume=folder)
    assert result.metrics["steps"] == 4 and told(folder).account.counts == {"trained": 8}


def test_changed_settings_are_refused_with_both_values_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tables(folder, trainer={"steps": 2}))
    before = (folder / "config.toml").read_bytes(), (folder / "ledger.sqlite").read_bytes()
    changed = tables(folder, rollout={"group_size": 8}, data={"limit": 50}, trainer={"steps": 9})
    with pytest.raises(ResumeError) as refused:
        run(changed, resume=folder)
    text = str(refused.value)
    assert "rollout.group_size" in text and "4" in text and "8" in text and "data.limit" in text and "50" in text
    assert "trainer.steps" not in text
    assert before == ((folder / "config.toml").read_bytes(), (folder / "ledger.sqlite").read_bytes())


def test_a_folder_in_use_or_already_used_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tables(folder, trainer={"steps": 1}))
    with pytest.raises(RunFolderError, match="already holds a run"):
        run(tables(folder))
    holder = RunFolder.open(folder).lock()
    try:
        with pytest.raises(RunFolderError, match="in use by process"):
            run(tables(folder), resume=folder)
    finally:
        holder.release()


def test_an_error_in_on_step_is_the_error_of_the_run(tmp_path: Path) -> None:
    def fails(line: dict) -> None:
        raise Stopped(f"at step {line['step']}")

    with pytest.raises(Stopped, match="at step 0"):
        run(tables(tmp_path / "run"), on_step=fails)


def test_a_reward_that_always_raises_ends_the_run_with_the_first_traceback(tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        raise KeyError(f"no such thing as {completion!r}")

    with pytest.raises(RunFailed) as failed:
        run(tables(tmp_path / "run"), reward=broken)
    text = str(failed.value)
    assert "every group of the first step failed" in text
    assert "Traceback" in text and 'raise KeyError(f"no such thing as' in text and "test_run_resume.py" in text


def test_one_reward_that_fails_now_and_then_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    calls = Counter[str]()

    def flaky(completion: str) -> float:
        calls["all"] += 1
        if calls["all"] % 11 == 0:
            raise ValueError("now and then")
        return spread(completion)

    result = run(tables(tmp_path / "run", rollout={"max_attempts": 1}), reward=flaky)
    story = told(tmp_path / "run")
    assert result.metrics["steps"] == 4 and story.account.counts["dropped: failed"] >= 1
    assert story.account.counts["trained"] == 8
    assert all(r.status.ok and r.reward is not None for g in story.groups.values() for r in g.rollouts)


def test_the_first_ctrl_c_beside_a_running_loop_saves_and_returns(tmp_path: Path) -> None:
    def interrupts(line: dict) -> None:
        if line["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async def in_a_notebook() -> Result:
        return run(tables(tmp_path / "run", trainer={"steps": 500}), on_step=interrupts)

    before = signal.getsignal(signal.SIGINT)
    result = asyncio.run(in_a_notebook())
    assert 2 <= result.metrics["steps"] < 500
    assert (tmp_path / "run" / "checkpoints" / f"step-{result.metrics['steps']}").is_dir()
    assert signal.getsignal(signal.SIGINT) is before
    resumed = run(tables(tmp_path / "run", trainer={"steps": result.metrics["steps"] + 3}), resume=tmp_path / "run")
    assert resumed.metrics["steps"] == result.metrics["steps"] + 3
    assert set(told(tmp_path / "run").account.counts) == {"trained"}


def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def interrupts(line: dict) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        run(tables(tmp_path / "run", trainer={"steps": 500}, run={"stop_grace_s": 60.0}), on_step=interrupts)


def test_runs_in_one_process_leave_nothing_in_it(tmp_path: Path) -> None:
    run(tables(tmp_path / "warm", trainer={"steps": 1}))
    before = Held.now(tmp_path)
    run(tables(tmp_path / "warm", trainer={"steps": 2}), resume=tmp_path / "warm")
    after = Held.now(tmp_path)
    assert after == before
    roles = (Trainer, EmbeddedEngine, Controller, RolloutWorker)
    assert [thing for thing in gc.get_objects() if type(thing) in roles] == []
