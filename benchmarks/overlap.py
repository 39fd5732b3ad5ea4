"""How much of generation and training overlaps: samples per second of virtual time under each staleness, beside what is possible.

    python benchmarks/overlap.py [--short] [--json PATH]

Real controller, ledger, rollout worker, engine loop and trainer loop, in a loop whose clock jumps (`virtual_time.py`), with timed stand-ins
for the forward pass and the training step (`timed_roles.py`). So a figure is exact: it depends on settings and seed and on no machine.

A rollout's length is lognormal with the given sigma, cut at 4 times the mean, in tokens; a token takes as long for 1 running sequence as
for all N slots. Times are in units of mu, the mean of the lengths that were drawn, and the same ones are drawn for every setting. A
training step takes w * mu * balance, w = samples per step / slots: at balance 1 both sides alone would make as many samples a second.

Bounds, from the same draws (`overlap_bounds.py` derives them): what both sides could do if neither ever waited, and what is possible
under max_staleness at all, since a group that may be S versions old can start no earlier than S + 1 steps before its own.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import multiprocessing
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench import Report, Table, start
from overlap_bounds import rates_bound, staleness_bound
from timed_roles import Outcome, play

from slipstream.config import Config
from slipstream.config.arithmetic import pull_window

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
CUT = 4  # times the mean
UNBOUNDED_BATCHES = 16  # in flight at most, where staleness has no bound
UNBOUNDED = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How a batch and the engine's slots compare."""

    name: str
    groups_per_step: int
    group_size: int
    slots: int
    steps: int

    @property
    def w(self) -> float:
        return self.groups_per_step * self.group_size / self.slots


@dataclass(frozen=True, slots=True)
class Setting:
    shape: Shape
    sigma: float
    max_staleness: int | None  # UNBOUNDED: whatever is ready is trained, however old
    balance: float = 1.0  # generation is that many times as fast as training


@dataclass(frozen=True, slots=True)
class Measured:
    """One run and its bounds; times in units of mu."""

    outcome: Outcome
    longest: float  # L_max / mu
    window: int | None
    step_s: float
    rates_s: float  # seconds at least
    staleness_s: float

    def of(self, bound_s: float) -> float:
        return bound_s / self.outcome.seconds


def shapes(short: bool) -> tuple[Shape, Shape]:
    """The defaults, and those of the quickstart."""
    default, quickstart = Config(), tomllib.loads(QUICKSTART.read_text())
    return (
        Shape("defaults", default.trainer.groups_per_step, default.rollout.group_size, default.engine.slots, 30 if short else 80),
        Shape(
            "quickstart",
            quickstart["trainer"]["groups_per_step"],
            quickstart["rollout"]["group_size"],
            quickstart["engine"]["slots"],
            12 if short else 24,
        ),
    )


def drawn_lengths(shape: Shape, sigma: float, mean_tokens: float, seed: int = 0) -> np.ndarray:
    """int[groups, G] tokens: lognormal, cut at CUT times the mean."""
    normal = np.random.default_rng(seed).standard_normal((shape.steps * shape.groups_per_step, shape.group_size))
    tokens = mean_tokens * np.exp(sigma * normal - sigma**2 / 2)
    return np.clip(np.rint(tokens), 1, CUT * mean_tokens).astype(int)


def settings_of(setting: Setting) -> Config:
    """The shipped defaults, but for what is compared; one process, since everything shares one clock."""
    shape, stale = setting.shape, setting.max_staleness
    unbounded = {"max_staleness": 1000, "window": "unbounded", "max_groups": UNBOUNDED_BATCHES * shape.groups_per_step}
    return Config.model_validate(
        {
            "launch": "inline",
            "rollout": {"group_size": shape.group_size},
            "engine": {"slots": shape.slots},
            "buffer": unbounded if stale is UNBOUNDED else {"max_staleness": stale},
            "trainer": {"groups_per_step": shape.groups_per_step, "steps": shape.steps},
        }
    )


def measure(setting: Setting) -> Measured:
    shape, config = setting.shape, settings_of(setting)
    tokens = drawn_lengths(shape, setting.sigma, config.rollout.max_new_tokens / CUT)
    token_s, step_s = 1 / float(tokens.mean()), shape.w * setting.balance
    seconds, window = tokens * token_s, pull_window(config)
    rates_s = rates_bound(seconds, shape.groups_per_step, shape.slots, step_s)
    staleness_s = rates_s
    if setting.max_staleness is not UNBOUNDED:
        assert window is not None, "bounded staleness has a window"
        own = staleness_bound(seconds, shape.groups_per_step, shape.slots, step_s, setting.max_staleness, window)
        staleness_s = max(rates_s, own)
    return Measured(play(config, tokens, token_s, step_s), float(seconds.max()), window, step_s, rates_s, staleness_s)


# ---- what is run, and shown ------------------------------------------------------------------------------------------------------


def balanced(short: bool) -> list[Setting]:
    defaults, quickstart = shapes(short)
    sigmas = (0.0, 1.0) if short else (0.0, 0.5, 1.0, 1.5)
    stale = (0, 1, 2, 8, UNBOUNDED) if short else (0, 1, 2, 4, 8, UNBOUNDED)
    out = [Setting(defaults, sigma, s) for sigma, s in itertools.product(sigmas, stale)]
    out += [Setting(quickstart, sigma, s) for sigma, s in itertools.product(sigmas[-1:] if short else sigmas, (0, 1, 2))]
    return out


def unbalanced(short: bool) -> list[Setting]:
    defaults, quickstart = shapes(short)
    out = [
        Setting(defaults, 1.0, s, b) for b, s in itertools.product((2.0,) if short else (0.5, 1.25, 2.0), (1, 2) if short else (0, 1, 2, 4))
    ]
    out += [
        Setting(quickstart, 1.0, s, b) for b, s in itertools.product((2.0,) if short else (0.5, 1.25, 2.0), (2,) if short else (0, 1, 2))
    ]
    return out


def measured_all(settings: list[Setting]) -> dict[Setting, Measured]:
    """Each in a process of its own; what else runs has no effect on the figures."""
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(settings, pool.map(measure, settings), strict=True))


def show(table: Table, results: dict[Setting, Measured]) -> None:
    for setting, m in results.items():
        outcome, samples = m.outcome, m.outcome.trained_samples
        sync = results.get(Setting(setting.shape, setting.sigma, 0, setting.balance))
        sampled = outcome.trained_tokens + outcome.masked_tokens
        ages = outcome.staleness
        table.rows.append(
            (
                f"{setting.shape.w:g}",
                f"{setting.balance:g}",
                f"{setting.sigma:g}",
                f"{m.longest:.1f}",
                "sync" if setting.max_staleness == 0 else "unbounded" if setting.max_staleness is UNBOUNDED else str(setting.max_staleness),
                "-" if m.window is None else str(m.window),
                f"{samples / outcome.seconds:.1f}",
                f"{samples / m.staleness_s:.1f}",
                f"{100 * m.of(m.staleness_s):.0f}",
                f"{samples / m.rates_s:.1f}",
                f"{100 * m.of(m.rates_s):.0f}",
                f"{sync.outcome.seconds / outcome.seconds:.2f}" if sync else "",
                f"{100 * outcome.trainer_idle:.1f}",
                f"{100 * outcome.slots_full:.0f}",
                f"{100 * outcome.masked_tokens / sampled:.1f}",
                f"{sum(age * n for age, n in ages.items()) / ages.total():.2f}",
            )
        )


COLUMNS = (
    "w", "gen/train", "σ", "L_max/μ", "η", "W", "samples/μ", "bound(η)", "% of it", "bound(rates)", "% of it", "x sync", "trainer idle %",
    "slots full %", "masked %", "mean age",
)  # fmt: skip


def aims(report: Report, results: dict[Setting, Measured]) -> None:
    """Targets at eta = 2: in the defaults' shape and in the quickstart's."""
    for shape in shapes(report.short):
        name = f"{shape.name} (w = {shape.w:g}), η = 2, σ = 1"
        even = results[Setting(shape, 1.0, 2)]
        report.at_least(f"{name}, balanced: share of what η = 2 allows", 100 * even.of(even.staleness_s), 95, " %")
        report.at_least(f"{name}, balanced: share of both sides' own rates", 100 * even.of(even.rates_s), 95, " %")
        for setting, m in results.items():
            if setting.shape == shape and setting.balance > 1 and setting.max_staleness == 2:
                report.at_most(f"{name}, generation {setting.balance:g}x: trainer idle", 100 * m.outcome.trainer_idle, 2, " %")


def main() -> None:
    report, options = start("overlap", "Overlap of generation and training in virtual time, beside what is possible")
    short = report.short
    results = measured_all([*balanced(short), *unbalanced(short)])
    even = {setting: m for setting, m in results.items() if setting.balance == 1}
    note = (
        "A batch holds w times as many samples as there are slots; η: max_staleness; W: window. bound(η): what any order of starts could "
        "reach under this η and W, were every length known; bound(rates): if neither side ever waited. masked: tokens older than η. "
        "Where the longest rollout outlasts the η steps that may pass meanwhile (L_max > η w μ), the limit itself keeps a run below "
        "bound(rates)."
    )
    show(report.table("Both sides equally fast", COLUMNS, note), even)
    show(
        report.table("One side faster (gen/train: how many times as fast generation is)", COLUMNS),
        {s: m for s, m in results.items() if s not in even},
    )
    aims(report, results)
    report.data["rows"] = [dict(zip(COLUMNS, row, strict=True)) for table in report.tables for row in table.rows]
    report.finish(options.json)


if __name__ == "__main__":
    main()
