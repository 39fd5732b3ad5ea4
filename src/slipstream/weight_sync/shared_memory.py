"""Transport `shared_memory`: the trainer packs into a slot's memory file, the engine copies out of it. Both map the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from slipstream.protocols import Manifest, ManifestEntry, WeightsOffer
from slipstream.tensors import dtype_of
from slipstream.weight_sync.hashed_copy import hashed_copy
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, WeightLayout, WeightSet, named_tensors, plain, raw_bytes, with_ends


class MemoryPublisher:
    """The trainer's side: packs the weights, cast included, into a slot. The slot is the staging; nothing else of that size is held."""

    def __init__(self, source: Source, slots: list[MemoryFile], dtype: torch.dtype | None = None):
        self._source = source
        self._slots = slots
        self.layout = WeightLayout.of(source, dtype)

    @torch.no_grad()
    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write the current weights into this slot and hash them. The caller owns the slot (`begin_write`) until it publishes it.

        Raises MemoryNeedError where the slot's memory cannot be had (first use of a slot).
        """
        self._slots[slot].resize(self.layout.total_bytes)
        block = self._slots[slot].map(writable=True)
        tensors = named_tensors(self._source)
        hasher = xxhash.xxh3_128()
        for entry, end in with_ends(self.layout):
            target, gap = block[entry.offset : entry.offset + entry.nbytes], block[entry.offset + entry.nbytes : end]
            _pack(target, entry, tensors[entry.name], hasher)
            gap[:] = 0
            hasher.update(gap.data)
        return self.layout.manifest(incarnation, version, hasher.hexdigest())


class MemoryWeights:
    """The engine's side: applies an offer to its model."""

    def __init__(self, model: Source, slots: Sequence[MemoryFile]):
        self._weights = WeightSet(model)
        self._slots = slots

    def __call__(self, offer: WeightsOffer) -> str:
        """The checksum of the engine's own copy. Raises what `WeightSet.apply` raises."""
        return self._weights.apply(self._slots[offer.slot].map(), offer.manifest)


def _pack(target: np.ndarray, entry: ManifestEntry, source: Tensor, hasher: xxhash.xxh3_128) -> None:
    """Write the tensor into its place, uint8[entry.nbytes], cast to the entry's dtype, and hash what is there then."""
    dtype = dtype_of(entry.dtype)
    if source.dtype == dtype and plain(source):
        hashed_copy(target, raw_bytes(source), hasher)
    else:
        torch.from_numpy(target).view(dtype).view(entry.shape).copy_(source)
        hasher.update(target.data)
