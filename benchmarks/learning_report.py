"""Tables of the study in learning.py, from the records that exist. A setting without a record has no row; what is missing is said."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench import Report
from study_statistics import (
    LAGS_TO_SOLVE,
    SAMPLES,
    SECONDS,
    SOLVED,
    Rows,
    censored_median,
    first_reached,
    has_collapsed,
    has_not_learned,
    interval,
    is_tested,
    paired,
    result,
    steps_to_solve,
    whole_course,
)

Record = dict[str, Any]
Results = Mapping[str, Mapping[int, Record]]  # setting -> seed -> record

SYNC, SYNC_2 = "sync", "sync2"  # the second with two threads to a role
SETTLED_STEP = 20  # from here on every lag of the study is in force
LAST_STEPS = 10
TITLES = {"lag": "Sort four digits", "smollm2": "SmolLM2, sums of two digits", "wallclock": "Sort four digits, local launcher"}
REWARDS = {"lag": (0.5, 0.8, 0.9), "smollm2": (0.3, 0.5, 0.7), "wallclock": (0.5, 0.8, 0.9)}


def rows(record: Record) -> Rows:
    return record["evaluations"]["rows"]


def title(setting: str) -> str:
    """lag4-tis -> lag 4 + tis; staleness2 -> max_staleness 2."""
    if setting == SYNC_2:
        return "sync, 2 threads"
    name, _, correction = setting.replace("staleness", "max_staleness ").replace("lag", "lag ").partition("-")
    return f"{name} + {correction}" if correction else name


def per_seed(records: Mapping[int, Record], value: Callable[[Rows], float]) -> dict[int, float]:
    return {seed: value(rows(record)) for seed, record in records.items()}


def difference(records: Mapping[int, Record], base: Mapping[int, Record], value: Callable[[Rows], float]) -> str:
    """`records` - `base` paired by seed, and whether that is a difference; empty where they share no seed."""
    found = paired(per_seed(records, value), per_seed(base, value))
    if found is None:
        return ""
    word = ("higher" if found.mean > 0 else "lower") if found.excludes_zero() else "no"
    return f"{found.text(sign=True)}, {word}"


# ---- tables --------------------------------------------------------------------------------------------------------------------


def outcome_table(report: Report, stage: str, results: Results, missing: Sequence[str]) -> None:
    """What each setting came to beside the synchronous one."""
    columns = (
        "setting",
        "seeds",
        "age of trained tokens",
        "tested",
        "result",
        "- sync",
        "all evaluations - sync",
        "collapsed",
        "not learned",
    )
    table = report.table(f"{TITLES[stage]}: mean of the last three evaluations, ± 95 % over seeds", columns)
    sync = results.get(SYNC, {})
    solve = sync_steps_to_solve(sync)
    for setting, records in results.items():
        lag, compared = token_age(records.values()), setting != SYNC and bool(sync)
        table.rows.append(
            (
                title(setting),
                str(len(records)),
                age_text(records.values()),
                ("yes" if is_tested(lag, solve) else "NO") if compared else "",
                interval(list(per_seed(records, result).values())).text(),
                difference(records, sync, result) if compared else "",
                difference(records, sync, whole_course) if compared else "",
                str(sum(has_collapsed(rows(record)) for record in records.values())),
                str(sum(has_not_learned(rows(record)) for record in records.values())),
            )
        )
    words = (called_note("result", table.rows, 5), called_note("mean of all evaluations", table.rows, 6))
    table.note = " ".join((*words, solve_note(sync, solve), missing_note(missing)))


def correction_table(report: Report, results: Results) -> None:
    """Each correction beside none at the same lag: what it gains, and what it is doing to the batch."""
    rows_ = [(setting, records, results.get(setting.partition("-")[0], {})) for setting, records in results.items() if "-" in setting]
    if not rows_:
        return
    table = report.table(
        "Sort four digits: corrections against none at the same lag", ("setting", "result - uncorrected", "all evaluations - uncorrected")
    )
    for setting, records, base in rows_:
        table.rows.append((title(setting), difference(records, base, result), difference(records, base, whole_course)))


def data_table(report: Report, stage: str, results: Results) -> None:
    """How far the data are from the model that is trained on them."""
    names = {"kl_k3": "KL k3", "ess_fraction": "ESS fraction", "clipped_fraction": "clipped", "masked_fraction": "rejected"}
    table = report.table(
        f"{TITLES[stage]}: how far the data are off", ("setting", *names.values(), "entropy at the end", "training reward at the end")
    )
    for setting, records in results.items():
        last = min(record["steps"] for record in records.values()) - LAST_STEPS
        cells = [course_mean(records.values(), key, SETTLED_STEP) for key in names]
        ends = [course_mean(records.values(), key, last) for key in ("entropy", "reward_mean")]
        table.rows.append((title(setting), *cells, *ends))
    table.note = (
        f"Means over seeds and over the steps from {SETTLED_STEP} on; the end is the last ten steps, sampled. Clipped: tokens whose "
        "gradient the policy loss cuts. Rejected: tokens that a correction gives no weight."
    )


def reached_table(report: Report, stage: str, results: Results, column: int) -> None:
    """Samples or seconds to a reward; runs that never got there are censored, and counted."""
    what, digits = ("Seconds", ".0f") if column == SECONDS else ("Trained samples", ",.0f")
    table = report.table(
        f"{TITLES[stage]}: {what.lower()} to a held-out reward", ("setting", *(f"{reward:g}" for reward in REWARDS[stage]))
    )
    for setting, records in results.items():
        cells = []
        for reward in REWARDS[stage]:
            values = [first_reached(rows(record), reward, column) for record in records.values()]
            cells.append(reached_text(values, max(rows(record)[-1][column] for record in records.values()), digits))
        table.rows.append((title(setting), *cells))
    table.note = (
        "Median over seeds of the first evaluation at or above the reward [earliest, latest run]; where runs ended without one, how many "
        "did not."
    )


def reached_text(values: Sequence[float | None], end: float, digits: str) -> str:
    """As `3,840 [2,560, 5,120]`; with censored runs the count of those that got there in place of the latest."""
    known = [value for value in values if value is not None]
    middle = censored_median(values)
    if not known:
        return f"> {end:{digits}} (0 of {len(values)})"
    head = f"> {end:{digits}}" if middle is None else f"{middle:{digits}}"
    if len(known) < len(values):
        return f"{head} ({len(known)} of {len(values)}, first {min(known):{digits}})"
    return f"{head} [{min(known):{digits}}, {max(known):{digits}}]"


def wallclock_table(report: Report, results: Results) -> None:
    """How long the same number of samples takes, and who waits."""
    table = report.table(
        f"{TITLES['wallclock']}: time for the whole run", ("setting", "seconds", "÷ faster sync", "trainer idle", "engine slots idle")
    )
    compared = faster_sync(results)
    base = {seed: record["train_s"] for seed, record in results.get(compared, {}).items()}
    for setting, records in results.items():
        ratios = [record["train_s"] / base[seed] for seed, record in records.items() if seed in base]
        idle = [statistics.fmean(record[key] for record in records.values()) for key in ("trainer_idle_fraction", "rollout_idle_fraction")]
        table.rows.append(
            (
                title(setting),
                _interval_text([record["train_s"] for record in records.values()], 1),
                _interval_text(ratios, 2) if setting != compared and ratios else "",
                *(f"{share:.0%}" for share in idle),
            )
        )
    table.note = (
        "From the opened run to the last step, evaluations every ten steps included; all settings train the same number of samples. "
        f"Compared with: {title(compared)}."
    )


def faster_sync(results: Results) -> str:
    """The synchronous setting that took less time, in the mean over its seeds."""
    mean_s = {s: statistics.fmean(r["train_s"] for r in results[s].values()) for s in (SYNC, SYNC_2) if results.get(s)}
    return min(mean_s, key=lambda setting: mean_s[setting], default=SYNC)


def _interval_text(values: Sequence[float], digits: int) -> str:
    found = interval(values)
    return f"{found.mean:.{digits}f}" + (f" ± {found.half:.{digits}f}" if found.count > 1 else " (one run)")


# ---- what the tables say beside the figures --------------------------------------------------------------------------------------


def token_age(records: Iterable[Record]) -> float:
    """What the lag rule judges a setting by: the lag that was held, or in an asynchronous run the mean age of trained tokens."""
    return max(record["staleness"]["held"] or record["staleness"]["mean"] for record in records)


def age_text(records: Iterable[Record]) -> str:
    """From the step on where a held lag is in force: the one age that all tokens have, else mean and maximum."""
    ages = [record["staleness"] for record in records]
    least, most = min(age["min_step_mean_from_there"] for age in ages), max(age["max"] for age in ages)
    if least == most:
        return f"{most:g}"
    return f"mean {statistics.fmean(age['mean'] for age in ages):.2f}, max {most:g}"


def sync_steps_to_solve(sync: Mapping[int, Record]) -> float | None:
    return censored_median([steps_to_solve(rows(record)) for record in sync.values()]) if sync else None


def solve_note(sync: Mapping[int, Record], solve: float | None) -> str:
    if not sync or solve is None:
        return "Without synchronous runs there is nothing to compare with."
    return (
        f"The synchronous runs come to {SOLVED:g} of their result after {solve:.0f} steps (median); a lag is tested if that is at least "
        f"{LAGS_TO_SOLVE} times the lag, here up to {solve / LAGS_TO_SOLVE:.0f}."
    )


def called_note(what: str, cells: Sequence[Sequence[str]], column: int) -> str:
    """The settings whose difference is called one, in words: `Lower than sync in the result: lag 8, lag 16.`"""
    words = {word: [row[0] for row in cells if row[column].endswith(f", {word}")] for word in ("lower", "higher")}
    said = [f"{word.capitalize()} than sync in the {what}: {', '.join(names)}." for word, names in words.items() if names]
    return " ".join(said) or f"No setting differs from sync in the {what}."


def missing_note(missing: Sequence[str]) -> str:
    return f"Missing: {', '.join(missing)}." if missing else "No run is missing."


def course_mean(records: Iterable[Record], key: str, from_step: int) -> str:
    """Mean of one training number over the steps after this one, and over seeds; a dash where no step has it."""
    means = []
    for record in records:
        table = record["training"]
        place = table["columns"].index(key)
        values = [row[place] for row in table["rows"] if row[0] > from_step and row[place] is not None]
        means += [statistics.fmean(values)] if values else []
    return f"{statistics.fmean(means):.3g}" if means else "–"


# ---- all of it -----------------------------------------------------------------------------------------------------------------


def add_tables(report: Report, stage: str, results: Results, missing: Sequence[str]) -> None:
    if not results:
        report.table(TITLES[stage], ("setting",), note=f"No run of this part is recorded ({len(missing)} missing).")
        return
    outcome_table(report, stage, results, missing)
    if stage == "lag":
        correction_table(report, results)
    if stage == "wallclock":
        wallclock_table(report, results)
        reached_table(report, stage, results, SECONDS)
    reached_table(report, stage, results, SAMPLES)
    data_table(report, stage, results)


def sources(records: Sequence[Record], planned: int) -> str:
    """What code the records come from, and what the runs took."""
    made = Counter(f"{r.get('revision', 'not recorded')}, torch {r.get('torch', 'not recorded')}" for r in records)
    told = "; ".join(f"{count} of revision {code}" for code, count in made.items())
    hours = sum(record["wall_s"] for record in records) / 3600
    return f"{len(records)} of {planned} runs are recorded, of {hours:.1f} hours together: {told or 'none'}."


def raw(results: Results) -> dict[str, Any]:
    """Per setting and seed, what the tables were made of."""
    return {
        setting: {
            str(seed): {"result": round(result(rows(r)), 4), "whole_course": round(whole_course(rows(r)), 4)} for seed, r in records.items()
        }
        for setting, records in results.items()
    }
