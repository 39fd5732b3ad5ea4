"""Real vLLM servers are killed (kill -9) amid generation: the run goes on, elsewhere or at the successor, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from live_run import GROUP_SIZE, LiveRun, run_file
from test_engine_killed import engines, events_of, homes_of, trained_groups
from test_run_killed import check_story
from vllm_server import START_S, needs_vllm, tiny_model, vllm_python

from slipstream.controller import events as ev
from slipstream.controller.controller import COMMIT_WITHIN_S

pytestmark = needs_vllm

AFTER_LOAD_S = 5.0  # from the server's death to the first new token, the successor's load of the model not counted
STEPS = 8
LOADING = ("start", "load", "start the vLLM server")  # the driver's phases until its server has a model
CHUNKS = "SELECT count(*) FROM prefixes"


def descendants(pid: int) -> list[int]:
    found = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*found, *(each for child in found for each in descendants(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def vllm_run(folder: Path, **engine: Any) -> Path:
    """A run file over vLLM servers; no rollout may fail."""
    file = run_file(folder)
    settings = tomllib.loads(file.read_text())
    settings["model"]["name"] = str(tiny_model(folder / "model"))
    settings["engine"] |= {"type": "vllm", **engine}
    settings["rollout"] |= {"max_attempts": 1, "temperature": 2.0}
    file.write_text(tomli_w.dumps(settings))
    return file


def until_loaded(run: LiveRun, engine_id: str) -> float:
    """When it was."""
    return run.until(lambda: run.state(engine_id).phase not in LOADING and time.monotonic(), START_S)


def half_generated(run: LiveRun, engine_id: str) -> bool:
    """Whether siblings of rollouts that have ended on this engine are under way. Siblings start together, so those have tokens."""
    recorded = [samples for samples in run.recorded().values() if 0 < len(samples) < GROUP_SIZE]
    return any(span.engine_id == engine_id for samples in recorded for chunk in samples for span in chunk.spans)


def kill_server_amid_generation(run: LiveRun, engine_id: str) -> float:
    """Kill the server's first process while rollouts have tokens of it; when that was. The driver stands still, so that the moment
    is that of the kill."""
    driver = run.freeze(engine_id, lambda: half_generated(run, engine_id), lag_s=2 * COMMIT_WITHIN_S)
    server, *others = descendants(driver)
    os.kill(server, signal.SIGKILL)
    run.until(lambda: not any(alive(pid) for pid in [server, *others]), 20.0)  # engine core and worker, by themselves
    killed = time.monotonic()
    os.kill(driver, signal.SIGCONT)
    return killed


def time_without_load(run: LiveRun, killed: float) -> float:
    """Seconds from the death to the first new token in the ledger, but for the time that the driver said it was loading."""
    started = run.until(lambda: run.state("engine-0").phase == "start" and time.monotonic())
    before = run.query(CHUNKS)
    loaded = until_loaded(run, "engine-0")
    first = run.until(lambda: run.query(CHUNKS) > before and time.monotonic())
    assert killed <= started <= loaded <= first
    print(f"killed to started {started - killed:.2f} s, load {loaded - started:.2f} s, loaded to first token {first - loaded:.2f} s")
    return (started - killed) + (first - loaded)


CHANGES = ("--weight_sync.transport", "collective", "--weight_sync.payload", "delta")
ADAPTER = ("--lora.rank", "4", "--weight_sync.payload", "adapter", "--rollout.kv", "recompute")


@pytest.mark.parametrize("settings", [(), CHANGES, ADAPTER], ids=["full", "messages of what changed", "adapter"])
def test_a_server_is_killed_and_its_rollouts_go_on_at_its_successor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
) -> None:
    with LiveRun(vllm_run(tmp_path, python=vllm_python()), "--trainer.steps", str(STEPS), *settings) as run:
        run.until(lambda: run.steps() >= 2, START_S)
        killed = kill_server_amid_generation(run, "engine-0")
        with capsys.disabled():
            assert time_without_load(run, killed) <= AFTER_LOAD_S
        assert run.process.wait(120) == 0, run.output
        assert run.ended() == 0
        assert "the vLLM server (pid" in run.output and "was killed by signal 9" in run.output and "It is started anew" in run.output
    groups = check_story(tmp_path / "run" / "ledger.sqlite", STEPS)
    events = events_of(tmp_path / "run" / "ledger.sqlite")
    assert [type(e).__name__ for e in events if isinstance(e, ev.EngineAdded | ev.EngineRemoved)] == [
        "EngineAdded", "EngineRemoved", "EngineAdded",
    ]  # fmt: skip
    assert not any(isinstance(e, ev.AttemptFailed | ev.Dropped) for e in events)
    assert all(group.attempt == 0 for group in groups)


def test_of_two_servers_one_is_killed_and_its_rollouts_go_on_at_the_other(tmp_path: Path) -> None:
    """It comes back with the weights of then; the other is dropped, and it serves alone; then another is added."""
    ledger = tmp_path / "run" / "ledger.sqlite"
    with LiveRun(vllm_run(tmp_path, python=vllm_python(), replicas=2)) as run:
        run.until(lambda: run.steps() >= 1, START_S)
        for engine_id in ("engine-0", "engine-1"):
            until_loaded(run, engine_id)
        kill_server_amid_generation(run, "engine-1")
        run.until(lambda: run.state("engine-1").phase == "start")
        steps = run.steps()
        run.until(lambda: run.steps() >= steps + 2)
        assert run.state("engine-1").phase in LOADING, "the other one served alone"
        until_loaded(run, "engine-1")
        run.until(lambda: engines(run, "list").splitlines()[1].startswith("engine-1  at version"))
        assert engines(run, "drop", "engine-0").startswith("engine-0 has left")
        steps = run.steps()
        run.until(lambda: run.steps() >= steps + 2)
        assert engines(run, "add").startswith("engine-0 serves at version ")
        steps = run.steps()
        run.until(lambda: run.steps() >= steps + 2)
        run.process.send_signal(signal.SIGINT)
        assert run.ended() == 0, run.output
    check_pool(ledger, dead="engine-1", alive="engine-0")


def check_pool(ledger: Path, *, dead: str, alive: str) -> None:
    """Nothing was lost when the one engine died: it went on at the other, and the dead one had nothing but the weights of then when it came
    back."""
    events, trained = events_of(ledger), trained_groups(ledger)
    assert not any(isinstance(e, ev.AttemptFailed | ev.Dropped) for e in events)
    assert any(home[:2] == (dead, alive) for home in homes_of(trained)), "no rollout went on elsewhere"
    removed = next(place for place, e in enumerate(events) if isinstance(e, ev.EngineRemoved) and e.engine_id == dead)
    back = next(place for place, e in enumerate(events) if place > removed and isinstance(e, ev.EngineAdded) and e.engine_id == dead)
    newest = max(e.version for e in events[:back] if isinstance(e, ev.VersionPublished))
    first = next(e.version for e in events[back:] if isinstance(e, ev.EngineConfirmed) and e.engine_id == dead)
    last = max(e.version for e in events[:removed] if isinstance(e, ev.EngineConfirmed) and e.engine_id == dead)
    assert last < newest <= first
    sampled = {span.version for group in trained for rollout in group.rollouts for span in rollout.spans if span.engine_id == dead}
    assert any(version >= first for version in sampled) and not sampled & set(range(last + 1, first))
