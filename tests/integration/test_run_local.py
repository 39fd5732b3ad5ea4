"""Whole runs with a process per role: bounded staleness, batches that retrain to the same bytes, nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_harness import Held, recorded_batches, run, run_file, sampled_with, step_lines, tables, told

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
class LocalRun:
    folder: Path
    config: Config
    result: Result


def test_a_run_of_processes_is_accounted_for_replays_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    settings = tables(tmp_path / "run", launch="local", trainer={"steps": STEPS}, checkpoint={"every": 3, "keep": 3})
    settings["engine"]["replicas"] = 2
    loaded = load_config([run_file(tmp_path, settings)])
    before = Held.now(temporary)
    local = LocalRun(tmp_path / "run", loaded.config, train(loaded))
    after = Held.now(temporary)
    assert after == before and after.children == ()
    is_accounted_for_and_bounded(local)
    recorded_batches_retrain_to_the_checksum_of_every_version(local)


def is_accounted_for_and_bounded(local: LocalRun) -> None:
    story, metrics = told(local.folder), local.result.metrics
    assert len(story.batches) == STEPS == metrics["steps"] and story.account.counts == {"trained": STEPS * 2}
    ages = [step - version for step, versions in sampled_with(story).items() for version in versions]
    assert 0 <= min(ages) and max(ages) <= metrics["staleness_bound"]
    groups = [group for batch in recorded_batches(local.folder).values() for group in batch.groups]
    assert {s.engine_id for g in groups for r in g.rollouts for s in r.spans} == {"engine-0", "engine-1"}
    assert metrics["staleness_mean"] > 0, "the run was not asynchronous"


def recorded_batches_retrain_to_the_checksum_of_every_version(local: LocalRun) -> None:
    versions = told(local.folder).versions
    assert len(set(versions.values())) == STEPS + 1, "the run did not learn, so equal bytes show nothing"
    assert retrain(Trainer(local.config, load_model(local.config.model, device="cpu")[0]), local) == versions
    resumed = Trainer(local.config, load_model(local.config.model, device="cpu")[0])
    load_checkpoint(local.folder / "checkpoints" / "step-3", resumed)
    assert retrain(resumed, local) == {version: checksum for version, checksum in versions.items() if version >= 3}


def retrain(trainer: Trainer, local: LocalRun) -> dict[int, str]:
    """Version -> checksum of the weights, from the trainer's step to the last."""
    batches = recorded_batches(local.folder)
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


def test_an_error_of_the_caller_ends_a_run_of_processes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fails(line: dict[str, Any]) -> None:
        raise LookupError(f"after step {line['step']}")

    settings = tables(tmp_path / "run", launch="local", trainer={"steps": 50})
    before = Held.now(tmp_path)
    with pytest.raises(LookupError, match="after step 0"):
        run(settings, on_step=fails)
    after = Held.now(tmp_path)
    assert (after.descriptors, after.threads, after.children) == (before.descriptors, before.threads, before.children)
    assert told(tmp_path / "run").account.counts.get("trained", 0) >= 2
