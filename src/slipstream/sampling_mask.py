"""The vocabulary that top-k, top-p and min-p left for a token, as few bytes: what the engine records and the trainer normalises over.

One token's kept set is a byte string: one byte that says how, then its token ids, ascending, as uint16 (uint32 beyond 65,536 entries),
or one bit per entry of the vocabulary, whichever is shorter; so it takes at most V/8 + 1 bytes. No bytes at all: nothing was cut off.
A rollout holds them joined (`types.SAMPLING_MASK`) with a length per token (`types.SAMPLING_MASK_SIZES`).

Shapes: V = vocabulary, L = tokens of a rollout, n = kept entries of one token.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slipstream.types import SAMPLING_MASK, SAMPLING_MASK_SIZES

_BITS = 1  # the byte before one bit per entry; before ids it is their width in bytes


def encode_kept(ids: np.ndarray, vocabulary: int) -> bytes:
    """The kept token ids int[n], ascending, at least one.

    >>> encode_kept(np.array([1, 258]), 49152).hex(), len(encode_kept(np.arange(40000), 49152))
    ('0201000201', 6145)
    """
    width = 2 if vocabulary <= 1 << 16 else 4
    if len(ids) * width < vocabulary // 8:
        return bytes([width]) + ids.astype(f"<u{width}").tobytes()
    bits = np.zeros(vocabulary, dtype=bool)
    bits[ids] = True
    return bytes([_BITS]) + np.packbits(bits, bitorder="little").tobytes()


def decode_kept(kept: bytes) -> np.ndarray:
    """int64[n], ascending: the ids that `encode_kept` was given. ValueError for what is not such a set.

    >>> decode_kept(encode_kept(np.array([1, 258]), 49152)).tolist()
    [1, 258]
    """
    kind, data = kept[0], np.frombuffer(kept, dtype=np.uint8, offset=1)
    if kind == _BITS:
        return np.flatnonzero(np.unpackbits(data, bitorder="little"))
    if kind not in (2, 4) or len(data) % kind or not len(data):
        raise ValueError(f"a kept vocabulary of {len(kept)} bytes that begins with {kind}")
    return data.view(f"<u{kind}").astype(np.int64)


def join_kept(kept: Iterable[bytes]) -> dict[str, np.ndarray]:
    """The arrays of a rollout whose tokens have these kept sets, b"" for one that was not cut; none where no token was."""
    parts = list(kept)
    if not any(parts):
        return {}
    sizes = np.array([len(part) for part in parts], dtype=np.int32)
    return {SAMPLING_MASK: np.frombuffer(b"".join(parts), dtype=np.uint8), SAMPLING_MASK_SIZES: sizes}


def split_kept(arrays: dict[str, np.ndarray], positions: np.ndarray) -> list[bytes] | None:
    """The kept sets of the tokens at these positions; None for a rollout of which none was cut. ValueError where the arrays do not fit."""
    if SAMPLING_MASK_SIZES not in arrays:
        return None
    sizes, joined = arrays[SAMPLING_MASK_SIZES], arrays[SAMPLING_MASK].tobytes()
    ends = np.cumsum(sizes, dtype=np.int64)
    if (sizes < 0).any() or int(sizes.sum()) != len(joined) or len(sizes) <= positions.max(initial=-1):
        raise ValueError(f"a sampling mask of {len(joined)} bytes for {len(sizes)} tokens that take {int(sizes.sum())}")
    return [joined[ends[at] - sizes[at] : ends[at]] for at in positions]
