"""Advantages: what each rollout's reward says against its siblings. Pure numpy, shapes [n] = rollouts of a batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

EPSILON = 1e-6  # beside the standard deviation, as in the common implementations of GRPO


def group_mean_std(rewards: Sequence[float | None], keys: Sequence[Hashable]) -> np.ndarray:
    """GRPO: (R - mean) / (std + 1e-6) over the rollouts of one key, std with n - 1 (Shao et al. 2024, arXiv:2402.03300).

    >>> group_mean_std([1.0, 0.0, 0.5, 0.5], ["a", "a", "b", "b"]).round(4).tolist()
    [0.7071, -0.7071, 0.0, 0.0]
    """
    return _per_key(rewards, keys, lambda r: (r - r.mean()) / (r.std(ddof=1) + EPSILON), alone=lambda r: r / (1 + EPSILON))


def group_mean(rewards: Sequence[float | None], keys: Sequence[Hashable]) -> np.ndarray:
    """Dr. GRPO: R - mean over the rollouts of one key (Liu et al. 2025, arXiv:2503.20783).

    >>> group_mean([1.0, 0.0, None], ["a", "a", "a"]).tolist()
    [0.5, -0.5, 0.0]
    """
    return _per_key(rewards, keys, lambda r: r - r.mean(), alone=lambda r: r)


ESTIMATORS = {"group_mean_std": group_mean_std, "group_mean": group_mean}


def _per_key(rewards: Sequence[float | None], keys: Sequence[Hashable], estimate, alone) -> np.ndarray:
    """float64[n]. Equal rewards give exactly 0; a reward of None takes no part and gets 0; one alone has no baseline and keeps its reward.

    `keys` says which rollouts share a baseline: (group, agent). Raises ValueError for a reward that is not finite.
    """
    members: dict[Hashable, list[int]] = {}
    for index, (reward, key) in enumerate(zip(rewards, keys, strict=True)):
        if reward is None:
            continue
        if not np.isfinite(reward):
            raise ValueError(f"rollout {index} of {key!r} has reward {reward}; a reward is a finite number or None")
        members.setdefault(key, []).append(index)
    out = np.zeros(len(rewards))
    for indices in members.values():
        values = np.array([rewards[i] for i in indices], dtype=np.float64)
        if len(values) == 1:
            out[indices] = alone(values)
        elif values.min() != values.max():  # else exactly 0, not a rounding error over 1e-6
            out[indices] = estimate(values)
    return out
