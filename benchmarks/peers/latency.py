"""Lognormal latencies with a cut tail and a given mean. Imports the standard library alone."""

from __future__ import annotations

import math
import random
from statistics import NormalDist


def cut_mean(sigma: float, longest: float) -> float:
    """E[min(X, longest)] of a lognormal X of mean 1: Phi((ln c - s²/2) / s) + c (1 - Phi((ln c + s²/2) / s)), c = longest, s = sigma.

    >>> round(cut_mean(1.0, 4.0), 3), round(cut_mean(1.0, 1e9), 3)
    (0.931, 1.0)
    """
    below, above = ((math.log(longest) + shift) / sigma for shift in (-(sigma**2) / 2, sigma**2 / 2))
    phi = NormalDist().cdf
    return phi(below) + longest * (1 - phi(above))


def draw(rng: random.Random, mean_s: float, sigma: float, longest: float) -> float:
    """Seconds: a lognormal of this shape, cut at `longest` times its mean, then scaled so that its mean is `mean_s`."""
    return min(longest, rng.lognormvariate(-(sigma**2) / 2, sigma)) * mean_s / cut_mean(sigma, longest)
