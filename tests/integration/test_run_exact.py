"""Exact when asked: equal seeds give equal runs, also when killed and resumed; recorded batches retrain to the same bytes; lag is exact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_harness import Tables, all_checksums, run, run_file, sampled_with, step_lines, tables, told

from slipstream import train
from slipstream.config.load import load_config
from slipstream.launch.inline import InlineRun

STEPS = 12
DEADLINE_S = 120.0


class Stopped(Exception):
    pass


def deterministic(folder: Path, seed: int = 0) -> Tables:
    """Checkpoints 3 and 6 fall amid the evaluation of 24 prompts, checkpoint 9 amid rollouts, which fewer slots than rollouts stagger."""
    return tables(
        folder,
        run={"deterministic": True, "seed": seed},
        data={"eval": "builtin:sort_digits:eval"},
        trainer={"steps": STEPS},
        checkpoint={"every": 3},
        evaluation={"limit": 24, "every": 5},
        engine={"slots": 8},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run from a run file that nothing interrupted."""
    folder = tmp_path_factory.mktemp("exact")
    file = run_file(folder, deterministic(folder / "reference"))
    train(load_config([file]))
    return folder / "reference"


def test_equal_seeds_give_equal_runs_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    run(deterministic(tmp_path / "again"))
    run(deterministic(tmp_path / "other", seed=1))
    first, again, other = told(reference), told(tmp_path / "again"), told(tmp_path / "other")
    assert sorted(first.versions) == list(range(STEPS + 1)) and len(set(first.versions.values())) == STEPS + 1
    assert (again.versions, again.batches, again.evaluations) == (first.versions, first.batches, first.evaluations)
    assert other.batches != first.batches
    assert len({s.version for g in first.groups.values() for r in g.rollouts for s in r.spans}) > 2, "the run was not asynchronous"


def test_evaluations_are_of_the_version_they_are_due_at_or_one_soon_after(reference: Path) -> None:
    evaluations = told(reference).evaluations
    assert evaluations[0][0] == 0 and evaluations[STEPS][0] == STEPS
    assert all(due <= version <= due + 2 for due, (version, _, _) in evaluations.items())


def test_a_run_ended_by_an_error_again_and_again_and_resumed_is_the_same_run(reference: Path, tmp_path: Path) -> None:
    folder, ended = tmp_path / "run", []
    for step in (2, 1, 5, 4, 10):  # before the first checkpoint, after it, after the third; the second end of a pair lies before the first

        def fails(line: dict, step: int = step) -> None:
            if line["step"] == step:
                raise Stopped(step)

        with pytest.raises(Stopped):
            run(deterministic(folder), on_step=fails, resume=folder if ended else None)
        ended.append(step)
    run(deterministic(folder), resume=folder)
    first, resumed = told(reference), told(folder)
    assert (resumed.versions, resumed.batches, resumed.evaluations) == (first.versions, first.batches, first.evaluations)
    spans = [r.spans for g in resumed.groups.values() for r in g.rollouts]
    assert any(len({s.incarnation for s in each}) > 1 for each in spans), "no half-generated rollout went on: the test shows nothing"
    assert all(checksum == first.versions[version] for (_, version), checksum in all_checksums(folder).items())


def test_a_run_stopped_while_a_checkpoint_waits_goes_on_from_the_one_before_and_is_the_same_run(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while checkpoint 6 waits for an evaluation: worker and evaluation then come to rest where no uninterrupted run does."""
    ended, calls = InlineRun.evaluation_ended, iter(range(10))

    async def interrupted(inline: InlineRun) -> None:
        if next(calls) == 2:  # after the start, which asks the same, and checkpoint 3
            assert inline._controller.core.state.evaluations.running is not None, "nothing is waited for: the test shows nothing"
            os.kill(os.getpid(), signal.SIGINT)
        await ended(inline)

    folder = tmp_path / "run"
    monkeypatch.setattr(InlineRun, "evaluation_ended", interrupted)
    assert run(deterministic(folder)).metrics["steps"] < STEPS
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-3"], "a checkpoint off its schedule"
    monkeypatch.undo()
    run(deterministic(folder), resume=folder)
    first, resumed = told(reference), told(folder)
    assert (resumed.versions, resumed.batches, resumed.evaluations) == (first.versions, first.batches, first.evaluations)


def test_a_run_killed_at_random_steps_and_resumed_is_the_same_run(reference: Path, tmp_path: Path) -> None:
    choose, folder = random.Random(20), tmp_path / "run"
    file = run_file(tmp_path, deterministic(folder))
    for first, last in ((1, 5), (6, 11)):
        kill_at_step(file, folder, choose.randint(first, last))
    train(load_config([file]), resume=folder)
    first, resumed = told(reference), told(folder)
    assert (resumed.versions, resumed.batches, resumed.evaluations) == (first.versions, first.batches, first.evaluations)


def kill_at_step(file: Path, folder: Path, step: int) -> None:
    """Start or resume the run in a process of its own and kill it as soon as its metrics show the step."""
    begun = (folder / "ledger.sqlite").exists()
    incarnation = max((line["incarnation"] for line in step_lines(folder)), default=0) + 1
    command = [sys.executable, "-m", "slipstream.cli.main", "train", str(file), *(["--resume", str(folder)] if begun else [])]
    with open(file.parent / "output", "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not any(line["incarnation"] == incarnation and line["step"] >= step for line in step_lines(folder)):
            assert process.poll() is None, (file.parent / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it had ended before it was killed"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_lag_holds_every_batch_exactly_that_many_versions_behind(lag: int, tmp_path: Path) -> None:
    run(tables(tmp_path / "run", weight_sync={"lag": lag}, buffer={"max_staleness": lag}, trainer={"steps": 6}))
    assert sampled_with(told(tmp_path / "run")) == {step: {max(0, step - lag)} for step in range(6)}


def test_with_learning_rate_zero_the_run_ends_where_it_began(tmp_path: Path) -> None:
    settings = tables(
        tmp_path / "run",
        data={"eval": "builtin:sort_digits:eval"},
        trainer={"learning_rate": 0.0},
        evaluation={"limit": 8, "every": 2},
    )
    result = run(settings)
    story = told(tmp_path / "run")
    assert len(set(story.versions.values())) == 1 and len(story.versions) == 5
    answers = [items for _, _, items in story.evaluations.values()]
    assert len(answers) >= 2 and all(items == answers[0] for items in answers)
    assert result.metrics["eval_reward_first"] == result.metrics["eval_reward_last"]
    assert all(line["grad_norm"] > 0 for line in step_lines(tmp_path / "run")), "there was nothing to learn anyway"
