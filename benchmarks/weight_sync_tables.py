"""What `weight_sync.py` measured, as tables and targets."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import Report, paired_ratio, paired_ratios, spread
from weight_sync_decoding import BATCH
from weight_sync_pair import Sync
from weight_sync_settings import Setting

from slipstream.controller.run_folder import file_system

SHARE_WANTED = 0.7
TOTAL_WANTED_MS = 100.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A sync while the engine decodes. Seconds."""

    sync: Sync
    gap_s: float  # from token to token of a sequence just before it, median
    longest_gap_s: float  # around it


@dataclass(slots=True)
class Measured:
    """All that one setting gave."""

    num_bytes: int = 0
    num_read: int = 0  # bytes, by the engine
    first: list[Sync] = field(default_factory=list)  # into a slot that was never used
    steady: list[Sync] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)  # seconds of what it is held against, after each of `steady`
    loaded: list[Loaded] = field(default_factory=list)
    rates: dict[int, list[float]] = field(default_factory=dict)  # sequences -> tokens per second
    memory_gib: float = 0.0
    took_s: float = 0.0


Results = Mapping[Setting, Measured]


def fill(report: Report, results: Results) -> None:
    report_syncs(report, results)
    report_shares(report, results)
    report_stalls(report, results)
    report_targets(report, results)


def share(bound: Sequence[float], measured: Sequence[float]) -> float:
    """Median over rounds of bound / measured seconds: 1 is as fast as the bound."""
    return paired_ratio(bound, measured)


def part(measured: Measured, *names: str) -> list[float]:
    """Seconds of each round; of several ways their sum."""
    return [sum(seconds[name] for name in names) for seconds in measured.parts]


def milliseconds(seconds: Sequence[float]) -> str:
    values = [1e3 * s for s in seconds]
    return spread(values, 3 if max(values) < 1000 else 4)


def steady_cells(setting: Setting, m: Measured) -> tuple[str, ...]:
    """Of a sync while the engine has no work: the trainer's stall, the engine's, the whole, its bound and the share of that."""
    bound = part(m, *setting.bound)
    return (
        milliseconds([sync.trainer_s for sync in m.steady]),
        milliseconds([sync.stall_s for sync in m.steady]),
        milliseconds([sync.total_s for sync in m.steady]),
        f"{1e3 * statistics.median(bound):.3g}",
        f"{share(bound, [sync.total_s for sync in m.steady]):.2f}",
    )


def loaded_cells(m: Measured) -> tuple[str, ...]:
    """Of a sync while it decodes: its stall, the longest gap between tokens and the usual one, and the whole sync."""
    return (
        milliseconds([each.sync.stall_s for each in m.loaded]),
        milliseconds([each.longest_gap_s for each in m.loaded]),
        milliseconds([each.gap_s for each in m.loaded]),
        milliseconds([each.sync.total_s for each in m.loaded]),
    )


def report_syncs(report: Report, results: Results) -> None:
    table = report.table(
        "A sync between two processes, milliseconds",
        (
            "weights",
            "transport",
            "payload",
            "MB",
            "engine reads, MB",
            "trainer's stall",
            "engine's stall",
            "whole sync",
            "bound",
            "share of it",
            "first use of a slot",
        ),
        note="Median [least, most]. The trainer's stall: it packs or writes, and hashes; it waits for no more than that. The engine's: it "
        "copies or reads, and hashes. Whole sync: both, and the messages. Bound of shared memory: 2 x memcpy. Bound of files, on "
        f"{file_system(Path(tempfile.gettempdir())) or 'this disk'}: as many bytes written with fsync and read without a hash; they are "
        "read from the page cache, as on one machine. Bound of collective: 2 x memcpy and as many bytes over a TCP connection of this "
        "machine; its engine receives beside its work, so its stall is a copy and a hash as over shared memory. Bound of what changed: "
        "both hash all their weights, 2 x hash; bits of random elements change, a share as measured on real steps (docs/weight_sync.md). "
        "An adapter is of rank 16, on all linear layers but the head, in float32. First use: the whole sync into a slot whose memory is "
        "still to be made.",
    )
    for setting, m in results.items():
        table.rows.append(
            (
                setting.name,
                setting.over,
                setting.payload,
                f"{m.num_bytes / 1e6:.3g}",
                f"{m.num_read / 1e6:.3g}",
                *steady_cells(setting, m),
                milliseconds([sync.total_s for sync in m.first]),
            )
        )


def report_shares(report: Report, results: Results) -> None:
    gigabytes = ("memcpy", "hash", "copy alone", "copy and hash")
    table = report.table(
        "Beside this machine's memory: one thread, the same bytes, GB/s, and shares of memcpy",
        (
            "weights",
            *gigabytes,
            "copy alone / memcpy",
            "copy and hash / memcpy",
            "copy and hash / (memcpy, then hash)",
            "engine's stall / memcpy",
        ),
        note="memcpy in one call writes past the cache. The loop's copy stays in the cache for the hash, so memory is read once more, for "
        "the lines about to be written; hashing from the cache then costs arithmetic alone. The other way, memcpy and then a hash that "
        "reads the copy from memory, is the last column but one: above 1 the loop is faster. Both move the bytes three times where memcpy "
        "moves them twice: where memory alone counts, a copy with a checksum of itself by one thread comes to two thirds of memcpy.",
    )
    for setting, m in results.items():
        if setting.transport != "shared_memory" or setting.payload != "full":
            continue
        rates = [m.num_bytes / statistics.median(part(m, name)) / 1e9 for name in gigabytes]
        memcpy = part(m, "memcpy")
        shares = (
            share(memcpy, part(m, "copy alone")),
            share(memcpy, part(m, "copy and hash")),
            share(part(m, "memcpy", "hash"), part(m, "copy and hash")),
            share(memcpy, [sync.stall_s for sync in m.steady]),
        )
        table.rows.append((setting.name, *(f"{rate:.3g}" for rate in rates), *(f"{value:.2f}" for value in shares)))


GAPS = (
    "Gaps lie between two successive tokens of a sequence, as the rollout worker gets them. Max token gap: the longest of any of the "
    f"{BATCH} sequences around a sync, from the trainer's begin to the first tokens after the engine's confirmation, one figure per sync; "
    "without a sync: the median just before it. "
)


def report_stalls(report: Report, results: Results) -> None:
    table = report.table(
        f"The engine's stall while it decodes {BATCH} sequences, one thread, milliseconds",
        ("weights", "transport", "payload", "engine's stall", "max token gap", "token gap without a sync", "whole sync", "stall in gaps"),
        note=GAPS
        + "Median [least, most] over syncs. The stall is what the engine reports. The whole sync waits for the step under way. The "
        "stall in gaps without a sync is the median of the rounds' own ratios.",
    )
    for setting, m in results.items():
        if m.loaded:
            ratio = paired_ratio([each.sync.stall_s for each in m.loaded], [each.gap_s for each in m.loaded])
            table.rows.append((setting.name, setting.over, setting.payload, *loaded_cells(m), f"{ratio:.2f}"))


def report_targets(report: Report, results: Results) -> None:
    for setting, m in results.items():
        if setting.layout == "135M" and setting.transport == "shared_memory" and setting.payload == "full":
            if setting.dtype == "bfloat16":
                total_ms = [1e3 * sync.total_s for sync in m.steady]
                report.at_most(
                    f"{setting.name}, {m.num_bytes / 1e6:.0f} MB: whole sync, checksums included", total_ms, TOTAL_WANTED_MS, " ms"
                )
            memcpy = part(m, "memcpy")
            for what, name in (("copy without checksum", "copy alone"), ("copy and checksum", "copy and hash")):
                report.at_least(f"{setting.name}: {what}, share of memcpy", paired_ratios(memcpy, part(m, name)), SHARE_WANTED)
