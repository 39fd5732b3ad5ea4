"""What it takes to bring new weights from the trainer into the engine, beside what copying the same bytes takes.

    python benchmarks/weight_sync.py [--short] [--json PATH]

Two processes of one thread each, started as the local launcher starts its roles, with the real controller, ledger and sockets between
them (`weight_sync_roles.py`). A sync lasts from the trainer's `begin_write` to the engine's confirmed checksum, both as the controller
sees them: pack and hash | publish, offer | copy and hash of the engine's own copy | confirm. The trainer waits for its end, so that
sides do not disturb each other.

After each sync, while both processes rest, this process copies the slot just read into the other one: in one call (the bound: memcpy),
with the loop of the shipped code without its hash, with its hash, and it hashes the slot. With transport `files` it writes as many bytes
into a new file beside the others, syncs it to disk, and reads the file just read: in the shipped code's chunks, without a hash. With
`collective` it sends as many bytes to itself through a TCP socket on the loopback interface, two threads, in messages as large as the
shipped code's. Shares are medians of the rounds' own ratios.

With payload `delta` the trainer changes a share of the weights per version, and both are held against hashing as many bytes.

    share of memcpy = seconds of memcpy / seconds of what moved the same bytes
    share of the bound = (2 x memcpy, write + read, or 2 x memcpy + loopback) / whole sync

At last the engine decodes a full batch while versions come in: its stall is what it reports as `weight_sync_s`, a decode step is the
median tick between two syncs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from bench import Report, paired_ratio, paired_ratios, spread, start
from weight_sync_pair import Pair, Sync

from slipstream.config.settings import WeightSyncSettings
from slipstream.controller.run_folder import file_system
from slipstream.launch.framing import private_directory
from slipstream.weight_sync.hashed_copy import CHUNK_BYTES, NoHash, hashed_copy
from slipstream.weight_sync.pair_group import buckets

FIRST_USES = 2  # slots; the third one is only used by a trainer that is ahead of its engine
CHANGED = (0.01, 0.03)  # of bfloat16 weights in a step of AdamW at learning rate 1e-6 and 1e-5: docs/weight_sync.md
BOUND = {  # the parts that a whole sync cannot do without
    "shared memory": ("memcpy", "memcpy"),
    "files": ("write", "read"),
    "collective": ("memcpy", "loopback", "memcpy"),
}
DELTA = ("shared memory", "files", "collective")  # transports of payload `delta`
BUCKET_BYTES = WeightSyncSettings().bucket_mib << 20
TICKS = 3  # of decoding between two syncs
SHARE_WANTED = 0.7
TOTAL_WANTED_MS = 100.0


@dataclass(frozen=True, slots=True)
class Setting:
    layout: str
    dtype: str
    transport: str = "shared memory"
    payload: str = "full"
    share: float = 1.0  # of the weights that change per version
    syncs: int = 10  # beyond the first use of each slot
    under_load: int = 0

    @property
    def name(self) -> str:
        changed = f", {100 * self.share:g} % change" if self.share < 1 else ""
        return f"{self.layout} {self.dtype}{changed}"

    @property
    def bound(self) -> tuple[str, ...]:
        """The parts that a whole sync cannot do without: of what changed, that both sides hash all of their weights."""
        return ("hash", "hash") if self.payload == "delta" else BOUND[self.transport]

    def options(self) -> dict[str, str]:
        """What the roles are told: `weight_sync_roles.Case`. Decoding starts with the last version that is measured without it."""
        last = 2 * FIRST_USES + self.syncs - 1
        told = {name: str(getattr(self, name)) for name in ("layout", "dtype", "transport", "payload", "share")}
        return told | {"decode_from": str(last)}


SETTINGS = {
    True: (
        Setting("135M", "bfloat16", syncs=10, under_load=6),
        Setting("135M", "float32", syncs=7, under_load=4),
        Setting("135M", "bfloat16", "files", syncs=7, under_load=3),
        Setting("135M", "bfloat16", "collective", syncs=7, under_load=3),
        Setting("135M", "bfloat16", payload="delta", share=CHANGED[0], syncs=7, under_load=3),
    ),
    False: (
        Setting("135M", "bfloat16", syncs=30, under_load=15),
        Setting("135M", "float32", syncs=20, under_load=15),
        Setting("1B", "bfloat16", syncs=10),
        Setting("135M", "bfloat16", "files", syncs=20, under_load=10),
        Setting("1B", "bfloat16", "files", syncs=5),
        Setting("135M", "bfloat16", "collective", syncs=20, under_load=10),
        Setting("1B", "bfloat16", "collective", syncs=5),
        *(Setting("135M", "bfloat16", over, "delta", share, syncs=20, under_load=10) for over in DELTA for share in CHANGED),
    ),
}


@dataclass(slots=True)
class Measured:
    """All that one setting gave."""

    num_bytes: int = 0
    num_read: int = 0  # bytes, by the engine
    first: list[Sync] = field(default_factory=list)  # into a slot that was never used
    steady: list[Sync] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)  # seconds of `memory_ways` or `file_ways`, after each of `steady`
    loaded: list[Sync] = field(default_factory=list)
    tick_s: list[float] = field(default_factory=list)  # of each round of `loaded`
    memory_gib: float = 0.0


# ---- one setting ---------------------------------------------------------------------------------------------------------------


async def measure(setting: Setting) -> Measured:
    """The syncs of a setting: into slots never used before, then steady ones beside the bound, then under load."""
    out = Measured()
    with private_directory() as sockets, tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        pair = Pair(setting.options(), Path(folder) / "run", sockets)
        try:
            await pair.start()
            out.first = [await pair.start_weights()]
            out.first += [await pair.one_sync() for _ in range(1, FIRST_USES)]
            for turn in range(-FIRST_USES, setting.syncs):
                sync = await pair.one_sync()
                seconds = timed(ways(setting, pair), turn)
                if turn >= 0:  # before, this process touches the slots' pages for the first time
                    out.steady.append(sync)
                    out.parts.append(seconds)
            for _ in range(setting.under_load):
                await load_round(pair, out)
            out.num_bytes, out.num_read, out.memory_gib = pair.controller.num_bytes, pair.controller.num_read, pair.memory_gib()
        finally:
            await pair.close()
    return out


async def load_round(pair: Pair, out: Measured) -> None:
    """Some ticks of decoding, then a version."""
    ticks = pair.controller.ticks
    while not ticks.empty():  # they ran beside the trainer's packing
        ticks.get_nowait()
    out.tick_s.append(statistics.median([await pair.wait(ticks.get()) for _ in range(TICKS)]))
    out.loaded.append(await pair.one_sync())


# ---- the bound -------------------------------------------------------------------------------------------------------------------


def ways(setting: Setting, pair: Pair) -> dict[str, Callable[[], Any]]:
    """What the setting's syncs are held against."""
    if setting.payload == "delta":
        return {"hash": lambda: xxhash.xxh3_128(pair.buffer().data).digest()}
    if setting.transport == "files":
        return file_ways(*pair.newest_and_spare(), pair.buffer())
    if setting.transport == "collective":
        return collective_ways(pair.buffer(), pair.buffer(1))
    return memory_ways(*pair.source_and_target())


def memory_ways(source: np.ndarray, target: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What moves or reads uint8[n] on this machine, by name."""
    return {
        "memcpy": lambda: np.copyto(target, source),
        "copy alone": lambda: hashed_copy(target, source, NoHash()),
        "copy and hash": lambda: hashed_copy(target, source, xxhash.xxh3_128()),
        "hash": lambda: xxhash.xxh3_128(source.data).digest(),
    }


def file_ways(newest: Path, spare: Path, data: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Writing uint8[n] into a file and onto the disk, and reading as many bytes of one that was just written."""
    return {"write": lambda: write_file(spare, data), "read": lambda: read_file(newest, data)}


def collective_ways(source: np.ndarray, target: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Copying uint8[n], and sending as many bytes to oneself."""
    return {"memcpy": lambda: np.copyto(target, source), "loopback": lambda: through_loopback(source, target)}


def through_loopback(source: np.ndarray, target: np.ndarray) -> None:
    """From a thread that sends to this one, which receives, over a TCP connection of their own."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sending:
        receiving, _ = server.accept()
        with receiving:
            sender = threading.Thread(target=lambda: [sending.sendall(part.data) for part in buckets(source, BUCKET_BYTES)])
            sender.start()
            for part in buckets(target, BUCKET_BYTES):
                receiving.recv_into(part.data, flags=socket.MSG_WAITALL)
            sender.join()


def write_file(path: Path, data: np.ndarray) -> None:
    """As the publisher: the old file goes, the new one is on disk at the end."""
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        for at in range(0, len(data), CHUNK_BYTES):
            file.write(data[at : at + CHUNK_BYTES].data)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, target: np.ndarray) -> None:
    with open(path, "rb") as file:
        for at in range(0, len(target), CHUNK_BYTES):
            file.readinto(target[at : at + CHUNK_BYTES].data)


def timed(ways: dict[str, Callable[[], Any]], turn: int) -> dict[str, float]:
    """Seconds of each, in an order that depends on the turn."""
    names = list(ways)
    first = turn % len(names)
    seconds = {}
    for name in names[first:] + names[:first]:
        began = time.perf_counter()
        ways[name]()
        seconds[name] = time.perf_counter() - began
    return seconds


def share(bound: Sequence[float], measured: Sequence[float]) -> float:
    """Median over rounds of bound / measured seconds: 1 is as fast as the bound."""
    return paired_ratio(bound, measured)


# ---- tables ----------------------------------------------------------------------------------------------------------------------


def part(measured: Measured, *names: str) -> list[float]:
    """Seconds of each round; of several ways their sum."""
    return [sum(seconds[name] for name in names) for seconds in measured.parts]


def milliseconds(syncs: Sequence[Sync], what: str) -> str:
    values = [1e3 * getattr(sync, what) for sync in syncs]
    return spread(values, 3 if max(values) < 1000 else 4)


def report_syncs(report: Report, results: dict[Setting, Measured]) -> None:
    table = report.table(
        "A sync between two processes, milliseconds",
        (
            "weights",
            "transport",
            "payload",
            "MB",
            "engine reads, MB",
            "trainer",
            "engine",
            "whole sync",
            "bound",
            "share of it",
            "first use of a slot",
        ),
        note="Median [least, most]. Trainer: packs or writes, and hashes. Engine: copies or reads, and hashes; its stall. Whole sync: "
        "both, and the messages. Bound of shared memory: 2 x memcpy. Bound of files, on "
        f"{file_system(Path(tempfile.gettempdir())) or 'this disk'}: as many bytes written with fsync and read without a hash; they are "
        "read from the page cache, as on one machine. Bound of collective: 2 x memcpy and as many bytes over a TCP connection of this "
        "machine; its engine receives beside its work, so its stall is a copy and a hash as over shared memory. Bound of what changed: "
        "both hash all their weights, 2 x hash; bits of random elements change, a share as measured on real steps (docs/weight_sync.md). "
        "First use: the whole sync into a slot whose memory is still to be made.",
    )
    for setting, m in results.items():
        table.rows.append(
            (
                setting.name,
                setting.transport,
                setting.payload,
                f"{m.num_bytes / 1e6:.0f}",
                f"{m.num_read / 1e6:.3g}",
                milliseconds(m.steady, "trainer_s"),
                milliseconds(m.steady, "stall_s"),
                milliseconds(m.steady, "total_s"),
                f"{1e3 * statistics.median(bound := part(m, *setting.bound)):.0f}",
                f"{share(bound, [sync.total_s for sync in m.steady]):.2f}",
                milliseconds(m.first, "total_s"),
            )
        )


def report_shares(report: Report, results: dict[Setting, Measured]) -> None:
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
        if setting.transport != "shared memory" or setting.payload != "full":
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


def report_stalls(report: Report, results: dict[Setting, Measured]) -> None:
    table = report.table(
        "The engine's stall while it decodes 32 sequences, one thread",
        ("weights", "transport", "payload", "stall, ms", "decode step, ms", "stall in decode steps", "whole sync, ms"),
        note="The stall in decode steps is the median of the rounds' own ratios. The whole sync waits for the step under way.",
    )
    for setting, m in results.items():
        if m.loaded:
            stalls = [sync.stall_s for sync in m.loaded]
            ticks = spread([1e3 * tick for tick in m.tick_s])
            ratio = paired_ratio(stalls, m.tick_s)
            total = milliseconds(m.loaded, "total_s")
            table.rows.append(
                (setting.name, setting.transport, setting.payload, milliseconds(m.loaded, "stall_s"), ticks, f"{ratio:.2f}", total)
            )


def report_targets(report: Report, results: dict[Setting, Measured]) -> None:
    for setting, m in results.items():
        if setting.layout == "135M" and setting.transport == "shared memory" and setting.payload == "full":
            if setting.dtype == "bfloat16":
                total_ms = [1e3 * sync.total_s for sync in m.steady]
                report.at_most(
                    f"{setting.name}, {m.num_bytes / 1e6:.0f} MB: whole sync, checksums included", total_ms, TOTAL_WANTED_MS, " ms"
                )
            memcpy = part(m, "memcpy")
            for what, name in (("copy without checksum", "copy alone"), ("copy and checksum", "copy and hash")):
                report.at_least(f"{setting.name}: {what}, share of memcpy", paired_ratios(memcpy, part(m, name)), SHARE_WANTED)


def main() -> None:
    report, options = start("weight_sync", "Weights from trainer to engine, beside memcpy.")
    results = {setting: asyncio.run(measure(setting)) for setting in SETTINGS[options.short]}
    report_syncs(report, results)
    report_shares(report, results)
    report_stalls(report, results)
    report_targets(report, results)
    report.data = {f"{setting.name}, {setting.transport}, {setting.payload}": asdict(measured) for setting, measured in results.items()}
    report.finish(options.json)


if __name__ == "__main__":
    main()
