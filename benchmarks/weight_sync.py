"""What it takes to bring new weights from the trainer into the engine, beside what copying the same bytes takes.

    python benchmarks/weight_sync.py [--short] [--json PATH]

Two processes of one thread each, started as the local launcher starts its roles, with the real controller, ledger and sockets between
them (`weight_sync_pair.py`, `weight_sync_roles.py`). A sync lasts from the trainer's `begin_write` to the engine's confirmed checksum,
both as the controller sees them: pack and hash | publish, offer | copy and hash of the engine's own copy | confirm. The trainer waits for
its end, so that sides do not disturb each other.

After each sync, while both processes rest, this process copies the slot just read into the other one: in one call (the bound: memcpy),
with the loop of the shipped code without its hash, with its hash, and it hashes the slot. With transport `files` it writes as many bytes
into a new file beside the others, syncs it to disk, and reads the file just read: in the shipped code's chunks, without a hash. With
`collective` it sends as many bytes to itself through a TCP socket on the loopback interface, two threads, in messages as large as the
shipped code's. Shares are medians of the rounds' own ratios.

With payload `delta` the trainer changes a share of the weights per version, and both are held against hashing as many bytes. With
`adapter` it changes an adapter of rank 16 on all linear layers but the head.

    share of memcpy = seconds of memcpy / seconds of what moved the same bytes
    share of the bound = (2 x memcpy, write + read, or 2 x memcpy + loopback) / whole sync

At last the engine decodes a full batch while versions come in. This process gets its frames, as a rollout worker does, and notes when each
token came (`weight_sync_decoding.py`): how long a sequence waits for its next one around a sync, and how long between two syncs. The stall
is what the engine itself reports as `weight_sync_s`.

What is measured is written to PATH setting by setting: of a run that ends early, that much is there. An engine that is a vLLM server:
`weight_sync_vllm.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench import Report, start
from weight_sync_bounds import measure_parts
from weight_sync_decoding import Decoding
from weight_sync_pair import Pair
from weight_sync_settings import FIRST_USES, SETTINGS, Setting
from weight_sync_tables import Loaded, Measured, Results, fill

from slipstream.launch.framing import private_directory

QUIET_GAPS = 3  # of each sequence between two syncs
RATE_BATCHES = (1, 8, 32)
RATE_TOKENS, RATE_ROUNDS = 5, 3
Fill = Callable[[Report, Results], None]


async def measure(setting: Setting, python: str | None = None) -> Measured:
    """The syncs of a setting: into slots never used before, then steady ones beside the bound, then under load. `python` has vLLM."""
    out, began = Measured(), time.monotonic()
    with private_directory() as sockets, tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        pair = Pair(setting.config(python), setting.options(), Path(folder) / "run", sockets)
        try:
            await pair.start()
            out.first = [await pair.start_weights()]
            out.first += [await pair.one_sync() for _ in range(1, FIRST_USES)]
            for turn in range(-FIRST_USES, setting.syncs):
                sync = await pair.one_sync()
                seconds = measure_parts(setting.transport, setting.payload, pair, turn)
                if turn >= 0:  # before, this process touches the slots' pages for the first time
                    out.steady.append(sync)
                    out.parts.append(seconds)
            if setting.under_load or setting.rates:
                await measure_decoding(setting, pair, out)
            out.num_bytes, out.num_read, out.memory_gib = pair.controller.num_bytes, pair.controller.num_read, pair.memory_gib()
        finally:
            await pair.close()
    out.took_s = time.monotonic() - began
    return out


async def measure_decoding(setting: Setting, pair: Pair, out: Measured) -> None:
    """Versions that come while it decodes; and how fast it does, where the setting asks for that."""
    decoding = await pair.wait(pair.decoding())
    try:
        for _ in range(setting.under_load):
            if decoding.is_old:
                await pair.wait(decoding.start())
            out.loaded.append(await load_round(pair, decoding))
        if setting.rates:
            for count in RATE_BATCHES:
                await pair.wait(decoding.start(count))
                out.rates[count] = [await pair.wait(decoding.rate(RATE_TOKENS)) for _ in range(RATE_ROUNDS)]
    finally:
        await decoding.stop()


async def load_round(pair: Pair, decoding: Decoding) -> Loaded:
    """Some tokens, then a version, and a token of each sequence after it."""
    quiet = time.perf_counter()
    await pair.wait(decoding.more(QUIET_GAPS + 1))
    began = time.perf_counter()
    sync = await pair.one_sync()
    ended = time.perf_counter()
    await pair.wait(decoding.after(ended))
    return Loaded(sync, statistics.median(decoding.gaps_within(quiet, began)), decoding.longest_gap_across(began, ended))


def measure_all(report: Report, chosen: Sequence[Setting], path: Path | None, fill: Fill, python: str | None = None) -> None:
    """One setting after the other; after each, what there is so far is written to `path`."""
    results: dict[Setting, Measured] = {}
    for setting in chosen:
        results[setting] = measured = asyncio.run(measure(setting, python))
        print(f"{setting}: {measured.took_s:.0f} s, {measured.memory_gib:.1f} GiB", flush=True)
        report.tables, report.targets = [], []
        fill(report, results)
        report.data = {str(setting): asdict(measured) for setting, measured in results.items()}
        report.sources = "" if len(results) == len(chosen) else f"It ended early, after {len(results)} of {len(chosen)} settings."
        report.save(path)
    report.finish(path)


def main() -> None:
    report, options = start("weight_sync", "Weights from trainer to engine, beside memcpy.")
    measure_all(report, SETTINGS[options.short], options.json, fill)


if __name__ == "__main__":
    main()
