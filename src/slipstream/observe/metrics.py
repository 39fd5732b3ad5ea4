"""`metrics.jsonl`: one line per step and per evaluation, always written; and how to read it back.

A run that was resumed trains some steps again. Every line carries its incarnation, and readers keep the last account: what a later
incarnation has trained replaces what earlier ones wrote from that point on. Totals of a run are questions for the ledger
(`controller/accounts.py`); these lines are the course of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.observe.jsonl import JsonLines, read_jsonl

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Writes the lines. A value that is not finite is written as null and its name listed under `non_finite`."""

    def __init__(self, folder: Path):
        self._lines = JsonLines(folder / FILE_NAME)

    def write(self, kind: str, line: dict[str, Any]) -> None:
        """`kind` is "step" or "evaluation"."""
        bad = sorted(k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v))
        self._lines.write({"kind": kind, **line, **({"non_finite": bad} if bad else {})})

    def close(self) -> None:
        self._lines.close()


@dataclass(slots=True)
class Metrics:
    """The lines that count, in order of step, and those that a later incarnation replaced."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    superseded: list[dict[str, Any]] = field(default_factory=list)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of one step metric, where it has a value."""
        return [(line["step"], line[key]) for line in self.steps if line.get(key) is not None]


def read_metrics(folder: Path | str) -> Metrics:
    """The run's metrics as they stand now; empty where nothing was written yet.

    Example: `read_metrics("runs/quickstart-20250101-120000").series("reward_mean")`
    """
    metrics = Metrics()
    for line in read_jsonl(Path(folder) / FILE_NAME):
        kind = line.pop("kind", None)
        if kind == "step":  # makes this version: what older incarnations knew of it, and of what came after, is history
            metrics.steps = _replaced(metrics.steps, line, metrics.superseded)
            metrics.evaluations = _replaced(metrics.evaluations, line, metrics.superseded)
            metrics.steps.append(line)
        elif kind == "evaluation":
            metrics.evaluations = _replaced(metrics.evaluations, line, metrics.superseded, same=True)
            metrics.evaluations.append(line)
    metrics.steps.sort(key=lambda line: line["version"])
    metrics.evaluations.sort(key=lambda line: line["version"])
    return metrics


def _replaced(
    kept: list[dict[str, Any]], line: dict[str, Any], superseded: list[dict[str, Any]], *, same: bool = False
) -> list[dict[str, Any]]:
    """`kept` without the lines of earlier incarnations at or after this line's version; with `same`, nor an equal name of its own."""
    name, out = (line["incarnation"], line["version"]), []
    for old in kept:
        older = old["incarnation"] < name[0] and old["version"] >= name[1]
        gone = older or (same and (old["incarnation"], old["version"]) == name)
        (superseded if gone else out).append(old)
    return out
