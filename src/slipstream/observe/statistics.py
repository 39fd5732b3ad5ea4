"""Numbers of an evaluation: mean, interval, pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution
SOLVED = 1.0  # a sample whose reward is at least this counts as solved, for pass@k


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % interval. None where there is nothing to take it from."""

    mean: float | None
    low: float | None
    high: float | None


def mean_interval(items: Sequence[Sequence[float | None]]) -> Interval:
    """The mean reward over items (each item's samples averaged first) and its 95 % interval.

    Items are what was drawn, so they are the unit: the samples of one item are not independent. One 0/1 sample per item gives Wilson's
    interval, which is right near 0 and 1, too; otherwise the normal interval of the item means. Samples without a reward are left out.
    """
    scored = [[r for r in rewards if r is not None] for rewards in items]
    means = [fmean(rewards) for rewards in scored if rewards]
    if not means:
        return Interval(None, None, None)
    mean = fmean(means)
    if len(means) == 1:
        return Interval(mean, None, None)
    if all(m in (0.0, 1.0) for m in means):
        return Interval(mean, *_wilson(mean, len(means)))
    half = Z_95 * stdev(means) / math.sqrt(len(means))
    return Interval(mean, mean - half, mean + half)


def _wilson(p: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927)."""
    z2 = Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that at least one of `k` samples is solved, unbiased from `num_samples >= k` (Chen et al. 2021, equation 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 2, 2)
    (0.25, 1.0, 0.8333333333333334)
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def pass_at_ks(items: Sequence[Sequence[float | None]]) -> dict[int, float]:
    """pass@k over the items for k = 1, 2, 4, ... up to the samples per item. A sample without a reward (failed) is not solved."""
    samples = min((len(rewards) for rewards in items), default=0)
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= samples]
    ks += [samples] if samples and samples not in ks else []
    solved = [sum(r is not None and r >= SOLVED for r in rewards) for rewards in items]
    return {k: fmean(pass_at_k(len(rewards), count, k) for rewards, count in zip(items, solved, strict=True)) for k in ks}
