"""Statistics of a few seeds: Student's intervals, paired differences, what a run took to reach a reward, whether it tested a lag.

Pure functions over plain numbers. The rows of a run's evaluations are [step, trained samples, wall seconds, reward] in order of step.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LAST = 3  # evaluations that a run's result is the mean of
SOLVED = 0.9  # of its result: where a run counts as having learned the task
LAGS_TO_SOLVE = 5  # a run that learns the task in fewer steps than so many times the lag says nothing about that lag

Rows = Sequence[Sequence[float]]
STEP, SAMPLES, SECONDS, REWARD = range(4)

# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 10.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % interval: infinite for one value, since one says nothing of the spread."""

    mean: float
    half: float
    count: int

    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half

    def text(self, *, sign: bool = False) -> str:
        mean = f"{self.mean:+.3f}" if sign else f"{self.mean:.3f}"
        return f"{mean} ± {self.half:.3f}" if math.isfinite(self.half) else f"{mean} (one run)"


def interval(values: Sequence[float]) -> Interval:
    """Mean ± t · s / √n. Raises ValueError for no value and beyond the table (11 values)."""
    count = len(values)
    if not 1 <= count <= len(STUDENT_T) + 1:
        raise ValueError(f"an interval of {count} values; the table of Student's t has 1 to {len(STUDENT_T) + 1}")
    if count == 1:
        return Interval(values[0], math.inf, 1)
    return Interval(statistics.fmean(values), STUDENT_T[count - 2] * statistics.stdev(values) / math.sqrt(count), count)


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Interval | None:
    """values - base over the seeds that both have; None if they share none."""
    both = sorted(values.keys() & base.keys())
    return interval([values[seed] - base[seed] for seed in both]) if both else None


def result(rows: Rows) -> float:
    """Mean of the last three evaluations."""
    return statistics.fmean(row[REWARD] for row in rows[-LAST:])


def whole_course(rows: Rows) -> float:
    """Mean of all evaluations after the first, which no training has touched: higher the faster a run learns."""
    return statistics.fmean(row[REWARD] for row in rows[1:])


def first_reached(rows: Rows, reward: float, column: int) -> float | None:
    """What `column` says at the first evaluation of at least this reward; None where none is: the run is censored."""
    return next((row[column] for row in rows if row[REWARD] >= reward), None)


def censored_median(values: Sequence[float | None]) -> float | None:
    """Median where None is later than everything: None where it falls on a censored run."""
    ordered = sorted(math.inf if value is None else value for value in values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return (low + high) / 2 if math.isfinite(high) else None


def steps_to_solve(rows: Rows) -> float | None:
    """Steps to 0.9 of the run's own result; None where no evaluation comes up to it."""
    return first_reached(rows, SOLVED * result(rows), STEP)


def is_tested(lag: float, steps_to_solve: float | None) -> bool:
    """Whether a task that takes so many steps has put this lag to the test."""
    return steps_to_solve is None or steps_to_solve >= LAGS_TO_SOLVE * lag


def has_collapsed(rows: Rows) -> bool:
    """It had learned (an evaluation at twice the start or more) and lost more than half of its best evaluation."""
    best = max(row[REWARD] for row in rows)
    return best >= 2 * rows[0][REWARD] and result(rows) < best / 2


def has_not_learned(rows: Rows) -> bool:
    """It ends below twice the start and never came above that: no collapse, but no learning either."""
    return not has_collapsed(rows) and result(rows) < 2 * rows[0][REWARD]


def at(rows: Rows, column: int, where: float) -> float:
    """Reward at a place between two evaluations, by the line between them; before the first and after the last that one's."""
    places = [row[column] for row in rows]
    after = bisect.bisect_left(places, where)
    if after == 0:
        return rows[0][REWARD]
    if after == len(rows):
        return rows[-1][REWARD]
    low, high = rows[after - 1], rows[after]
    share = (where - low[column]) / (high[column] - low[column])
    return low[REWARD] + share * (high[REWARD] - low[REWARD])
