"""Attention over a paged pool of keys and values: the engine's body of the shared attention function.

Sequences hold their keys and values in blocks of BLOCK_TOKENS positions; a block may belong to several sequences (a group's
prompt). A pass writes the new tokens' keys and values, then gathers each row's blocks into [B, L, K, D], or reads them where they
lie in one piece (`dense_rows.py`), and calls SDPA with a mask over the tail. L is a multiple of BLOCK_TOKENS and a decode pass has at
least 4 rows: with one thread this makes a row's result independent of its neighbours on the CPUs measured (the probe checks it, see
`probe.py`).

Shapes: B = rows, T = new tokens per row, L = keys per row, H = heads, K = key/value heads, D = head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from slipstream.errors import ModelError
from slipstream.models.layout import BLOCK_TOKENS, PagedLayout

_ROUTING = "routing"


class KVPool:
    """Keys and values of every layer, [num_blocks, BLOCK_TOKENS, K, D] each. Block 0 is the null block: padding reads and writes it.

    Beside them lie the experts that the positions were routed to, where that is kept: [num_blocks, BLOCK_TOKENS, experts per token].

    A layer's tensors are made when it first writes, in the shape it writes, so the pool needs to know nothing of the model. They are
    zeros, so that unused positions are finite: a masked key's weight is 0, and 0 times NaN is not.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._stores: dict[int | str, tuple[torch.Tensor, ...]] = {}  # by layer, and _ROUTING

    def reserve(self, num_blocks: int) -> None:
        """Have at least so many blocks. Growth doubles, so memory follows what is used and not what could be."""
        if num_blocks <= self.num_blocks:
            return
        self.num_blocks = max(num_blocks, 2 * self.num_blocks)
        for name, stores in self._stores.items():
            self._stores[name] = tuple(torch.cat([t, t.new_zeros(self.num_blocks - len(t), *t.shape[1:])]) for t in stores)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors made so far."""
        return sum(t.numel() * t.element_size() for stores in self._stores.values() for t in stores)

    @property
    def position_bytes(self) -> int:
        """Size of one position, as far as the tensors are made."""
        return self.num_bytes // (self.num_blocks * BLOCK_TOKENS)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store key and value [B, K, T, D] at `slots` int64[B * T] (block * BLOCK_TOKENS + offset)."""
        self._put(layer, tuple(new.transpose(1, 2).flatten(0, 1) for new in (key, value)), slots)

    def read(self, layer: int, block_table: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, K, L, D] (views of [B, L, K, D]) of the blocks int64[B * blocks]."""
        key, value = (s.index_select(0, block_table).view(rows, -1, *s.shape[2:]).transpose(1, 2) for s in self._stores[layer])
        return key, value

    def write_routing(self, experts: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the experts [B * T, n] of positions at `slots` int64[B * T]."""
        self._put(_ROUTING, (experts,), slots)

    def read_routing(self, blocks: list[int], num_tokens: int) -> torch.Tensor:
        """Experts [num_tokens, n] of the first positions of these blocks."""
        (store,) = self._stores[_ROUTING]
        return store[torch.tensor(blocks, device=store.device)].flatten(0, 1)[:num_tokens]

    def copy_block(self, source: int, target: int) -> None:
        for stores in self._stores.values():
            for store in stores:
                store[target] = store[source]

    def _put(self, name: int | str, rows: tuple[torch.Tensor, ...], slots: torch.Tensor) -> None:
        """Write rows [B * T, ...]; the first ones make the tensors that hold them."""
        if name not in self._stores:
            self._stores[name] = tuple(row.new_zeros(self.num_blocks, BLOCK_TOKENS, *row.shape[1:]) for row in rows)
        for store, new in zip(self._stores[name], rows, strict=True):
            store.view(-1, *store.shape[2:]).index_copy_(0, slots, new)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, K, T, D]
    value: torch.Tensor,  # [B, K, T, D]
    layout: PagedLayout,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Write the new keys and values into the layout's pool, attend, and give [B, T, H, D]."""
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(f"{type(module).__name__} has no layer_idx, so its keys and values have no place in the pool")
    rows, heads, new_tokens, _ = query.shape
    layout.pool.write(layer, key, value, layout.write_slots)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))  # else SDPA takes a slow way
    if softcap is not None or sinks is not None:
        return _plain_attention(layer, query, key, value, layout, _Options(scaling, sliding_window, softcap, sinks)).transpose(1, 2)
    if layout.fresh:
        if sliding_window is None or new_tokens <= sliding_window:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            mask = _mask(layout, sliding_window, new_tokens, query.dtype)
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)
    if layout.dense is not None:
        key, value = layout.dense.read(layer, key, value, layout)
    else:
        key, value = layout.pool.read(layer, layout.block_table, rows)
    mask = _mask(layout, sliding_window, layout.num_keys, query.dtype)
    if new_tokens == 1:  # the heads of one key head become its queries: no key is read twice
        folded = query.view(rows, key.shape[1], -1, query.shape[-1])
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(rows, 1, heads, -1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2)


def _mask(layout: PagedLayout, window: int | None, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive [B, 1, T, L]: a query sees the keys up to its own position, and with a window only the last `window` of them."""
    mask = layout.masks.get(window)
    if mask is None:
        at = layout.positions[:, None, :, None]
        keys = torch.arange(num_keys, device=at.device)
        seen = keys <= at
        if window is not None:
            seen &= keys > at - window
        mask = torch.zeros(seen.shape, dtype=dtype, device=at.device).masked_fill_(~seen, float("-inf"))
        layout.masks[window] = mask
    return mask


class _Options(NamedTuple):
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def _plain_attention(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PagedLayout, options: _Options
) -> torch.Tensor:
    """[B, H, T, D] in plain operations, for what SDPA does not know: soft-capped scores and sinks.

    Unlike SDPA's, their rounding depends on L. So each row reads exactly its own blocks; rows with equally many go together.
    """
    if layout.fresh:
        return _attend(query, key, value, _mask(layout, options.sliding_window, key.shape[2], query.dtype), options)
    rows = len(query)
    mask = _mask(layout, options.sliding_window, layout.num_keys, query.dtype)
    table = layout.block_table.view(rows, layout.blocks)
    out: torch.Tensor | None = None
    for num_blocks, index in layout.rows_by_blocks.items():
        key, value = layout.pool.read(layer, table[index, :num_blocks].reshape(-1), len(index))
        part = _attend(query[index], key, value, mask[index, ..., : num_blocks * BLOCK_TOKENS], options)
        out = part.new_empty(rows, *part.shape[1:]) if out is None else out
        out[index] = part
    assert out is not None, "a pass has at least one row"
    return out


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, options: _Options) -> torch.Tensor:
    """[B, H, T, D]. A sink is one more score per head that takes weight and no value."""
    rows, heads, new_tokens, width = query.shape
    kv_heads = key.shape[1]
    key, value = key.contiguous(), value.contiguous()  # as a product of several rows would lay them out; of one row its sums may be others
    folded = query.reshape(rows, kv_heads, -1, width)  # [B, K, H/K * T, D]
    scores = (folded @ key.transpose(-1, -2)).view(rows, heads, new_tokens, -1) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = (scores + mask).float()
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.float().view(1, -1, 1, 1).expand(rows, -1, new_tokens, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    return (weights.reshape(rows, kv_heads, -1, key.shape[2]) @ value).view(rows, heads, new_tokens, -1)
