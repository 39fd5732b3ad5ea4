"""Curves of the study in learning.py: mean over seeds with its 95 % interval, one colour a setting. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from learning_report import SYNC, Results, rows, title
from matplotlib.axes import Axes
from study_statistics import SAMPLES, SECONDS, at, interval

# Okabe and Ito's colours, which those who do not see all colours can tell apart as well; the synchronous runs are black and dashed.
BLACK, COLOURS = "#222222", ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
POINTS = 120
SVG = {"Date": None}
plt.rcParams.update({"svg.hashsalt": "slipstream", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def draw_curve(axis: Axes, records: Mapping[int, Any], column: int, label: str, colour: str, *, dashed: bool = False) -> None:
    """Mean and interval over seeds, on places up to the end of the run that ends first."""
    end = min(rows(record)[-1][column] for record in records.values())
    places = [end * i / POINTS for i in range(POINTS + 1)]
    found = [interval([at(rows(record), column, place) for record in records.values()]) for place in places]
    axis.plot(places, [f.mean for f in found], color=colour, linestyle="--" if dashed else "-", linewidth=1.6, label=label)
    if found[0].count > 1:
        low, high = [max(0.0, f.mean - f.half) for f in found], [min(1.0, f.mean + f.half) for f in found]
        axis.fill_between(places, low, high, color=colour, alpha=0.13, linewidth=0)


def draw_panel(axis: Axes, results: Results, names: Sequence[str], column: int, heading: str) -> None:
    """The synchronous runs and these settings, as far as they have records, with a legend below the axis."""
    colours = iter(COLOURS)
    for name in (SYNC, *names):
        colour = BLACK if name == SYNC else next(colours)
        if results.get(name):
            draw_curve(axis, results[name], column, title(name), colour, dashed=name == SYNC)
    axis.set_title(heading, fontsize=10)
    axis.set_xlabel("wall-clock, s" if column == SECONDS else "trained samples, thousands")
    axis.set_ylim(0, 1.02)
    axis.set_xlim(left=0)
    if column == SAMPLES:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)


def draw_figure(path: Path, results: Results, panels: Sequence[tuple[str, Sequence[str], int]]) -> None:
    """One row of panels (heading, settings beside the synchronous one, column of the horizontal axis) with a common reward axis."""
    figure, axes = plt.subplots(1, len(panels), figsize=(3.7 * len(panels) + 0.5, 4.1), sharey=True, squeeze=False)
    for axis, (heading, names, column) in zip(axes[0], panels, strict=True):
        draw_panel(axis, results, names, column, heading)
    axes[0][0].set_ylabel("held-out reward, greedy")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata=SVG)
    plt.close(figure)
