"""Who holds which block of the KV pool: reference counts and a free list. Bookkeeping only; the tensors are in `KVPool`."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """Hands out blocks 1 .. num_blocks - 1 (0 is the null block), lowest free one last given back first.

    >>> blocks = BlockAllocator(4)
    >>> block = blocks.take()
    >>> blocks.share([block])
    >>> blocks.give_back([block]); blocks.num_taken
    1
    >>> blocks.give_back([block]); blocks.num_taken
    0
    """

    def __init__(self, num_blocks: int):
        self._free = list(range(num_blocks - 1, 0, -1))
        self._holders = [0] * num_blocks
        self._num_blocks = num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self._num_blocks - 1 - len(self._free)

    def take(self) -> int:
        """A block with one holder. The pool is sized so that one is always free (see `Cache`)."""
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free"
            self._holders[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One holder fewer of each; a block without holders is free again."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
