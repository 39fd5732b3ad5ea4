"""Token logprobs and entropies in chunks, so that the full logits matrix is never held.

Each chunk runs the model's own head (`models.head`) and is reduced to a few numbers per row. Several chunks are each computed again in the
backward pass; the trainer asks for one at a time where the loss lets it make the gradient at once.
Rows are distinct (packed position, temperature, kept vocabulary) triples: the last prompt token predicts the first token of all G
completions, and its logits are computed once for all of them.

Shapes: T = packed tokens, d = hidden size, R = rows of logits, N = trained tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.models.head import head_logits
from slipstream.sampling_mask import decode_kept
from slipstream.trainer.kl import full_kl

_BLOCK_LOGITS = 1 << 17  # logits that pass through the softmax together on a CPU: three arrays of them fit a core's cache
_CUT_OFF = -1e30  # a logit of probability 0; finite, since 0 times infinity is NaN in the entropy


class HeadRows(NamedTuple):
    """Which logits a micro-batch needs, and which of them predicts which token."""

    positions: torch.Tensor  # int64[R], packed position whose hidden state is used; R rows are distinct
    temperature: torch.Tensor | None  # float32[R], the sampler's: logits are divided by it; None: 1 everywhere
    row: torch.Tensor  # int64[N], sorted: the row that predicts token n
    target_ids: torch.Tensor  # int64[N]
    kept: tuple[bytes, ...] | None = None  # [R], what truncated sampling left (`sampling_mask.py`), b"": all; None: no row was cut

    def chunks(self, size: int) -> list[HeadRows]:
        """Consecutive parts of at most `size` rows; `row` counts from each part's first."""
        starts = torch.arange(0, len(self.positions), size)
        bounds = [*torch.searchsorted(self.row.cpu(), starts).tolist(), len(self.row)]
        parts = []
        for start, first, last in zip(starts.tolist(), bounds[:-1], bounds[1:], strict=True):
            temperature = None if self.temperature is None else self.temperature[start : start + size]
            row, target_ids = self.row[first:last] - start, self.target_ids[first:last]
            kept = None if self.kept is None else self.kept[start : start + size]
            parts.append(HeadRows(self.positions[start : start + size], temperature, row, target_ids, kept))
        return parts

    def to(self, device: torch.device | str) -> HeadRows:
        return HeadRows(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self))  # type: ignore[arg-type]


class TokenOutputs(NamedTuple):
    """What a forward pass says of the trained tokens."""

    logprob: torch.Tensor  # float32[N], with a gradient
    entropy: torch.Tensor  # float32[N], nats, of the distribution the token comes from; with a gradient where that was asked for
    divergence: torch.Tensor | None  # float32[N], KL(model ‖ teacher) over the vocabulary, with a gradient; None without a teacher

    def detach(self) -> TokenOutputs:
        return TokenOutputs(*(None if x is None else x.detach() for x in self))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[TokenOutputs]) -> TokenOutputs:
        """Of tokens one part after another."""
        return cls(*(None if columns[0] is None else torch.cat(columns) for columns in zip(*parts, strict=True)))  # type: ignore[arg-type]


class Teacher(NamedTuple):
    """A frozen model over the same tokens."""

    model: nn.Module
    hidden: torch.Tensor  # [T, d of the teacher]


def token_logprobs(
    model: nn.Module,
    hidden: torch.Tensor,
    rows: HeadRows,
    chunk_rows: int,
    *,
    entropy_gradient: bool = False,
    teacher: Teacher | None = None,
) -> TokenOutputs:
    """Logprob and entropy of the tokens, from the body's hidden states [T, d]; with a teacher the divergence from it as well.

    At most `chunk_rows` rows of logits exist at a time (of each model). Logits are divided by the temperature; the softmax is in float32.
    """
    chunks = rows.chunks(chunk_rows)
    outputs = []
    for part in chunks:
        arguments = (model, hidden.index_select(0, part.positions), part, entropy_gradient, teacher)
        if len(chunks) == 1:  # one chunk is within the bound anyway, so it need not be computed twice
            outputs.append(_chunk_outputs(*arguments))
        else:
            outputs.append(checkpoint(_chunk_outputs, *arguments, use_reentrant=False))
    return TokenOutputs.joined([TokenOutputs(*part) for part in outputs])


def _chunk_outputs(
    model: nn.Module, hidden: torch.Tensor, part: HeadRows, entropy_gradient: bool, teacher: Teacher | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One chunk: hidden [R, d] -> logprob, entropy and divergence [N]."""
    logits = _scaled_logits(model, hidden, part)
    logprob, entropy = _LogprobAndEntropy.apply(logits, part.row, part.target_ids, entropy_gradient)  # type: ignore[misc]
    if teacher is None:
        return logprob, entropy[part.row], None
    with torch.no_grad():
        teacher_logits = _scaled_logits(teacher.model, teacher.hidden.index_select(0, part.positions), part)
    return logprob, entropy[part.row], full_kl(logits, teacher_logits)[part.row]


def _scaled_logits(model: nn.Module, hidden: torch.Tensor, part: HeadRows) -> torch.Tensor:
    """[R, V], divided by the temperature, and without what the sampler had cut off: the distribution that the tokens were drawn from."""
    logits = head_logits(model, hidden).float()
    if part.temperature is not None:
        logits = logits / part.temperature[:, None]
    if part.kept is not None:
        logits = logits.masked_fill(_cut_off(part.kept, logits.shape[1]).to(logits.device), _CUT_OFF)
    return logits


def _cut_off(kept: tuple[bytes, ...], vocabulary: int) -> torch.Tensor:
    """bool[R, V]: what is not kept."""
    out = np.zeros((len(kept), vocabulary), dtype=bool)
    for row, part in enumerate(kept):
        if part:
            out[row] = True
            ids = decode_kept(part)
            out[row, ids[ids < vocabulary]] = False  # a frozen model's embedding may be padded to fewer rows than the sampler's
    return torch.from_numpy(out)


class _LogprobAndEntropy(torch.autograd.Function):
    """(logprob [N] of the targets, entropy [R] of the rows) of logits [R, V].

    With x = logits[r] - max, e = exp(x), Z = sum e, p = e / Z, for the row r of token n and its entropy H:

        log p = x - log Z        H = log Z - sum(p x)
        d logprob[n] / d logits[r] = onehot(target n) - p
        d H[r] / d logits[r]       = -p (log p + H)                only where the entropy has a gradient

    One exponential per logit, and e is all that is kept: the gradient is made in its place. A few rows at a time pass through all of it,
    so that they stay in a CPU's cache: a vocabulary's worth of logits is read once and e written once.
    """

    @staticmethod
    def forward(
        ctx, logits: torch.Tensor, row: torch.Tensor, target_ids: torch.Tensor, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.empty_like(logits)  # e
        highest, total, mean = logits.new_empty(3, len(logits)).unbind()
        block = max(1, _BLOCK_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        for x, e, top, z, m in zip(*(part.split(block) for part in (logits, kept, highest, total, mean)), strict=True):
            torch.amax(x, dim=-1, out=top)
            x = x - top[:, None]
            torch.exp(x, out=e)
            torch.sum(e, dim=-1, out=z)
            torch.linalg.vecdot(e, x, out=m)
        log_total = total.log()
        logprob = logits[row, target_ids] - highest[row] - log_total[row]  # in this order: the first difference rounds nothing off
        entropy = log_total - mean / total
        ctx.save_for_backward(kept, total, row, target_ids, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, gradient: torch.Tensor, entropy_gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        kept, total, row, target_ids, entropy = ctx.saved_tensors
        scale = torch.zeros_like(total).index_add_(0, row, -gradient)
        if ctx.entropy_gradient:
            probability = kept / total[:, None]
            by_entropy = (torch.xlogy(probability, probability) + probability * entropy[:, None]) * entropy_gradient[:, None]
            kept.mul_((scale / total)[:, None]).sub_(by_entropy)
        else:
            kept.mul_((scale / total)[:, None])
        return kept.index_put_((row, target_ids), gradient, accumulate=True), None, None, None
