"""Several experiments in one run: each is the run that it would be alone, over one copy of the model, however the command ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from run_harness import REWARDS, Tables, Told, deterministic, merged, run, step_lines, tables, told
from test_run_lora import retrained

from slipstream import train
from slipstream.config.load import load_config
from slipstream.run import Result

STEPS = 4
DIFFERENT: dict[str, Tables] = {
    "seed": {"run": {"seed": 1}, "loss": {"kl_coefficient": 0.1}},
    "rank": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "rollout": {"interrupt": "abort_resume"}, "trainer": {"steps": 3}},
}


class Stopped(Exception):
    pass


def lora(folder: Path, **changes: Tables | str) -> Tables:
    """A deterministic run of an adapter, with evaluations and checkpoints."""
    trainer: Tables = {"steps": STEPS, "learning_rate": 1e-2}
    base = deterministic(folder, lora={"rank": 2}, trainer=trainer, checkpoint={"every": 2}, engine={"slots": 6})
    return merged(base, changes)


def together(folder: Path, **more: Any) -> Result:
    return run({**lora(folder), "experiment": [{"name": name, **table} for name, table in DIFFERENT.items()]}, **more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Each of the runs by itself."""
    folder = tmp_path_factory.mktemp("alone")
    for name, table in DIFFERENT.items():
        run(merged(lora(folder / name), table))
    return {name: told(folder / name) for name in DIFFERENT}


def is_as_alone(folder: Path, alone: dict[str, Told]) -> None:
    for name, expected in alone.items():
        found = told(folder / name)
        assert (found.versions, found.batches, found.evaluations) == (expected.versions, expected.batches, expected.evaluations), name


def test_each_is_the_run_that_it_is_alone_bit_for_bit(alone: dict[str, Told], tmp_path: Path) -> None:
    result = together(tmp_path / "run")
    is_as_alone(tmp_path / "run", alone)
    assert {name: each.metrics["steps"] for name, each in result.experiments.items()} == {"seed": STEPS, "rank": 3}
    assert result.metrics["experiments"]["rank"]["run_folder"] == str(tmp_path / "run" / "rank")


def test_however_they_end_they_go_on_together_or_alone(alone: dict[str, Told], tmp_path: Path) -> None:
    def fails(line: dict[str, Any]) -> None:
        if (line["experiment"], line["step"]) == ("seed", 1):
            raise Stopped

    def interrupts(line: dict[str, Any]) -> None:
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        together(folder, on_step=fails)
    stopped = together(folder, on_step=interrupts, resume=folder)
    assert any(each.metrics["steps"] < 3 for each in stopped.experiments.values()), "Ctrl-C came too late to show anything"
    run(merged(lora(tmp_path), DIFFERENT["rank"]), resume=folder / "rank")
    together(folder, resume=folder)
    is_as_alone(folder, alone)


def test_processes_play_their_roles_in_all_of_them(tmp_path: Path) -> None:
    settings = tables(tmp_path / "run", launch="local", lora={"rank": 2}, trainer={"steps": 3, "learning_rate": 1e-2})
    (tmp_path / "rewards.py").write_text(REWARDS)
    one: Tables = {"name": "one", "reward": [{"function": "rewards.py:spread"}]}
    other: Tables = {"name": "other", "reward": [{"function": "rewards.py:spread", "weight": -1.0}], "trainer": {"steps": 2}}
    (tmp_path / "run.toml").write_text(tomli_w.dumps({**settings, "experiment": [one, other]}))
    loaded = load_config([tmp_path / "run.toml"])
    train(loaded)
    assert sorted(path.name for path in (tmp_path / "run" / "log").iterdir()) == ["engine-0.log", "rollout.log", "trainer.log"]
    for experiment, steps in zip(loaded.experiments, (3, 2), strict=True):
        story = told(tmp_path / "run" / experiment.name)
        assert sorted(story.batches) == list(range(steps)) and len(set(story.versions.values())) == steps + 1
        assert retrained(experiment.config, tmp_path / "run" / experiment.name, steps=steps) == story.versions
    assert step_lines(tmp_path / "run" / "one")[-1]["reward_mean"] > 0 > step_lines(tmp_path / "run" / "other")[-1]["reward_mean"]
