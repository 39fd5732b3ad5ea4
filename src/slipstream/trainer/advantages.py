"""Advantages: what each rollout's reward says against the others. Pure numpy, shapes [n] = rollouts of a batch.

Every estimator takes rewards [n] (None takes no part and gets 0), keys [n] (which rollouts share a baseline: (group, agent)) and lengths
[n] (trained tokens), and gives float64[n]. Where the rewards of a key are equal its advantage is exactly 0; a rollout that is alone has
no baseline and keeps its reward. Raises ValueError for a reward that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

EPSILON = 1e-6  # beside the standard deviation, as in the common implementations of GRPO
_WHITEN_EPSILON = 1e-8  # beside the variance

Rewards = Sequence[float | None]
Keys = Sequence[Hashable]
Lengths = Sequence[int] | np.ndarray


def group_mean_std(rewards: Rewards, keys: Keys, lengths: Lengths = ()) -> np.ndarray:
    """GRPO: (R - mean) / (std + 1e-6) over the rollouts of one key, std with n - 1 (Shao et al. 2024, arXiv:2402.03300).

    >>> group_mean_std([1.0, 0.0, 0.5, 0.5], ["a", "a", "b", "b"]).round(4).tolist()
    [0.7071, -0.7071, 0.0, 0.0]
    """
    return _per_key(rewards, keys, lambda r, _: (r - r.mean()) / (r.std(ddof=1) + EPSILON), alone=lambda r: r / (1 + EPSILON))


def group_mean(rewards: Rewards, keys: Keys, lengths: Lengths = ()) -> np.ndarray:
    """Dr. GRPO: R - mean over the rollouts of one key (Liu et al. 2025, arXiv:2503.20783).

    >>> group_mean([1.0, 0.0, None], ["a", "a", "a"]).tolist()
    [0.5, -0.5, 0.0]
    """
    return _per_key(rewards, keys, lambda r, _: r - r.mean())


def leave_one_out(rewards: Rewards, keys: Keys, lengths: Lengths = ()) -> np.ndarray:
    """RLOO: R - mean of the others, which is n / (n - 1) (R - mean) (Ahmadian et al. 2024, arXiv:2402.14740).

    >>> leave_one_out([1.0, 0.0, 0.0], ["a", "a", "a"]).tolist()
    [1.0, -0.5, -0.5]
    """
    return _per_key(rewards, keys, lambda r, _: (r - r.mean()) * len(r) / (len(r) - 1))


def group_mean_then_batch_whiten(rewards: Rewards, keys: Keys, lengths: Lengths) -> np.ndarray:
    """REINFORCE++ baseline: R - mean of the key, then less the batch's mean and over its std (n - 1), each counted once per token.

    Hu et al. 2025, arXiv:2501.03262. The batch's mean moves groups with equal rewards off 0, unless the whole batch is 0.

    >>> group_mean_then_batch_whiten([1.0, 0.0], ["a", "a"], [3, 3]).round(4).tolist()
    [0.9129, -0.9129]
    """
    centred = group_mean(rewards, keys)
    tokens = np.array([0 if reward is None else length for reward, length in zip(rewards, lengths, strict=True)], dtype=np.float64)
    total = tokens.sum()
    if total < 2 or not centred.any():
        return centred
    mean = (tokens * centred).sum() / total
    variance = (tokens * (centred - mean) ** 2).sum() / (total - 1)
    whitened = (centred - mean) / np.sqrt(variance + _WHITEN_EPSILON)
    return np.where([reward is None for reward in rewards], 0.0, whitened)


def length_weighted_baseline(rewards: Rewards, keys: Keys, lengths: Lengths) -> np.ndarray:
    """OPO: R - Σ length R / Σ length over the key: the baseline of least variance (Hao et al. 2025, arXiv:2505.23585).

    >>> length_weighted_baseline([1.0, 0.0], ["a", "a"], [3, 1]).tolist()
    [0.25, -0.75]
    """
    return _per_key(rewards, keys, lambda r, n: r - ((n @ r) / n.sum() if n.any() else r.mean()), lengths=lengths)


def max_rl(rewards: Rewards, keys: Keys, lengths: Lengths = ()) -> np.ndarray:
    """MaxRL: (R - mean) / mean of rewards >= 0: the likelihood of success rather than its rate, so rare successes count for more.

    Tajwar et al. 2026, arXiv:2602.02710. Where the mean is not above 0 there is no success to speak of: all 0.

    >>> max_rl([1.0, 0.0, 0.0, 0.0], ["a"] * 4).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    return _per_key(rewards, keys, lambda r, _: (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r))


ESTIMATORS = {
    f.__name__: f for f in (group_mean_std, group_mean, leave_one_out, group_mean_then_batch_whiten, length_weighted_baseline, max_rl)
}


def overlong_penalty(lengths: Lengths, longest: int, overlong_tokens: int) -> np.ndarray:
    """float64[n], to be added to the reward: 0 up to `longest - overlong_tokens`, then linear to -1 at `longest`.

    `lengths`: sampled tokens. DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476).

    >>> overlong_penalty([6, 7, 8], longest=8, overlong_tokens=2).tolist()
    [0.0, -0.5, -1.0]
    """
    beyond = np.asarray(lengths, dtype=np.float64) - (longest - overlong_tokens)
    return -np.clip(beyond / overlong_tokens, 0.0, 1.0) + 0.0


Estimate = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (rewards, lengths) of one key -> advantages


def _per_key(
    rewards: Rewards,
    keys: Keys,
    estimate: Estimate,
    *,
    lengths: Lengths | None = None,
    alone: Callable[[np.ndarray], np.ndarray] = lambda r: r,
) -> np.ndarray:
    """float64[n]: `estimate` of each key's rewards, under the rules of this module."""
    members: dict[Hashable, list[int]] = {}
    for index, (reward, key) in enumerate(zip(rewards, keys, strict=True)):
        if reward is None:
            continue
        if not np.isfinite(reward):
            raise ValueError(f"rollout {index} of {key!r} has reward {reward}; a reward is a finite number or None")
        members.setdefault(key, []).append(index)
    counts = np.zeros(len(rewards)) if lengths is None else np.asarray(lengths, dtype=np.float64)
    out = np.zeros(len(rewards))
    for indices in members.values():
        values = np.array([rewards[i] for i in indices], dtype=np.float64)
        if len(values) == 1:
            out[indices] = alone(values)
        elif values.min() != values.max():  # else exactly 0, not a rounding error over 1e-6
            out[indices] = estimate(values, counts[indices])
    return out
