"""A probe of the weights that an engine computes with: logprobs of fixed tokens, the trainer's beside the engine's. No torch.

A checksum proves the bytes that arrived; the probe looks at what the engine made of them (packed, fused, cast). The trainer sends its own
logprobs with each version, the engine's side asks for the same ones after it has adopted it:

    distance   mean |engine - trainer| over the tokens: the noise of two implementations and a dtype, if the weights are the same
    shift      mean |trainer - trainer one version before|: how far the update moved them

Told apart is what moves the logprobs by at least `TELLS` times the noise. In bfloat16 one step at a small learning rate does not: the
probe finds weights that are wrong, mixed or of long ago, and says how many updates it takes until it would notice a missed one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

NUM_TOKENS = 64
CONTEXT_TOKENS = NUM_TOKENS + 1  # that a server must have: it is asked for the logprobs of a prompt, and samples one token
TELLS = 2.0  # times the noise: a shift that the noise does not hide
LIMIT = 5.0  # times the noise: weights that are not the trainer's
LEAST_LIMIT = 1e-3  # nats; float32 noise is far below, and varies
MEMORY = 16  # distances that the noise is the mean of


def probe_tokens(vocab_size: int) -> np.ndarray:
    """int64[64]: the same tokens for every run of a vocabulary of this size."""
    return np.random.default_rng(64).integers(0, vocab_size, NUM_TOKENS)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one comparison found; all in nats per token."""

    distance: float
    noise: float  # of the distances before this one; of the first one, itself
    shift: float | None  # None for the first version
    problem: str | None  # what is wrong, if anything is

    @property
    def updates_told(self) -> float | None:
        """How many updates like this one the probe would notice missing, and no fewer; None where the weights did not change."""
        return TELLS * self.noise / self.shift if self.shift else None


@dataclass
class ProbeRecord:
    """Compares version after version."""

    _distances: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _previous: np.ndarray | None = None

    def read(self, engine: np.ndarray, trainer: np.ndarray) -> Reading:
        """Both float[63]: the logprob of each token but the first."""
        distance = _mean(engine, trainer)
        noise = float(np.mean(self._distances)) if self._distances else distance
        shift = None if self._previous is None else _mean(trainer, self._previous)
        problem = self._problem(engine, distance, noise, shift)
        if problem is None:
            self._distances.append(distance)
            self._previous = trainer
        return Reading(distance, noise, shift, problem)

    def _problem(self, engine: np.ndarray, distance: float, noise: float, shift: float | None) -> str | None:
        if not np.isfinite(distance):
            return "the engine's logprobs are not finite"
        if self._previous is None or shift is None:
            return f"they are {distance:.2f} nats apart" if distance > 1.0 else None  # nothing is known of the noise yet
        if shift > TELLS * noise and _mean(engine, self._previous) < distance:
            return "the engine still computes with the version before"
        if distance > max(LIMIT * noise, LEAST_LIMIT):
            return f"they are {distance:.2g} nats apart, where {noise:.2g} is usual"
        return None


def _mean(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.mean(np.abs(a - b)))
