"""Whether anything grows faster than its work: with parameters, rollouts in flight, group size, length, and steps.

    python benchmarks/scale.py [--short] [--json PATH] [--folder DIR]

    parameters   packing and hashing the weights for a version, and taking them in, float32       unit of work: a parameter
    in flight    admission, hand-off, buffer and ledger, as in `overhead.py`, way `control`       a rollout
    group size   the same, 1,024 in flight                                                        a rollout
    length       the same, and with the real worker token by token, 256 in flight                 a token
    steps        one run to 10,000 steps, ended and resumed on the way                            a step; of a resume: an event

Time T(n) of n units is fitted as T = a n^b by least squares on logarithms, three times over. The bound is b = 1: each unit is touched
once. Below 1 a fixed cost is shared by more; above 1 something looks at more than its own. What the long run keeps in memory is the slope
of its resident memory over the steps of its longest stretch without a resume, the first tenth left out; the bound is 0. CPU time of all
processes; the ledger with the settings that ship, by default in memory (/dev/shm) where that exists, since here the question is what
grows: what a disk adds is in `overhead.py`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from bench import Report, spread, start
from long_run import Left, LongRun, Look
from long_run import measure as measure_long
from measured_runs import Spec, measure
from numpy.typing import ArrayLike

from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import WeightSet
from slipstream.weight_sync.shared_memory import MemoryPublisher

ROUNDS = 3
EXPONENT = 1.1  # b at most: 1 and what scatter does to a fit over few points
FLAT = 1.1
KB_PER_STEP = 0.5  # of resident memory, at most: 5 MB in 10,000 steps. The data of a step's 16 rollouts are 20 KB
GROWTH = 20.0  # per cent of the mean
SHARED = "/dev/shm"


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """b of seconds = a size^b, by least squares on logarithms.

    >>> round(exponent([1, 10, 100], [3, 30, 300]), 6), round(exponent([1, 2, 4], [1, 4, 16]), 6)
    (1.0, 2.0)
    """
    return slope(np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float)))


def slope(x: ArrayLike, y: ArrayLike) -> float:
    """Of the straight line through the points, by least squares.

    >>> round(slope([100, 200, 300], [50, 60, 70]), 6)
    0.1
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def steps_for(rollouts: int, in_flight: int) -> int:
    """Whole batches that make up about so many rollouts, two at least."""
    return max(2, -(-rollouts // (in_flight // 2)))


# ---- what is scaled ------------------------------------------------------------------------------------------------------------------


def parameters(millions: Sequence[int]) -> dict[str, list[list[float]]]:
    """CPU ms per million parameters of one thread to pack and to take in so many million of them, in each round. All sizes are more than
    the processor's caches hold: below that memory is faster, which is no property of this code."""
    torch.set_num_threads(1)
    costs: dict[str, list[list[float]]] = {name: [[] for _ in range(ROUNDS)] for name in ("pack and hash", "copy in and hash")}
    for size in millions:
        tensors = {f"layer.{n}": torch.randn(500_000) for n in range(2 * size)}
        slot, target = MemoryFile.create("scale"), {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        publisher, reader = MemoryPublisher(tensors, [slot]), WeightSet(target)
        for turn in range(-1, ROUNDS):  # the first one maps the memory
            began = time.thread_time()
            manifest = publisher.pack(0, 1, turn + 1)
            middle = time.thread_time()
            assert reader.apply(slot.map(), manifest) == manifest.checksum
            if turn >= 0:
                costs["pack and hash"][turn].append((middle - began) / size * 1e3)
                costs["copy in and hash"][turn].append((time.thread_time() - middle) / size * 1e3)
        slot.close()
    return costs


def cost_rounds(specs: Sequence[Spec]) -> list[list[float]]:
    """µs per rollout of each spec, round after round."""
    return [[measure(spec).cost_us for spec in specs] for _ in range(ROUNDS)]


def in_flight(levels: Sequence[int], rollouts: int, folder: str) -> list[list[float]]:
    return cost_rounds([Spec(n, steps_for(rollouts, n), folder=folder) for n in levels])


def group_sizes(sizes: Sequence[int], rollouts: int, folder: str) -> list[list[float]]:
    return cost_rounds([Spec(1_024, steps_for(rollouts, 1_024), group_size=g, folder=folder) for g in sizes])


def lengths(tokens: Sequence[int], rollouts: int, worker: str, folder: str) -> list[list[float]]:
    """µs per token."""
    rounds = cost_rounds([Spec(256, steps_for(rollouts, 256), worker, tokens=n, folder=folder) for n in tokens])
    return [[cost / n for cost, n in zip(costs, tokens, strict=True)] for costs in rounds]


# ---- the report ----------------------------------------------------------------------------------------------------------------------


def scaled(report: Report, title: str, sizes: Sequence[int], unit_costs: dict[str, list[list[float]]], unit: str) -> None:
    """A table of costs per unit of work, the median of the rounds, and for each row the exponent of the whole in each round."""
    table = report.table(title, ("", *(f"{n:,}" for n in sizes), "exponent b"))
    for name, rounds in unit_costs.items():
        b = [exponent(sizes, [n * cost for n, cost in zip(sizes, costs, strict=True)]) for costs in rounds]
        medians = [f"{statistics.median(costs):.3g}" for costs in zip(*rounds, strict=True)]
        table.rows.append((f"{name}, {unit}", *medians, spread(b)))
        report.at_most(f"{title.partition(',')[0]}: exponent of {name}", b, EXPONENT)
    report.data[title] = {"sizes": list(sizes), "costs": unit_costs, "unit": unit}


def long_run_tables(report: Report, left: Left) -> None:
    looks = left.looks
    table = report.table("One long run", ("after step", "CPU, ms per step", "resident, MB", "ledger, MB"))
    shown = [looks[i] for i in sorted({round(x) for x in np.linspace(1, len(looks) - 1, 9)})]
    working = {look.step: look.cpu_s - sum(r.seconds for r in left.resumes if r.step < look.step) for look in looks}
    for before, now in zip([looks[0], *shown], shown, strict=False):
        spent = (working[now.step] - working[before.step]) / (now.step - before.step)
        table.rows.append((f"{now.step:,}", f"{spent * 1e3:.2f}", f"{now.resident_bytes / 1e6:.1f}", f"{now.ledger_bytes / 1e6:.1f}"))
    table.note = (
        "32 rollouts in flight, groups of 4, 16 rollouts per step, 128 tokens in the mean; a checkpoint every 50 steps, two kept. CPU "
        "without that of opening the folder again."
    )
    _ledger_table(report, left)
    _resume_table(report, left)
    tenth = max(1, len(looks) // 10)
    pairs = list(itertools.pairwise(looks[tenth:]))
    per_step = [(working[b.step] - working[a.step]) / (b.step - a.step) for a, b in pairs]
    middles = [(a.step + b.step) / 2 for a, b in pairs]
    grown = slope(middles, per_step) * (middles[-1] - middles[0]) / statistics.fmean(per_step)
    report.at_most("CPU per step, growth of its straight line from the second tenth to the end of the run", 100 * grown, GROWTH, " %")
    stretch = longest_stretch(left)
    kept = slope([look.step for look in stretch], [look.resident_bytes / 1e3 for look in stretch])
    table.note += (
        f" Resident memory grows by {kept:.2f} KB per step, by least squares over steps {stretch[0].step:,} to {stretch[-1].step:,}: the "
        "longest stretch without an opening, which leaves a larger process behind, and of that not the first tenth."
    )
    report.at_most("resident memory of the long run, slope of its longest stretch", kept, KB_PER_STEP, " KB per step")


def longest_stretch(left: Left) -> list[Look]:
    """The looks between the two openings that are farthest apart, without the first tenth of that."""
    ends = [0, *(resume.step for resume in left.resumes), left.looks[-1].step]
    start, end = max(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0])
    return [look for look in left.looks if start + (end - start) / 10 <= look.step <= end]


def _ledger_table(report: Report, left: Left) -> None:
    (early, before), (late, after) = sorted(left.tables.items())[0], sorted(left.tables.items())[-1]
    table = report.table("What the ledger holds", ("table", f"rows, step {early:,}", f"rows, step {late:,}", "KB then", "KB in the end"))
    for name in after:
        cells = (f"{before[name][0]:,}", f"{after[name][0]:,}", f"{before[name][1] / 1e3:.0f}", f"{after[name][1] / 1e3:.0f}")
        table.rows.append((name, *cells))
    per_rollout = (after["events"][1] - before["events"][1]) / ((late - early) * 16)
    table.note = (
        f"Tokens (groups, prefixes) are kept for the window of checkpoints; the log of events is kept for good: {per_rollout:.0f} bytes "
        "per rollout, its place in the account of the run."
    )
    data = [sum(counts[name][1] for name in ("groups", "prefixes")) for counts in (before, after)]
    report.at_most("tokens held in the ledger, at the end over the first stop", data[1] / data[0], FLAT)
    report.data["tables"] = left.tables


def _resume_table(report: Report, left: Left) -> None:
    table = report.table("Opening the folder again", ("at step", "events", "seconds", "µs per event"))
    for resume in left.resumes:
        cells = (f"{resume.num_events:,}", f"{resume.seconds:.2f}", f"{resume.seconds / resume.num_events * 1e6:.1f}")
        table.rows.append((f"{resume.step:,}", *cells))
    table.note = "A resume folds all events of the run into its state again: it grows with the run, and with nothing else."
    b = exponent([r.num_events for r in left.resumes], [r.seconds for r in left.resumes])
    report.at_most("resume: exponent over events", b, EXPONENT)


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        default = SHARED if Path(SHARED).is_dir() else tempfile.gettempdir()
        parser.add_argument("--folder", default=default, help="where the run folders are made")

    report, options = start("scale", __doc__.splitlines()[0], more)
    short, folder = options.short, options.folder
    sizes = (32, 64, 128) if short else (32, 64, 128, 256)
    scaled(report, "Parameters, millions", sizes, parameters(sizes), "ms per million")
    levels = (64, 1_024, 4_096) if short else (64, 256, 1_024, 4_096, 16_384)
    scaled(report, "Rollouts in flight", levels, {"control": in_flight(levels, 1_000 if short else 4_000, folder)}, "µs per rollout")
    groups = (2, 8, 32) if short else (2, 4, 8, 16, 32, 64)
    scaled(report, "Group size, 1,024 rollouts in flight", groups, {"control": group_sizes(groups, 2_000, folder)}, "µs per rollout")
    tokens = (128, 512, 2_048) if short else (128, 512, 2_048, 8_192)
    ways = (("control", "groups"), ("worker, token by token", "worker"))
    per_token = {name: lengths(tokens, 256 if short else 512, worker, folder) for name, worker in ways}
    scaled(report, "Length, tokens", tokens, per_token, "µs per token")
    stops = [300, 600, 1_200, 1_500] if short else [1_000, 3_000, 9_000, 10_000]
    long_run_tables(report, measure_long(LongRun(stops, folder=folder)))
    report.finish(options.json)


if __name__ == "__main__":
    main()
