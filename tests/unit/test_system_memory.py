"""What the machine and its control groups leave for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import system_memory
from slipstream.system_memory import available_bytes, container_bytes

MIB = 1 << 20


def group(path: Path, limit: str, current: int, inactive_file: int = 0) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")
    return path


def test_this_machine_says_what_it_has():
    assert 64 * MIB < (available_bytes() or 0) < 1 << 50


@pytest.mark.parametrize(("limit", "current", "cached", "left"), [("1000", 600, 100, 500), ("1000", 1200, 0, 0), ("max", 600, 100, None)])
def test_what_a_limit_leaves(tmp_path, limit, current, cached, left):
    assert container_bytes(group(tmp_path, limit, current, cached), "/") == left


def test_the_tightest_group_above_counts(tmp_path):
    group(tmp_path, "max", 0)
    group(tmp_path / "slice", "1000", 900)
    group(tmp_path / "slice" / "own", "5000", 0)
    assert container_bytes(tmp_path, "/slice/own") == 100
    assert container_bytes(tmp_path, "/elsewhere") is None
    assert container_bytes(tmp_path / "absent", "/") is None


@pytest.mark.parametrize(("machine", "container", "expected"), [(5, 3, 3), (2, 3, 2), (None, 3, 3), (5, None, 5), (None, None, None)])
def test_the_smaller_of_machine_and_container(monkeypatch, machine, container, expected):
    monkeypatch.setattr(system_memory, "_machine_bytes", lambda: machine)
    monkeypatch.setattr(system_memory, "container_bytes", lambda: container)
    assert available_bytes() == expected
