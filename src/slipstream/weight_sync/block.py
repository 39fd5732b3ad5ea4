"""Weights into one block of main memory, hashed as they are written. Sharded ones are gathered on the way, tensor by tensor.

    every rank of a sharded model     cast the own shard, gather the whole tensor     a collective: all ranks, in the layout's order
    the rank that has the block       copy, hash
    the others (`lend_shards`)        let go of it

No device ever holds more than one whole tensor of the model. When `pack_block` returns, gathering has ended and the block is complete; only
then is it published and sent, in a group of its own. So gathering and sending never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash
from torch import Tensor

from slipstream.protocols import ManifestEntry
from slipstream.tensors import dtype_of
from slipstream.weight_sync.hashed_copy import hashed_copy
from slipstream.weight_sync.packing import Source, WeightLayout, named_tensors, plain, raw_bytes, with_ends


@torch.no_grad()
def pack_block(layout: WeightLayout, source: Source, block: np.ndarray) -> str:
    """Write the weights, cast included, into `block`, uint8[at least layout.total_bytes]; the hash of what it then holds, gaps zero."""
    hasher = xxhash.xxh3_128()

    def keep(entry: ManifestEntry, end: int, tensor: Tensor) -> None:
        target, gap = block[entry.offset : entry.offset + entry.nbytes], block[entry.offset + entry.nbytes : end]
        _pack(target, entry, tensor, hasher)
        gap[:] = 0
        hasher.update(gap.data)

    _gather(layout, source, keep)
    return hasher.hexdigest()


@torch.no_grad()
def lend_shards(layout: WeightLayout, source: Source) -> None:
    """The part of every other rank in `pack_block`, called at the same time; `layout` is the same."""
    _gather(layout, source, lambda entry, end, tensor: None)


def _gather(layout: WeightLayout, source: Source, keep: Callable[[ManifestEntry, int, Tensor], None]) -> None:
    """Each entry, where the next one starts, and its whole tensor, of which nobody holds the one before any more."""
    tensors = named_tensors(source)
    for entry, end in with_ends(layout):
        keep(entry, end, _whole(tensors[entry.name], entry))


def _whole(tensor: Tensor, entry: ManifestEntry) -> Tensor:
    """The tensor itself; a DTensor is cast before it is gathered, so that no more bytes travel than are packed."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.to(dtype_of(entry.dtype)).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def _pack(target: np.ndarray, entry: ManifestEntry, source: Tensor, hasher: xxhash.xxh3_128) -> None:
    """Write the tensor into its place, uint8[entry.nbytes], cast to the entry's dtype, and hash what is there then."""
    dtype = dtype_of(entry.dtype)
    if source.dtype == dtype and plain(source):
        hashed_copy(target, raw_bytes(source), hasher)
    else:
        torch.from_numpy(target).view(dtype).view(entry.shape).copy_(source)
        hasher.update(target.data)
