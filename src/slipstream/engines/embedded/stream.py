"""One set of weights with its sequences: admission into slots, prefill, and one decode pass at a time.

The engine has one stream for its live weights, and a second one while a version is pinned for evaluation.

A sequence of n tokens holds keys and values of its first n - 1; the decode pass feeds its last token, and so gives the logits of
the next. Prefill therefore needs no head, and a group's samples all get their first token from ordinary decode rows.

Shapes: R = rows of a decode pass (live rows, then padding), S = slots, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from slipstream.engines.embedded.cache import Cache
from slipstream.engines.embedded.prompts import Prompt
from slipstream.engines.embedded.rows import Rows
from slipstream.engines.embedded.sampling import choose, uniforms
from slipstream.engines.embedded.sequence import Sequence
from slipstream.engines.embedded.states import SavedState
from slipstream.engines.embedded.versions import Version
from slipstream.errors import RunFailed
from slipstream.models.head import head_logits
from slipstream.models.layout import BLOCK_TOKENS
from slipstream.models.routing import Routers
from slipstream.sampling_mask import encode_kept
from slipstream.types import Purpose, StopReason

MIN_ROWS = 4  # below, the CPU's matrix product takes another kernel with another rounding


class Admitted(NamedTuple):
    """What one admission did: sequences by handle, in order."""

    prefilled: tuple[tuple[int, Version], ...] = ()  # started or remade, and whose weights made the prompt's keys and values
    recomputed: tuple[int, ...] = ()  # newer weights made keys and values of tokens that older ones had sampled
    num_prefill_tokens: int = 0


class Decoded(NamedTuple):
    """What one decode pass did, B live rows."""

    handles: np.ndarray  # int32[B]
    token_ids: np.ndarray  # int32[B]
    logprobs: np.ndarray  # float32[B]
    finished: tuple[tuple[int, StopReason], ...]
    routing: dict[int, np.ndarray] = {}  # of the finished ones by handle, where it is kept: see `Frame.routing`
    kept: tuple[bytes, ...] = ()  # per row, or none: see `Frame.kept`


class Stream:
    """Sequences on one model object. Not thread-safe: one loop calls it between its own waits.

    `min_rows` is the least number of rows of a decode pass; `prefill_budget` the tokens after which prefill waits for the next tick (the
    first sequence of a tick always gets its own), so that running sequences are not held up for long. No version overwrites the `frozen`
    weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_context: int,
        min_rows: int = MIN_ROWS,
        prefill_budget: int = 1024,
        saved_states: int = 0,
        saved_bytes: int = 0,
        routers: Routers | None = None,
        frozen: Iterable[torch.Tensor] = (),
    ):
        self.model = model
        self.waiting: dict[int, Sequence] = {}  # by handle, in order of submission
        self._min_rows = max(min_rows, MIN_ROWS)
        self.cache = Cache(
            model,
            slots=slots,
            max_context=max_context,
            min_rows=self._min_rows,
            saved_states=saved_states,
            saved_bytes=saved_bytes,
            routers=routers,
            frozen=frozen,
        )
        self.draining = False  # nothing that waits starts
        self._slots: list[Sequence | None] = [None] * slots
        self._stale: dict[int, Sequence] = {}  # by handle: they hold a slot and pause until their keys and values are made again
        self._prefill_budget = prefill_budget
        self._rows = Rows(slots, self.cache.blocks_per_sequence)

    # ---- sequences ---------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """In slot order, which is also the order of rows."""
        return [s for s in self._slots if s is not None]

    def has_work(self, version: int) -> bool:
        """Whether a tick at this version would do anything."""
        return any(self._slots) or bool(self._ready(version))

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.handle] = sequence
        self.cache.prompts.wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what only it holds."""
        running = sequence.slot is not None
        if running:
            self._vacate(sequence)
        else:
            del self.waiting[sequence.handle]
        self.cache.prompts.leave(sequence, was_running=running)

    def save(self, sequence: Sequence, *, once: bool = False) -> int:
        """Keep a running sequence's keys and values; the state's id. The sequence goes on."""
        stale = sequence.handle in self._stale
        return self.cache.states.add(
            SavedState(
                key=sequence.request.key,
                tokens=tuple(sequence.tokens),
                num_sampled=sequence.draw_index,
                blocks=() if stale else tuple(sequence.blocks),
                num_cached=0 if stale else len(sequence.tokens) - 1,
                marks=sequence.marks.copy(),
                once=once,
            )
        )

    def swapped(self, version: Version, *, keep_prompts: bool, recompute: bool) -> None:
        """The model's tensors hold another version now.

        `recompute`: what runs pauses until its keys and values are made again, those that have paused longest first; saved states go.
        Without `keep_prompts` no sequence starts over a prompt's keys and values of an older version.
        """
        self.draining = False
        self.cache.products.forget()
        for sequence in self.running:
            sequence.marks.add(len(sequence.tokens) - 1, version)  # the next pass makes this position's
        if recompute:
            self._stale |= {s.handle: s for s in self.running if s.handle not in self._stale}
            self.cache.states.free_all()
        if not keep_prompts:
            self.cache.prompts.drop_all()

    # ---- one tick ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def admit(self, version: Version) -> Admitted:
        """Remake what is stale, then move waiting sequences whose `min_version` is met into free slots, within the prefill budget."""
        prefilled: list[tuple[int, Version]] = []
        recomputed: list[int] = []
        spent = 0
        free = [i for i, s in enumerate(self._slots) if s is None]
        for sequence in [*self._stale.values(), *self._ready(version[1])[: len(free)]]:
            need = self._prefill_need(sequence)
            if spent and spent + need > self._prefill_budget:
                break
            spent += need
            older = sequence.oldest is not None and sequence.oldest < version[1]
            made_by = self._start(sequence, free.pop(0), version) if sequence.slot is None else self._remake(sequence, version)
            prefilled.append((sequence.handle, made_by))
            if need and older:
                recomputed.append(sequence.handle)
        return Admitted(tuple(prefilled), tuple(recomputed), spent)

    def _ready(self, version: int) -> list[Sequence]:
        """What may start now. Those with tokens go first, since those age while they wait; then in order of submission."""
        if self.draining:
            return []
        ready = [s for s in self.waiting.values() if s.request.min_version <= version]
        return sorted(ready, key=lambda s: s.oldest is None)

    @torch.inference_mode()
    def decode(self) -> Decoded:
        """Feed every running sequence's last token and sample one more for each. RunFailed when the logits are not finite."""
        self._close_gaps()
        rows = np.array([i for i, s in enumerate(self._slots) if s is not None and s.handle not in self._stale], dtype=np.int64)
        sequences = [s for s in self.running if s.handle not in self._stale]
        if not sequences:
            empty = np.zeros(0, dtype=np.int32)
            return Decoded(empty, empty, np.zeros(0, dtype=np.float32), ())
        self._grow(rows)
        logits = self._forward(rows)[: len(rows)]
        tokens, logprobs, kept = choose(
            logits, uniforms(self._rows.keys[rows], self._rows.draws[rows]), [s.request.sampling for s in sequences]
        )
        if not np.isfinite(logprobs).all():
            bad = sequences[int(np.flatnonzero(~np.isfinite(logprobs))[0])].request
            raise RunFailed(
                f"the model's logits are not finite (group {bad.group_id} sample {bad.sample}): its weights have diverged; "
                "lower trainer.learning_rate or resume from an earlier checkpoint"
            )
        self._rows.advance(rows, tokens)
        finished: list[tuple[int, StopReason]] = []
        routing: dict[int, np.ndarray] = {}
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            reason = sequence.append(token)
            if reason is not None:
                finished.append((sequence.handle, reason))
                experts = self.cache.routing(sequence.blocks, len(sequence.tokens) - 1)
                if experts is not None:
                    routing[sequence.handle] = experts
                self.remove(sequence)
        handles = np.array([s.handle for s in sequences], dtype=np.int32)
        return Decoded(handles, tokens, logprobs, tuple(finished), routing, self._encode(sequences, kept, logits.shape[1]))

    @staticmethod
    def _encode(sequences: list[Sequence], kept: tuple[np.ndarray | None, ...], vocabulary: int) -> tuple[bytes, ...]:
        """What truncation kept, for the trainer: of training sequences only, and nothing at all where none was cut."""
        if all(ids is None for ids in kept):
            return ()
        trained = [s.request.purpose is Purpose.TRAIN for s in sequences]
        return tuple(encode_kept(ids, vocabulary) if ids is not None and own else b"" for ids, own in zip(kept, trained, strict=True))

    def _forward(self, rows: np.ndarray) -> torch.Tensor:
        """Logits [R, V] after the last token of each row."""
        padding = max(0, self._min_rows - len(rows))
        positions = np.pad(self._rows.position[rows], (0, padding))  # padding feeds token 0 at position 0 of the null block
        num_blocks = int(positions.max()) // BLOCK_TOKENS + 1
        blocks = np.pad(self._rows.blocks[rows, :num_blocks], ((0, padding), (0, 0)))
        layout = self.cache.decode_layout(blocks, positions, in_order=rows[-1] == len(rows) - 1)
        tokens = torch.from_numpy(np.pad(self._rows.last[rows], (0, padding))).to(self.model.device)[:, None]
        hidden = self.cache.forward(tokens, layout)[:, 0]
        with self.cache.products.fast():
            return head_logits(self.model, hidden)

    # ---- keys and values ---------------------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence, slot: int, version: Version) -> Version:
        """Put a waiting sequence into a slot; whose weights made its prompt's keys and values."""
        del self.waiting[sequence.handle]
        self.cache.prompts.start(sequence)
        sequence.slot, self._slots[slot] = slot, sequence
        sequence.oldest = version[1] if sequence.oldest is None else min(sequence.oldest, version[1])
        self._rows.set(slot, sequence)
        made_by = self._fill(sequence, version)
        self.cache.states.free_used(sequence.request.state)
        return made_by

    def _remake(self, sequence: Sequence, version: Version) -> Version:
        """Make a running sequence's keys and values again; it holds none of the old ones afterwards."""
        del self._stale[sequence.handle]
        self.cache.blocks.give_back(sequence.blocks)
        return self._fill(sequence, version)

    def _fill(self, sequence: Sequence, version: Version) -> Version:
        """Give a sequence in a slot keys and values for all its tokens but the last; whose weights made the first of them.

        The first ones are a saved state's or the prompt's; the rest is made now.
        """
        cache, last = self.cache, len(sequence.tokens) - 1
        if (saved := self._saved(sequence)) is not None:
            state, num_tokens = saved
            sequence.blocks, sequence.marks = cache.branch(state.blocks, num_tokens), state.marks.copy()
        else:
            prompt = cache.prompts.get(sequence) or self._make_prompt(sequence, version)
            num_tokens = prompt.num_tokens
            sequence.blocks = cache.branch(prompt.blocks, num_tokens, keep=sequence.prompt_key)
            sequence.marks.add(0, prompt.version)
        cache.grow(sequence.blocks, last)
        cache.prefill(sequence.tokens[num_tokens:last], num_tokens, sequence.blocks)
        sequence.marks.add(num_tokens, version)  # from here on, the passes to come included
        assert sequence.slot is not None
        self._rows.set_blocks(sequence.slot, sequence.blocks)
        cache.dense.forget(sequence.slot)
        return sequence.marks.first

    def _prefill_need(self, sequence: Sequence) -> int:
        """Tokens that must be prefilled before the sequence can decode."""
        last = len(sequence.tokens) - 1
        if (saved := self._saved(sequence)) is not None:
            return last - saved[1]
        return last - (sequence.request.prompt_length - 1 if self.cache.prompts.get(sequence) is not None else 0)

    def _saved(self, sequence: Sequence) -> tuple[SavedState, int] | None:
        """The saved state that the sequence may start from, and how many positions of it; None where there is none of use."""
        state = self.cache.states.get(sequence.request.state)
        if state is None:
            return None
        num_tokens = min(state.num_common(sequence.tokens), state.num_cached, len(sequence.tokens) - 1)
        return (state, num_tokens) if num_tokens else None

    def _make_prompt(self, sequence: Sequence, version: Version) -> Prompt:
        num_tokens = sequence.request.prompt_length - 1
        blocks: list[int] = []
        self.cache.grow(blocks, num_tokens)
        self.cache.prefill(sequence.tokens[:num_tokens], 0, blocks)
        prompt = Prompt(blocks, num_tokens, version)
        self.cache.prompts.put(sequence, prompt)
        return prompt

    def _grow(self, rows: np.ndarray) -> None:
        """A block for every row whose next position begins one."""
        for slot in rows[self._rows.position[rows] % BLOCK_TOKENS == 0].tolist():
            sequence = self._slots[slot]
            assert sequence is not None
            self.cache.grow(sequence.blocks, int(self._rows.position[slot]) + 1)
            self._rows.set_blocks(slot, sequence.blocks)

    def _vacate(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        self._stale.pop(sequence.handle, None)
        self.cache.blocks.give_back(sequence.blocks)
        sequence.blocks, sequence.slot, self._slots[slot] = [], None, None
        self._rows.set_blocks(slot, [])

    def _close_gaps(self) -> None:
        """Move sequences from the last slots into free ones between others: rows in order are read in place (`dense_rows.py`)."""
        running = self.running
        for target, occupant in enumerate(self._slots[: len(running)]):
            if occupant is None:
                sequence = running.pop()
                source = sequence.slot
                assert source is not None and source > target
                self._rows.move(source, target)
                self.cache.dense.forget(target)
                sequence.slot, self._slots[target], self._slots[source] = target, sequence, None
