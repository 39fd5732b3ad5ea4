"""What every benchmark here shares: its command line, pairs of timings, the table it prints and the JSON it writes.

    python benchmarks/NAME.py [--short] [--json PATH]

`--short` is what `make bench` runs: fewer repetitions and settings, or fewer tokens in each. A benchmark prints its tables and, below
them, each target with the measured value beside it. Missing a target is a result, not an error: the exit code stays 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
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
    reached: bool  # by the median of the rounds
    scattered: bool = False  # some rounds reach it and some do not

    def verdict(self, missed: str = "missed") -> str:
        return f"{'reached' if self.reached else missed}{', within the scatter' if self.scattered else ''}"

    def text(self) -> str:
        return f"{self.verdict('MISSED'):7}  {self.what}: {self.measured} (wanted {self.wanted})"


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
    options: Sequence[str] = ()  # of the command line, as they were given
    load_before: float = field(default_factory=lambda: _load())
    sources: str = ""  # where figures come from that this command did not measure itself

    def table(self, title: str, columns: Sequence[str], note: str = "") -> Table:
        table = Table(title, columns, note=note)
        self.tables.append(table)
        return table

    def at_least(self, what: str, measured: float | Sequence[float], wanted: float, unit: str = "") -> None:
        """`measured`: of each round, or one figure that has no scatter. The median is what is held against `wanted`."""
        rounds = _rounds(measured)
        self._target(what, f"at least {wanted:g}{unit}", rounds, unit, lambda value: value >= wanted)

    def at_most(self, what: str, measured: float | Sequence[float], wanted: float, unit: str = "") -> None:
        """As `at_least`."""
        rounds = _rounds(measured)
        self._target(what, f"at most {wanted:g}{unit}", rounds, unit, lambda value: value <= wanted)

    def _target(self, what: str, wanted: str, rounds: Sequence[float], unit: str, reaches: Callable[[float], bool]) -> None:
        scattered = reaches(min(rounds)) != reaches(max(rounds))
        self.targets.append(Target(what, wanted, spread(rounds) + unit, reaches(statistics.median(rounds)), scattered))

    def finish(self, path: Path | None) -> None:
        """Print everything; write it to `path`, where one is given."""
        for table in self.tables:
            print(table.text(), end="\n\n")
        for target in self.targets:
            print(target.text())
        self.save(path)

    def save(self, path: Path | None) -> None:
        """Write what there is so far, where a path is given."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {
                "name": self.name,
                "command": shlex.join(["python", f"benchmarks/{self.name}.py", *self.options]),
                "date": datetime.date.today().isoformat(),
                "machine": machine() | {"load_before": self.load_before, "load_after": _load()},
                "took_s": round(time.monotonic() - self.started if self.took_s is None else self.took_s, 1),
                "revision": revision(),
                "sources": self.sources,
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
    parser.add_argument("--short", action="store_true", help="fewer repetitions and settings, or fewer tokens in each")
    parser.add_argument("--json", type=Path, default=None, help="write tables, targets and raw figures to this file")
    if more is not None:
        more(parser)
    options = parser.parse_args()
    return Report(name, options.short, options=recorded_options(sys.argv[1:])), options


def recorded_options(arguments: Sequence[str]) -> list[str]:
    """The command line without `--json PATH`, which changes no figure.

    >>> recorded_options(["--short", "--json", "out.json", "--cases", "long"])
    ['--short', '--cases', 'long']
    """
    kept, skip = [], False
    for word in arguments:
        if not skip and word != "--json" and not word.startswith("--json="):
            kept.append(word)
        skip = word == "--json"
    return kept


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


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Each round's own ratio, which what slows a whole round down leaves alone."""
    return [n / d for n, d in zip(numerators, denominators, strict=True)]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Their median."""
    return statistics.median(paired_ratios(numerators, denominators))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median [least, most]; of a single one just that.

    >>> spread([2, 1, 4]), spread([2783.4]), spread([0.12345])
    ('2 [1, 4]', '2,783', '0.123')
    """
    median = _figure(statistics.median(values), digits)
    return median if len(values) == 1 else f"{median} [{_figure(min(values), digits)}, {_figure(max(values), digits)}]"


def _figure(value: float, digits: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def _rounds(measured: float | Sequence[float]) -> Sequence[float]:
    return measured if isinstance(measured, Sequence) else [measured]


def _load() -> float:
    """Mean number of processes that wanted to run in the last minute."""
    return round(os.getloadavg()[0], 2)


def revision() -> str:
    """The commit that was measured, and whether its code was changed since; empty where there is no repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return ""
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", "../src"], check=False).returncode
    return head.stdout.strip() + (" with changes" if changed else "")


def machine() -> dict[str, Any]:
    """What the figures were measured on. The versions are those of the environment of this process and of those it starts from it."""
    versions = {}
    for name in ("torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
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
