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
    superseded: list[dict[str, Any]] = []
    steps, evaluations = _Account(superseded), _Account(superseded)
    for line in read_jsonl(Path(folder) / FILE_NAME):
        kind = line.pop("kind", None)
        if kind == "step":  # makes this version: what older incarnations knew of it, and of what came after, is history
            evaluations.begin(line)
            steps.add(line)
        elif kind == "evaluation":
            evaluations.add(line)
    return Metrics(steps.in_order(), evaluations.in_order(), superseded)


class _Account:
    """The lines of one kind that count so far. The file is in order of incarnations, since one has ended when the next begins."""

    def __init__(self, superseded: list[dict[str, Any]]):
        self._lines: dict[tuple[int, int], dict[str, Any]] = {}  # by incarnation and version; a second one of that name replaces the first
        self._superseded = superseded
        self._begun = (-1, 0)  # the newest incarnation, and the lowest version that it has told of: from there on no older line is left

    def begin(self, line: dict[str, Any]) -> None:
        """This version and all that follow are this incarnation's to tell of."""
        incarnation, version = line["incarnation"], line["version"]
        if incarnation == self._begun[0] and version >= self._begun[1]:
            return  # which makes reading linear: a look at every line only when an incarnation begins
        for name in [name for name in self._lines if name[0] < incarnation and name[1] >= version]:
            self._superseded.append(self._lines.pop(name))
        self._begun = incarnation, version

    def add(self, line: dict[str, Any]) -> None:
        self.begin(line)
        name = line["incarnation"], line["version"]
        if name in self._lines:
            self._superseded.append(self._lines.pop(name))
        self._lines[name] = line

    def in_order(self) -> list[dict[str, Any]]:
        return sorted(self._lines.values(), key=lambda line: line["version"])
