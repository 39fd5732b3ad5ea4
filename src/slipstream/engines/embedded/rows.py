"""What a decode pass feeds and draws, by slot. Arrays, so that a pass takes all its rows at once.

Shapes: S = slots.
"""

from __future__ import annotations

import numpy as np

from slipstream.engines.embedded.sequence import Sequence


class Rows:
    """One row per slot; what a free slot has in it means nothing, except that its blocks are the null block."""

    def __init__(self, slots: int, blocks_per_sequence: int):
        self.blocks = np.zeros((slots, blocks_per_sequence), dtype=np.int64)  # [S, blocks]; 0 is the null block
        self.last = np.zeros(slots, dtype=np.int64)  # [S] the token that the next pass feeds
        self.position = np.zeros(slots, dtype=np.int64)  # [S] its position
        self.keys = np.zeros(slots, dtype=np.uint64)  # [S] random streams
        self.draws = np.zeros(slots, dtype=np.int64)  # [S] number of the next draw

    def set(self, slot: int, sequence: Sequence) -> None:
        """A sequence that has not got its blocks yet."""
        self.last[slot], self.position[slot] = sequence.tokens[-1], len(sequence.tokens) - 1
        self.keys[slot], self.draws[slot] = sequence.key, sequence.draw_index

    def set_blocks(self, slot: int, blocks: list[int]) -> None:
        self.blocks[slot] = 0
        self.blocks[slot, : len(blocks)] = blocks

    def move(self, source: int, target: int) -> None:
        """What was in slot `source` is in `target` now."""
        for array in (self.blocks, self.last, self.position, self.keys, self.draws):
            array[target] = array[source]
        self.blocks[source] = 0

    def advance(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """These tokens were sampled for these slots."""
        self.last[rows] = tokens
        self.position[rows] += 1
        self.draws[rows] += 1
