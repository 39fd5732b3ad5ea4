"""How token losses become one number: the weight of each trained token, for a whole batch before its first micro-batch. numpy only.

n = rollouts of the batch, those without a trained token included.
"""

from __future__ import annotations

import numpy as np


def token_weights(aggregation: str, lengths: np.ndarray, longest: int) -> np.ndarray:
    """float64[n]: what each trained token of a rollout weighs; the batch's loss is the weighted sum of its tokens' losses.

    `lengths` int[n]: trained tokens per rollout. `longest`: the longest completion possible, in tokens.

    - token_mean: 1 / trained tokens of the batch, so every token weighs the same (DAPO).
    - sequence_mean_of_token_mean: 1 / (rollouts with trained tokens x trained tokens of this one), so every rollout does.
    - sequence_mean_of_token_sum_over_max_length: 1 / (rollouts x longest), so no weight depends on a length (Dr. GRPO).

    Tokens that a correction rejects keep their place in these counts: rejecting half a batch halves its step.

    >>> token_weights("sequence_mean_of_token_mean", np.array([4, 0, 2]), 8).tolist()
    [0.125, 0.0, 0.25]
    """
    trained = lengths > 0
    if aggregation == "token_mean":
        weights = np.full(len(lengths), 1 / max(lengths.sum(), 1))
    elif aggregation == "sequence_mean_of_token_mean":
        weights = 1 / (max(trained.sum(), 1) * np.maximum(lengths, 1))
    elif aggregation == "sequence_mean_of_token_sum_over_max_length":
        weights = np.full(len(lengths), 1 / (max(len(lengths), 1) * longest))
    else:
        raise ValueError(f"no aggregation {aggregation!r}")
    return np.where(trained, weights, 0.0)
