"""From logits to tokens, without a generator: every draw is a pure function of who draws it.

u = hash(seed, purpose, group, sample, attempt, token index) in [0, 1), then the inverse of the distribution function. So a token
does not depend on its neighbours in the batch, on what was drawn before, or on how often a run was interrupted.

Shapes: B = rows, V = vocabulary, C = chunks of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from slipstream.types import Purpose, Sampling

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 128  # tokens summed in float32 before the float64 running sum: 9x faster than a float64 sum over V. A power of 2
_ROUNDING = 1e-6  # a logprob in (0, 1e-6] is rounding of log 1


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_key(*parts: int) -> np.uint64:
    """Hash of whole numbers (in order) into 64 bits: the key of one rollout's random stream.

    >>> stream_key(1, 2) == stream_key(1, 2), stream_key(1, 2) == stream_key(2, 1)
    (True, False)
    """
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = _mix(state * _GAMMA + np.array([part & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64) + _GAMMA)
    return state[0]


def rollout_key(engine_seed: int, seed: int, purpose: Purpose, group_id: int, sample: int, attempt: int) -> np.uint64:
    """Key of the stream that one attempt at one rollout draws from; `seed` is the request's own."""
    return stream_key(engine_seed, seed, int(purpose is Purpose.EVAL), group_id, sample, attempt)


def uniforms(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """float64[B] in [0, 1): draw number `index` int[B] of the streams `keys` uint64[B]; 53 bits each."""
    bits = _mix(keys + (index.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (_mix(bits) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Choice(NamedTuple):
    """One token per row."""

    tokens: np.ndarray  # int32[B]
    logprobs: np.ndarray  # float32[B]
    kept: tuple[np.ndarray | None, ...]  # [B], the token ids int64[n] that truncation left, ascending; None where it cut nothing off


def choose(logits: torch.Tensor, u: np.ndarray, settings: list[Sampling]) -> Choice:
    """One token per row of `logits` [B, V].

    The logprob is that under the distribution the token was sampled from: softmax of logits / temperature, cut to the kept
    vocabulary and renormalised where top-k, top-p or min-p cut it. Temperature 0 takes the likeliest token and gives its logprob
    under the untempered softmax. A row's result does not depend on other rows.
    """
    temperature = np.array([s.temperature for s in settings], dtype=np.float32)
    greedy = temperature == 0.0
    logits = logits.float()
    if (temperature[~greedy] != 1.0).any():
        divisor = torch.from_numpy(np.where(greedy, np.float32(1.0), temperature)).to(logits.device)
        logits = logits / divisor[:, None]
    top = logits.amax(dim=-1)  # [B]
    weights = (logits - top[:, None]).exp_()  # [B, V], in the layout of the logits
    cuts: dict[int, torch.Tensor] = {}  # by row, float32[V] on the CPU
    for row, s in enumerate(settings):
        if s.truncates_vocabulary and not greedy[row]:
            cuts[row] = _truncate(torch.log_softmax(logits[row], dim=-1).cpu(), s)
            weights[row] = cuts[row].exp().to(weights.device)
    tokens, totals = _invert(weights, u)
    if greedy.any():
        tokens = np.where(greedy, logits.argmax(dim=-1).cpu().numpy(), tokens)
    chosen = (logits.gather(1, torch.from_numpy(tokens).to(logits.device)[:, None])[:, 0] - top).cpu().numpy() - np.log(totals)
    for row, cut in cuts.items():
        chosen[row] = cut[tokens[row]]
    chosen = np.where((chosen > 0) & (chosen <= _ROUNDING), 0.0, chosen).astype(np.float32)
    kept = tuple(np.flatnonzero(cuts[row].numpy() > -np.inf) if row in cuts else None for row in range(len(settings)))
    return Choice(tokens.astype(np.int32), chosen, kept)


def _invert(weights: torch.Tensor, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64[B]: the first token at which the running sum of weights [B, V] exceeds u times their sum, never one of weight 0; float64[B]:
    that sum.

    The running sums are in float64 and on the CPU (mps has no float64): [B, C] of chunks, then [B, _CHUNK] within the one chosen.
    """
    rows, vocabulary = weights.shape
    weights = weights.t()
    if vocabulary % _CHUNK:
        weights = pad(weights, (0, 0, 0, -vocabulary % _CHUNK))
    chunks = weights.unflatten(0, (-1, _CHUNK))  # [C, _CHUNK, B]
    outer = _sum_chunks(chunks).t().cpu().double().cumsum(-1)
    target = torch.from_numpy(u)[:, None] * outer[:, -1:]
    chunk = _first_above(outer, target)  # [B, 1]
    below = torch.where(chunk > 0, outer.gather(1, (chunk - 1).clamp_min(0)), 0.0)
    inner = chunks[chunk[:, 0].to(chunks.device), :, torch.arange(rows, device=chunks.device)].cpu().double().cumsum(-1)
    token = chunk * _CHUNK + _first_above(inner, (target - below).clamp_min(0.0))
    # Beyond the end only for NaN, whose sum is then NaN too.
    return token.clamp_max(vocabulary - 1)[:, 0].numpy(), outer[:, -1].numpy()


def _sum_chunks(chunks: torch.Tensor) -> torch.Tensor:
    """[C, B] sums over the middle of [C, _CHUNK, B], by halves: `Tensor.sum` would add in an order that depends on B."""
    while chunks.shape[1] > 1:
        half = chunks.shape[1] // 2
        chunks = chunks[:, :half] + chunks[:, half:]
    return chunks[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64[B, 1]: first index whose running sum exceeds the target; where rounding leaves none, the last one that adds anything."""
    found = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)
    return torch.minimum(found, last).clamp_max(cumulative.shape[1] - 1)


def _truncate(logprobs: torch.Tensor, s: Sampling) -> torch.Tensor:
    """float32[V] log-probabilities of the kept vocabulary, renormalised; -inf elsewhere. Cuts in the order top-k, top-p, min-p."""
    ordered, order = logprobs.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if s.top_k > 0:
        keep[s.top_k :] = False
    if s.top_p < 1.0:
        kept = torch.where(keep, ordered, float("-inf")).softmax(-1).double()
        keep &= kept.cumsum(-1) - kept < s.top_p  # the token that crosses top_p is kept
    if s.min_p > 0.0:
        keep &= ordered >= ordered[0] + float(np.log(s.min_p))
    cut = torch.full_like(logprobs, float("-inf"))
    cut[order[keep]] = ordered[keep]
    return torch.log_softmax(cut, dim=-1)
