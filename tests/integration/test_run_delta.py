"""Whole runs that send what changed: bit for bit the run that sends whole weights, over files; and over messages, between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_harness import Tables, deterministic, run, step_lines, tables, told

SPARSE: Tables = {"model": {"dtype": "bfloat16"}, "trainer": {"steps": 4, "learning_rate": 1e-5}}


def check_lines(lines: list[dict[str, Any]]) -> None:
    assert all(0 < line["sync_changed_fraction"] < 0.3 and line["sync_repairs"] == 0 for line in lines)
    assert len({line["sync_bytes"] for line in lines}) > 1, "not the bytes of whole weights"


def test_a_deterministic_run_is_the_same_run_with_either_payload(tmp_path: Path) -> None:
    run(deterministic(tmp_path / "full", **SPARSE))
    full = told(tmp_path / "full")
    assert len(set(full.versions.values())) == 5, "the run did not learn, so equal bytes show nothing"
    folder = tmp_path / "delta"
    run(deterministic(folder, weight_sync={"payload": "delta", "transport": "files"}, **SPARSE))
    delta = told(folder)
    assert (delta.versions, delta.batches, delta.evaluations) == (full.versions, full.batches, full.evaluations)
    check_lines(step_lines(folder))
    assert list((folder / "weights").iterdir()) == []


def test_processes_sample_with_the_weights_that_were_published(tmp_path: Path) -> None:
    sync = {"payload": "delta", "transport": "collective"}
    run(tables(tmp_path / "run", launch="local", buffer={"max_staleness": 0}, weight_sync=sync, **SPARSE))
    story = told(tmp_path / "run")
    assert story.account.counts == {"trained": 8} and len(set(story.versions.values())) == 5
    check_lines(step_lines(tmp_path / "run"))
