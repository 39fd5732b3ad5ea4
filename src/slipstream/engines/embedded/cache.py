"""The keys and values of one stream: the pool, who holds which block of it, prompts, saved states; and the passes that make them.

Where routing is kept, the experts that a position was routed to lie in the pool beside its keys and values: what is shared, branched off,
saved or made again is so for both, and a sequence's routing always is the one that made the keys and values it has.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from transformers import PreTrainedModel

from slipstream.engines.embedded.blocks import BlockAllocator
from slipstream.engines.embedded.products import Products
from slipstream.engines.embedded.prompts import PromptStore
from slipstream.engines.embedded.states import StateStore
from slipstream.models.dense_rows import DenseRows
from slipstream.models.head import base_model
from slipstream.models.layout import BLOCK_TOKENS, PagedLayout
from slipstream.models.paged_attention import KVPool
from slipstream.models.routing import Routers, record

_FIRST_BLOCKS = 4  # per slot: what the pool starts with


class Cache:
    """Room for `slots` sequences of `max_context` tokens, and for `saved_states` more; the tensors grow with use.

    Each running sequence holds at most `blocks_per_sequence` blocks, and one more while the partly filled block of a prompt is copied for
    it; each saved state holds at most as many as a sequence. So there always is a block, if only that of a prompt that can be made again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_context: int,
        min_rows: int,
        saved_states: int = 0,
        saved_bytes: int = 0,
        routers: Routers | None = None,
        frozen: Iterable[torch.Tensor] = (),
    ):
        self._model, self._routers = model, routers
        self.products = Products(model, frozen)
        self.blocks_per_sequence = -(-max_context // BLOCK_TOKENS)
        num_blocks = slots * (self.blocks_per_sequence + 1) + saved_states * self.blocks_per_sequence + 1
        self.pool = KVPool(min(num_blocks, slots * _FIRST_BLOCKS + 1))
        self.dense = DenseRows(max(slots, min_rows), self.blocks_per_sequence * BLOCK_TOKENS)
        self.blocks = BlockAllocator(num_blocks)
        self.prompts = PromptStore(self.blocks)
        pool = self.pool  # not through self: a cycle would keep a pinned model alive until the collector comes by
        self.states = StateStore(self.blocks, saved_states, saved_bytes, lambda: pool.num_bytes // pool.num_blocks)

    def grow(self, blocks: list[int], num_tokens: int, keep: tuple | None = None) -> None:
        """Append blocks until there are enough for `num_tokens` positions. Any prompt but that of key `keep` may give way."""
        while len(blocks) * BLOCK_TOKENS < num_tokens:
            blocks.append(self._take(keep))

    def branch(self, blocks: list[int] | tuple[int, ...], num_tokens: int, keep: tuple | None = None) -> list[int]:
        """Blocks that begin with the same `num_tokens` positions: whole ones by reference, the partly filled one copied. Where they are a
        prompt's, `keep` is its key."""
        whole, partial = divmod(num_tokens, BLOCK_TOKENS)
        out = list(blocks[:whole])
        self.blocks.share(out)
        if partial:
            self.grow(out, num_tokens, keep)
            self.pool.copy_block(blocks[whole], out[whole])
        return out

    def decode_layout(self, blocks: np.ndarray, positions: np.ndarray, in_order: bool) -> PagedLayout:
        """For one new position int64[B] per row, each within its row of `blocks` int64[B, n]. `in_order`: the rows are slots 0, 1, ..."""
        device = self._model.device
        at = torch.from_numpy(positions).to(device)
        slots = blocks[np.arange(len(blocks)), positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        if in_order:
            dense = self.dense.plan(at, blocks.shape[1] * BLOCK_TOKENS, self.pool.position_bytes)
        else:
            self.dense.forget_all()
            dense = None
        return PagedLayout(
            pool=self.pool,
            positions=at[:, None],
            write_slots=torch.from_numpy(slots).to(device),
            block_table=torch.from_numpy(blocks.reshape(-1)).to(device),
            blocks=blocks.shape[1],
            dense=dense,
        )

    def prefill(self, tokens: list[int], start: int, blocks: list[int]) -> None:
        """Make keys and values of `tokens` at positions start, start + 1, ...; one row alone, so no neighbour can matter."""
        if not tokens:
            return
        device = self._model.device
        end = start + len(tokens)
        at = np.arange(start, end)
        table = np.array(blocks[: -(-end // BLOCK_TOKENS)], dtype=np.int64)
        slots = table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
        positions = torch.from_numpy(at).to(device)[None]
        layout = PagedLayout(
            pool=self.pool,
            positions=positions,
            write_slots=torch.from_numpy(slots).to(device),
            block_table=torch.from_numpy(table).to(device),
            blocks=len(table),
            fresh=start == 0,
        )
        self.forward(torch.tensor([tokens], device=device), layout)

    def forward(self, tokens: torch.Tensor, layout: PagedLayout) -> torch.Tensor:
        """The body's last hidden states [B, T, d] of `tokens` [B, T]; their keys and values, and their routing, go into the pool."""
        if self._routers is None:
            return self._run(tokens, layout)
        with record(self._routers) as recording:
            hidden = self._run(tokens, layout)
        self.pool.write_routing(recording.experts, layout.write_slots)
        return hidden

    def routing(self, blocks: list[int], num_tokens: int) -> np.ndarray | None:
        """[num_tokens, experts per token] of the first positions of these blocks; None where routing is not kept."""
        return None if self._routers is None else self.pool.read_routing(blocks, num_tokens).cpu().numpy()

    def _run(self, tokens: torch.Tensor, layout: PagedLayout) -> torch.Tensor:
        body = base_model(self._model)
        with self.products.fast():
            return body(input_ids=tokens, position_ids=layout.positions, use_cache=False, layout=layout).last_hidden_state

    def _take(self, keep: tuple | None) -> int:
        while not self.blocks.num_free:
            evicted = self.prompts.evict_one(keep)
            assert evicted, "there are blocks for every slot at max_context"
        block = self.blocks.take()
        self.pool.reserve(block + 1)
        return block
