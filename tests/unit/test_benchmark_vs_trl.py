"""What can be wrong in the comparisons with TRL without anybody noticing: latencies, turns, what a sample is counted as."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_importable():
    """The benchmarks import each other by name, as scripts of one folder do."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- the synchronous comparison


def test_the_facts_of_a_step_are_the_same_for_both_ways_of_counting() -> None:
    """4 prompts of 50 tokens x 8 rollouts of 10 tokens, told by TRL's masks and by slipstream's packing."""
    vs, turns = load("vs_trl_sync"), load("turns")
    by_masks = {"prompt_tokens": 32 * 50, "completion_tokens": 320, "padded_tokens": 32 * (52 + 16), "reward": 0.5}
    by_packing = {"num_loss_tokens": 320, "packed_tokens": 4 * 50 + 32 * 9, "reward_mean": 0.5}
    theirs = vs.facts("trl", [turns.Turn(1.0, 2.0, [by_masks])])
    ours = vs.facts("sync", [turns.Turn(1.0, 2.0, [by_packing])])
    for name in ("samples", "prompt", "new", "cpu_s", "reward"):
        assert theirs[name] == ours[name], name
    assert (ours["prompt"], ours["new"]) == (50, 10)
    assert (theirs["forwarded"], ours["forwarded"]) == (2176, 488)
    assert theirs["distinct"] == 4 * 50 + 320


def test_a_turn_of_two_steps_counts_both() -> None:
    vs, turns = load("vs_trl_sync"), load("turns")
    step = {"num_loss_tokens": 320, "packed_tokens": 488, "reward_mean": 0.5}
    facts = vs.facts("async", [turns.Turn(1.0, 6.0, [step, step]), turns.Turn(1.0, 3.0, [step])])
    assert facts["samples"] == [64, 32] and facts["tokens"] == [640, 320] and facts["cpu_s"] == 3.0


@pytest.mark.parametrize(
    ("completion", "answer", "score"), [("3", "3", 1.0), ("3. It is", "3", 1.0), ("It is 3", "3", 0.3), ("", "3", 0.0), ("4", "3", 0.0)]
)
def test_the_score(completion: str, answer: str, score: float) -> None:
    assert load("peers/chain_sum").score(completion, answer) == score


def test_worked_examples_are_earlier_turns() -> None:
    row, example = {"question": "1 + 1 =", "answer": "2"}, {"question": "2 + 2 =", "answer": "4"}
    told = load("peers/chain_sum").messages(row, [example])
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert told[1]["content"] == "4" and told[2]["content"].startswith("1 + 1 =")


# ---- turns


PROGRAM = """
import json, time
for step in range(1000):
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until: pass
    print(json.dumps({"step": step}), flush=True)
"""


def test_a_program_works_in_its_turns_alone(tmp_path: Path) -> None:
    program = load("turns").Program("counts", [sys.executable, "-c", PROGRAM], tmp_path / "log")
    try:
        program.turn(1, 30.0)
        time.sleep(0.3)  # another's turn
        turn = program.turn(2, 30.0)
    finally:
        program.close()
    assert [step["step"] for step in turn.steps][:2] == [1, 2], "steps were made while it was stopped"
    assert turn.wall_s >= 0.05 and turn.cpu_s > 0


def test_a_program_that_ends_says_why(tmp_path: Path) -> None:
    program = load("turns").Program("fails", [sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log")
    try:
        with pytest.raises(RuntimeError, match="no such thing"):
            program.turn(1, 30.0)
    finally:
        program.close()


def test_the_tree_of_a_process_holds_its_children() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    try:
        assert child in load("turns").tree_of(os.getpid())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


# ---- the asynchronous comparison


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
def test_latency_and_bound_follow_the_speed(speed: float) -> None:
    vs = load("vs_trl_async")
    trainer = vs.GROUPS * vs.GROUP_SIZE / vs.STEP_S
    assert vs.IN_FLIGHT / vs.mean_latency_s(speed) == pytest.approx(speed * trainer)
    assert vs.bound(speed) == pytest.approx(min(speed, 1.0) * trainer)


def test_latencies_have_their_mean_and_their_end() -> None:
    """The cut takes a little off the mean, which is given back."""
    latency, rng = load("peers/latency"), random.Random(0)
    drawn = [latency.draw(rng, 0.8, 1.0, 4.0) for _ in range(50_000)]
    assert statistics.fmean(drawn) == pytest.approx(0.8, rel=0.02)
    assert max(drawn) == pytest.approx(0.8 * 4.0 / latency.cut_mean(1.0, 4.0))


def test_what_became_of_the_samples_adds_up() -> None:
    vs = load("vs_trl_async")
    theirs = vs._outcome("trl", [{"trained": 16, "dropped": 0}, {"trained": 32, "dropped": 12}], _log(100))
    assert (theirs.trained, theirs.dropped, theirs.waiting) == (32, 12, 56)
    assert theirs.trained_share == pytest.approx(32 / 44)
    steps = [{"num_loss_tokens": 240, "masked_stale_tokens": 16}, {"num_loss_tokens": 256, "masked_stale_tokens": 0, "wasted_tokens/x": 64}]
    ours = vs._outcome("shipped", steps, _log(50))
    assert (ours.trained, ours.dropped, ours.waiting) == (31, 5, 14)
    given_up = vs._outcome("ready first", steps, _log(50) | {"cut_off": 4, "cut_off_s": 10.0, "running": 3})
    assert given_up.trained_share == pytest.approx(31 / 40) and (given_up.wasted_time, given_up.running) == (0.2, 3)
    assert json.loads(json.dumps(ours.rate)) == pytest.approx(3.1)


def _log(answered: int) -> dict[str, float]:
    return {
        "finished": answered, "latency_s": 40.0, "cut_off": 0, "cut_off_s": 0.0, "running": 0, "since_first_s": 10.0, "most_running": 64,
    }  # fmt: skip
