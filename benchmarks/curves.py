"""Curves and a table from finished runs: what docs/results.md shows.

    python benchmarks/curves.py [--by-steps] OUT.svg TITLE [NAME=]RUNFOLDER ...

Draws held-out and sampled training reward against wall-clock, or against steps, one colour per run, and prints one table row per
run. A run is called NAME, or by its seed. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from slipstream.observe.metrics import Metrics, read_metrics

LAST_EVALUATIONS = 3
LAST_STEPS = 10
COLOURS = ("#1b6ca8", "#c2571a", "#3a7d44", "#7a4fa3", "#8c6d1f")
COLUMNS = (
    "seed",
    "steps",
    "greedy first",
    "greedy, last three",
    "sampled first ten",
    "sampled last ten",
    "tokens",
    "zero variance",
    "KL k3",
)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def window(lines: list[dict[str, Any]], key: str) -> float:
    """Mean over the lines that have the key."""
    return mean([line[key] for line in lines if line.get(key) is not None])


def row(folder: Path, metrics: Metrics) -> list[str]:
    """One table row: rewards at both ends, and what stands beside them."""
    config = tomllib.loads((folder / "config.toml").read_text())
    evaluations = [line["eval_reward"] for line in metrics.evaluations]
    last = metrics.steps[-LAST_STEPS:]
    values = (
        evaluations[0],
        mean(evaluations[-LAST_EVALUATIONS:]),
        window(metrics.steps[:LAST_STEPS], "reward_mean"),
        window(last, "reward_mean"),
        window(last, "completion_tokens_mean"),
        window(last, "zero_variance_fraction"),
        window(last, "kl_k3"),
    )
    return [str(config["run"]["seed"]), str(len(metrics.steps)), *(f"{value:.3g}" for value in values)]


def finished(metrics: Metrics, by_steps: bool) -> list[float]:
    """Where each version stands on the horizontal axis: steps, or seconds of the run, at which it was finished."""
    return [0.0, *(line["version"] if by_steps else line["time_s"] for line in metrics.steps)]


def draw(runs: list[tuple[str, Metrics]], title: str, target: Path, by_steps: bool) -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for (name, metrics), colour in zip(runs, COLOURS * len(runs), strict=False):
        at = finished(metrics, by_steps)
        evaluated = [(at[line["version"]], line["eval_reward"]) for line in metrics.evaluations if line["version"] < len(at)]
        axis.plot(*zip(*evaluated, strict=True), color=colour, marker="o", markersize=3, label=f"{name}: held out, greedy")
        sampled = [line["reward_mean"] for line in metrics.steps]
        smooth = [mean(sampled[max(0, i - LAST_STEPS + 1) : i + 1]) for i in range(len(sampled))]
        axis.plot(at[1:], smooth, color=colour, linewidth=0.8, alpha=0.6, label="training, sampled")
    axis.set(title=title, xlabel="steps" if by_steps else "wall-clock, s", ylabel="reward", ylim=(0, 1.02))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(runs), frameon=False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("title")
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUNFOLDER")
    parser.add_argument("--by-steps", action="store_true", help="the horizontal axis: steps, not wall-clock")
    options = parser.parse_args()
    runs = []
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for given in options.runs:
        name, _, folder = given.rpartition("=")
        metrics, cells = read_metrics(Path(folder)), row(Path(folder), read_metrics(Path(folder)))
        print("| " + " | ".join(cells) + " |")
        runs.append((name or f"seed {cells[0]}", metrics))
    draw(runs, options.title, options.target, options.by_steps)


if __name__ == "__main__":
    main()
