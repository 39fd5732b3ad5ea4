"""Tokens for the tests of losses and corrections: the oracle's tables and random ones, split and reordered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.trainer.aggregation import token_weights
from slipstream.trainer.losses import Tokens

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "losses.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in ORACLE["cases"]}
ROWS, COLUMNS = 6, 7


def oracle_table(name: str) -> Tensor:
    """One of the oracle's tables as flat float64 [42]."""
    return torch.tensor(ORACLE["inputs"][name], dtype=torch.float64).flatten()


def oracle_tokens() -> tuple[Tokens, Tensor, Tensor]:
    """(the trained tokens, the whole table of log π [42] with a gradient, bool[42] which of it are trained)."""
    logprob, mask = oracle_table("logprob").requires_grad_(), oracle_table("mask") == 1
    proximal = oracle_table("proximal_logprob")[mask]
    tokens = Tokens(
        logprob=logprob[mask],
        old_logprob=proximal,
        start_logprob=proximal,
        sampler_logprob=oracle_table("behaviour_logprob")[mask],
        advantage=oracle_table("advantage")[mask],
        sequence=torch.arange(ROWS).repeat_interleave(COLUMNS)[mask],
        num_sequences=ROWS,
        staleness=torch.zeros(int(mask.sum()), dtype=torch.int32),
    )
    return tokens, logprob, mask


def random_tokens(seed: int = 0, lengths: tuple[int, ...] = (5, 1, 9, 4, 2, 7), spread: float = 0.5) -> Tokens:
    """Float64 tokens of rollouts of these lengths, interleaved; ratios of e^±spread are common, advantages have both signs and 0."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    sampler = -rng.exponential(0.8, n)
    start = np.minimum(sampler + rng.normal(0, spread, n), -1e-3)
    logprob = np.minimum(start + rng.normal(0, spread, n), -1e-3)
    sequence = rng.permutation(np.repeat(np.arange(len(lengths)), lengths))
    advantage = np.linspace(-1.5, 1.5, len(lengths))
    advantage[-1] = 0.0
    start_logprob = torch.from_numpy(start)
    return Tokens(
        logprob=torch.from_numpy(logprob).requires_grad_(),
        old_logprob=start_logprob,
        start_logprob=start_logprob,
        sampler_logprob=torch.from_numpy(sampler),
        advantage=torch.from_numpy(advantage[sequence]),
        sequence=torch.from_numpy(sequence),
        num_sequences=len(lengths),
        staleness=torch.from_numpy(rng.integers(0, 4, n).astype(np.int32)),
    )


def take(t: Tokens, which: Tensor) -> Tokens:
    """These tokens [indices or bool], as a micro-batch of their own: rollouts are numbered anew."""
    fields = {name: getattr(t, name)[which] for name in Tokens.__slots__ if name != "num_sequences"}
    numbers, sequence = fields["sequence"].unique(return_inverse=True)
    return Tokens(**{**fields, "sequence": sequence, "num_sequences": len(numbers)})


def split(t: Tokens) -> list[Tensor]:
    """Indices of the tokens of three parts that keep rollouts whole."""
    parts = torch.arange(t.num_sequences) % 3
    return [torch.nonzero(parts[t.sequence] == part).flatten() for part in range(3)]


def weights(t: Tokens, aggregation: str, longest: int = COLUMNS) -> Tensor:
    """[N]: the aggregation's weight of each token, these being the whole batch."""
    lengths = torch.bincount(t.sequence, minlength=t.num_sequences).numpy()
    return torch.from_numpy(token_weights(aggregation, lengths, longest))[t.sequence]


def tokens_of(logprob: Tensor, **fields: Any) -> Tokens:
    """Tokens of one rollout, fresh and with advantage 1 but for what is given."""
    base = logprob.detach()
    fresh = Tokens(
        logprob=logprob,
        old_logprob=base,
        start_logprob=base,
        sampler_logprob=base,
        advantage=torch.ones_like(base),
        sequence=torch.zeros(len(base), dtype=torch.int64),
        num_sequences=1,
        staleness=torch.zeros(len(base), dtype=torch.int32),
    )
    return replace(fresh, **fields)
