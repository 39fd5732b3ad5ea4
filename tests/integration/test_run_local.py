"""Whole runs with a process per role: bounded staleness, batches that retrain to the same bytes, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_harness import recorded_batches, run_file, sampled_with, step_lines, tables, told

import slipstream
from slipstream.config.load import load_config
from slipstream.config.settings import Config
from slipstream.models.loading import load_model
from slipstream.run import Result, train
from slipstream.trainer.checkpoint import load_checkpoint
from slipstream.trainer.trainer import Trainer
from slipstream.weight_sync.packing import checksum

STEPS = 7


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    descriptors: tuple[str, ...]
    threads: tuple[str, ...]
    children: tuple[str, ...]
    temporary: tuple[str, ...]
    shared: tuple[str, ...]

    @classmethod
    def now(cls, temporary: Path) -> Held:
        gc.collect()
        names = []
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            except FileNotFoundError:  # the one that listed the folder
                continue
        children = [Path(f"/proc/self/task/{t}/children").read_text() for t in os.listdir("/proc/self/task")]
        return cls(
            tuple(sorted(name.split(":[")[0] for name in names)),
            tuple(sorted(thread.name for thread in threading.enumerate())),
            tuple(pid for text in children for pid in text.split()),
            tuple(sorted(os.listdir(temporary))),
            tuple(sorted(name for name in os.listdir("/dev/shm") if "slipstream" in name)),
        )


@dataclass(frozen=True, slots=True)
class LocalRun:
    folder: Path
    config: Config
    result: Result
    before: Held
    after: Held


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """One run with all three roles in processes of their own, started from a run file."""
    folder, temporary = tmp_path_factory.mktemp("local"), tmp_path_factory.mktemp("tmp")
    settings = tables(folder / "run", launch="local", trainer={"steps": STEPS}, checkpoint={"every": 3, "keep": 3})
    loaded = load_config([run_file(folder, settings)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(temporary))
        before = Held.now(temporary)
        result = train(loaded)
        after = Held.now(temporary)
    return LocalRun(folder / "run", loaded.config, result, before, after)


def test_nothing_is_left_open_running_or_lying_about(local: LocalRun) -> None:
    assert local.after == local.before
    assert local.after.children == ()


def test_every_group_is_accounted_for_and_no_token_is_too_old_or_from_the_future(local: LocalRun) -> None:
    story, metrics = told(local.folder), local.result.metrics
    assert len(story.batches) == STEPS == metrics["steps"]
    ages = [step - version for step, versions in sampled_with(story).items() for version in versions]
    assert 0 <= min(ages) and max(ages) <= metrics["staleness_bound"]
    assert metrics["staleness_mean"] > 0, "the run was not asynchronous"


def test_recorded_batches_retrain_to_the_checksum_of_every_version(local: LocalRun) -> None:
    story = told(local.folder)
    model, _, _ = load_model(local.config.model, device="cpu")
    assert retrain(Trainer(local.config, model), local) == story.versions
    resumed = Trainer(local.config, load_model(local.config.model, device="cpu")[0])
    load_checkpoint(local.folder / "checkpoints" / "step-3", resumed)
    assert retrain(resumed, local) == {version: c for version, c in story.versions.items() if version >= 3}
    assert len(set(story.versions.values())) == STEPS + 1, "the run did not learn, so equal bytes show nothing"


def retrain(trainer: Trainer, local: LocalRun) -> dict[int, str]:
    """Version -> checksum of the weights, from the trainer's step to the last."""
    batches = recorded_batches(local.folder, local.config.buffer.max_staleness, local.config.buffer.on_stale)
    versions = {trainer.step: checksum(trainer.model)}
    for step in range(trainer.step, STEPS):
        assert trainer.train_step(batches[step]).skipped is None
        versions[trainer.step] = checksum(trainer.model)
    return versions


def test_synchronous_five_lines_with_a_closure_inside_a_running_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    lines: list[dict[str, Any]] = []
    rows = [{"prompt": f"sort {a}{b}{a}{b}", "answer": "".join(sorted(f"{a}{b}{a}{b}"))} for a in range(4) for b in range(4)]

    def reward(completion: str, answer: str) -> float:
        seen.append(completion)
        return float(completion.strip() == answer)

    async def in_a_notebook() -> Result:
        return slipstream.train(
            model="builtin:tiny",
            data=rows,
            reward=reward,
            on_step=lines.append,
            trainer={"steps": 3, "groups_per_step": 2},
            buffer={"max_staleness": 0},
            rollout={"group_size": 4, "max_new_tokens": 8},
            engine={"slots": 16, "max_context": 64},
            ledger={"keep": "all"},
        )

    before = Held.now(tmp_path)
    result = asyncio.run(in_a_notebook())
    after = Held.now(tmp_path)
    assert result.run_folder.parent == tmp_path / "runs"
    assert [line["step"] for line in lines] == [line["step"] for line in step_lines(result.run_folder)] == [0, 1, 2]
    assert len(seen) == 3 * 2 * 4  # by the closure in this process
    assert sampled_with(told(result.run_folder)) == {0: {0}, 1: {1}, 2: {2}}
    assert result.metrics["staleness_max"] == 0 == result.metrics["staleness_bound"]
    assert (after.descriptors, after.threads, after.children) == (before.descriptors, before.threads, before.children)
