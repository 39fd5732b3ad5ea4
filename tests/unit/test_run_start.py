"""How a run starts and what a refusal leaves behind: nothing new, nothing changed, nothing held. No model is loaded here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream import opening, train
from slipstream import run as run_module
from slipstream.config.load import load_tables
from slipstream.config.settings import Config
from slipstream.controller.run_folder import RunFolder
from slipstream.errors import DataError, MemoryNeedError, ResumeError, RunFailed, RunFolderError
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

    monkeypatch.setattr(opening, "check_memory", too_small)
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

    monkeypatch.setattr(opening, "open_observer", broken)
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


@pytest.mark.parametrize("beside_a_loop", [False, True])
def test_a_signal_while_nothing_can_be_saved_yet_stops_code_that_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside_a_loop: bool
) -> None:
    """Data that loads for ever in one long call; beside a running loop, in a notebook, that call has a thread of its own."""
    release, main_thread = threading.Event(), threading.current_thread()

    def loads_for_ever(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        if not release.wait(0 if threading.current_thread() is main_thread else 60):
            pytest.fail("the signal did not stop it")

    async def in_a_notebook() -> None:
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)

    monkeypatch.setattr(opening, "load_data", loads_for_ever)
    monkeypatch.setattr(run_module, "STOP_S", 0.01)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        if beside_a_loop:
            asyncio.run(in_a_notebook())
        else:
            train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    release.set()
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "run").exists()


def test_the_second_signal_stops_a_launcher_that_does_not_wait_and_what_it_holds_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story: list[str] = []

    async def blocks(runs: Any, rewards: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            story.append("goes on after the first")
            os.kill(os.getpid(), signal.SIGTERM)
            story.append("goes on after the second")
        finally:
            await asyncio.sleep(0)  # children are waited for in here
            story.append("cleaned")

    monkeypatch.setattr(inline, "run_inline", blocks)
    with pytest.raises(KeyboardInterrupt):
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    assert story == ["goes on after the first", "cleaned"]
    RunFolder(tmp_path / "run").lock().release()


def test_the_second_signal_in_another_task_ends_the_run_as_a_cancellation_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []

    async def steps() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    async def launches(runs: Any, rewards: Any) -> None:
        step = asyncio.create_task(steps())
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.gather(step, return_exceptions=True)
            story.append("cleaned")

    monkeypatch.setattr(inline, "run_inline", launches)
    with pytest.raises(KeyboardInterrupt):
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    assert story == ["cleaned"]
    RunFolder(tmp_path / "run").lock().release()


def test_a_signal_in_a_task_that_others_wait_for_does_not_cut_the_clean_up_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone who waits raises it too, and each time it stops the loop."""
    story: list[str] = []

    async def steps() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    async def waits(task: asyncio.Task[None], turns: int) -> None:
        try:
            await task
        finally:
            for _ in range(turns):
                await asyncio.sleep(0)

    async def launches(runs: Any, rewards: Any) -> None:
        step = asyncio.create_task(steps())
        waiting = [asyncio.create_task(waits(step, turns)) for turns in (10, 20, 30)]
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)  # children are waited for in here
            story.append("cleaned")
            await asyncio.gather(step, *waiting, return_exceptions=True)

    monkeypatch.setattr(inline, "run_inline", launches)
    with pytest.raises(KeyboardInterrupt):
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    assert story == ["cleaned"]


def test_a_signal_that_the_controller_hears_of_does_not_strike_those_who_ask_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []

    async def launches(runs: Any, rewards: Any) -> None:
        async def asks() -> None:
            with pytest.raises(RunFailed, match=r"stopped at once \(KeyboardInterrupt\)"):
                await runs[0].controller.wait_finished()
            story.append("told")

        asking = asyncio.create_task(asks())
        await asyncio.sleep(0)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            runs[0].controller.fail(error)
            raise
        finally:
            await asyncio.wait_for(asking, 60)
            story.append("cleaned")

    monkeypatch.setattr(inline, "run_inline", launches)
    with pytest.raises(KeyboardInterrupt):
        train(load_tables(tables(tmp_path / "run"), reward_given=True), reward=len)
    assert story == ["told", "cleaned"]


def test_other_evaluation_data_is_refused_with_both_values_and_another_limit_is_not(tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", tmp_path / "eval.jsonl"
    asked = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(8)]
    rows.write_text("\n".join(map(json.dumps, asked)))
    start(folder, data={"eval": str(rows)})
    start(folder, data={"eval": str(rows)}, evaluation={"limit": 3}, resume=folder)
    rows.write_text("\n".join(map(json.dumps, asked[1:])))
    settings = load_tables(tables(folder, data={"eval": str(rows)}), reward_given=True)
    with pytest.raises(ResumeError, match=r"evaluation data was '\w{32}' and is now '\w{32}'"):
        train(settings, reward=len, resume=folder)


def test_rows_from_python_are_recorded_as_such_and_wanted_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(8)]

    def again(**given: Any) -> None:
        more = {name: table for name, table in tables(folder).items() if name != "data"}
        train(reward=len, **given, **more)

    with pytest.raises(Loaded):
        again(data=rows)
    assert 'train = "python:rows"' in (folder / "config.toml").read_text()
    with pytest.raises(Loaded):
        again(data=rows, resume=folder)
    with pytest.raises(ResumeError, match="data was"):
        again(data=rows[1:], resume=folder)
    with pytest.raises(ResumeError, match=r"data\.train was 'python:rows' and is now 'builtin:sort_digits'"):
        again(resume=folder)
    with pytest.raises(DataError, match=r"its rows in Python; give them again with data=\.\.\."):
        train(load_tables(tables(folder, data={"train": "python:rows"}), reward_given=True), reward=len, resume=folder)


def test_model_and_data_may_be_whole_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("slipstream.run._run_blocking", lambda main, run: seen.append(run._asked.loaded.config))
    train(
        model={"name": "builtin:tiny", "dtype": "bfloat16"},
        data={"train": "builtin:sort_digits", "eval": 50},
        reward=lambda completion: 1.0,
    )
    assert (seen[0].model.dtype, seen[0].data.eval) == ("bfloat16", 50)
