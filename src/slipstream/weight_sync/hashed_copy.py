"""Copy bytes and hash the copy in one pass over memory: chunk by chunk, so that the hash reads each chunk from the cache.

Copying everything and then hashing everything reads the copy from memory once more. xxh3 is a streaming hash, so the result is the same.
Measured on 270 MB on one thread, tensors of 135 million parameters: 1.4 times faster than the two passes on the engine's side, 1.3 times
on the trainer's. Chunks of 128 KiB to 1 MiB are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

CHUNK_BYTES = 256 << 10  # both sides of a chunk fit into a core's second-level cache


class Hasher(Protocol):
    """A streaming hash, such as `xxhash.xxh3_128()`."""

    def update(self, data: memoryview, /) -> None: ...


class NoHash:
    """In the place of a hash: the bytes pass on their way to where they are hashed."""

    def update(self, data: memoryview, /) -> None:
        pass


def hashed_copy(target: np.ndarray, source: np.ndarray, hasher: Hasher) -> None:
    """Copy `source` into `target` (uint8[n] each, not overlapping) and feed what `target` then holds to `hasher`."""
    for at in range(0, len(source), CHUNK_BYTES):
        copied = target[at : at + CHUNK_BYTES]
        np.copyto(copied, source[at : at + CHUNK_BYTES])
        hasher.update(copied.data)


def hashed_write(write: Callable[[memoryview], object], source: np.ndarray, hasher: Hasher) -> None:
    """Hand `source`, uint8[n], to `hasher` and to `write`, which finds each chunk in the cache."""
    for at in range(0, len(source), CHUNK_BYTES):
        chunk = source[at : at + CHUNK_BYTES].data
        hasher.update(chunk)
        write(chunk)
