"""The study of learning under lag: its statistics against known values, its plan, and its records."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
learning: Any = importlib.import_module("learning")
learning_report: Any = importlib.import_module("learning_report")
runs: Any = importlib.import_module("study_runs")
stats: Any = importlib.import_module("study_statistics")


def curve(*rewards: float, every: int = 10) -> list[list[float]]:
    return [[i * every, i * every * 8, i * 2.0, reward] for i, reward in enumerate(rewards)]


# ---- intervals -----------------------------------------------------------------------------------------------------------------


def student_cdf(t: float, dof: int) -> float:
    """Its density, integrated by Simpson's rule."""
    scale = math.gamma((dof + 1) / 2) / (math.gamma(dof / 2) * math.sqrt(dof * math.pi))
    points = 20_001
    h = t / (points - 1)
    weights = [1 if i in (0, points - 1) else 4 if i % 2 else 2 for i in range(points)]
    return 0.5 + h / 3 * math.fsum(w * scale * (1 + (i * h) ** 2 / dof) ** (-(dof + 1) / 2) for i, w in enumerate(weights))


def test_quantiles_of_students_t() -> None:
    assert stats.STUDENT_T[0] == pytest.approx(math.tan(math.pi * 0.475), abs=1e-4)  # one degree of freedom: Cauchy
    assert stats.STUDENT_T[1] == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), abs=1e-4)  # two: closed form
    for dof, t in enumerate(stats.STUDENT_T, start=1):
        assert student_cdf(t, dof) == pytest.approx(0.975, abs=2e-6)


def test_interval() -> None:
    found = stats.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.7764 * math.sqrt(2.5) / math.sqrt(5))
    assert stats.interval([0.5]).half == math.inf
    with pytest.raises(ValueError, match="0 values"):
        stats.interval([])
    with pytest.raises(ValueError, match="12 values"):
        stats.interval([0.0] * 12)


def test_a_difference_is_paired_by_seed_and_needs_an_interval_without_zero() -> None:
    base = {0: 0.1, 1: 0.5, 2: 0.9}
    shifted = {0: 0.15, 1: 0.56, 2: 0.95, 7: 0.0}  # seed 7 has no partner
    found = stats.paired(shifted, base)
    assert found.count == 3
    assert found.excludes_zero()
    assert not stats.paired({0: 0.2, 1: 0.4, 2: 0.9}, base).excludes_zero()
    assert not stats.paired({0: 0.9}, base).excludes_zero(), "one pair says nothing of the spread"
    assert not stats.paired(base, base).excludes_zero(), "equal runs differ by nothing"
    assert stats.paired({7: 1.0}, base) is None


# ---- courses -------------------------------------------------------------------------------------------------------------------


def test_result_is_the_mean_of_the_last_three() -> None:
    assert stats.result(curve(0.0, 0.9, 0.3, 0.6, 0.6)) == pytest.approx(0.5)
    assert stats.whole_course(curve(9.0, 0.2, 0.4)) == pytest.approx(0.3), "the first is before training"


def test_first_reached_and_censored() -> None:
    rows = curve(0.1, 0.4, 0.3, 0.6, 0.55)
    assert stats.first_reached(rows, 0.4, stats.STEP) == 10
    assert stats.first_reached(rows, 0.5, stats.SAMPLES) == 240
    assert stats.first_reached(rows, 0.6, stats.SECONDS) == 6.0
    assert stats.first_reached(rows, 0.61, stats.STEP) is None


@pytest.mark.parametrize(
    ("values", "median"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([3.0, None, 2.0], 3.0),
        ([None, None, 2.0], None),
        ([1.0, 2.0, 3.0, None], 2.5),
        ([1.0, 2.0, None, None], None),
        ([None], None),
    ],
)
def test_censored_median(values: list[float | None], median: float | None) -> None:
    assert stats.censored_median(values) == median


def test_reached_text_counts_censored_runs() -> None:
    assert learning_report.reached_text([10.0, 30.0, 20.0], 90, ",.0f") == "20 [10, 30]"
    assert learning_report.reached_text([10.0, None, 20.0], 90, ",.0f") == "20 (2 of 3, first 10)"
    assert learning_report.reached_text([None, None, 20.0], 90, ",.0f") == "> 90 (1 of 3, first 20)"
    assert learning_report.reached_text([None, None], 25600, ",.0f") == "> 25,600 (0 of 2)"


def test_a_task_solved_in_fewer_steps_than_five_lags_has_not_tested_the_lag() -> None:
    solved_at_40 = curve(0.1, 0.3, 0.5, 0.7, 0.9, 1.0, 1.0, 1.0)
    assert stats.steps_to_solve(solved_at_40) == 40
    assert stats.is_tested(8, 40)
    assert not stats.is_tested(8.1, 40)
    assert stats.is_tested(16, None), "a task that is never solved tests every lag"


def test_collapse_and_no_learning() -> None:
    assert stats.has_collapsed(curve(0.1, 0.8, 0.9, 0.2, 0.1, 0.1))
    assert not stats.has_collapsed(curve(0.1, 0.8, 0.9, 0.6, 0.5, 0.5))
    never = curve(0.2, 0.15, 0.05, 0.0, 0.0, 0.0)
    assert not stats.has_collapsed(never), "what was never learned cannot be lost"
    assert stats.has_not_learned(never)
    assert not stats.has_not_learned(curve(0.2, 0.5, 0.5, 0.5))


def test_reward_between_two_evaluations() -> None:
    rows = curve(0.0, 0.4, 0.6)
    assert stats.at(rows, stats.STEP, -1) == 0.0
    assert stats.at(rows, stats.STEP, 5) == pytest.approx(0.2)
    assert stats.at(rows, stats.STEP, 10) == pytest.approx(0.4)
    assert stats.at(rows, stats.SECONDS, 3.0) == pytest.approx(0.5)
    assert stats.at(rows, stats.STEP, 99) == 0.6


# ---- the plan and its records --------------------------------------------------------------------------------------------------


def test_plan() -> None:
    counts = {stage: len(learning.runs(stage)) for stage in learning.STAGES}
    assert counts == {"lag": 55, "smollm2": 9, "wallclock": 25}
    every = [run for stage in learning.STAGES for run in learning.runs(stage)]
    assert len({run.name for run in every}) == len(every)
    assert [run.seed for run in learning.runs("lag")[:11]] == [0] * 11, "a seed of every setting before the next seed"


@pytest.mark.parametrize("stage", ["lag", "smollm2", "wallclock"])
def test_settings_are_accepted(stage: str) -> None:
    from slipstream.config.load import load_config

    root = Path(learning.__file__).parent.parent
    for run in learning.runs(stage):
        if run.seed:
            continue
        arguments = run.arguments()
        config = load_config([root / arguments[0]], arguments[1:]).config
        assert config.weight_sync.lag == run.lag
        if run.lag is not None:
            assert config.buffer.max_staleness == run.lag


def lines(ages: list[float]) -> list[dict[str, Any]]:
    return [
        {
            "step": s,
            "version": s + 1,
            "num_loss_tokens": 5,
            "staleness_mean": age,
            "staleness_max": age,
            "time_s": s + 1.0,
            "reward_mean": 0.5,
        }
        for s, age in enumerate(ages)
    ]


def finished(ages: list[float]) -> tuple[dict[str, Any], Any]:
    summary = {
        "steps": len(ages),
        "steps_planned": len(ages),
        "evaluations_skipped": 0,
        "dropped_groups": 0,
        "trained_samples": 8 * len(ages),
        "skipped_steps": 0,
        "wall_s": 5.0,
        "trainer_idle_fraction": 0.1,
        "rollout_idle_fraction": 0.2,
        "staleness_mean": 1.0,
        "staleness_max": 2,
    }
    evaluations = [{"version": v, "eval_reward": 0.1 * v, "failed": 0} for v in (0, len(ages))]
    return summary, SimpleNamespace(steps=lines(ages), evaluations=evaluations)


LAG_2 = runs.Run("quickstart", "lag2", 0, "quickstart.toml", {"weight_sync.lag": "2"})


def test_a_run_whose_tokens_are_not_as_old_as_planned_is_refused() -> None:
    assert runs.flaw(LAG_2, *finished([0, 1, 2, 2])) is None
    assert "1 versions old, not 2" in runs.flaw(LAG_2, *finished([0, 1, 1, 2]))
    summary, metrics = finished([0, 1, 2, 2])
    assert "failed" in runs.flaw(LAG_2, summary | {"dropped_groups": 1}, metrics)
    assert "3 of 4" in runs.flaw(LAG_2, summary | {"steps": 3}, metrics)


def test_record_is_read_back_and_only_for_the_same_settings(tmp_path: Path) -> None:
    record = runs.record(LAG_2, *finished([0, 1, 2, 2]), "abc")
    runs.write_record(runs.record_path(tmp_path, LAG_2), record)
    assert runs.recorded(tmp_path, LAG_2) == json.loads(json.dumps(record))
    assert record["evaluations"]["rows"] == [[0, 0, 0.0, 0.0], [4, 32, 4.0, 0.4]]
    assert record["staleness"]["min_step_mean_from_there"] == 2
    other = runs.Run("quickstart", "lag2", 0, "quickstart.toml", {"weight_sync.lag": "2", "trainer.steps": "9"})
    assert runs.recorded(tmp_path, other) is None
    assert not list(tmp_path.glob("*.tmp"))


def test_course_is_of_ten_steps_each() -> None:
    rows = runs.course(lines([0.0] * 25))
    assert [row[0] for row in rows] == [10, 20, 25]
    assert rows[0][1] == 0.5
    assert rows[0][2] is None, "a number that no line has"


def test_differences_in_words() -> None:
    cells = [("lag 1", "-0.1 ± 0.2, no"), ("lag 4", "-0.3 ± 0.2, lower"), ("lag 8", "-0.4 ± 0.2, lower"), ("sync", "")]
    assert learning_report.called_note("result", cells, 1) == "Lower than sync in the result: lag 4, lag 8."
    assert learning_report.called_note("result", cells[:1], 1) == "No setting differs from sync in the result."


def test_tables_of_an_incomplete_study_name_what_is_missing() -> None:
    from bench import Report  # benchmarks/ is on the path

    report = Report("learning", short=False)
    learning_report.add_tables(report, "lag", {}, ["a", "b"])
    assert "2 missing" in report.tables[0].note
    record = runs.record(LAG_2, *finished([0, 1, 2, 2]), "abc")
    learning_report.add_tables(report, "smollm2", {"lag2": {0: record}}, ["smollm2-sync-seed0"])
    outcome = report.tables[1]
    assert "smollm2-sync-seed0" in outcome.note
    assert outcome.rows[0][:3] == ("lag 2", "1", "2")


def test_asynchronous_runs_are_compared_with_the_faster_synchronous_ones() -> None:
    def taking(seconds: float) -> dict[str, Any]:
        return {"train_s": seconds, "trainer_idle_fraction": 0.5, "rollout_idle_fraction": 0.5}

    from bench import Report

    results = {"sync": {0: taking(60.0)}, "sync2": {0: taking(50.0)}, "staleness2": {0: taking(40.0)}}
    report = Report("learning", short=False)
    learning_report.wallclock_table(report, results)
    rows = {row[0]: row[2] for row in report.tables[0].rows}
    assert rows == {"sync": "1.20 (one run)", "sync, 2 threads": "", "max_staleness 2": "0.80 (one run)"}
    assert report.tables[0].note.endswith("Compared with: sync, 2 threads.")
    assert learning_report.faster_sync({"sync": {0: taking(60.0)}}) == learning_report.faster_sync({}) == "sync"


def test_records_say_what_code_they_come_from_where_they_know() -> None:
    old, new = {"wall_s": 1800.0}, {"wall_s": 3600.0, "revision": "abc", "torch": "2.13.0"}
    said = learning_report.sources([old, new, new], 89)
    assert said == (
        "3 of 89 runs are recorded, of 2.5 hours together: 1 of revision not recorded, torch not recorded; 2 of revision abc, torch 2.13.0."
    )
