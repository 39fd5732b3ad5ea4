"""Layouts: how the tokens of one forward pass see each other. Passed to the model as the keyword argument `layout`.

A layout travels as an argument, never as a context variable: gradient checkpointing calls the attention again later, when any
context is gone. `attention.py` looks at its type: `PackedLayout` (trainer) or `PagedLayout` (engine).

Shapes: B = rows, T = new tokens per row, L = keys per row (blocks x BLOCK_TOKENS), H = heads, K = key/value heads, D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from slipstream.models.dense_rows import DensePass
    from slipstream.models.paged_attention import KVPool


BLOCK_TOKENS = 16  # positions per block of the KV pool


class Segment(NamedTuple):
    """Packed tokens [start, start + length), causal among themselves; they also see all of the parent segment and its ancestors."""

    start: int
    length: int
    parent: int = -1  # index of the segment this one continues; -1: it begins at position 0

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class PackedLayout:
    """One row of T tokens made of segments that form a forest: a shared prompt is the parent of its completions.

    Segments cover the row without gaps, and a parent comes before its children (ValueError otherwise).

    >>> layout = PackedLayout((Segment(0, 3), Segment(3, 2, parent=0), Segment(5, 2, parent=0)))
    >>> layout.position_ids().tolist()
    [[0, 1, 2, 3, 4, 3, 4]]
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        at = 0
        for index, segment in enumerate(self.segments):
            if segment.start != at or segment.length < 1:
                raise ValueError(f"segment {index} is [{segment.start}, {segment.end}); expected at least one token from {at} on")
            if not -1 <= segment.parent < index:
                raise ValueError(f"segment {index} has parent {segment.parent}; a parent is an earlier segment, or -1")
            at = segment.end

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each segment's first token within its sequence."""
        out: list[int] = []
        for segment in self.segments:
            parent = segment.parent
            out.append(0 if parent < 0 else out[parent] + self.segments[parent].length)
        return tuple(out)

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Segment indices by parent; key -1 holds the roots. In order, only parents that have children."""
        out: dict[int, list[int]] = {}
        for index, segment in enumerate(self.segments):
            out.setdefault(segment.parent, []).append(index)
        return {parent: tuple(indices) for parent, indices in out.items()}

    def ancestors(self, index: int) -> tuple[int, ...]:
        """Segments that `index` sees whole, root first; without itself."""
        out: list[int] = []
        parent = self.segments[index].parent
        while parent >= 0:
            out.append(parent)
            parent = self.segments[parent].parent
        return tuple(reversed(out))

    def position_ids(self, device: torch.device | str | None = None) -> torch.Tensor:
        """int64[1, T]: each token's position within its own sequence."""
        if not self.segments:
            return torch.zeros(1, 0, dtype=torch.int64, device=device)
        parts = [torch.arange(at, at + segment.length) for at, segment in zip(self.offsets, self.segments, strict=True)]
        return torch.cat(parts)[None].to(device)


@dataclass(eq=False)
class PagedLayout:
    """B rows of T new tokens each over a paged pool of keys and values. Made once per forward pass, read by every layer.

    The new tokens' keys and values are written to `write_slots` first; then each row sees the first positions of its blocks up to
    and including each query's own. T > 1 (prefill) comes with B = 1, so that a row's prefill never depends on a neighbour.
    """

    pool: KVPool
    positions: torch.Tensor  # int64[B, T], of the new tokens within their sequences
    write_slots: torch.Tensor  # int64[B * T], block * BLOCK_TOKENS + offset
    block_table: torch.Tensor  # int64[B * blocks], row after row; the unused tail points to the null block
    blocks: int  # per row; L = blocks * BLOCK_TOKENS
    fresh: bool = False  # one row whose new tokens begin at position 0: its keys are the new ones, nothing is read from the pool
    dense: DensePass | None = None  # decode: keys are read from here, where the pool's are a second time and in one piece per row
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # additive [B, 1, T, L] per window, made at first use

    @property
    def num_keys(self) -> int:
        """L."""
        return self.blocks * BLOCK_TOKENS

    @cached_property
    def rows_by_blocks(self) -> dict[int, torch.Tensor]:
        """Row indices int64[n] by the number of blocks a row really has; row order within each."""
        out: dict[int, list[int]] = {}
        for row, last in enumerate(self.positions[:, -1].tolist()):
            out.setdefault(last // BLOCK_TOKENS + 1, []).append(row)
        return {blocks: torch.tensor(rows, device=self.positions.device) for blocks, rows in sorted(out.items())}
