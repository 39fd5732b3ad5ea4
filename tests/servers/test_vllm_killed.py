"""A real vLLM server is killed (kill -9) amid generation: the run goes on at its successor, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
import tomllib
from pathlib import Path

import pytest
import tomli_w
from live_run import GROUP_SIZE, LiveRun, run_file
from test_run_killed import check_story
from vllm_server import needs_vllm, tiny_model, vllm_python

from slipstream.controller import events as ev
from slipstream.controller.controller import COMMIT_WITHIN_S
from slipstream.controller.ledger import LedgerReader

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


def kill_server_amid_generation(run: LiveRun) -> float:
    """Kill the server's first process while rollouts have tokens; when that was. Siblings start together: where some have ended, the others
    have tokens. The driver stands still meanwhile, so that the moment is that of the kill."""

    def half_generated() -> bool:
        return any(0 < len(samples) < GROUP_SIZE for samples in run.recorded().values())

    driver = run.freeze("engine-0", half_generated, lag_s=2 * COMMIT_WITHIN_S)
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
    loaded = run.until(lambda: run.state("engine-0").phase not in LOADING and time.monotonic(), 240.0)
    first = run.until(lambda: run.query(CHUNKS) > before and time.monotonic())
    assert killed <= started <= loaded <= first
    print(f"killed to started {started - killed:.2f} s, load {loaded - started:.2f} s, loaded to first token {first - loaded:.2f} s")
    return (started - killed) + (first - loaded)


@pytest.mark.parametrize("payload", ["full", "adapter"])
def test_a_server_is_killed_and_its_rollouts_go_on_at_its_successor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], payload: str
) -> None:
    file = run_file(tmp_path)
    settings = tomllib.loads(file.read_text())
    settings["model"]["name"] = str(tiny_model(tmp_path / "model"))
    settings["engine"] |= {"type": "vllm", "python": vllm_python()}
    settings["rollout"] |= {"max_attempts": 1, "temperature": 2.0}
    if payload == "adapter":
        settings |= {"lora": {"rank": 4}, "weight_sync": {"payload": "adapter"}}
        settings["rollout"]["kv"] = "recompute"
    settings["trainer"]["steps"] = STEPS
    file.write_text(tomli_w.dumps(settings))
    with LiveRun(file) as run:
        run.until(lambda: run.steps() >= 2, 240.0)
        killed = kill_server_amid_generation(run)
        with capsys.disabled():
            assert time_without_load(run, killed) <= AFTER_LOAD_S
        assert run.process.wait(120) == 0, run.output
        assert run.ended() == 0
        assert "the vLLM server (pid" in run.output and "was killed by signal 9" in run.output and "It is started anew" in run.output
    groups = check_story(tmp_path / "run" / "ledger.sqlite", STEPS)
    with LedgerReader.open(tmp_path / "run" / "ledger.sqlite") as reader:
        events = [event for *_, event in reader.live_events()]
    assert [type(e).__name__ for e in events if isinstance(e, ev.EngineAdded | ev.EngineRemoved)] == [
        "EngineAdded", "EngineRemoved", "EngineAdded",
    ]  # fmt: skip
    assert not any(isinstance(e, ev.AttemptFailed | ev.Dropped) for e in events)
    assert all(group.attempt == 0 for group in groups)
