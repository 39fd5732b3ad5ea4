"""Rewards that hang, crash, exit, fork or return nonsense, in real child processes and threads: the group fails, the run goes on."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import ConfigError, DeadlineExceeded, RunFailed, ScoringDeadline, ScoringError
from slipstream.scoring.process import ProcessScorer
from slipstream.scoring.score import score_group
from slipstream.scoring.scorers import CallableScorer
from slipstream.types import Draw, Group, Rollout

REWARDS = """
import os, sys, time, signal, subprocess

def good(completion, answer): return float(completion == answer)
def hang(completion):
    if completion == "hang": time.sleep(600)
    return 1.0
def spin(completion):  # holds the interpreter lock for ever
    import re
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))
def raises(completion): raise ValueError("not today")
def exits(completion): os._exit(7)
def leaves(completion): sys.exit(3)
def killed(completion): os.kill(os.getpid(), signal.SIGKILL)
def nan(completion): return float("nan")
def nothing(completion): return None
def text(completion): return "1.0"
def short(completions, **kw): return [1.0]
def forks(completion):
    os.fork()  # both come back from here
    return float(len(completion))
def leftover(completion, pid_file):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    with open(pid_file, "a") as f: f.write(f"{pid}\\n")
    return 1.0
def leftover_then_exit(completion, pid_file):
    leftover(completion, pid_file)
    os._exit(5)
def leftover_then_hang(completion, pid_file):
    leftover(completion, pid_file)
    time.sleep(600)
def whoami(completion): return os.getpid()
def ignores_signals(completion):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
def prints(completion):
    print("noise on stdout")
    os.write(1, b"raw noise")
    assert sys.stdin.read() == ""
    return 1.0
def secrets(completion): return float("SLIPSTREAM_SECRET" in os.environ)
async def asynchronous(completion):
    import asyncio
    await asyncio.sleep(0)
    return 1.0
def alarm(completion):  # what math-verify does: needs the main thread
    signal.signal(signal.SIGALRM, lambda *_: None)
    return 1.0
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def group(*completions: str) -> Group:
    empty = np.zeros(1, dtype=np.int32)
    rollouts = tuple(
        Rollout(
            group_id=3,
            sample=i,
            prompt_length=1,
            token_ids=empty,
            logprobs=empty.astype(np.float32),
            loss_mask=empty.astype(bool),
            completion=text,
        )
        for i, text in enumerate(completions)
    )
    return Group(group_id=3, draw=Draw(number=3, row=0, epoch=0, dataset="d"), row={"prompt": "p", "answer": "ok"}, rollouts=rollouts)


def run(scorer, main):
    """`main(scorer)`, and the scorer closed whatever happens."""

    async def whole():
        try:
            async with asyncio.timeout(60):
                return await main(scorer)
        finally:
            await scorer.close()

    return asyncio.run(whole())


def make(rewards: Path, name: str, **more) -> ProcessScorer:
    return ProcessScorer(f"{rewards}:{name}", name=name, **more)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def test_a_good_function_scores_in_a_process_that_is_kept(rewards):
    async def main(scorer):
        assert [s.value for s in await scorer.score(group("ok", "no"))] == [1.0, 0.0]

    run(make(rewards, "good"), main)

    async def same(scorer):
        first, second = await scorer.score(group("a")), await scorer.score(group("a"))
        assert first[0].value == second[0].value != os.getpid()

    run(make(rewards, "whoami"), same)


def test_a_hang_is_killed_at_its_deadline_and_the_next_group_gets_a_new_process(rewards):
    async def main(scorer):
        await scorer.start()
        began = time.monotonic()
        with pytest.raises(ScoringDeadline, match=r"reward 'hang' did not answer within 0.5 s \(killed\)"):
            await scorer.score(group("fine", "hang"))
        assert time.monotonic() - began < 3
        assert [s.value for s in await scorer.score(group("fine"))] == [1.0]

    run(make(rewards, "hang", timeout_s=0.5), main)


@pytest.mark.parametrize("name", ["spin", "ignores_signals"])
def test_a_function_that_cannot_be_interrupted_is_killed_too(rewards, name):
    async def main(scorer):
        await scorer.start()
        pid = scorer._idle[0]._process.pid
        with pytest.raises(ScoringDeadline):
            await scorer.score(group("x"))
        assert gone(pid)

    run(make(rewards, name, timeout_s=0.5), main)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"reward 'raises' raised ValueError: not today\nTraceback[\s\S]*in raises"),
        ("exits", r"reward 'exits' ended its process \(exit code 7\)"),
        ("leaves", "reward 'leaves' raised SystemExit: 3"),
        ("killed", r"reward 'killed' ended its process \(killed by SIGKILL\)"),
        ("nan", "reward 'nan' returned nan for sample 0"),
        ("text", r"reward 'text' returned '1.0' \(str\)"),
        ("short", r"reward 'short' returned 1 rewards for 2 samples: \[1.0\]"),
    ],
)
def test_what_goes_wrong_fails_the_group_and_is_named_again_the_next_time(rewards, name, message):
    async def main(scorer):
        for _ in range(2):
            with pytest.raises(ScoringError, match=message):
                await scorer.score(group("a", "b"))
        failed = await score_group(group("a", "b"), [scorer])
        assert all(not r.status.ok and r.reward is None for r in failed.rollouts)  # never 0.0
        assert failed.rollouts[0].error.startswith("scoring failed: reward ")

    run(make(rewards, name), main)


def test_none_is_not_applicable(rewards):
    async def main(scorer):
        assert [s.value for s in await scorer.score(group("a"))] == [None]

    run(make(rewards, "nothing"), main)


def test_a_function_that_forks_and_comes_back_twice_answers_once(rewards):
    async def main(scorer):
        for length in range(4):  # an answer of the copy would be taken for the answer to the next call
            assert [s.value for s in await scorer.score(group("x" * length))] == [float(length)]

    run(make(rewards, "forks", num_children=1), main)


@pytest.mark.parametrize("name", ["leftover", "leftover_then_exit", "leftover_then_hang"])
def test_what_a_function_forked_does_not_outlive_its_process(rewards, tmp_path, name):
    pids = tmp_path / "pids"

    async def main(scorer):
        if name == "leftover":
            assert [s.value for s in await scorer.score(group("a"))] == [1.0]
        else:
            with pytest.raises(ScoringError):
                await scorer.score(group("a"))

    run(make(rewards, name, options={"pid_file": str(pids)}, timeout_s=1.0 if name == "leftover_then_hang" else 30.0), main)
    (pid,) = (int(line) for line in pids.read_text().split())
    assert gone(pid)


@pytest.mark.parametrize(("name", "value"), [("prints", 1.0), ("secrets", 0.0), ("asynchronous", 1.0), ("alarm", 1.0)])
def test_functions_may_print_await_and_use_alarms_but_see_no_secrets(rewards, monkeypatch, name, value):
    monkeypatch.setenv("SLIPSTREAM_SECRET", "x")

    async def main(scorer):
        for _ in range(2):
            assert [s.value for s in await scorer.score(group("a"))] == [value]

    run(make(rewards, name), main)


def test_groups_are_scored_by_two_processes_at_a_time(rewards):
    async def main(scorer):
        results = await asyncio.gather(*(scorer.score(group("a")) for _ in range(6)))
        assert len({r[0].value for r in results}) == 2

    run(make(rewards, "whoami"), main)


def test_a_cancelled_call_kills_its_process(rewards):
    async def main(scorer):
        await scorer.start()
        pid = scorer._idle[0]._process.pid
        task = asyncio.create_task(scorer.score(group("hang")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gone(pid)
        assert [s.value for s in await scorer.score(group("fine"))] == [1.0]

    run(make(rewards, "hang"), main)


def test_a_function_that_does_not_load_is_a_wrong_setting(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\ndef score(completion): return 1.0\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(4)\n")
    for file, message in (("broken.py", "No module named 'nothing_of_that_name'"), ("dies.py", "exit code 4"), ("absent.py", "no file")):

        async def main(scorer, message=message):
            with pytest.raises(ConfigError, match=message):
                await scorer.start()

        run(ProcessScorer(f"{tmp_path}/{file}:score", name="score"), main)


def test_children_end_when_their_parent_is_killed(rewards):
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_scoring_process import group
from slipstream.scoring.process import ProcessScorer
async def main():
    scorer = ProcessScorer({f"{rewards}:hang"!r}, name="hang")
    await scorer.start()
    print(scorer._idle[0]._process.pid, flush=True)
    await scorer.score(group("hang"))
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(child)


def test_closing_leaves_no_process_thread_or_descriptor(rewards):
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def main(scorer):
        with pytest.raises(ScoringDeadline):
            await scorer.score(group("hang"))
        await scorer.score(group("fine"))
        pids.append(scorer._idle[0]._process.pid)

    pids: list[int] = []
    before = fds()
    for _ in range(3):
        run(make(rewards, "hang", timeout_s=0.2), main)
    assert all(gone(pid) for pid in pids) and len(pids) == 3
    assert fds() <= before
    assert not [t for t in threading.enumerate() if t.name.startswith("watch")]


def test_in_a_deterministic_run_a_scorers_deadline_ends_the_run(rewards):
    async def main(scorer):
        with pytest.raises(DeadlineExceeded, match=r"reward 'hang' did not answer .* ends a deterministic run"):
            await score_group(group("hang"), [scorer], deadlines_are_fatal=True)

    run(make(rewards, "hang", timeout_s=0.2), main)


# ---- callables, in threads


def test_a_closure_scores_in_a_thread_one_call_at_a_time():
    seen, inside = [], []

    def reward(completion):
        inside.append(1)
        seen.append((len(inside), threading.current_thread() is threading.main_thread()))
        inside.pop()
        return 1.0

    async def main(scorer):
        await asyncio.gather(*(scorer.score(group("a", "b")) for _ in range(4)))
        assert seen == [(1, False)] * 8
        assert scorer.name == "reward"

    run(CallableScorer(reward), main)


def test_a_callable_past_its_deadline_fails_its_group_and_after_a_limit_the_run():
    release = threading.Event()

    def slow(completion):
        release.wait(30)
        return 1.0

    async def main(scorer):
        for _ in range(3):
            failed = await score_group(group("a"), [scorer])
            assert failed.rollouts[0].error == "scoring failed: reward 'slow' did not answer within 0.05 s (its thread is lost)"
        with pytest.raises(RunFailed, match=r"reward 'slow' did not answer .* 4 of its threads still run"):
            await score_group(group("a"), [scorer])

    try:
        run(CallableScorer(slow, timeout_s=0.05), main)
    finally:
        release.set()


def test_lost_threads_that_end_are_no_longer_counted():
    releases = [threading.Event() for _ in range(8)]
    calls = iter(releases)

    def slow(completion):
        next(calls).wait(30)
        return 1.0

    async def main(scorer):
        for release in releases:
            with pytest.raises(ScoringDeadline):
                await scorer.score(group("a"))
            release.set()
            for thread in scorer._threads._lost:
                thread.join(10)
            assert scorer._threads.num_lost == 0

    run(CallableScorer(slow, timeout_s=0.02), main)


@pytest.mark.parametrize(
    ("error", "message"), [(StopIteration(), "StopIteration"), (SystemExit(3), "SystemExit: 3"), (TimeoutError("mine"), "mine")]
)
def test_a_callable_may_raise_anything(error, message):
    def bad(completion):
        raise error

    async def main(scorer):
        failed = await score_group(group("a"), [scorer])
        assert failed.rollouts[0].error.startswith("scoring failed: ") and message in failed.rollouts[0].error

    run(CallableScorer(bad), main)
