"""Attention of the trainer: one packed row of segments that form a forest (`PackedLayout`), without a T x T mask.

Every segment becomes one row of a small batch: its own tokens attend to [keys of its ancestors, its own keys]. Rows of similar size
share one call (siblings, mostly), padded to the longest; a shared prompt is read by all of its completions and its gradient is the
sum over them. Linear layers never see the padding, it exists only in here. Two facts make this small:

* ancestors are padded on the left and own keys on the right, so query i of a row and key j are (ancestors + i) - j apart in every
  row: one band describes causality and the sliding window for the whole batch, by true positions;
* a query pad may compute what it likes: its output is never read, hence its gradient is zero.

Shapes: T = packed tokens, H = heads, K = key/value heads, D = head width, n = rows of a batch, L = query tokens per row,
A = ancestor tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.models.layout import PackedLayout

_WASTE = 1.3  # a batch may cost this times the sum of its rows ...
_SLACK = 2048  # ... plus so many scores, which is about what one more call costs
_MAX_MASK = 1 << 20  # elements of a mask that differs between rows (rows with different numbers of ancestor tokens)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, K, T, D]
    value: torch.Tensor,  # [1, K, T, D]
    layout: PackedLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Attention output [1, T, H, D]. Differentiable; called again in the backward pass under gradient checkpointing."""
    plan = _plan(layout, sliding_window, query.dtype, query.device)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
    queries = _Place.apply(query, plan.query_index, plan.output_index, None).split(plan.query_sizes)
    keys, values = (x.index_select(0, plan.key_index).split(plan.key_sizes) for x in (key, value))
    outputs = []
    for batch, *rows in zip(plan.batches, queries, keys, values, strict=True):
        q, k, v = (x.unflatten(0, (batch.num_rows, -1)).transpose(1, 2) for x in rows)  # [n, H or K, L or A + L, D]
        if softcap is None and sinks is None:
            causal = batch.mask is None
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, is_causal=causal, scale=scaling, enable_gqa=grouped)
        else:
            out = _plain_attention(q, k, v, batch.mask, scaling, softcap, sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [n * L, H, D]
    return _Place.apply(torch.cat(outputs), plan.output_index, plan.query_index, plan.pads).unsqueeze(0)


class _Place(torch.autograd.Function):
    """x[index], where every token is at exactly one place and `back` says at which: so its gradient is gathered too, where that of
    `index_select` is added up in a row of zeros. `pads` are the places of the gradient that no token is at, or None: there it is 0.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor, back: torch.Tensor, pads: torch.Tensor | None) -> torch.Tensor:
        ctx.back, ctx.pads = back, pads
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        out = gradient.index_select(0, ctx.back)
        return (out if ctx.pads is None else out.index_fill_(0, ctx.pads, 0.0)), None, None, None


def _plain_attention(
    query: torch.Tensor,  # [n, H, L, D]
    key: torch.Tensor,  # [n, K, A + L, D]
    value: torch.Tensor,
    mask: torch.Tensor | None,  # additive [n or 1, 1, L, A + L]; None: causal
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out, for what fused kernels do not do: soft-capped scores, sinks (a score per head that takes no value)."""
    num_heads, num_tokens = query.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (key, value))
    if mask is None:
        mask = _band(num_tokens, 0, None).to(query)
    scores = query @ key.transpose(-1, -2) * scaling  # [n, H, L, A + L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + mask).float()
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, num_tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


# ---- the plan: made once per layout and window, read by every layer ------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Rows that share one call. Row r holds queries [r * L, (r + 1) * L) of `query_index`."""

    num_rows: int
    query_index: np.ndarray  # int64[n * L] into the packed tokens; pads repeat the row's first token
    key_index: np.ndarray  # int64[n * (A + L)]; ancestors (padded on the left), then own tokens (padded on the right)
    mask: torch.Tensor | None  # additive [n or 1, 1, L, A + L]; None: plain causal


@dataclass(frozen=True)
class _Plan:
    batches: tuple[_Batch, ...]
    query_index: torch.Tensor  # those of all batches, one after another
    key_index: torch.Tensor
    query_sizes: list[int]  # per batch
    key_sizes: list[int]
    output_index: torch.Tensor  # int64[T]: where each packed token is in `query_index`
    pads: torch.Tensor | None  # int64: the places of `query_index` that are padding; None: there are none


@dataclass(frozen=True)
class _Row:
    tokens: np.ndarray  # int64[own length], packed positions
    ancestors: np.ndarray  # int64[a], those a first own token can still see

    @property
    def cost(self) -> int:
        return len(self.tokens) * (len(self.ancestors) + len(self.tokens))


def _plan(layout: PackedLayout, window: int | None, dtype: torch.dtype, device: torch.device) -> _Plan:
    """The layout's plan; kept with the layout, as its other derived values are."""
    plans = layout.__dict__.setdefault("_attention_plans", {})
    found = plans.get((window, dtype, device))
    if found is None:
        found = plans[window, dtype, device] = _make_plan(layout, window, dtype, device)
    return found


def _make_plan(layout: PackedLayout, window: int | None, dtype: torch.dtype, device: torch.device) -> _Plan:
    output_index = np.empty(layout.num_tokens, dtype=np.int64)
    batches, at = [], 0
    for rows in _group_rows(_make_rows(layout, window)):
        longest = max(len(row.tokens) for row in rows)
        for row in rows:
            output_index[row.tokens] = np.arange(at, at + len(row.tokens))
            at += longest
        batches.append(_make_batch(rows, window, dtype, device))
    padding = np.ones(at, dtype=bool)
    padding[output_index] = False
    return _Plan(
        batches=tuple(batches),
        query_index=torch.from_numpy(np.concatenate([b.query_index for b in batches])).to(device),
        key_index=torch.from_numpy(np.concatenate([b.key_index for b in batches])).to(device),
        query_sizes=[len(b.query_index) for b in batches],
        key_sizes=[len(b.key_index) for b in batches],
        output_index=torch.from_numpy(output_index).to(device),
        pads=torch.from_numpy(np.flatnonzero(padding)).to(device) if padding.any() else None,
    )


def _make_rows(layout: PackedLayout, window: int | None) -> list[_Row]:
    paths: list[np.ndarray] = []  # per segment: packed positions of its sequence up to its end
    rows = []
    for segment in layout.segments:
        ancestors = paths[segment.parent] if segment.parent >= 0 else np.empty(0, dtype=np.int64)
        tokens = np.arange(segment.start, segment.end)
        paths.append(np.concatenate([ancestors, tokens]))
        if window is not None:
            ancestors = ancestors[max(0, len(ancestors) - (window - 1)) :]
        rows.append(_Row(tokens, ancestors))
    return rows


def _group_rows(rows: list[_Row]) -> list[list[_Row]]:
    """Rows that share a call: neighbours in size, as long as the padding stays cheap."""
    groups: list[list[_Row]] = []
    own_cost = ancestors = longest = 0
    for row in sorted(rows, key=lambda row: (len(row.ancestors), len(row.tokens))):
        longest = max(longest, len(row.tokens))
        same = bool(groups) and len(row.ancestors) == ancestors
        padded = (len(groups[-1]) + 1 if groups else 1) * longest * (len(row.ancestors) + longest)
        own_cost += row.cost
        if groups and padded <= _WASTE * own_cost + _SLACK and (same or padded <= _MAX_MASK):
            groups[-1].append(row)
        else:
            groups.append([row])
            own_cost, longest = row.cost, len(row.tokens)
        ancestors = len(row.ancestors)
    return groups


def _make_batch(rows: list[_Row], window: int | None, dtype: torch.dtype, device: torch.device) -> _Batch:
    num_tokens = max(len(row.tokens) for row in rows)  # L
    num_ancestors = max(len(row.ancestors) for row in rows)  # A
    query_index = np.empty((len(rows), num_tokens), dtype=np.int64)
    key_index = np.empty((len(rows), num_ancestors + num_tokens), dtype=np.int64)
    for r, row in enumerate(rows):
        query_index[r] = row.tokens[0]
        query_index[r, : len(row.tokens)] = row.tokens
        key_index[r] = row.tokens[0]
        key_index[r, num_ancestors - len(row.ancestors) : num_ancestors] = row.ancestors
        key_index[r, num_ancestors : num_ancestors + len(row.tokens)] = row.tokens
    return _Batch(
        num_rows=len(rows),
        query_index=query_index.reshape(-1),
        key_index=key_index.reshape(-1),
        mask=_make_mask(rows, num_tokens, num_ancestors, window, dtype, device),
    )


def _make_mask(
    rows: list[_Row], num_tokens: int, num_ancestors: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    if num_ancestors == 0 and (window is None or num_tokens <= window):
        return None
    mask = _band(num_tokens, num_ancestors, window)[None, None]
    missing = np.array([num_ancestors - len(row.ancestors) for row in rows])
    if missing.any():
        absent = torch.arange(num_ancestors + num_tokens) < torch.from_numpy(missing)[:, None]  # [n, A + L]
        mask = mask.masked_fill(absent[:, None, None, :], float("-inf"))
    return mask.to(device=device, dtype=dtype)


def _band(num_tokens: int, num_ancestors: int, window: int | None) -> torch.Tensor:
    """float32[L, A + L]: 0 where query i may see key j (0 <= A + i - j < window), -inf elsewhere."""
    distance = num_ancestors + torch.arange(num_tokens)[:, None] - torch.arange(num_ancestors + num_tokens)[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
