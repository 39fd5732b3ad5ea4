"""What is added to the rewards before advantages are made of them: overlong punishment, KL to the reference. Shapes: n = rollouts."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.config.settings import Config
from slipstream.trainer import advantages, kl
from slipstream.trainer.token_table import other_logprobs
from slipstream.types import REFERENCE_LOGPROBS, Batch, Rollout


def shaped_rewards(batch: Batch, config: Config) -> list[float | None]:
    """[n]: the rewards of the batch's rollouts as the settings shape them; None stays None.

    Both are facts of the rollout, whatever of it is trained: they are over its sampled tokens, so a masked rollout remains comparable.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    added = np.zeros(len(rollouts))
    if config.loss.overlong_tokens is not None:
        lengths = [_longest_turn(rollout) for rollout in rollouts]
        added += advantages.overlong_penalty(lengths, config.rollout.max_new_tokens, config.loss.overlong_tokens)
    if config.loss.kl_coefficient > 0 and config.loss.kl_in == "reward":
        estimator = kl.ESTIMATORS[config.loss.reference_estimator]
        added -= config.loss.kl_coefficient * np.array([_divergence(rollout, estimator) for rollout in rollouts])
    return [None if r.reward is None else r.reward + float(extra) for r, extra in zip(rollouts, added, strict=True)]


def _longest_turn(rollout: Rollout) -> int:
    """Sampled tokens of the longest turn: `max_new_tokens` is per turn."""
    turns = [turn.end - turn.start for turn in rollout.turns if turn.sampling is not None]
    return max(turns, default=rollout.num_sampled_tokens)


def _divergence(rollout: Rollout, estimator) -> float:
    """The estimate of KL(μ ‖ reference), summed over the rollout's sampled tokens."""
    sampled = np.flatnonzero(rollout.model_versions() >= 0)
    reference = other_logprobs(rollout, REFERENCE_LOGPROBS, sampled)
    return float(estimator(torch.from_numpy(rollout.logprobs[sampled]).double(), torch.from_numpy(reference).double()).sum())
