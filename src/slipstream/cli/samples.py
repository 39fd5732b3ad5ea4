"""`slipstream samples`: read what the model wrote during a run."""

from __future__ import annotations

import argparse
import sys

from slipstream.cli.arguments import run_folder
from slipstream.cli.show import Output, show_sample
from slipstream.errors import ConfigError
from slipstream.observe.samples import Sample, best, read_samples

HELP = "show the text of rollouts that a run kept, by step, best or worst"
EPILOG = """examples:
  slipstream samples runs/quickstart-20250101-120000            the newest step
  slipstream samples runs/quickstart-20250101-120000 --step 40
  slipstream samples runs/quickstart-20250101-120000 --worst --count 5
  slipstream samples runs/quickstart-20250101-120000 --evaluation

How many rollouts of a step are kept is metrics.samples_per_step."""
TAKES_SETTINGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from pathlib import Path

    parser.add_argument("run", metavar="FOLDER", type=Path, help="run folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the samples of this step (with --evaluation: of this version)")
    which.add_argument("--best", action="store_true", help="those with the highest reward")
    which.add_argument("--worst", action="store_true", help="those with the lowest reward")
    parser.add_argument("--evaluation", action="store_true", help="answers to held-out prompts instead of training rollouts")
    parser.add_argument("--count", "-n", type=int, default=8, help="how many at most (8)")


def run(args: argparse.Namespace) -> int:
    folder = run_folder(args.run)
    samples = read_samples(folder, kind="evaluation" if args.evaluation else "train")
    if not samples:
        raise ConfigError(f"{folder}: no samples yet; a run keeps metrics.samples_per_step rollouts of every step in samples.jsonl")
    console = Output(sys.stdout)
    for sample in choose(samples, args)[: args.count]:
        show_sample(console, sample)
    return 0


def choose(samples: list[Sample], args: argparse.Namespace) -> list[Sample]:
    if args.best or args.worst:
        return best(samples, args.count, worst=args.worst)
    steps = sorted({s.step for s in samples})
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        raise ConfigError(f"--step {step}: samples are there for steps {steps[0]} to {steps[-1]} ({len(steps)} of them)")
    return [s for s in samples if s.step == step]
