"""From sequences to packed micro-batches: no padding, a shared prompt once, only the needed logits.

`pack` lays the sequences of `token_table` into micro-batches of at most so many packed tokens; rollouts that share a prefix (a prompt, or
the rollout they were forked from) become a tree of segments, and a group that is split repeats its prompt. A rollout is never split.

The index that everything rests on: every rollout has a path, the packed position of each of its tokens, and token t is predicted at
path[t - 1]. Never "shift by one": the first tokens of all completions are predicted by the same last prompt position.

Shapes: T = packed tokens, N = trained tokens of a micro-batch. Tokens of different rollouts are interleaved: they are sorted by predictor.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.models.layout import PackedLayout, Segment
from slipstream.trainer.logprobs import HeadRows
from slipstream.trainer.token_table import Sequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass. All tensors on one device."""

    input_ids: torch.Tensor  # int64[1, T]
    position_ids: torch.Tensor  # int64[1, T]
    layout: PackedLayout
    rows: HeadRows  # the logits that are needed, and the targets [N]
    sampler_logprob: torch.Tensor  # float32[N]
    advantage: torch.Tensor  # float32[N]
    staleness: torch.Tensor  # int32[N]
    prefix_kv: torch.Tensor  # int8[N], token_table.PrefixKV
    sequence: torch.Tensor  # int64[N], which of the micro-batch's rollouts the token belongs to
    num_sequences: int
    weight: torch.Tensor  # float32[N], the token's share of the loss; over a whole batch they are made once, so that splits add up
    arrays: dict[str, torch.Tensor]  # float32[N] each, logprobs under other models
    routing: torch.Tensor | None = None  # int8 or int16 [T, routing width], NOT_ROUTED where nothing is recorded; None: it is not kept

    def to(self, device: torch.device | str) -> MicroBatch:
        """Itself, where it is there already."""
        if self.input_ids.device == torch.device(device):
            return self
        tensors = {name: value.to(device) for name in self.__slots__ if isinstance(value := getattr(self, name), torch.Tensor)}
        arrays = {name: value.to(device) for name, value in self.arrays.items()}
        return replace(self, rows=self.rows.to(device), arrays=arrays, **tensors)

    def chunks(self, size: int) -> Iterator[tuple[slice, MicroBatch]]:
        """Parts that need at most `size` rows of logits each, and where their tokens are among [N]. Their forward pass is the whole's."""
        at = 0
        for rows in self.rows.chunks(size):
            part = slice(at, at + len(rows.row))
            tensors = {name: getattr(self, name)[part] for name in _BY_TOKEN}
            yield part, replace(self, rows=rows, arrays={name: value[part] for name, value in self.arrays.items()}, **tensors)
            at = part.stop


_BY_TOKEN = ("sampler_logprob", "advantage", "staleness", "prefix_kv", "sequence", "weight")  # [N] each


def pack(sequences: Seq[Sequence], max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens (a single longer rollout goes alone). Groups stay whole where they fit.

    A pure function of its arguments: the same batch is split in the same way at every training of it.
    """
    builders: list[_Builder] = []
    for members in _by_group(sequences):
        whole = _Builder()
        for sequence in members:
            whole.add(sequence)
        room = max_tokens - builders[-1].num_tokens if builders else 0
        if room < whole.num_tokens <= max_tokens:
            builders.append(whole)
            continue
        for sequence in members:
            if not builders or builders[-1].num_tokens + builders[-1].cost(sequence) > max_tokens:
                builders.append(_Builder())
            builders[-1].add(sequence)
    return [builder.build() for builder in builders]


def _by_group(sequences: Seq[Sequence]) -> list[list[Sequence]]:
    groups: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.group, []).append(sequence)
    return list(groups.values())


class _Builder:
    """One micro-batch in the making: sequences and where each leaves the one it shares a prefix with."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sequences: list[Sequence] = []
        self._forks: list[tuple[int, int]] = []  # (owner, offset): the first `offset` tokens are the owner's; (-1, 0) for none
        self._extents: list[int] = []  # tokens of the sequence that must be packed, shared ones included
        self._prompts: dict[tuple[int, bytes, bytes], int] = {}
        self._samples: dict[tuple[int, int], int] = {}

    def cost(self, sequence: Sequence) -> int:
        """Packed tokens that adding it takes."""
        owner, offset = self._fork(sequence)
        return max(0, sequence.needed - offset) + self._missing(owner, min(offset, sequence.needed))

    def add(self, sequence: Sequence) -> None:
        self.num_tokens += self.cost(sequence)
        owner, offset = self._fork(sequence)
        self._extend(owner, min(offset, sequence.needed))
        self._prompts.setdefault(_prompt_key(sequence), len(self._sequences))
        self._samples[sequence.group, sequence.sample] = len(self._sequences)
        self._sequences.append(sequence)
        self._forks.append((owner, offset))
        self._extents.append(sequence.needed)

    def _missing(self, owner: int, end: int) -> int:
        """How many tokens must still be packed so that the owner's first `end` are there."""
        if owner < 0 or end <= self._extents[owner]:
            return 0
        parent, offset = self._forks[owner]
        return max(0, end - max(self._extents[owner], offset)) + self._missing(parent, min(end, offset))

    def _extend(self, owner: int, end: int) -> None:
        if owner >= 0 and end > self._extents[owner]:
            self._extents[owner] = end
            parent, offset = self._forks[owner]
            self._extend(parent, min(end, offset))

    def _fork(self, sequence: Sequence) -> tuple[int, int]:
        owner, offset = -1, 0
        if sequence.parent is not None:
            sample, offset = sequence.parent
            owner = self._samples.get((sequence.group, sample), -1)
            if owner >= 0 and _prefix(self._sequences[owner], offset) != _prefix(sequence, offset):
                owner = -1  # the record's parent was rewritten since, or routed anew: share no more than the prompt
        if owner < 0:
            owner, offset = self._prompts.get(_prompt_key(sequence), -1), sequence.prompt_length
        while owner >= 0 and offset <= self._forks[owner][1]:  # the fork lies in what the owner itself shares
            owner = self._forks[owner][0]
        return (owner, offset) if owner >= 0 else (-1, 0)

    def build(self) -> MicroBatch:
        segments, paths = self._lay_out()
        layout = PackedLayout(tuple(segments))
        assert layout.num_tokens == self.num_tokens, "the cost of a sequence is not what laying it out took"
        input_ids = np.empty(layout.num_tokens, dtype=np.int64)
        for sequence, path in zip(self._sequences, paths, strict=True):
            input_ids[path] = sequence.token_ids[: len(path)]

        def gather(per_sequence: list[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate(per_sequence).astype(dtype, copy=False)

        predictor = gather([path[s.targets - 1] for s, path in zip(self._sequences, paths, strict=True)], np.int64)
        temperature = gather([s.temperature for s in self._sequences], np.float32)
        counts = [len(s.targets) for s in self._sequences]

        kept = [part for s, n in zip(self._sequences, counts, strict=True) for part in (s.kept or (b"",) * n)]
        order, first, row = _head_rows(predictor, temperature, kept)
        row_temperature, row_kept = temperature[first], tuple(kept[i] for i in first.tolist())

        def tokens(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[order])

        return MicroBatch(
            input_ids=torch.from_numpy(input_ids)[None],
            position_ids=layout.position_ids(),
            layout=layout,
            rows=HeadRows(
                positions=torch.from_numpy(predictor[first]),
                temperature=None if (row_temperature == 1).all() else torch.from_numpy(row_temperature),
                row=torch.from_numpy(row),
                target_ids=tokens(gather([s.token_ids[s.targets] for s in self._sequences], np.int64)),
                kept=row_kept if any(row_kept) else None,
            ),
            sampler_logprob=tokens(gather([s.sampler_logprob for s in self._sequences], np.float32)),
            advantage=tokens(np.repeat(np.array([s.advantage for s in self._sequences], dtype=np.float32), counts)),
            staleness=tokens(gather([s.staleness for s in self._sequences], np.int32)),
            prefix_kv=tokens(gather([s.prefix_kv for s in self._sequences], np.int8)),
            sequence=tokens(np.repeat(np.arange(len(counts)), counts)),
            num_sequences=len(counts),
            weight=tokens(gather([s.weight for s in self._sequences], np.float32)),
            arrays={name: tokens(gather([s.arrays[name] for s in self._sequences], np.float32)) for name in self._sequences[0].arrays},
            routing=self._routing(layout.num_tokens, paths),
        )

    def _routing(self, num_tokens: int, paths: list[np.ndarray]) -> torch.Tensor | None:
        """[T, routing width]. Where sequences share tokens they agree on these tokens' routing."""
        parts = [s.routing for s in self._sequences if s.routing is not None]
        if not parts:
            return None
        routing = np.empty((num_tokens, parts[0].shape[1]), dtype=np.result_type(*parts))
        for part, path in zip(parts, paths, strict=True):
            routing[path] = part[: len(path)]
        return torch.from_numpy(routing)

    def _lay_out(self) -> tuple[list[Segment], list[np.ndarray]]:
        """The segments, and each sequence's path: packed position per token, as far as it is packed."""
        cuts: list[set[int]] = [set() for _ in self._sequences]
        for owner, offset in self._forks:
            if owner >= 0:
                cuts[owner].add(offset)
        segments: list[Segment] = []
        ends: dict[tuple[int, int], int] = {}  # (sequence, offset where a piece ends) -> segment
        paths: list[np.ndarray] = []
        at = 0
        for index, (owner, offset) in enumerate(self._forks):
            extent = self._extents[index]
            shared = paths[owner][:offset] if owner >= 0 else np.empty(0, dtype=np.int64)
            parent = ends[owner, offset] if owner >= 0 and extent > offset else -1
            begin, first = offset, at
            for end in sorted({cut for cut in cuts[index] if cut < extent} | {extent}):
                if end > begin:
                    segments.append(Segment(at, end - begin, parent))
                    parent = ends[index, end] = len(segments) - 1
                    at += end - begin
                    begin = end
            paths.append(np.concatenate([shared, np.arange(first, at)]))
        return segments, paths


def _prompt_key(sequence: Sequence) -> tuple[int, bytes, bytes]:
    return sequence.group, *_prefix(sequence, sequence.prompt_length)


def _prefix(sequence: Sequence, length: int) -> tuple[bytes, bytes]:
    """What the first tokens' hidden states depend on: tokens and their routing."""
    routing = b"" if sequence.routing is None else sequence.routing[:length].tobytes()
    return sequence.token_ids[:length].tobytes(), routing


def _head_rows(predictor: np.ndarray, temperature: np.ndarray, kept: Seq[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(order, first, row): tokens sorted by (predictor, temperature, kept vocabulary); the first token of each distinct triple, and
    which triple each sorted token has."""
    numbers: dict[bytes, int] = {}
    kept_number = np.array([numbers.setdefault(part, len(numbers)) for part in kept])
    order = np.lexsort((kept_number, temperature, predictor))
    keys = np.stack([predictor, temperature, kept_number])[:, order]  # float64 holds all three exactly
    new = np.ones(len(order), dtype=bool)
    new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return order, order[new], np.cumsum(new) - 1
