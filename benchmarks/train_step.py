"""A training step: the shipped trainer against a padded trainer and against a bare loop, on the same batch, in one process.

    shipped   `Trainer.train_step`: token table, packing, shared prompts once, logprobs in chunks, entropy, diagnostics, gradient norm
    padded    one row per completion, padded to the longest, the prompt repeated in each: what trainers without packing do
    bare      the packed forward pass, logits where a trained token is predicted, loss, backward; its indices are made beforehand

All three train every completion token of the same groups with the same clipped loss in float32, on SmolLM2-135M; loss and gradient are
held against each other before anything is timed. The optimizer's update is made in the shipped step, taken out of its time and printed
apart: it is the same whatever the batch is.

Bound: with b parameters in the weight matrices of the body, h in the output head, G completions of R tokens over a prompt of P,

    ideal gain = [G (P + R) b + G R h] / [(P + G R) b + G R h]                 (`sharing_bounds.py`)

which is the padded step's weight products over the packed one's. Attention's own products, everything that is no matrix product and the
last token of each completion (from which nothing is predicted, so that packing leaves it out) are not in it.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from bench import Report, alternate, paired_ratios, spread, start
from sharing_bounds import sharing_gain
from smollm2 import MODEL
from torch import nn
from train_step_ways import (
    Bare,
    Padded,
    Shape,
    Shipped,
    gradient_of,
    make_batch,
    matrix_parameters,
    padded_twin,
    record_sampler,
    relative_distance,
)

from slipstream.config.settings import ModelSettings
from slipstream.models.loading import load_model

TOLERANCE = 1e-4  # of loss (advantages are of order 1) and gradient (2-norm of the difference, relative)
MAIN = Shape.equal(52, 24, 8, 4)
COMPARED = ("gain over padded", "ideal", "share of it", "over bare")

# What of the gain is left for other prompts, lengths and groups. Few groups: the ratio hardly depends on how many there are.
OTHERS = {
    "300 : 24 : 8": Shape.equal(300, 24, 8, 1),
    "52 : 256 : 8": Shape.equal(52, 256, 8, 1),
    "52 : 24 : 16": Shape.equal(52, 24, 16, 1),
    "52 : 6..48 : 8": Shape(52, tuple(random.Random(0).choices(range(6, 49), k=8)), 2),
}


ROUNDS = {2: (3, 5), 1: (3, 5)}  # by threads, of the first table: beside the padded step, beside the bare loop
ROUNDS_SHORT = {2: (3, 3)}
ROUNDS_OTHERS = (1, 1)  # no target is judged by them


class Models(NamedTuple):
    """One set of weights three times: a gradient of its own for each way, and nothing of the trainer in the other two."""

    shipped: nn.Module
    padded: nn.Module
    bare: nn.Module

    @classmethod
    def load(cls) -> Models:
        model, _, _ = load_model(ModelSettings(name=MODEL, dtype="float32"))
        return cls(model, padded_twin(model), copy.deepcopy(model))


def main() -> None:
    report, options = start("train_step", __doc__ or "")
    models = Models.load()
    report.data["parameters"] = dict(zip(("body", "head"), matrix_parameters(models.bare), strict=True))
    _headline(report, models)
    if not report.short:
        _by_shape(report, models)
    report.finish(options.json)


def _headline(report: Report, models: Models) -> None:
    steps = report.table("One step, without the optimizer", ("threads", "shipped, s", "padded, s", "bare, s", *COMPARED))
    steps.note = (
        f"SmolLM2-135M in float32, {MAIN.groups} groups of {len(MAIN.lengths)} completions of {max(MAIN.lengths)} tokens over prompts of "
        f"{MAIN.prompt}. Median [least, most]; gain and overhead are medians of the rounds' own ratios."
    )
    update = report.table("The optimizer's update, apart", ("threads", "AdamW, s", "of the whole step"))
    for threads, rounds in (ROUNDS_SHORT if report.short else ROUNDS).items():
        seconds = _measure(report, models, MAIN, threads, rounds)
        compared = _Compared.of(seconds, ideal_gain(MAIN, models.bare))
        shipped = seconds["shipped beside padded"] + seconds["shipped beside bare"]
        steps.rows.append((str(threads), *map(spread, (shipped, seconds["padded"], seconds["bare"])), *compared.cells()))
        alone, step = statistics.median(seconds["optimizer"]), statistics.median(shipped)
        update.rows.append((str(threads), spread(seconds["optimizer"]), f"{alone / (alone + step):.1%}"))
        where = f"P 52 : R 24 : G 8, {threads} thread{'s' if threads > 1 else ''}"
        report.at_least(f"{where}: share of the ideal gain, {compared.ideal:.2f}", [100 * share for share in compared.shares], 90, " %")
        report.at_most(f"{where}: time over the bare loop", [100 * overhead for overhead in compared.overheads], 5, " %")


def _by_shape(report: Report, models: Models) -> None:
    table = report.table("By prompt : completion : group size", ("P : R : G", *COMPARED))
    table.note = "2 threads. Completions of 6 to 48 tokens are padded to the longest in the padded step."
    for name, shape in OTHERS.items():
        seconds = _measure(report, models, shape, threads=2, rounds=ROUNDS_OTHERS)
        table.rows.append((name, *_Compared.of(seconds, ideal_gain(shape, models.bare)).cells()))


@dataclass(frozen=True, slots=True)
class _Compared:
    """Ratios of one setting, of each round."""

    gains: list[float]  # padded / shipped
    ideal: float
    overheads: list[float]  # shipped / bare - 1

    @classmethod
    def of(cls, seconds: dict[str, list[float]], ideal: float) -> _Compared:
        over = paired_ratios(seconds["shipped beside bare"], seconds["bare"])
        return cls(paired_ratios(seconds["padded"], seconds["shipped beside padded"]), ideal, [ratio - 1 for ratio in over])

    @property
    def shares(self) -> list[float]:
        return [gain / self.ideal for gain in self.gains]

    def cells(self) -> tuple[str, ...]:
        gain, overhead = statistics.median(self.gains), statistics.median(self.overheads)
        return f"{gain:.2f}", f"{self.ideal:.2f}", f"{gain / self.ideal:.0%}", f"{overhead:+.1%}"


def ideal_gain(shape: Shape, model: nn.Module) -> float:
    return sharing_gain(shape.prompt, shape.lengths, *matrix_parameters(model))


def _measure(report: Report, models: Models, shape: Shape, threads: int, rounds: tuple[int, int]) -> dict[str, list[float]]:
    """Seconds per round: "shipped beside padded", "padded", "shipped beside bare", "bare", "optimizer" (which the shipped ones leave out).

    The padded step takes twice as long and differs by much, the bare loop by little: so pairs with it are apart, more and closer in time.
    """
    torch.set_num_threads(threads)
    batch = make_batch(shape, models.bare.config.vocab_size)
    with torch.no_grad():
        record_sampler(batch, Bare(models.bare, batch, threads).logprob())
    ways = Shipped(models.shipped, batch, threads), Padded(models.padded, batch, threads), Bare(models.bare, batch, threads)
    distances = _assert_equal(*ways)
    shipped, updates = ways[0], []

    def step() -> None:
        before = shipped.optimizer_s
        shipped()
        updates.append(shipped.optimizer_s - before)

    def without_updates() -> float:
        return time.perf_counter() - shipped.optimizer_s

    seconds = {"optimizer": updates}
    for name, way, count in zip(("padded", "bare"), ways[1:], rounds, strict=True):
        seconds |= alternate({f"shipped beside {name}": step, name: way}, count, without_updates)
    measured = {"shape": str(shape), "threads": threads, "distances": distances, "metrics": shipped.metrics, "seconds": seconds}
    report.data.setdefault("measured", []).append(measured)
    for model in models:
        model.zero_grad()
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
