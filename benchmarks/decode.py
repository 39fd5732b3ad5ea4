"""Decoding: useful tokens per second of the embedded engine, of transformers' `generate` and `generate_batch`, and of vLLM on CPU.

    python benchmarks/decode.py [--short] [--json PATH] [--vllm PYTHON]

SmolLM2-135M-Instruct, the same weights, prompts of 52 tokens in groups of 8, exactly the same number of new tokens per request in every
way, all with the same number of threads. Lengths are equal (64 tokens) or lognormal (sigma 1, mean 64, cut at 256), two batches of them.
What each way does of sampling and logprobs stands in `decode_ways.py`; useful tokens are those that were asked for. `--vllm` (or
DECODE_VLLM) names the Python of an environment with vLLM; without it that row is left out, with a line that says so.

Bounds, per number of threads and dtype:

    reading         B / (bytes of the weights / bytes read per second); at most one token per request and pass
    multiplying     B / (seconds of the pass's matrix products with B rows, alone, each in the fastest form the library has)

Both leave out attention, keys and values, sampling and prefill.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from bench import Report, alternate, paired_ratio, spread, start
from decode_ways import VLLM, Generate, GenerateBatch, Slipstream, Way
from decode_work import Machine, Work, lognormal_lengths, make_work, static_passes
from smollm2 import MODEL, model_folder
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from slipstream.config.settings import ModelSettings
from slipstream.models.loading import load_model
from slipstream.models.probe import probe

MEAN = 64  # new tokens per request
SHORT_MEAN = 32
BATCH = 32  # what the targets are about
OTHER_BATCHES = (1, 8, 64)
THREADS = 2
VOCABULARY = 49_152


class Models:
    """The weights once per dtype and side: slipstream's copy has its attention function, the peers' is as transformers loads it."""

    def __init__(self, dtype: str):
        self.dtype = dtype
        self.ours, *_ = load_model(ModelSettings(name=MODEL), dtype=dtype)
        self.peers: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=getattr(torch, dtype)).eval()
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.ours.parameters())

    def slipstream(self, batch: int, *, greedy: bool = False) -> Slipstream:
        return Slipstream(self.ours, batch, min_rows=probe(self.ours, slots=batch).min_rows, greedy=greedy)


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    report, options = start("decode", "Decoding: useful tokens per second against generate, generate_batch and vLLM.", _more)
    torch.set_num_threads(THREADS)
    mean = SHORT_MEAN if options.short else MEAN
    models = Models("float32")
    main_table(report, models, mean, options)
    if not options.short:
        batches_table(report, models, mean)
        other_table(report, models, mean)
    tick_table(report, models)
    report.finish(options.json)


def _more(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("DECODE_VLLM")
    parser.add_argument("--vllm", default=default, help="the Python of an environment that has vLLM's CPU build in it")


# ---- batch 32, float32 ---------------------------------------------------------------------------------------------------------


def main_table(report: Report, models: Models, mean: int, options: argparse.Namespace) -> None:
    """Batch 32 at equal and at lognormal lengths, every way, with the targets."""
    rounds = 1 if options.short else 2
    fixed = make_work(f"{mean} each", [mean] * BATCH, VOCABULARY)
    varied = make_work(f"lognormal, mean {mean}", lognormal_lengths(2 * BATCH, mean), VOCABULARY)
    ours = models.slipstream(BATCH)
    generate = Generate(models.peers, BATCH)
    ways: list[Way] = [ours, generate]
    vllm = _vllm(options.vllm, "float32", THREADS)
    if vllm is not None:
        ways.append(vllm)
    machine = measure(models.ours, BATCH)
    table = report.table(
        f"Useful tokens per second, batch {BATCH}, float32, {THREADS} threads",
        ("way", fixed.name, varied.name),
        note=f"`generate` needs {static_passes(varied.lengths, BATCH)} passes for the {varied.num_tokens} tokens of lognormal lengths. "
        f"{'vLLM is not installed here and was not run.' if vllm is None else f'vLLM {vllm.version}.'}",
    )
    rates: dict[str, dict[str, list[float]]] = {}
    for work in (fixed, varied):
        rates[work.name] = measured(ways, work, rounds)
    extra = [Generate(models.peers, BATCH, logprobs=True)]
    rates[fixed.name]["generate, logprobs too"] = measured(extra, fixed, 1)["generate"]
    if not options.short:
        rates[fixed.name]["generate_batch"] = measured([GenerateBatch(copy.deepcopy(models.peers), BATCH)], fixed, 1)["generate_batch"]
    for name in rates[fixed.name]:
        table.rows.append((name, *(spread(rates[w.name][name]) if name in rates[w.name] else "" for w in (fixed, varied))))
    bounds = {work.name: machine.bounds(work, BATCH, models.weight_bytes) for work in (fixed, varied)}
    table.rows.append(("bound: reading the weights", *(f"{bounds[w.name][0]:.0f}" for w in (fixed, varied))))
    table.rows.append(("bound: the matrix products", *(f"{bounds[w.name][1]:.0f}" for w in (fixed, varied))))
    for work, wanted in ((fixed, 1.4), (varied, 2.5)):
        mine = rates[work.name]
        report.at_least(f"against generate, {work.name}", paired_ratio(mine["slipstream"], mine["generate"]), wanted, "x")
        if vllm is not None:
            report.at_least(f"against vLLM, {work.name}", paired_ratio(mine["slipstream"], mine["vLLM"]), 1.0, "x")
    report.data |= {"rates": rates, "bounds": bounds, "bytes_per_s": machine.bytes_per_s, "products_s": machine.products_s}
    if vllm is not None:
        vllm.close()


def measured(ways: list[Any], work: Work, rounds: int) -> dict[str, list[float]]:
    """Useful tokens per second of each way, round by round, after a short warm-up; what comes out is checked."""
    warm = make_work("warm-up", [2] * min(work.num_requests, BATCH), VOCABULARY)

    def once(way: Way, work: Work) -> None:
        lengths = tuple(map(len, way.run(work)))
        if lengths != work.lengths:
            raise RuntimeError(f"{way.name} made {sum(lengths)} tokens in place of {work.num_tokens}")

    for way in ways:
        once(way, warm)
    seconds = alternate({way.name: lambda way=way: once(way, work) for way in ways}, rounds)
    return {name: [work.num_tokens / s for s in times] for name, times in seconds.items()}


def _vllm(python: str | None, dtype: str, threads: int) -> VLLM | None:
    if python is None:
        print("vLLM: not installed here (--vllm PYTHON names an environment with it); its row is left out\n")
        return None
    return VLLM(python, model_folder(), BATCH, threads, dtype)


# ---- other batches, one thread, bfloat16, greedy -------------------------------------------------------------------------------


def batches_table(report: Report, models: Models, mean: int) -> None:
    table = report.table(
        f"Useful tokens per second by batch, {mean} tokens each, float32, {THREADS} threads",
        ("batch", "slipstream", "generate", "ratio", "bound: reading", "bound: products"),
    )
    for batch in OTHER_BATCHES:
        work = make_work(f"{mean} each", [mean] * batch, VOCABULARY)
        _compare(report, table.rows, str(batch), models, batch, work)


def other_table(report: Report, models: Models, mean: int) -> None:
    """Batch 32 in another dtype, with one thread (what a process of its own gets), and greedy (where both must say the same)."""
    work = make_work(f"{mean // 2} each", [mean // 2] * BATCH, VOCABULARY)
    table = report.table(
        f"Useful tokens per second, batch {BATCH}, {work.name}",
        ("", "slipstream", "generate", "ratio", "bound: reading", "bound: products"),
    )
    torch.set_num_threads(1)
    _compare(report, table.rows, "float32, 1 thread", models, BATCH, work)
    torch.set_num_threads(THREADS)
    same = greedy_agreement(models, work)
    table.note = f"Greedy, float32: {100 * same:.1f} % of the tokens are the same as those of generate."
    report.data["greedy_same"] = same
    _compare(report, table.rows, f"bfloat16, {THREADS} threads", Models("bfloat16"), BATCH, work)


def _compare(report: Report, rows: list[Any], label: str, models: Models, batch: int, work: Work) -> None:
    rates = measured([models.slipstream(batch), Generate(models.peers, batch)], work, 1)
    reading, products = measure(models.ours, batch).bounds(work, batch, models.weight_bytes)
    ours, theirs = rates["slipstream"], rates["generate"]
    rows.append((label, spread(ours), spread(theirs), f"{paired_ratio(ours, theirs):.2f}x", f"{reading:.0f}", f"{products:.0f}"))
    report.data[f"{models.dtype}, batch {batch}, {label}"] = {"rates": rates, "reading": reading, "products": products}


def greedy_agreement(models: Models, work: Work) -> float:
    """Share of the tokens that are the same where nothing is random. After a near tie of two tokens a sequence goes another way."""
    ours = models.slipstream(BATCH, greedy=True)
    theirs = Generate(models.peers, BATCH, greedy=True).run(work)
    pairs = [(a, b) for x, y in zip(ours.run(work), theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


# ---- bounds and parts ----------------------------------------------------------------------------------------------------------


def measure(model: PreTrainedModel, batch: int) -> Machine:
    """Reading speed and the time of a pass's products, with the threads that are set."""
    buffer = torch.zeros(1 << 28)  # 1 GiB, far beyond any cache
    read_s = min(_seconds(buffer.sum) for _ in range(4))
    return Machine(buffer.numel() * 4 / read_s, products_s(model, batch))


@torch.inference_mode()
def products_s(model: PreTrainedModel, batch: int) -> float:
    """Seconds of all products of one pass, layer by layer as a pass meets them, so that no weight is in a cache."""
    forms = (torch.nn.functional.linear, lambda x, w: torch.mm(w, x.t()), lambda x, w: torch.mm(x, w.t()))
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], dtype=w.dtype) for w in weights}
    best: dict[tuple[torch.Size, int], float] = {}
    for _ in range(5):
        for form_index, form in enumerate(forms):
            spent: dict[torch.Size, float] = defaultdict(float)
            for w in weights:
                spent[w.shape] += _seconds(lambda form=form, w=w: form(inputs[w.shape[1]], w))
            for shape, s in spent.items():
                best[shape, form_index] = min(s, best.get((shape, form_index), s))
    return sum(min(best[shape, i] for i in range(len(forms))) for shape in {w.shape for w in weights})


def _seconds(do: Any) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "keys and values: write, gather": ("aten::index_copy_", "aten::index_select", "aten::index_put_"),
}


def tick_table(report: Report, models: Models) -> None:
    """Where the time of a tick goes, by torch's profiler, which makes small operations look dearer than they are."""
    way = models.slipstream(BATCH)
    work = make_work("profiled", [MEAN] * BATCH, VOCABULARY)
    for i in range(work.num_requests):
        way.engine.submit(way._request(work, i))
    for _ in range(MEAN // 2):
        way.engine.tick()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(4):
            way.engine.tick()
    events = profile.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    table = report.table(f"Where a tick goes, batch {BATCH}, float32, {THREADS} threads, at {PROMPT_AND_HALF} tokens", ("part", "share"))
    known = 0.0
    for part, names in PARTS.items():
        share = sum(e.self_cpu_time_total for e in events if e.key in names) / total
        known += share
        table.rows.append((part, f"{100 * share:.0f} %"))
    table.rows.append(("everything else: norms, rotary, activations, sampling, Python", f"{100 * (1 - known):.0f} %"))


PROMPT_AND_HALF = 52 + MEAN // 2

if __name__ == "__main__":
    main()
