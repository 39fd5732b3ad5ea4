"""Does learning survive lag: the same task trained at fixed lags, without and with corrections, and with real asynchrony.

    python benchmarks/learning.py [--stage lag|smollm2|wallclock|all] [--only-report]      hours of two idle cores, 89 runs

lag        sort four digits, 200 steps of 8 x 16 samples. The inline launcher holds the weights exactly k versions behind
           (`weight_sync.lag`), so a result by steps is a function of settings and seed, whatever else the machine does.
smollm2    recipes/smollm2_arithmetic.toml at exact lags. Two runs at a time in both stages, one thread each.
wallclock  recipes/quickstart.toml as it ships, on the local launcher, synchronous and at `max_staleness` 1, 2, 4: one run at a time,
           reward against wall-clock. Needs a quiet machine. Asynchronous roles work side by side, a thread each; synchronous ones take
           turns, so the synchronous run is made with one thread to a role and with two, and the faster is what others are compared with.

Every run that finishes leaves a record in results/learning/; what has one is not run again, so the command resumes where it stopped,
and a kill at any moment costs the runs under way. Tables and plots are made from the records that exist, and say which are missing.

Same initial weights, same evaluation prompts, the same training prompts for the same seed in every setting. A run's result is the mean
of its last three evaluations. Intervals are Student's t over seeds; a setting differs from the synchronous one only where the 95 %
interval of the difference, paired by seed, excludes 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import RESULTS, Report, start
from learning_report import SYNC, SYNC_2, Results, add_tables, raw, sources
from study_runs import ROOT, Run, recorded, run_all, say

STAGES = ("lag", "smollm2", "wallclock")
OUT = Path(__file__).parent / "out" / "learning"
FIGURES = ROOT / "docs" / "figures"
SEEDS = {"lag": range(5), "smollm2": range(3), "wallclock": range(5)}
FIGURE_NAMES = {stage: f"learning_{stage}.svg" for stage in STAGES}
CAPTIONS = {
    "lag": "Sort four digits: reward against trained samples at fixed lags",
    "smollm2": "SmolLM2: reward against trained samples at fixed lags",
    "wallclock": "Local launcher: asynchronous against synchronous, by wall-clock and by samples",
}
AT_A_TIME = {"lag": 2, "smollm2": 2, "wallclock": 1}

# ---- settings: what differs ----------------------------------------------------------------------------------------------------

LAGS = (1, 4, 8, 16)
CORRECTED_LAGS = (4, 16)
# One of each family that recent practice uses against stale samplers; all else (advantage, aggregation) stays as it is.
CORRECTIONS = {
    "tis": {"loss.correction": '["tis"]'},  # weigh by the ratio, cut at 2: truncated importance sampling, per token
    "seq_mis": {"loss.correction": '["seq_mis"]'},  # weigh by the ratio of the whole answer, reject outside 0.5 .. 2
    "dppo_tv": {"loss.policy": "dppo_tv"},  # stop where the probability, not the ratio, has moved by 0.2
}
SMOLLM2_LAGS = (1, 4)
STALENESS = (1, 2, 4)

# ---- settings: what is equal ---------------------------------------------------------------------------------------------------

# The recipe's 16 groups and 1e-3 learn this task in about 50 steps, which would leave lag 16 untested.
LAG_TASK = {
    "launch": "inline",
    "trainer.steps": "200",
    "trainer.groups_per_step": "8",
    "trainer.learning_rate": "5e-4",
    "evaluation.every": "10",
    "checkpoint.every": "200",
    "buffer.window": "1",
}
SMOLLM2_TASK = {"launch": "inline", "evaluation.every": "10", "checkpoint.every": "100", "buffer.window": "1"}
WALLCLOCK_TASK = {"evaluation.every": "10"}


def lag_changes(lag: int) -> dict[str, str]:
    """Hold the engine exactly so many versions behind."""
    return {"weight_sync.lag": str(lag), "buffer.max_staleness": str(lag)}


def settings(stage: str) -> dict[str, dict[str, str]]:
    """Name -> what it changes, the synchronous one first."""
    if stage == "wallclock":
        sync = {"buffer.max_staleness": "0"}
        both = {SYNC: sync, SYNC_2: sync | {"engine.threads": "2", "trainer.threads": "2"}}
        return both | {f"staleness{n}": {"buffer.max_staleness": str(n)} for n in STALENESS}
    lags = LAGS if stage == "lag" else SMOLLM2_LAGS
    found = {SYNC: lag_changes(0)} | {f"lag{k}": lag_changes(k) for k in lags}
    if stage == "lag":
        found |= {f"lag{k}-{name}": lag_changes(k) | extra for k in CORRECTED_LAGS for name, extra in CORRECTIONS.items()}
    return found


def runs(stage: str) -> list[Run]:
    """All seeds of one setting beside the others: what is finished first compares."""
    task, recipe, common = {
        "lag": ("quickstart", "quickstart.toml", LAG_TASK),
        "smollm2": ("smollm2", "smollm2_arithmetic.toml", SMOLLM2_TASK),
        "wallclock": ("wallclock", "quickstart.toml", WALLCLOCK_TASK),
    }[stage]
    return [Run(task, name, seed, recipe, common | changes) for seed in SEEDS[stage] for name, changes in settings(stage).items()]


def short_runs() -> list[Run]:
    """A fifth of one seed of two settings: whether the study works at all."""
    few = {"trainer.steps": "40", "checkpoint.every": "40"}
    return [Run("quickstart", name, 0, "quickstart.toml", LAG_TASK | settings("lag")[name] | few) for name in (SYNC, "lag4")]


# ---- from records to tables and plots ------------------------------------------------------------------------------------------


def recorded_results(wanted: list[Run], records: Path) -> tuple[Results, list[str]]:
    """Setting -> seed -> record, in the order of `settings`; and the names of the runs that have none."""
    found: dict[str, dict[int, Any]] = {}
    missing = []
    for run in wanted:
        content = recorded(records, run)
        if content is None:
            missing.append(run.name)
        else:
            found.setdefault(run.setting, {})[run.seed] = content
    order = list(dict.fromkeys(run.setting for run in wanted))
    return {setting: found[setting] for setting in order if setting in found}, missing


def report_stages(report: Report, records: Path, figures: Path) -> None:
    """Tables of all stages and a figure of each that has synchronous runs."""
    report.took_s, used = 0.0, []
    for stage in STAGES:
        results, missing = recorded_results(runs(stage), records)
        add_tables(report, stage, results, missing)
        report.data[stage] = raw(results)
        report.took_s += sum(r["wall_s"] for seeds in results.values() for r in seeds.values()) / AT_A_TIME[stage]
        used += [record for seeds in results.values() for record in seeds.values()]
        if SYNC in results:
            draw_stage(stage, results, figures / FIGURE_NAMES[stage])
            report.figures[CAPTIONS[stage]] = FIGURE_NAMES[stage]
    report.sources = sources(used, sum(len(runs(stage)) for stage in STAGES))


def draw_stage(stage: str, results: Results, path: Path) -> None:
    """The stage's settings beside the synchronous one, in panels that hold at most five curves."""
    from learning_plots import SAMPLES, SECONDS, draw_figure

    names = [name for name in settings(stage) if name != SYNC]
    if stage == "lag":
        by_lag = [(f"lag {k}", [n for n in names if n.partition("-")[0] == f"lag{k}"], SAMPLES) for k in CORRECTED_LAGS]
        panels = [("without correction", [n for n in names if "-" not in n], SAMPLES), *by_lag]
    elif stage == "smollm2":
        panels = [("SmolLM2, exact lags", names, SAMPLES)]
    else:
        panels = [("by wall-clock", names, SECONDS), ("by trained samples", names, SAMPLES)]
    draw_figure(path, results, panels)


# ---- command line --------------------------------------------------------------------------------------------------------------


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all", help="all: one after the other")
    parser.add_argument("--only-report", action="store_true", help="no runs: tables and plots from the records that exist")
    parser.add_argument("--work", type=Path, default=OUT, help="where run folders are while they run (default: benchmarks/out/learning)")
    parser.add_argument("--records", type=Path, default=RESULTS / "learning", help="where a record of each finished run is kept")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="where the plots go (default: docs/figures)")


def main() -> None:
    report, options = start("learning", "Does learning survive lag?", more)
    stages = STAGES if options.stage == "all" else (options.stage,)
    if options.short:
        run_all(short_runs(), 2, options.work, OUT / "short")
        results, _ = recorded_results(short_runs(), OUT / "short")
        add_tables(report, "lag", results, [])
    elif not options.only_report:
        for stage in stages:
            say(f"stage {stage}: {len(runs(stage))} runs")
            run_all(runs(stage), AT_A_TIME[stage], options.work, options.records)
    if not options.short:
        report_stages(report, options.records, options.figures)
    report.finish(options.json)


if __name__ == "__main__":
    main()
