"""Transport `shared_memory`: the trainer packs into a slot's memory file, the engine copies out of it. Both map the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.protocols import Manifest, WeightsOffer
from slipstream.weight_sync.block import pack_block
from slipstream.weight_sync.ends import Publisher, Reader
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, WeightLayout, WeightSet


class MemoryPublisher(Publisher):
    """The trainer's side: packs the weights, cast included, into a slot. The slot is the staging; nothing else of that size is held."""

    def __init__(self, source: Source, slots: Sequence[MemoryFile], dtype: torch.dtype | None = None):
        self._source = source
        self._slots = slots
        self.layout = WeightLayout.of(source, dtype)

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write the current weights into this slot and hash them. The caller owns the slot (`begin_write`) until it publishes it.

        Raises MemoryNeedError where the slot's memory cannot be had (first use of a slot).
        """
        self._slots[slot].resize(self.layout.total_bytes)
        checksum = pack_block(self.layout, self._source, self._slots[slot].map(writable=True))
        return self.layout.manifest(incarnation, version, checksum)


class MemoryWeights(Reader):
    """The engine's side: applies an offer to its model."""

    def __init__(self, model: Source, slots: Sequence[MemoryFile]):
        self._weights = WeightSet(model)
        self._slots = slots

    def __call__(self, offer: WeightsOffer) -> str:
        """The checksum of the engine's own copy. Raises what `WeightSet.apply` raises."""
        return self._weights.apply(self._slots[offer.slot].map(), offer.manifest)
