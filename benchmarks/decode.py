"""Decoding: useful tokens per second of the embedded engine, of transformers' `generate` and `generate_batch`, and of vLLM on CPU.

    python benchmarks/decode.py [--short] [--json PATH] [--vllm PYTHON]

SmolLM2-135M-Instruct, the same weights, prompts of 52 tokens in groups of 8, exactly the same number of new tokens per request in every
way, all with the same number of threads. Lengths are equal (64 tokens) or lognormal (sigma 1, mean 64, cut at 256), two batches of them;
12 in place of 64 in the short form, where prefill therefore weighs more. What each way does of sampling and logprobs stands in
`decode_ways.py`. `--vllm` (or DECODE_VLLM) names the Python of an environment with vLLM; without it there is a line that says so in place
of its figures.

Bounds, per number of threads and dtype, in tokens per second with B sequences at a time:

    reading         B / (bytes of the weights / bytes read per second); fewer with lengths so unequal that passes cannot be full
    multiplying     B / (seconds of the pass's matrix products with B rows, alone, each in the fastest form the library has)

Both leave out attention, keys and values, sampling and prefill.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench import Report, Table, alternate, paired_ratio, paired_ratios, spread, start
from decode_ways import VLLM, Generate, GenerateBatch, Slipstream, Way
from decode_work import PROMPT_TOKENS, Machine, Work, lognormal_lengths, make_work, static_passes
from smollm2 import MODEL, model_folder
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from slipstream.config.settings import ModelSettings
from slipstream.models.loading import load_model
from slipstream.models.probe import probe

MEAN, SHORT_MEAN = 64, 12  # new tokens per request
ROUNDS = 3  # where a target is judged
BATCH = 32  # what the targets are about
OTHER_BATCHES = (1, 8, 64)
THREADS = 2
VOCABULARY = 49_152


class Models:
    """The weights once per side: slipstream's copy has its attention function, the peers' is as transformers loads it."""

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
    if options.vllm is None:
        print("vLLM: not installed here (--vllm PYTHON names an environment with it); its figures are left out\n", flush=True)
    torch.set_num_threads(THREADS)
    models = Models("float32")
    mean = SHORT_MEAN if options.short else MEAN
    main_table(report, models, mean, options)
    if not options.short:
        batches_table(report, models, mean)
        other_table(report, models, mean // 2, options)
    tick_table(report, models)
    report.finish(options.json)


def _more(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("DECODE_VLLM")
    parser.add_argument("--vllm", default=default, help="the Python of an environment that has vLLM's CPU build in it")


# ---- batch 32, float32 ---------------------------------------------------------------------------------------------------------


def main_table(report: Report, models: Models, mean: int, options: argparse.Namespace) -> None:
    """Batch 32 at equal and at lognormal lengths, every way, with the targets."""
    fixed = make_work(f"{mean} each", [mean] * BATCH, VOCABULARY)
    varied = make_work(f"lognormal, mean {mean}", lognormal_lengths(2 * BATCH, mean), VOCABULARY)
    machine = measure(models.ours, BATCH)
    ways: list[Way] = [models.slipstream(BATCH), Generate(models.peers, BATCH)]
    vllm = VLLM(options.vllm, model_folder(), BATCH, THREADS, "float32") if options.vllm else None
    if vllm is not None:
        ways.append(vllm)
    rates = {
        fixed.name: measured(ways, fixed, ROUNDS),
        varied.name: measured(ways, varied, ROUNDS),
    }
    if not options.short:
        rates[fixed.name] |= measured([Generate(models.peers, BATCH, logprobs=True)], fixed, 1)
        rates[fixed.name] |= measured([GenerateBatch(copy.deepcopy(models.peers), BATCH)], fixed, 1)
    table = report.table(
        f"Useful tokens per second, batch {BATCH}, float32, {THREADS} threads",
        ("way", fixed.name, varied.name),
        note=f"Of lognormal lengths `generate` makes {static_passes(varied.lengths, BATCH)} passes for {varied.num_tokens} tokens. "
        f"{f'vLLM {vllm.version}.' if vllm else 'vLLM was not installed.'}",
    )
    for name in rates[fixed.name]:
        table.rows.append((name, *(spread(rates[w.name][name]) if name in rates[w.name] else "" for w in (fixed, varied))))
    bounds = {work.name: machine.bounds(work, BATCH, models.weight_bytes) for work in (fixed, varied)}
    for i, bound in enumerate(("reading the weights", "the matrix products")):
        table.rows.append((f"bound: {bound}", *(f"{bounds[w.name][i]:.0f}" for w in (fixed, varied))))
    for work, wanted in ((fixed, 1.4), (varied, 2.5)):
        mine = rates[work.name]
        report.at_least(f"against generate, {work.name}", paired_ratios(mine["slipstream"], mine["generate"]), wanted, "x")
        if vllm is not None:
            report.at_least(f"against vLLM, {work.name}", paired_ratios(mine["slipstream"], mine["vLLM"]), 1.0, "x")
    report.data |= {"rates": rates, "bounds": bounds, "bytes_per_s": machine.bytes_per_s, "products_s": machine.products_s}
    if vllm is not None:
        vllm.close()


def measured(ways: Sequence[Way], work: Work, rounds: int) -> dict[str, list[float]]:
    """Useful tokens per second of each way, round by round, which has prompts of its own, after a warm-up; what comes out is counted."""
    warm = make_work("warm-up", [2] * min(work.num_requests, BATCH), VOCABULARY)
    rates: dict[str, list[float]] = {way.name: [] for way in ways}

    def once(way: Way) -> None:
        asked = work.with_other_prompts(len(rates[way.name]), VOCABULARY)
        began = time.perf_counter()
        lengths = tuple(map(len, way.run(asked)))
        rates[way.name].append(work.num_tokens / (time.perf_counter() - began))
        if lengths != work.lengths:
            raise RuntimeError(f"{way.name} made {sum(lengths)} tokens in place of {work.num_tokens}")
        time.sleep(way.settles_s)

    for way in ways:
        way.run(warm)
        time.sleep(way.settles_s)
    alternate({way.name: lambda way=way: once(way) for way in ways}, rounds)
    return rates


# ---- other batches, one thread, bfloat16, greedy -------------------------------------------------------------------------------

_COLUMNS = ("slipstream", "generate", "ratio", "bound: reading", "bound: products")


def batches_table(report: Report, models: Models, mean: int) -> None:
    table = report.table(f"Useful tokens per second by batch, {mean} tokens each, float32, {THREADS} threads", ("batch", *_COLUMNS))
    for batch in OTHER_BATCHES:
        _compare(report, table, str(batch), models, batch, make_work(f"{mean} each", [mean] * batch, VOCABULARY))


def other_table(report: Report, models: Models, tokens: int, options: argparse.Namespace) -> None:
    """Batch 32 with one thread (what an engine in a process of its own gets), in bfloat16, and greedy (where all must say the same)."""
    work = make_work(f"{tokens} each", [tokens] * BATCH, VOCABULARY)
    table = report.table(f"Useful tokens per second, batch {BATCH}, {work.name}", ("", *_COLUMNS))
    torch.set_num_threads(1)
    _compare(report, table, "float32, 1 thread", models, BATCH, work)
    torch.set_num_threads(THREADS)
    same = greedy_agreement(models, work)
    _compare(report, table, f"bfloat16, {THREADS} threads", Models("bfloat16"), BATCH, work)
    table.note = f"Greedy, in float32, {100 * same:.1f} % of the tokens are those of `generate`."
    report.data["greedy_same"] = same
    if options.vllm:
        vllm = VLLM(options.vllm, model_folder(), BATCH, THREADS, "bfloat16")
        rates = measured([vllm], work, 1)["vLLM"]
        table.note += f" vLLM in bfloat16, {THREADS} threads: {spread(rates)}."
        report.data["bfloat16, vLLM"] = rates
        vllm.close()


def _compare(report: Report, table: Table, label: str, models: Models, batch: int, work: Work) -> None:
    rates = measured([models.slipstream(batch), Generate(models.peers, batch)], work, 1)
    reading, products = measure(models.ours, batch).bounds(work, batch, models.weight_bytes)
    ours, theirs = rates["slipstream"], rates["generate"]
    table.rows.append((label, spread(ours), spread(theirs), f"{paired_ratio(ours, theirs):.2f}x", f"{reading:.0f}", f"{products:.0f}"))
    report.data[f"{models.dtype}, batch {batch}, {label}"] = {"rates": rates, "reading": reading, "products": products}


def greedy_agreement(models: Models, work: Work) -> float:
    """Share of the tokens that are the same where nothing is random. After a near tie of two tokens a sequence goes another way."""
    ours = models.slipstream(BATCH, greedy=True).run(work)
    theirs = Generate(models.peers, BATCH, greedy=True).run(work)
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


# ---- bounds, and where the time goes -------------------------------------------------------------------------------------------


def measure(model: PreTrainedModel, batch: int) -> Machine:
    """Reading speed and the time of a pass's products, with the threads that are set."""
    buffer = torch.zeros(1 << 28)  # 1 GiB, far beyond any cache
    read_s = min(_seconds(buffer.sum) for _ in range(4))
    return Machine(buffer.numel() * 4 / read_s, products_s(model, batch))


@torch.inference_mode()
def products_s(model: PreTrainedModel, batch: int, rounds: int = 4) -> float:
    """Seconds of all products of one pass, layer after layer as a pass meets them, so that no weight is in a cache."""
    forms: list[tuple[Callable, Callable]] = [  # what is done to a weight beforehand, and the product
        (lambda w: w, lambda x, w, _: torch.nn.functional.linear(x, w)),
        (lambda w: w, lambda x, w, _: torch.mm(w, x.t())),
    ]
    if torch.backends.mkl.is_available() and model.dtype == torch.float32:
        pack, multiply = torch.ops.mkl._mkl_reorder_linear_weight, torch.ops.mkl._mkl_linear
        forms.append((lambda w: pack(w.detach(), batch), lambda x, w, packed: multiply(x, packed, w, None, batch)))
    if torch.backends.mkldnn.is_available():
        reorder, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        forms.append((lambda w: reorder(w.detach(), batch), lambda x, w, packed: linear(x, packed, None, "none", [], "")))
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], dtype=w.dtype) for w in weights}
    best: dict[torch.Size, float] = {}  # of all products of this shape together
    for _ in range(rounds):
        for prepare, product in forms:
            spent: dict[torch.Size, float] = defaultdict(float)
            prepared = [prepare(w) for w in weights]
            for w, given in zip(weights, prepared, strict=True):
                spent[w.shape] += _seconds(lambda product=product, w=w, given=given: product(inputs[w.shape[1]], w, given))
            best |= {shape: min(s, best.get(shape, s)) for shape, s in spent.items()}
    return sum(best.values())


def _seconds(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


_PARTS = {
    "matrix products": ("mkl::_mkl_linear", "mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "keys and values: write and gather": ("aten::index_copy_", "aten::index_select"),
    "copies (operands turned over)": ("aten::copy_",),
}


def tick_table(report: Report, models: Models) -> None:
    """Shares of a tick by torch's profiler, which makes many small operations look dearer than they are."""
    way = models.slipstream(BATCH)
    work = make_work("profiled", [MEAN] * BATCH, VOCABULARY)
    for i in range(work.num_requests):
        way.engine.submit(way.request(work, i))
    ticks = MEAN // 2
    for _ in range(ticks):
        way.engine.tick()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(4):
            way.engine.tick()
    events = profile.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    shares = {part: sum(e.self_cpu_time_total for e in events if e.key in names) / total for part, names in _PARTS.items()}
    shares["everything else: norms, rotary, activations, sampling"] = 1 - sum(shares.values())
    table = report.table(
        f"Where a tick goes, batch {BATCH}, float32, {THREADS} threads, {PROMPT_TOKENS + ticks} tokens per sequence", ("part", "share")
    )
    table.rows += [(part, f"{100 * share:.0f} %") for part, share in shares.items()]
    report.data["tick"] = shares


if __name__ == "__main__":
    main()
