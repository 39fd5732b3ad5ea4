"""Whole runs whose weights travel as files or as messages: bit for bit the run of shared memory, a process per role, no litter."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_harness import deterministic, run, run_file, step_lines, tables, told

from slipstream import train
from slipstream.config.load import load_config
from slipstream.errors import ConfigError, RunFolderError


def test_a_deterministic_run_is_the_same_run_over_every_transport(tmp_path: Path) -> None:
    run(deterministic(tmp_path / "memory"))
    directory = tmp_path / "elsewhere"
    seen: list[list[str]] = []
    run(
        deterministic(tmp_path / "files", weight_sync={"transport": "files", "directory": str(directory)}),
        on_step=lambda line: seen.append(sorted(path.name for path in directory.iterdir())),
    )
    run(deterministic(tmp_path / "collective", weight_sync={"transport": "collective"}))
    memory = told(tmp_path / "memory")
    for other in (told(tmp_path / "files"), told(tmp_path / "collective")):
        assert (other.versions, other.batches, other.evaluations) == (memory.versions, memory.batches, memory.evaluations)
    assert len(set(memory.versions.values())) == 5, "the run did not learn, so equal bytes show nothing"
    assert all(names and len(names) <= 3 for names in seen), "one for each slot that the broker has used"
    assert list(directory.iterdir()) == []


def test_processes_that_share_a_directory_sample_with_the_weights_that_were_published(tmp_path: Path) -> None:
    """The trainer's logprobs of tokens sampled without staleness are the engine's, up to rounding: both hold the same weights."""
    settings = tables(
        tmp_path / "run",
        launch="local",
        trainer={"steps": 3, "learning_rate": 1e-2},
        buffer={"max_staleness": 0},
        weight_sync={"transport": "files", "directory": "shared"},
    )
    train(load_config([run_file(tmp_path, settings)]))
    story, lines = told(tmp_path / "run"), step_lines(tmp_path / "run")
    assert story.account.counts == {"trained": 6} and len(set(story.versions.values())) == 4
    assert [line["step"] for line in lines] == list(range(3))
    assert all(line["logprob_gap_max"] < 1e-4 for line in lines)
    assert list((tmp_path / "shared").iterdir()) == []
    assert not (tmp_path / "run" / "weights").exists()


def test_a_directory_of_another_run_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    directory = tmp_path / "shared"
    directory.mkdir()
    (directory / "1.0.safetensors").write_bytes(b"of somebody else")
    with pytest.raises(RunFolderError, match="is not of this run"):
        run(tables(tmp_path / "run", weight_sync={"transport": "files", "directory": str(directory)}))
    assert (directory / "1.0.safetensors").read_bytes() == b"of somebody else"


def test_a_directory_without_files_to_put_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'directory = ".*" with transport = "shared_memory", which writes no files'):
        run(tables(tmp_path / "run", weight_sync={"directory": str(tmp_path)}))
