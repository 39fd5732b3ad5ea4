"""slipstream against TRL's `GRPOTrainer`, the same training on the same two CPU threads.

    python benchmarks/vs_trl_sync.py [--short] [--json PATH] [--cases NAME ...]

SmolLM2-135M (the same float32 bytes), sums of two one-digit numbers from reasoning-gym, 4 prompts x 8 rollouts a step, temperature 1, the
clipped loss with the mean over all tokens of the batch (TRL: loss_type="dapo", beta=0), clip 0.2, group mean and deviation, AdamW at 2e-5
without decay, gradient clip 1. Groups without variance are trained on every side. Two threads in all:

    trl     TRL 1.16.0 GRPOTrainer, transformers' `generate`, both with 2 threads
    sync    slipstream, max_staleness = 0, launch = "inline": one process whose engine and trainer take turns, so each has both threads
    async   slipstream, max_staleness = 1, launch = "local": engine and trainer side by side, one thread each

Cases: at most 24 new tokens after a short prompt, after one of about 290 tokens (seven worked examples), and exactly 256 new tokens. For
the last one every side is given an end token that is never sampled. Checksums, ledger and versions are on.

Method: the three programs take turns (`turns.py`), a few steps each, in an order that turns by one every round. The asynchronous one has 4
steps in a turn, since its steps overlap and one alone may take more or less than its share. A first turn is not counted: one step, or as
many as fill the pipeline (max_staleness + 1). A figure is samples, or new tokens, over seconds of a turn; a ratio the median of the rounds'
ratios. Completions end where they end, so the sides' mean lengths differ by chance, and the ratio of new tokens per second stands beside
that of samples. The bound is what computing each prompt once can give (`sharing_bounds.py`): what goes beyond it comes from elsewhere, no
padding and less overhead. There are three rounds, of the last case two, since one of them takes ten minutes. The short form, the first case
alone, takes about 5 minutes; the long form about 50, two thirds of them TRL's, and 20 GB of memory, since all three programs are alive.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
import tomli_w
from bench import Report, paired_ratios, spread, start
from peers.chain_sum import messages
from peers.environment import peer_python
from sharing_bounds import operations, sharing_gain
from smollm2 import BODY_PARAMETERS, HEAD_PARAMETERS, endless_folder, model_folder
from turns import Program, Turn

HERE = Path(__file__).parent
OUT = HERE / "out" / "vs_trl_sync"
GROUPS, GROUP_SIZE, THREADS, LEARNING_RATE = 4, 8, 2, 2e-5
PASS_TOKENS = 1280  # of one forward and backward pass at most, on every side; with more, the three programs take over 24 GB
STEP_DEADLINE_S = 1500.0  # the first one holds the start, too
MANY = 10_000  # steps: the programs are ended, they do not end


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    title: str
    new_tokens: int
    examples: int  # worked ones before the question
    endless: bool  # every completion has `new_tokens` tokens
    turn_steps: int  # in the long form, of those whose steps do not overlap
    wanted: float  # times TRL's samples per second
    rounds: int = 3  # turns that each side has


CASES = (
    Case("short", "24 new tokens", 24, 0, False, 2, 3.0),
    Case("examples", "24 new tokens, long prompt", 24, 7, False, 1, 3.0),
    Case("long", "256 new tokens", 256, 0, True, 1, 1.7, rounds=2),
)
SIDES = ("trl", "sync", "async")
MAX_STALENESS = {"sync": 0, "async": 1}
ASYNC_TURN_STEPS = 4


def main() -> None:
    report, options = start("vs_trl_sync", __doc__.splitlines()[0], _options)
    cases = [case for case in CASES if case.name in (options.cases or [c.name for c in (CASES[:1] if options.short else CASES)])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped program is left behind
    python = peer_python()
    results = {}
    for case in cases:
        folder = OUT / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        results[case.name] = measure(case, folder, python, options.rounds or case.rounds, 1 if options.short else case.turn_steps)
    tell(report, cases, results)
    report.finish(options.json)


def _options(parser: Any) -> None:
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--rounds", type=int, help="turns that each side has (default: 3, of the last case 2)")


# ---- running ---------------------------------------------------------------------------------------------------------------------


def measure(case: Case, folder: Path, python: Path, rounds: int, turn_steps: int) -> dict[str, list[Turn]]:
    """The turns of each side, the first one left out: the start, and the steps until as many batches are under way as ever are."""
    steps = {side: ASYNC_TURN_STEPS if side == "async" else turn_steps for side in SIDES}
    model = endless_folder() if case.endless else model_folder()
    rows, num_prompt_tokens = _rows(case, folder / "rows.jsonl", model)
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        programs: dict[str, Program] = {}
        for side in SIDES:
            programs[side] = _start(side, case, folder, model, rows, num_prompt_tokens, python)
            stack.callback(programs[side].close)
            _say(case, side, "start", programs[side].turn(MAX_STALENESS.get(side, 0) + 1, STEP_DEADLINE_S))
        for turn in range(rounds):
            first = turn % len(SIDES)
            for side in SIDES[first:] + SIDES[:first]:
                turns[side].append(programs[side].turn(steps[side], STEP_DEADLINE_S))
                _say(case, side, f"turn {turn + 1}", turns[side][-1])
    return turns


def _say(case: Case, side: str, what: str, turn: Turn) -> None:
    each = turn.wall_s / len(turn.steps)
    print(
        f"{time.strftime('%H:%M:%S')} {case.name} {side}: {what}, {each:.1f} s a step, {turn.cpu_s:.1f} s of CPU",
        file=sys.stderr,
        flush=True,
    )


def _rows(case: Case, path: Path, model: Path) -> tuple[Path, int]:
    """Writes the rows that all sides read; the longest prompt's tokens."""
    from slipstream.config.settings import ModelSettings
    from slipstream.models.loading import load_tokenizer

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = list(reasoning_gym.create_dataset("chain_sum", size=200 + case.examples, seed=1, **options))
    examples, asked = data[: case.examples], data[case.examples :]
    rows = [{"prompt": messages(row, examples), "answer": row["answer"]} for row in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, _ = load_tokenizer(ModelSettings(name=str(model)))
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    return path, max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def _start(side: str, case: Case, folder: Path, model: Path, rows: Path, num_prompt_tokens: int, python: Path) -> Program:
    if side == "trl":
        given = {
            "model": str(model),
            "rows": str(rows),
            "output": str(folder / "trl"),
            "steps": MANY,
            "threads": THREADS,
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            "rows_per_pass": rows_per_pass(num_prompt_tokens + case.new_tokens),
            "new_tokens": case.new_tokens,
            "learning_rate": LEARNING_RATE,
        }
        command = [str(python), str(HERE / "peers" / "trl_sync.py"), json.dumps(given)]
    else:
        run_file = folder / f"{side}.toml"
        run_file.write_text(tomli_w.dumps(_settings(side, case, folder, model, rows, num_prompt_tokens)))
        command = [sys.executable, str(HERE / "step_lines.py"), str(run_file)]
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return Program(side, command, folder / f"{side}.log", {**env, "OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"})


def rows_per_pass(row_tokens: int) -> int:
    """Rollouts of a batch that TRL passes through the model at once: a divisor of the batch.

    >>> rows_per_pass(76), rows_per_pass(316)
    (16, 4)
    """
    return max(n for n in range(1, GROUPS * GROUP_SIZE + 1) if GROUPS * GROUP_SIZE % n == 0 and n * row_tokens <= PASS_TOKENS)


def _settings(side: str, case: Case, folder: Path, model: Path, rows: Path, num_prompt_tokens: int) -> dict[str, Any]:
    """The run file; what it does not name is as shipped."""
    sync = side == "sync"
    threads = THREADS if sync else THREADS // 2
    return {
        "launch": "inline" if sync else "local",
        "run": {"folder": str(folder / f"{side}-run")},
        "model": {"name": str(model)},
        "data": {"train": str(rows)},
        "reward": [{"function": f"{HERE / 'peers' / 'chain_sum.py'}:score"}],
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": case.new_tokens, "temperature": 1.0},
        "engine": {"threads": threads, "max_context": max(16, num_prompt_tokens + case.new_tokens)},
        "buffer": {"max_staleness": MAX_STALENESS[side]},
        "trainer": {
            "steps": MANY,
            "groups_per_step": GROUPS,
            "learning_rate": LEARNING_RATE,
            "threads": threads,
            "max_tokens_per_micro_batch": PASS_TOKENS,
        },
        "loss": {"preset": "grpo"},  # TRL calls it dapo with epsilon_high = epsilon: clipped ratio, mean over the batch's tokens
        "checkpoint": {"every": MANY},
    }


# ---- telling ---------------------------------------------------------------------------------------------------------------------


RATIOS = (("sync", "TRL"), ("async", "TRL"), ("async", "sync"))


def tell(report: Report, cases: list[Case], results: dict[str, dict[str, list[Turn]]]) -> None:
    work = report.table(
        "Work of a step (means)",
        ("case", "side", "prompt tokens", "new tokens a sample", "through the trainer", "of them distinct", "CPU s", "reward"),
        "Through the trainer: tokens of one forward and backward pass, padding included. Reward: mean over the counted steps, from the "
        "same start; so few steps compare no learning.",
    )
    speed = report.table(
        "Trained samples and new tokens per second, median [least, most]",
        ("case", "of what", "TRL", "sync", "async", *(f"{a} / {b}" for a, b in RATIOS)),
        "Of turns and of their ratios. New tokens: those that were sampled and trained; prompts are not counted.",
    )
    bounds = report.table(
        "What sharing the prompt can give at most",
        ("case", "P", "R", "bound", "sync / TRL", "async / TRL", "GFLOP/s TRL", "sync", "async"),
        "Bound: times as many samples, by FLOPs, if each prompt is computed once a group instead of once a rollout. GFLOP/s counts the "
        "matrices of the tokens that each side has to compute, padding not included.",
    )
    for case in cases:
        turns = results[case.name]
        figures = {side: facts(side, turns[side]) for side in SIDES}
        ratios: dict[str, list[list[float]]] = {}
        for what in ("samples", "tokens"):
            rates = {side: paired_ratios(figures[side][what], [turn.wall_s for turn in turns[side]]) for side in SIDES}
            ratios[what] = [paired_ratios(rates[a.lower()], rates[b.lower()]) for a, b in RATIOS]
            speed.rows.append((case.title, what, *(spread(rates[side]) for side in SIDES), *map(spread, ratios[what])))
        for side in SIDES:
            f = figures[side]
            cells = (f["prompt"], f["new"], f["forwarded"], f["distinct"], f["cpu_s"])
            work.rows.append((case.title, side, *(f"{value:.0f}" for value in cells), f"{f['reward']:.2f}"))
        bounds.rows.append(_bound_cells(case, figures, turns, ratios["samples"]))
        report.data[case.name] = {
            side: {**figures[side], "wall_s": [t.wall_s for t in turns[side]], "cpu_each_s": [t.cpu_s for t in turns[side]]}
            for side in SIDES
        }
        for (a, b), rounds in zip(RATIOS, ratios["samples"], strict=True):
            report.at_least(f"{case.title}: {a} / {b}", rounds, case.wanted if b == "TRL" else 1.0, "x")


def _bound_cells(case: Case, figures: dict[str, Any], turns: dict[str, list[Turn]], ratios: list[list[float]]) -> list[str]:
    prompt, new = figures["trl"]["prompt"], figures["trl"]["new"]
    gains = (sharing_gain(prompt, [new] * GROUP_SIZE, BODY_PARAMETERS, HEAD_PARAMETERS), *map(statistics.median, ratios[:2]))
    flops = (_gflops(figures[side], turns[side], shared=side != "trl") for side in SIDES)
    return [case.title, f"{prompt:.0f}", f"{new:.0f}", *(f"{gain:.2f}" for gain in gains), *(f"{rate:.0f}" for rate in flops)]


def facts(side: str, turns: list[Turn]) -> dict[str, Any]:
    """What a side's steps were made of: means over its counted steps."""
    steps = [step for turn in turns for step in turn.steps]
    samples = GROUPS * GROUP_SIZE
    name = "completion_tokens" if side == "trl" else "num_loss_tokens"
    new = statistics.fmean(step[name] for step in steps) / samples
    if side == "trl":
        prompt = statistics.fmean(s["prompt_tokens"] for s in steps) / samples
        forwarded = statistics.fmean(s["padded_tokens"] for s in steps)
        rewards = [s["reward"] for s in steps]
    else:
        forwarded = statistics.fmean(s["packed_tokens"] for s in steps)
        prompt = (forwarded - samples * (new - 1)) / GROUPS  # no rollout's last token is read by anybody, so it is not packed
        rewards = [s["reward_mean"] for s in steps]
    return {
        "samples": [samples * len(turn.steps) for turn in turns],
        "tokens": [sum(step[name] for step in turn.steps) for turn in turns],
        "prompt": prompt,
        "new": new,
        "forwarded": forwarded,
        "distinct": GROUPS * prompt + samples * new if side == "trl" else forwarded,
        "cpu_s": sum(turn.cpu_s for turn in turns) / len(steps),
        "reward": statistics.fmean(rewards),
    }


def _gflops(figures: dict[str, Any], turns: list[Turn], *, shared: bool) -> float:
    """Per second, in the mean of all turns."""
    prompts = figures["prompt"] * (1 if shared else GROUP_SIZE)
    of_a_group = operations(prompts, GROUP_SIZE * figures["new"], BODY_PARAMETERS, HEAD_PARAMETERS)
    return of_a_group * sum(figures["samples"]) / GROUP_SIZE / sum(turn.wall_s for turn in turns) / 1e9


if __name__ == "__main__":
    main()
