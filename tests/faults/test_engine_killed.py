"""Whole runs whose engines are killed (kill -9): the run goes on, loses nothing, and has tokens again as soon as a model is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_run import GROUP_SIZE, LiveRun, run_file
from test_run_killed import check_story

from slipstream.controller import events as ev
from slipstream.controller.controller import COMMIT_WITHIN_S
from slipstream.controller.ledger import LedgerReader
from slipstream.types import Group

pytestmark = pytest.mark.timeout(600)

AFTER_LOAD_S = 5.0  # from an engine's death to the first pass of its successor, the load of the model not counted
STEPS = 12


def events_of(ledger: Path) -> list[ev.Event]:
    with LedgerReader.open(ledger) as reader:
        return [event for *_, event in reader.live_events()]


def trained_groups(ledger: Path) -> list[Group]:
    with LedgerReader.open(ledger) as reader:
        finished = [event for *_, event in reader.live_events() if isinstance(event, ev.GroupFinished)]
        return [reader.group(event.group_id, event.attempt) for event in finished]


def homes_of(groups: list[Group]) -> set[tuple[str, ...]]:
    """The engines that each rollout was on, one after the other."""
    return {tuple(dict.fromkeys(span.engine_id for span in rollout.spans)) for group in groups for rollout in group.rollouts}


def engines(run: LiveRun, what: str, *arguments: str) -> str:
    """What `slipstream engines` says of the run."""
    command = [sys.executable, "-m", "slipstream.cli.main", "engines", what, str(run.folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_amid_generation(run: LiveRun, engine_id: str) -> float:
    """Kill the engine while it has rollouts with tokens; when that was. Siblings start together: where some have ended, the others have."""

    def half_generated() -> bool:
        recorded = [samples for samples in run.recorded().values() if 0 < len(samples) < GROUP_SIZE]
        return any(span.engine_id == engine_id for samples in recorded for chunk in samples for span in chunk.spans)

    pid = run.freeze(engine_id, half_generated, lag_s=2 * COMMIT_WITHIN_S)
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def time_without_load(run: LiveRun, engine_id: str, killed: float) -> float:
    """Seconds from the death to the successor's first pass, but for the time that it said it was loading its model."""
    started = run.until(lambda: run.state(engine_id).phase == "start" and time.monotonic())
    began = run.until(lambda: run.state(engine_id).phase == "load" and time.monotonic())
    loaded = run.until(lambda: run.state(engine_id).phase not in ("start", "load") and time.monotonic())
    first = run.until(lambda: run.state(engine_id).phase == "tick" and time.monotonic())
    assert killed <= started <= began <= loaded <= first
    return (started - killed) + (first - loaded)


def test_an_engine_alone_is_killed_and_its_rollouts_go_on_at_its_successor(tmp_path: Path) -> None:
    """Weights travel in a group with the engine: it is made anew with its successor."""
    file = run_file(tmp_path)
    with LiveRun(file, "--weight_sync.transport", "collective", "--trainer.steps", str(STEPS), "--rollout.max_attempts", "1") as run:
        run.until(lambda: run.steps() >= 2)
        killed = kill_amid_generation(run, "engine-0")
        assert time_without_load(run, "engine-0", killed) <= AFTER_LOAD_S
        assert run.process.wait(120) == 0, run.output
        assert run.ended() == 0
        assert "engine-0 (pid" in run.output and "was killed by SIGKILL" in run.output and "It is started anew" in run.output
    groups = check_story(tmp_path / "run" / "ledger.sqlite", STEPS)
    events = events_of(tmp_path / "run" / "ledger.sqlite")
    assert [type(e).__name__ for e in events if isinstance(e, ev.EngineAdded | ev.EngineRemoved)] == [
        "EngineAdded", "EngineRemoved", "EngineAdded",
    ]  # fmt: skip
    assert not any(isinstance(e, ev.AttemptFailed | ev.Dropped) for e in events)
    assert all(group.attempt == 0 for group in groups)


def test_engines_are_added_killed_and_dropped_while_a_run_trains(tmp_path: Path) -> None:
    """Of two engines one is killed: its rollouts go on at the other until it is back."""
    file = run_file(tmp_path)

    with LiveRun(file, "--rollout.max_attempts", "1") as run:
        run.until(lambda: run.steps() >= 1)
        assert engines(run, "add").startswith("engine-1 serves at version ")
        assert [line.split()[:2] for line in engines(run, "list").splitlines()] == [["engine-0", "at"], ["engine-1", "at"]]
        kill_amid_generation(run, "engine-1")
        run.until(lambda: run.state("engine-1").phase == "start")
        steps = run.steps()
        run.until(lambda: run.steps() > steps)  # the other one serves alone
        run.until(lambda: run.state("engine-1").phase == "tick")
        assert engines(run, "drop", "engine-0").startswith("engine-0 has left")
        steps = run.steps()
        run.until(lambda: run.steps() >= steps + 3)  # the one that came back serves alone
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 0, run.output
    events = events_of(tmp_path / "run" / "ledger.sqlite")
    killed, dropped = (event for event in events if isinstance(event, ev.EngineRemoved))
    assert (killed.engine_id, dropped.engine_id, dropped.reason) == ("engine-1", "engine-0", "dropped by request")
    assert not any(isinstance(e, ev.AttemptFailed | ev.Dropped) for e in events)
    homes = homes_of(trained_groups(tmp_path / "run" / "ledger.sqlite"))
    assert any(home[:2] == ("engine-1", "engine-0") for home in homes), "no rollout went on elsewhere"
    assert any(isinstance(e, ev.EngineConfirmed) and e.engine_id == "engine-1" for e in events[events.index(killed) :])
