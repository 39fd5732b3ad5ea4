"""What every benchmark here shares: its command line, pairs of timings, the table it prints and the JSON it writes.

    python benchmarks/NAME.py [--short] [--json PATH]

`--short` is what `make bench` runs: fewer repetitions and settings, the same work in each. A benchmark prints its tables and, below
them, each target with the measured value beside it. Missing a target is a result, not an error: the exit code stays 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Table:
    """Rows of strings under columns; `note` says what a reader must know beside it."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    note: str = ""

    def text(self) -> str:
        """For a terminal: the first column to the left, figures to the right."""
        lines = [list(self.columns), *map(list, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]

        def one(cells: Sequence[str]) -> str:
            first, *others = zip(cells, widths, strict=True)
            return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

        body = [one(lines[0]), "  ".join("-" * width for width in widths), *map(one, lines[1:])]
        return "\n".join([self.title, *("  " + line.rstrip() for line in body), *([f"  {self.note}"] if self.note else [])])

    def markdown(self) -> str:
        align = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, align, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.note] if self.note else [])])


@dataclass(frozen=True, slots=True)
class Target:
    """What was to be reached, and what was measured."""

    what: str
    wanted: str
    measured: str
    reached: bool

    def text(self) -> str:
        return f"{'reached' if self.reached else 'MISSED '}  {self.what}: {self.measured} (wanted {self.wanted})"


@dataclass(slots=True)
class Report:
    """One run of one benchmark. `data` holds the raw figures that the tables were made of."""

    name: str
    short: bool
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)  # caption -> file in docs/figures
    data: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    took_s: float | None = None  # where it is not the time since `started`: of a study that was resumed

    def table(self, title: str, columns: Sequence[str], note: str = "") -> Table:
        table = Table(title, columns, note=note)
        self.tables.append(table)
        return table

    def at_least(self, what: str, measured: float, wanted: float, unit: str = "") -> None:
        self.targets.append(Target(what, f"at least {wanted:g}{unit}", f"{measured:.3g}{unit}", measured >= wanted))

    def at_most(self, what: str, measured: float, wanted: float, unit: str = "") -> None:
        self.targets.append(Target(what, f"at most {wanted:g}{unit}", f"{measured:.3g}{unit}", measured <= wanted))

    def finish(self, path: Path | None) -> None:
        """Print everything; write it to `path`, where one is given."""
        for table in self.tables:
            print(table.text(), end="\n\n")
        for target in self.targets:
            print(target.text())
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {
                "name": self.name,
                "command": f"python benchmarks/{self.name}.py{' --short' if self.short else ''}",
                "date": datetime.date.today().isoformat(),
                "machine": machine(),
                "took_s": round(time.monotonic() - self.started if self.took_s is None else self.took_s, 1),
                "figures": self.figures,
                "tables": [asdict(table) for table in self.tables],
                "targets": [asdict(target) for target in self.targets],
                "data": self.data,
            }
            path.write_text(json.dumps(record, indent=1, default=float) + "\n")


def start(
    name: str, description: str, more: Callable[[argparse.ArgumentParser], object] | None = None
) -> tuple[Report, argparse.Namespace]:
    """Read the command line; `more` adds a benchmark's own options. `options.json` is where the results go: pass it to `Report.finish`."""
    parser = argparse.ArgumentParser(prog=f"python benchmarks/{name}.py", description=description)
    parser.add_argument("--short", action="store_true", help="fewer repetitions and settings, the same work in each")
    parser.add_argument("--json", type=Path, default=None, help="write tables, targets and raw figures to this file")
    if more is not None:
        more(parser)
    options = parser.parse_args()
    return Report(name, options.short), options


def alternate(ways: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """Seconds of each way, round after round, in an order that turns by one each round: drift of the machine meets all alike."""
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = clock()
            ways[name]()
            seconds[name].append(clock() - began)
    return seconds


def paired_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """How many times faster: the median of the rounds' own ratios, which what slows a whole round down leaves alone."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median [least, most]; of a single one just that."""
    median = f"{statistics.median(values):.{digits}g}"
    return median if len(values) == 1 else f"{median} [{min(values):.{digits}g}, {max(values):.{digits}g}]"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {}
    for name in ("torch", "transformers"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = module.__version__
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
        **versions,
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
