"""Curves and a table from finished runs: what docs/results.md shows.

    python benchmarks/curves.py OUT.svg TITLE RUNFOLDER [RUNFOLDER ...]

Draws held-out and sampled training reward against wall-clock, one colour per run, and prints one table row per run. Needs matplotlib.
"""

from __future__ import annotations

import math
import sys
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


def times(metrics: Metrics) -> dict[int, float]:
    """Seconds of the run at which each version was finished."""
    return {0: 0.0} | {int(line["version"]): line["time_s"] for line in metrics.steps}


def draw(runs: list[tuple[Path, Metrics]], title: str, target: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for (folder, metrics), colour in zip(runs, COLOURS * len(runs), strict=False):
        at = times(metrics)
        seed = tomllib.loads((folder / "config.toml").read_text())["run"]["seed"]
        evaluated = [(at[line["version"]], line["eval_reward"]) for line in metrics.evaluations if line["version"] in at]
        axis.plot(*zip(*evaluated, strict=True), color=colour, marker="o", markersize=3, label=f"seed {seed}: held out, greedy")
        sampled = [line["reward_mean"] for line in metrics.steps]
        smooth = [mean(sampled[max(0, i - LAST_STEPS + 1) : i + 1]) for i in range(len(sampled))]
        axis.plot([line["time_s"] for line in metrics.steps], smooth, color=colour, linewidth=0.8, alpha=0.6, label="training, sampled")
    axis.set(title=title, xlabel="wall-clock, s", ylabel="reward", ylim=(0, 1.02))
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(runs), frameon=False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main(arguments: list[str]) -> None:
    target, title, *folders = arguments
    runs = [(Path(folder), read_metrics(Path(folder))) for folder in folders]
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for folder, metrics in runs:
        print("| " + " | ".join(row(folder, metrics)) + " |")
    draw(runs, title, Path(target))


if __name__ == "__main__":
    main(sys.argv[1:])
