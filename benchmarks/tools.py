"""Rollouts that wait for a tool: asynchronous against synchronous, in wall-clock.

    python benchmarks/tools.py [--short] [--json PATH]

Whole runs, as a person starts them: `slipstream.train`, a process per role, the tool environment with a Python function as its tool, a
small real model (`tool_caller.py`) that is sampled and trained, ledger and checksums on. In every rollout the model calls the tool once
and then answers; a call sleeps a lognormal time of mean 1 s (`slow_tool.py`). Defaults otherwise: 4 groups of 8 rollouts per step.

A rollout that waits for its tool counts against `engine.slots`, since it will come back with tokens that age. The defaults' 32 slots let
one batch and one group more wait at a time; the long form has a row with slots for all three batches that max_staleness 2 admits.

The settings take turns, three whole runs each.

Bound, from the same draws (`overlap_bounds.staleness_bound`): rollout i takes its sleep at least, a step what it took at the median,
tokens nothing, and every admitted rollout starts at once. In a synchronous run a step takes the longest sleep of its 32 and the step's own
time; with max_staleness S the sleeps of S further batches pass at the same time. Calls come in the order of admission but for chance, and
so do the draws.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import slow_tool
from bench import alternate, paired_ratios, spread, start
from overlap_bounds import staleness_bound
from tool_caller import MAX_NEW_TOKENS, tool_caller

import slipstream
from slipstream.config import Config
from slipstream.config.arithmetic import pull_window

TOOL = Path(slow_tool.__file__)
ALL_AT_ONCE = 1 << 20  # slots
ROUNDS = 3
SHARE_WANTED = 90  # per cent of the bound, which leaves out tokens, messages, and what is under way when the run ends
LEAST_CALLS = 0.97  # per rollout; with fewer the runs would do less than they claim


@dataclass(frozen=True, slots=True)
class Setting:
    max_staleness: int
    slots: int

    @property
    def name(self) -> str:
        return "sync" if self.max_staleness == 0 else f"async, η = {self.max_staleness}"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.slots} slots"


@dataclass(frozen=True, slots=True)
class Measured:
    metrics: dict[str, Any]  # of the run's summary
    step_s: float  # median of a step and its publication
    sleeps: list[float]  # of each call that ended
    bound_s: float  # seconds of the whole run at least

    @property
    def samples_per_s(self) -> float:
        return self.metrics["trained_samples_per_s"]


def run(setting: Setting, steps: int, model: Path) -> Measured:
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tools-") as folder:
        calls = Path(folder) / "calls.txt"
        os.environ["TOOL_CALLS"] = str(calls)
        config = Config.model_validate(
            {
                "run": {"folder": f"{folder}/run"},
                "model": {"name": str(model)},
                "reward": [{"function": f"{TOOL}:last_line"}],
                "rollout": {"environment": "tools", "tools": [f"{TOOL}:wait"], "max_turns": 2, "max_new_tokens": MAX_NEW_TOKENS},
                "engine": {"slots": setting.slots},
                "buffer": {"max_staleness": setting.max_staleness},
                "trainer": {"steps": steps},
            }
        )
        metrics = slipstream.train(config, on_step=lines.append).metrics
        sleeps = [float(end) - float(began) for _, began, end in map(str.split, calls.read_text().splitlines())]
    if len(sleeps) < LEAST_CALLS * metrics["trained_samples"]:
        raise RuntimeError(f"only {len(sleeps)} calls for {metrics['trained_samples']} rollouts: the model does not call its tool any more")
    step_s = statistics.median(line["step_s"] + line["publish_s"] for line in lines)
    return Measured(metrics, step_s, sleeps, bound(config, steps, step_s))


def bound(config: Config, steps: int, step_s: float) -> float:
    """Seconds of the run at least."""
    shape = (steps * config.trainer.groups_per_step, config.rollout.group_size)
    sleeps = slow_tool.drawn_seconds()[: shape[0] * shape[1]].reshape(shape)
    window = pull_window(config)
    assert window is not None, "the default window is a number"
    return staleness_bound(sleeps, config.trainer.groups_per_step, ALL_AT_ONCE, step_s, config.buffer.max_staleness, window)


def settings(short: bool) -> list[Setting]:
    """The synchronous one first."""
    defaults = Config()
    batch, slots = defaults.trainer.groups_per_step * defaults.rollout.group_size, defaults.engine.slots
    stale = (0, 2) if short else (0, 1, 2)
    return [*(Setting(s, slots) for s in stale), *([] if short else [Setting(2, 3 * batch)])]


def measured_all(compared: list[Setting], steps: int) -> dict[Setting, list[Measured]]:
    """Every setting's rounds, taken in turns."""
    model, results = tool_caller(), {setting: [] for setting in compared}
    alternate({s.label: lambda s=s: results[s].append(run(s, steps, model)) for s in compared}, ROUNDS)
    return results


def main() -> None:
    report, options = start("tools", "Rollouts that wait for tools: asynchronous against synchronous")
    steps = 4 if report.short else 8
    samples = steps * Config().trainer.groups_per_step * Config().rollout.group_size
    results = measured_all(settings(report.short), steps)
    table = report.table(
        f"{samples} rollouts in {steps} steps, each with one call of mean {slow_tool.MEAN_S:g} s (σ = {slow_tool.SIGMA:g})",
        ("", "slots", "samples/s", "bound", "% of it", "x sync", "bound of that", "trainer idle %", "mean staleness", "step s"),
        "Of three runs each: median [least, most], of the last three columns the mean. samples/s: from the first admission on. bound of "
        "that: what this run could do at best beside the synchronous one as measured.",
    )
    sync_rates = [m.samples_per_s for m in next(iter(results.values()))]
    for setting, rounds in results.items():
        rates, possible = [m.samples_per_s for m in rounds], [samples / m.bound_s for m in rounds]
        shares = [100 * share for share in paired_ratios(rates, possible)]
        means = [fmean(m.metrics[name] for m in rounds) for name in ("trainer_idle_fraction", "staleness_mean")]
        table.rows.append(
            (
                setting.name,
                str(setting.slots),
                spread(rates),
                f"{fmean(possible):.2f}",
                spread(shares),
                spread(paired_ratios(rates, sync_rates)),
                f"{statistics.median(paired_ratios(possible, sync_rates)):.2f}",
                f"{100 * means[0]:.0f}",
                f"{means[1]:.2f}",
                f"{fmean(m.step_s for m in rounds):.2f}",
            )
        )
        if setting.max_staleness:
            report.at_least(f"{setting.label}: share of its bound", shares, SHARE_WANTED, " %")
        report.data[setting.label] = [
            {"calls": len(m.sleeps), "mean_sleep_s": fmean(m.sleeps), "metrics": m.metrics, "step_s": m.step_s, "bound_s": m.bound_s}
            for m in rounds
        ]
    report.finish(options.json)


if __name__ == "__main__":
    main()
