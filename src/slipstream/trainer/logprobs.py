"""Token logprobs and entropies in chunks, so that the full logits matrix is never held.

Each chunk runs the model's own head (`models.head`), is reduced to a few numbers per row, and is computed again in the backward pass.
Rows are distinct (packed position, temperature) pairs: the last prompt token predicts the first token of all G completions, and its
logits are computed once for all of them.

Shapes: T = packed tokens, d = hidden size, R = rows of logits, N = trained tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.models.head import head_logits


class HeadRows(NamedTuple):
    """Which logits a micro-batch needs, and which of them predicts which token."""

    positions: torch.Tensor  # int64[R], packed position whose hidden state is used; R rows are distinct
    temperature: torch.Tensor | None  # float32[R], the sampler's: logits are divided by it; None: 1 everywhere
    row: torch.Tensor  # int64[N], sorted: the row that predicts token n
    target_ids: torch.Tensor  # int64[N]

    def chunks(self, size: int) -> list[HeadRows]:
        """Consecutive parts of at most `size` rows; `row` counts from each part's first."""
        starts = torch.arange(0, len(self.positions), size)
        bounds = [*torch.searchsorted(self.row.cpu(), starts).tolist(), len(self.row)]
        parts = []
        for start, first, last in zip(starts.tolist(), bounds[:-1], bounds[1:], strict=True):
            temperature = None if self.temperature is None else self.temperature[start : start + size]
            row, target_ids = self.row[first:last] - start, self.target_ids[first:last]
            parts.append(HeadRows(self.positions[start : start + size], temperature, row, target_ids))
        return parts

    def to(self, device: torch.device | str) -> HeadRows:
        return HeadRows(*(None if x is None else x.to(device) for x in self))  # type: ignore[arg-type]


def token_logprobs(model: nn.Module, hidden: torch.Tensor, rows: HeadRows, chunk_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob float32[N] with gradient, entropy float32[N] without) of the tokens, from the body's hidden states [T, d].

    At most `chunk_rows` rows of logits exist at a time. Logits are divided by the temperature; the softmax is in float32.
    """
    chunks = rows.chunks(chunk_rows)
    logprobs, entropies = [], []
    for part in chunks:
        selected = hidden.index_select(0, part.positions)
        if len(chunks) == 1:  # one chunk is within the bound anyway, so it need not be computed twice
            logprob, entropy = _chunk_logprobs(model, selected, part)
        else:
            logprob, entropy = checkpoint(_chunk_logprobs, model, selected, part, use_reentrant=False)  # type: ignore[misc]
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(model: nn.Module, hidden: torch.Tensor, part: HeadRows) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk: hidden [R, d] -> (logprob [N], entropy [N])."""
    logits = head_logits(model, hidden).float()
    if part.temperature is not None:
        logits = logits / part.temperature[:, None]
    logprob, entropy = _LogprobAndEntropy.apply(logits, part.row, part.target_ids)  # type: ignore[misc]
    return logprob, entropy[part.row]


class _LogprobAndEntropy(torch.autograd.Function):
    """(logprob [N] of the targets, entropy [R] of the rows) of logits [R, V], in as few passes over them as there can be.

    d logprob[n] / d logits[r] = onehot(target n) - softmax(logits[r]) for its row r; the softmax is at hand from the entropy.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, row: torch.Tensor, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logs = logits.log_softmax(dim=-1)
        logprob = logs[row, target_ids]
        probability = logs.exp()
        entropy = -logs.mul_(probability).sum(dim=-1)
        ctx.save_for_backward(probability, row, target_ids)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        probability, row, target_ids = ctx.saved_tensors
        per_row = torch.zeros_like(probability[:, 0]).index_add_(0, row, gradient)
        out = probability * -per_row[:, None]
        return out.index_put_((row, target_ids), gradient, accumulate=True), None, None
