"""The order in which dataset rows are drawn: a seeded shuffle per epoch, addressed by position.

A position counts draws over all epochs. Which row lies at a position is a function of (seed, number of rows) alone, so a cursor is one
integer. What was drawn is nevertheless recorded with every group (`types.Draw`) and never derived again: the data may have changed.
"""

from __future__ import annotations

import numpy as np
import xxhash


class Cursor:
    """Row and epoch of every position. Memory: one permutation of the rows (two at a change of epoch).

    >>> cursor = Cursor(num_rows=3, seed=0)
    >>> sorted(cursor.row_at(p)[0] for p in range(3)), cursor.row_at(5)[1]
    ([0, 1, 2], 1)
    """

    def __init__(self, num_rows: int, seed: int):
        if num_rows < 1:
            raise ValueError("a cursor needs at least one row")
        self._num_rows, self._seed = num_rows, seed
        self._orders: dict[int, np.ndarray] = {}  # epoch -> permutation

    def row_at(self, position: int) -> tuple[int, int]:
        """(row, epoch) at this position."""
        epoch, index = divmod(position, self._num_rows)
        return int(self._order(epoch)[index]), epoch

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            key = xxhash.xxh3_64_intdigest(f"slipstream row order, seed {self._seed}, epoch {epoch}".encode())
            order = np.random.Generator(np.random.Philox(key)).permutation(self._num_rows)
            while len(self._orders) >= 2:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return order
