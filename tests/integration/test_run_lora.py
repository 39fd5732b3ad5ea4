"""Whole runs that train an adapter: only it travels, nothing else changes, checkpoints replay, and what is exported loads elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from run_harness import all_checksums, recorded_batches, run, run_file, step_lines, tables, told
from test_run_exact import Stopped
from transformers import AutoModelForCausalLM

from slipstream import train
from slipstream.cli.main import main
from slipstream.config.load import load_config, load_tables
from slipstream.config.settings import Config
from slipstream.errors import ResumeError
from slipstream.launch.assemble import build_trainer
from slipstream.launch.context import RunContext
from slipstream.models.tiny import tiny_folder
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import checksum

STEPS = 6
FLOOR = 1e-5  # nats: the gap of float32 passes over whole weights


def retrained(config: Config, folder: Path, start_step: int = 0, steps: int = STEPS) -> dict[int, str]:
    """Version -> checksum of what would be sent, from the recorded batches alone."""
    trainer, publisher = build_trainer(RunContext(config, folder, folder, 1, start_step, "replay"), [MemoryFile.create("replay")])
    batches, versions = recorded_batches(folder), {}
    versions[trainer.step] = publisher.pack(0, 1, trainer.step).checksum
    for step in range(trainer.step, steps):
        assert trainer.train_step(batches[step]).skipped is None
        versions[trainer.step] = publisher.pack(0, 1, trainer.step).checksum
    return versions


def worst_gap(lines: list[dict[str, Any]]) -> float:
    """Of fresh tokens between trainer and sampler; steps without any say nothing."""
    return max(line["logprob_gap_max"] for line in lines if line.get("logprob_gap_max") is not None)


def test_a_run_of_processes_sends_the_adapter_alone_and_replays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    settings = tables(
        folder,
        launch="local",
        lora={"rank": 4},
        loss={"kl_coefficient": 0.05},
        data={"eval": 8},
        trainer={"steps": STEPS, "learning_rate": 1e-2},
        evaluation={"every": 3},
        checkpoint={"every": 3, "keep": 3},
    )
    loaded = load_config([run_file(tmp_path, settings)])
    train(loaded)
    story, lines = told(folder), step_lines(folder)
    assert sorted(story.batches) == list(range(STEPS)) and len(set(story.versions.values())) == STEPS + 1
    assert not (folder / "log" / "logprobs.log").exists(), "the reference has a process of its own"
    assert all(not r.arrays for g in story.groups.values() for r in g.rollouts)
    assert 0 < worst_gap(lines) < FLOOR
    assert lines[0]["reference_kl"] < 1e-6 < 1e-4 < lines[-1]["reference_kl"]
    assert retrained(loaded.config, folder) == story.versions
    assert retrained(loaded.config, folder, 3) == {v: c for v, c in story.versions.items() if v >= 3}
    exported_adapter_and_merged_weights_say_the_same(folder, tmp_path, capfd)


def exported_adapter_and_merged_weights_say_the_same(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(folder), str(tmp_path / "whole"), "--merged"]) == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_folder())
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    ids = torch.tensor([[5, 90, 12, 33, 7, 64, 64, 2]])
    with torch.no_grad():
        expected, plain = whole(ids).logits, base(ids).logits
        found = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(ids).logits
    assert torch.allclose(found, expected, atol=1e-4) and (plain - expected).abs().max() > 1e-2
    capfd.readouterr()
    assert main(["generate", str(folder), "--prompt", "sort 4132"]) == 0
    inside = capfd.readouterr().out
    assert main(["generate", str(folder), "--model", str(tmp_path / "whole"), "--prompt", "sort 4132"]) == 0
    assert capfd.readouterr().out == inside


def test_merged_weights_travel_as_whole_ones_do(tmp_path: Path) -> None:
    """DoRA, which is sent no other way; the engine has no adapter."""
    folder = tmp_path / "run"
    settings = tables(folder, lora={"rank": 2, "dora": True}, trainer={"steps": STEPS, "learning_rate": 1e-2}, data={"eval": 4})
    run(settings)
    story = told(folder)
    assert 0 < worst_gap(step_lines(folder)) < FLOOR and len(set(story.versions.values())) == STEPS + 1
    assert retrained(load_tables(settings, reward_given=True).config, folder) == story.versions
    assert main(["export", str(folder), str(tmp_path / "whole"), "--merged"]) == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert checksum(whole) == story.versions[STEPS], "what is exported is not what was sent"


@pytest.mark.parametrize("interrupt", ["in_flight", "abort_resume"])
def test_a_deterministic_run_is_the_same_again_ended_and_resumed(interrupt: str, tmp_path: Path) -> None:
    def settings(name: str):
        return tables(
            tmp_path / name,
            run={"deterministic": True},
            lora={"rank": 2},
            loss={"kl_coefficient": 0.1, "kl_in": "reward"},
            rollout={"interrupt": interrupt},
            trainer={"steps": STEPS, "learning_rate": 1e-2},
            checkpoint={"every": 2},
            engine={"slots": 6},
        )

    def fails(line: dict) -> None:
        if line["step"] == 3:
            raise Stopped

    run(settings("first"))
    with pytest.raises(Stopped):
        run(settings("resumed"), on_step=fails)
    run(settings("resumed"), resume=tmp_path / "resumed")
    first, resumed = told(tmp_path / "first"), told(tmp_path / "resumed")
    assert (resumed.versions, resumed.batches) == (first.versions, first.batches)
    assert all(made == first.versions[version] for (_, version), made in all_checksums(tmp_path / "resumed").items())
    spans = [s for g in first.groups.values() for r in g.rollouts for s in r.spans]
    assert len({s.version for s in spans}) > 2, "the run was not asynchronous"


def test_a_base_in_4_bits_is_the_same_to_all_of_a_run_and_to_one_that_goes_on(tmp_path: Path) -> None:
    """QLoRA: the engine, which holds the rounded weights, samples what the trainer, which holds their codes, computes."""

    def settings(name: str, payload: str, **lora: Any):
        return tables(
            tmp_path / name,
            run={"deterministic": True},
            model={"quantize": "nf4"},
            lora={"rank": 2, **lora},
            loss={"kl_coefficient": 0.1},
            trainer={"steps": 2, "learning_rate": 1e-2},
            checkpoint={"every": 1, "keep": 2},
            weight_sync={"payload": payload},
        )

    def fails(line: dict) -> None:
        raise Stopped

    first = settings("first", "adapter")
    run(first)
    with pytest.raises(Stopped):
        run(settings("resumed", "adapter"), on_step=fails)
    run(settings("resumed", "adapter"), resume=tmp_path / "resumed")
    versions = told(tmp_path / "first").versions
    assert told(tmp_path / "resumed").versions == versions and len(set(versions.values())) == 3
    assert 0 < worst_gap(step_lines(tmp_path / "first")) < FLOOR
    with pytest.raises(ResumeError, match=r"model\.quantize was 'nf4' and is now None"):
        run({**first, "model": {}}, resume=tmp_path / "first")
    run(settings("merged", "full", dora=True))
    assert 0 < worst_gap(step_lines(tmp_path / "merged")) < FLOOR
    assert main(["export", str(tmp_path / "merged"), str(tmp_path / "whole"), "--merged"]) == 0
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert checksum(whole) == told(tmp_path / "merged").versions[2], "what is exported is not what was sent"


def test_export_says_what_a_run_without_an_adapter_cannot(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tables(tmp_path / "run", trainer={"steps": 1}))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--merged"]) == 2
    assert "leave --merged out" in capfd.readouterr().err
