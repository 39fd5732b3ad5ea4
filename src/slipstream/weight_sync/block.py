"""Weights into one block of main memory, hashed as they are written. Sharded ones are gathered on the way, tensor by tensor.

    every rank of a sharded model     cast the own shard, gather the whole tensor     a collective: all ranks, in the layout's order
    the rank that packs               write, hash                                     into a block here, or a file (`packing.send`)
    the others (`lend_shards`)        let go of it

No device ever holds more than one whole tensor of the model. When weights are packed, gathering has ended and the block or file is
complete; only then is it published and sent, in a group of its own. So gathering and sending never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.protocols import ManifestEntry
from slipstream.tensors import dtype_of
from slipstream.weight_sync.hashed_copy import Hasher, hashed_copy
from slipstream.weight_sync.packing import Source, WeightLayout, fold, inside, named_tensors, plain, raw_bytes, whole, with_ends

Write = Callable[[np.ndarray, ManifestEntry, Tensor, Hasher], None]


def write_tensor(target: np.ndarray, entry: ManifestEntry, tensor: Tensor, hasher: Hasher) -> None:
    """Write the tensor into its place, uint8[entry.nbytes], cast to the entry's dtype, and hash what is there then."""
    dtype = dtype_of(entry.dtype)
    if tensor.dtype == dtype and plain(tensor):
        hashed_copy(target, raw_bytes(tensor), hasher)
    else:
        torch.from_numpy(target).view(dtype).view(entry.shape).copy_(tensor)
        hasher.update(target.data)


@torch.no_grad()
def pack_block(layout: WeightLayout, source: Source, block: np.ndarray, write: Write = write_tensor) -> str:
    """Write the weights, cast included, into `block`, uint8[at least layout.total_bytes]; the hash of what it then holds, gaps zero."""
    for entry, end in with_ends(layout):
        block[entry.offset + entry.nbytes : end] = 0
    return fold(layout, source, lambda entry, tensor, hasher: write(inside(block, entry), entry, tensor, hasher))


@torch.no_grad()
def lend_shards(layout: WeightLayout, source: Source) -> None:
    """The part of every other rank when weights are packed, called at the same time; `layout` is the same."""
    tensors = named_tensors(source)
    for entry in layout.entries:
        whole(tensors[entry.name], entry)
