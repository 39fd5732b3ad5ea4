"""One set of weights with its sequences: admission into slots, prefill, and one decode pass at a time.

The engine has one stream for its live weights, and a second one while a version is pinned for evaluation.

A sequence of n tokens holds keys and values of its first n - 1; the decode pass feeds its last token, and so gives the logits of
the next. Prefill therefore needs no head, and a group's samples all get their first token from ordinary decode rows.

Shapes: R = rows of a decode pass (live rows, then padding), S = slots, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from slipstream.engines.embedded.blocks import BlockAllocator
from slipstream.engines.embedded.prompts import Prompt, PromptStore, Version
from slipstream.engines.embedded.sampling import choose, uniforms
from slipstream.engines.embedded.sequence import Sequence
from slipstream.errors import RunFailed
from slipstream.models.head import base_model, head_logits
from slipstream.models.layout import BLOCK_TOKENS, PagedLayout
from slipstream.models.paged_attention import KVPool
from slipstream.types import StopReason

_FIRST_BLOCKS = 4  # per slot: what the pool starts with
MIN_ROWS = 4  # below, the CPU's matrix product takes another kernel with another rounding


class Admitted(NamedTuple):
    """What one admission did."""

    started: tuple[tuple[Sequence, Version], ...]  # and whose weights made the prompt's keys and values
    num_prefill_tokens: int


class Decoded(NamedTuple):
    """What one decode pass did, B live rows."""

    handles: np.ndarray  # int32[B]
    token_ids: np.ndarray  # int32[B]
    logprobs: np.ndarray  # float32[B]
    finished: tuple[tuple[int, StopReason], ...]


class Stream:
    """Sequences on one model object. Not thread-safe: one loop calls it between its own waits.

    `min_rows` is the least number of rows of a decode pass; `prefill_budget` the prompt tokens after which admission waits for the
    next tick (the first prompt of a tick always goes in), so that running sequences are not held up for long.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_context: int, min_rows: int = MIN_ROWS, prefill_budget: int = 1024):
        self.model = model
        self.waiting: dict[int, Sequence] = {}  # by handle, in order of submission
        self._slots: list[Sequence | None] = [None] * slots
        self._min_rows = max(min_rows, MIN_ROWS)
        self._prefill_budget = prefill_budget
        # Each running sequence holds at most blocks_per_sequence blocks, and its group's prompt one partial block more.
        blocks_per_sequence = -(-max_context // BLOCK_TOKENS)
        num_blocks = slots * (blocks_per_sequence + 1) + 1
        self.pool = KVPool(min(num_blocks, slots * _FIRST_BLOCKS + 1))
        self.blocks = BlockAllocator(num_blocks)
        self.prompts = PromptStore(self.blocks)
        self._table = np.zeros((slots, blocks_per_sequence), dtype=np.int64)  # [S, blocks]; 0 is the null block
        self._last = np.zeros(slots, dtype=np.int64)  # [S] the token that the next pass feeds
        self._position = np.zeros(slots, dtype=np.int64)  # [S] its position
        self._keys = np.zeros(slots, dtype=np.uint64)  # [S] random streams
        self._draws = np.zeros(slots, dtype=np.int64)  # [S] number of the next draw

    # ---- sequences ---------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """In slot order, which is also the order of rows."""
        return [s for s in self._slots if s is not None]

    def has_work(self, version: int) -> bool:
        """Whether a tick at this version would do anything."""
        return any(self._slots) or any(s.request.min_version <= version for s in self.waiting.values())

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.handle] = sequence
        self.prompts.wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what only it holds."""
        running = sequence.slot is not None
        if running:
            self._vacate(sequence)
        else:
            del self.waiting[sequence.handle]
        self.prompts.leave(sequence, was_running=running)

    # ---- one tick ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, version: Version) -> Admitted:
        """Move waiting sequences whose `min_version` is met into free slots, in order, within the prefill budget."""
        started: list[tuple[Sequence, Version]] = []
        spent = 0
        free = [i for i, s in enumerate(self._slots) if s is None]
        ready = (s for s in list(self.waiting.values()) if s.request.min_version <= version[1])
        for slot, sequence in zip(free, ready, strict=False):
            if spent and spent + self._prefill_need(sequence) > self._prefill_budget:
                break
            spent += self._prefill_need(sequence)
            started.append((sequence, self._start(sequence, slot, version)))
        return Admitted(tuple(started), spent)

    @torch.inference_mode()
    def decode(self) -> Decoded:
        """Feed every running sequence's last token and sample one more for each. RunFailed when the logits are not finite."""
        rows = np.array([i for i, s in enumerate(self._slots) if s is not None], dtype=np.int64)
        sequences = self.running
        if not sequences:
            empty = np.zeros(0, dtype=np.int32)
            return Decoded(empty, empty, np.zeros(0, dtype=np.float32), ())
        self._grow(rows)
        logits = self._forward(rows)[: len(rows)]
        tokens, logprobs = choose(logits, uniforms(self._keys[rows], self._draws[rows]), [s.request.sampling for s in sequences])
        if not np.isfinite(logprobs).all():
            bad = sequences[int(np.flatnonzero(~np.isfinite(logprobs))[0])].request
            raise RunFailed(
                f"the model's logits are not finite (group {bad.group_id} sample {bad.sample}): its weights have diverged; "
                "lower trainer.learning_rate or resume from an earlier checkpoint"
            )
        self._last[rows] = tokens
        self._position[rows] += 1
        self._draws[rows] += 1
        finished: list[tuple[int, StopReason]] = []
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            reason = sequence.append(token)
            if reason is not None:
                finished.append((sequence.handle, reason))
                self.remove(sequence)
        handles = np.array([s.handle for s in sequences], dtype=np.int32)
        return Decoded(handles, tokens, logprobs, tuple(finished))

    def _forward(self, rows: np.ndarray) -> torch.Tensor:
        """Logits [R, V] after the last token of each row."""
        device = self.model.device
        padding = max(0, self._min_rows - len(rows))
        position = np.pad(self._position[rows], (0, padding))  # padding feeds token 0 at position 0 of the null block
        num_blocks = int(position.max()) // BLOCK_TOKENS + 1
        table = np.pad(self._table[rows, :num_blocks], ((0, padding), (0, 0)))
        slots = table[np.arange(len(table)), position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        positions = torch.from_numpy(position).to(device)[:, None]
        layout = PagedLayout(
            pool=self.pool,
            positions=positions,
            write_slots=torch.from_numpy(slots).to(device),
            block_table=torch.from_numpy(table.reshape(-1)).to(device),
            blocks=num_blocks,
        )
        tokens = torch.from_numpy(np.pad(self._last[rows], (0, padding))).to(device)[:, None]
        hidden = base_model(self.model)(input_ids=tokens, position_ids=positions, use_cache=False, layout=layout).last_hidden_state
        return head_logits(self.model, hidden[:, 0])

    # ---- keys and values ---------------------------------------------------------------------------------------------------

    def _prefill_need(self, sequence: Sequence) -> int:
        """Tokens that must be prefilled before the sequence can decode."""
        shared = sequence.request.prompt_length - 1 if self.prompts.get(sequence) is not None else 0
        return len(sequence.tokens) - 1 - shared

    def _start(self, sequence: Sequence, slot: int, version: Version) -> Version:
        """Put a waiting sequence into a slot; whose weights made its prompt's keys and values."""
        del self.waiting[sequence.handle]
        self.prompts.start(sequence)
        prompt = self.prompts.get(sequence)
        if prompt is None:
            prompt = self._prefill_prompt(sequence, version)
            self.prompts.put(sequence, prompt)
        whole, partial = divmod(prompt.num_tokens, BLOCK_TOKENS)
        sequence.blocks = prompt.blocks[:whole]
        self.blocks.share(sequence.blocks)
        if partial:
            sequence.blocks.append(self._take(sequence))
            self.pool.copy_block(prompt.blocks[whole], sequence.blocks[whole])
        sequence.slot, self._slots[slot] = slot, sequence
        last = len(sequence.tokens) - 1
        self._table[slot, : len(sequence.blocks)] = sequence.blocks
        self._last[slot], self._position[slot] = sequence.tokens[-1], last
        self._keys[slot], self._draws[slot] = sequence.key, sequence.draw_index
        if last > prompt.num_tokens:
            self._extend(sequence, last)
            self._prefill(sequence.tokens[prompt.num_tokens : last], prompt.num_tokens, sequence.blocks)
        return prompt.version if prompt.num_tokens else version

    def _prefill_prompt(self, sequence: Sequence, version: Version) -> Prompt:
        num_tokens = sequence.request.prompt_length - 1
        blocks = [self._take(sequence) for _ in range(-(-num_tokens // BLOCK_TOKENS))]
        if num_tokens:
            self._prefill(sequence.tokens[:num_tokens], 0, blocks)
        return Prompt(blocks, num_tokens, version)

    def _prefill(self, tokens: list[int], start: int, blocks: list[int]) -> None:
        """Make keys and values of `tokens` at positions start, start + 1, ...; one row alone, so no neighbour can matter."""
        device = self.model.device
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
        base_model(self.model)(input_ids=torch.tensor([tokens], device=device), position_ids=positions, use_cache=False, layout=layout)

    def _grow(self, rows: np.ndarray) -> None:
        """A block for every row whose next position begins one."""
        for slot in rows[self._position[rows] % BLOCK_TOKENS == 0].tolist():
            sequence = self._slots[slot]
            assert sequence is not None
            self._extend(sequence, int(self._position[slot]) + 1)

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for its first `num_tokens` positions."""
        while len(sequence.blocks) * BLOCK_TOKENS < num_tokens:
            sequence.blocks.append(self._take(sequence))
            self._table[sequence.slot, len(sequence.blocks) - 1] = sequence.blocks[-1]

    def _take(self, sequence: Sequence) -> int:
        while not self.blocks.num_free:
            evicted = self.prompts.evict_one(keep=sequence.prompt_key)
            assert evicted, "there are blocks for every slot at max_context"
        block = self.blocks.take()
        self.pool.reserve(block + 1)
        return block

    def _vacate(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        self.blocks.give_back(sequence.blocks)
        sequence.blocks, sequence.slot, self._slots[slot] = [], None, None
        self._table[slot] = 0
