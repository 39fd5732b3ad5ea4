"""How a run starts and what a refusal leaves behind: nothing new, nothing changed, nothing held. No model is loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import run as run_module
from slipstream import train
from slipstream.config.load import load_tables
from slipstream.config.settings import Config
from slipstream.controller.run_folder import RunFolder
from slipstream.errors import DataError, MemoryNeedError, ResumeError, RunFolderError
from slipstream.launch import inline

ROWS = [{"question": f"What is {i}?", "answer": str(i)} for i in range(8)]


class Loaded(Exception):
    """The launcher was reached."""


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reached(*_: Any) -> None:
        raise Loaded

    monkeypatch.setattr(inline, "run_inline", reached)


def tables(folder: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "launch": "inline",
        "run": {"folder": str(folder)},
        "data": {"train": "builtin:sort_digits"},
        "trainer": {"steps": 4, "groups_per_step": 2},
    }
    return {name: {**base.get(name, {}), **changes.get(name, {})} if name != "launch" else "inline" for name in (*base, *changes)}


def start(folder: Path, *, resume: Any = None, rewind: int | None = None, **changes: Any) -> None:
    """As far as the launcher."""
    with pytest.raises(Loaded):
        train(load_tables(tables(folder, **changes), reward_given=True), reward=len, resume=resume, rewind=rewind)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def test_bad_data_leaves_no_folder(tmp_path: Path) -> None:
    settings = load_tables(tables(tmp_path / "run", data={"train": "none.jsonl"}), reward_given=True)
    with pytest.raises(DataError):
        train(settings, reward=len)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_is_too_small_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_small(config: Config) -> None:
        raise MemoryNeedError(f"the run needs more for {config.model.name}")

    monkeypatch.setattr(run_module, "check_memory", too_small)
    with pytest.raises(MemoryNeedError, match="builtin:tiny"):
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_resume_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(folder)
    (folder / "checkpoints" / ".tmp-4").mkdir()
    before = contents(folder)
    data = load_tables(tables(folder, trainer={"steps": 9}), reward_given=True)
    with pytest.raises(ResumeError, match="no checkpoint of step 3"):
        train(data, reward=len, resume=folder, rewind=3)
    after = contents(folder)
    assert after["config.toml"] == before["config.toml"] and after["ledger.sqlite"] == before["ledger.sqlite"]
    start(folder, resume=folder, trainer={"steps": 9})
    assert contents(folder)["config.toml"] != before["config.toml"] and not (folder / "checkpoints" / ".tmp-4").exists()


def test_an_observer_that_cannot_open_gives_the_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr(run_module, "open_observer", broken)
    with pytest.raises(OSError, match="no terminal"):
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    RunFolder(tmp_path / "run").lock().release()


def test_settings_that_cannot_be_written_are_an_error_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / ".config.toml.tmp").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="cannot be used"):
        train(load_tables(tables(folder), reward_given=True), reward=len)
    RunFolder(folder).lock().release()


def test_the_newest_run_of_a_run_file_that_names_a_folder_is_the_one_there(tmp_path: Path) -> None:
    start(tmp_path / "run")
    start(tmp_path / "run", resume="newest", trainer={"steps": 5})
    assert "steps = 5" in (tmp_path / "run" / "config.toml").read_text()
