"""`slipstream eval`: how good a model is on held-out data."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

from slipstream.cli.arguments import OVERRIDES_HELP, add_json
from slipstream.cli.show import Output, show_sample
from slipstream.cli.target import Target, add_sampling, add_target, find_target, sampling_of
from slipstream.errors import ConfigError, DataError, RunFailed
from slipstream.observe.samples import sample_of
from slipstream.observe.state import number
from slipstream.observe.statistics import mean_interval, pass_at_ks
from slipstream.types import Group, Sampling

HELP = "evaluate a model: mean reward with its interval, pass@k, worst items"
EPILOG = f"""{OVERRIDES_HELP}

examples:
  slipstream eval runs/quickstart-20250101-120000                 the newest checkpoint, as in training
  slipstream eval runs/quickstart-20250101-120000 --untrained --samples 8 --temperature 1
  slipstream eval run.toml --model model/ --data test.jsonl --json

The data is data.eval of the run, unless --data names another. The 95 % interval takes the items as drawn at random; pass@k is the
unbiased estimate, where an answer with reward 1 or more is solved."""
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--data", metavar="SOURCE", help="other data: a file, folder, id:config:split, ... as data.eval takes")
    parser.add_argument("--samples", type=int, help="answers per item; evaluation.samples by default")
    add_sampling(parser)
    parser.add_argument("--limit", type=int, help="only the first items")
    parser.add_argument("--worst", type=int, default=3, help="how many of the worst items to print (3)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.data is not None:
        args.overrides = [*args.overrides, "--data.eval", args.data]
    target = find_target(args)
    evaluation = target.loaded.config.evaluation
    sampling = sampling_of(args, target.loaded, evaluation.temperature)
    num_samples = args.samples or evaluation.samples
    if num_samples > 1 and sampling.temperature == 0:
        raise ConfigError(f"{num_samples} samples at temperature 0 are {num_samples} times the same answer; give --temperature")
    stream = sys.stderr if args.json else sys.stdout
    groups = asyncio.run(evaluate(target, num_samples, sampling, args.limit))
    result = {"run": str(args.run[0]), "model": target.label, "temperature": sampling.temperature, **numbers(groups)}
    if result["scored"] == 0:
        raise RunFailed(f"no answer of {result['items']} items could be scored; the first failure: {first_error(groups)}")
    console = Output(stream)
    print_result(console, result)
    for group in worst(groups, args.worst):
        show_sample(console, sample_of(0, 0, group, group.rollouts[0]), f"item {group.group_id} · mean {number(mean_of(group))}")
    if args.json:
        print(json.dumps(result | {"worst_items": [g.group_id for g in worst(groups, args.worst)]}))
    return 0


async def evaluate(target: Target, num_samples: int, sampling: Sampling, limit: int | None) -> list[Group]:
    """The evaluation rows as scored groups, in their order."""
    from slipstream.cli.session import open_session
    from slipstream.data import load_data

    config = target.loaded.config
    rows = load_data(config, target.loaded.base_folder).eval[:limit]
    if not rows:
        raise DataError("the run has no evaluation data (data.eval); name some with --data")
    async with open_session(config, target.checkpoint) as session:
        for note in session.info.notes:
            print(f"note: {note}", file=sys.stderr)
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task(f"{len(rows)} items", total=len(rows))
            return await session.run(rows, num_samples, sampling, on_group=lambda _: progress.advance(bar))


def numbers(groups: list[Group]) -> dict[str, Any]:
    """The result as a JSON-able object. A failed answer has no reward: it is left out of the mean, and counted."""
    rewards = [[r.reward if r.status.ok else None for r in g.rollouts] for g in groups]
    every = [r for g in groups for r in g.rollouts]
    interval = mean_interval(rewards)
    return {
        "items": len(groups),
        "samples": len(groups[0].rollouts) if groups else 0,
        "scored": sum(r is not None for row in rewards for r in row),
        "failed": sum(not r.status.ok for r in every),
        "reward_mean": interval.mean,
        "reward_low": interval.low,
        "reward_high": interval.high,
        "pass_at_k": {str(k): value for k, value in pass_at_ks(rewards).items()},
        "parts": parts_of(groups),
        "completion_tokens_mean": sum(r.num_sampled_tokens for r in every) / len(every) if every else None,
        "truncated_fraction": sum(bool(r.stop_reason and r.stop_reason.truncated) for r in every) / len(every) if every else None,
    }


def parts_of(groups: list[Group]) -> dict[str, float]:
    """The mean of each score that applied, before weighting."""
    values: dict[str, list[float]] = {}
    for score in (s for g in groups for r in g.rollouts for s in r.scores):
        if score.value is not None:
            values.setdefault(score.name, []).append(score.value)
    return {name: sum(v) / len(v) for name, v in values.items()}


def mean_of(group: Group) -> float | None:
    return sum(group.rewards) / len(group.rewards) if group.rewards else None


def worst(groups: list[Group], count: int) -> list[Group]:
    """The items with the lowest mean reward; those without any reward first."""
    return sorted(groups, key=lambda g: (mean_of(g) is not None, mean_of(g) or 0.0, g.group_id))[:count]


def first_error(groups: list[Group]) -> str:
    return next((r.error for g in groups for r in g.rollouts if r.error), "no reward applied")


def print_result(console: Console, result: dict[str, Any]) -> None:
    low, high = result["reward_low"], result["reward_high"]
    interval = "" if low is None else f"  95 % interval {number(low)} to {number(high)}"
    failed = f", {result['failed']} failed" if result["failed"] else ""
    console.print(
        f"{result['model']}: {result['items']} items x {result['samples']} samples, temperature {result['temperature']:g}{failed}"
    )
    console.print(f"reward [bold green]{number(result['reward_mean'])}[/bold green]{interval}")
    console.print("   ".join(f"pass@{k} {number(value)}" for k, value in result["pass_at_k"].items()))
    if len(result["parts"]) > 1:
        console.print("   ".join(f"{name} {number(value)}" for name, value in result["parts"].items()))
    console.print(
        f"{number(result['completion_tokens_mean'], 1)} tokens a completion, {number(100 * result['truncated_fraction'], 1)} % cut off"
    )
