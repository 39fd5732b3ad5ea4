"""A slot broker that holds an engine exactly k versions behind: lag as an experiment's variable (`weight_sync.lag`, inline launcher).

Versions are kept in order and handed over one at a time, each only after `release_next`, which the scheduler calls when the engine
has run dry behind a closed gate. With max_staleness = k the gate lets an engine at version v make exactly the batches up to v + k, so
batch s is sampled by version max(0, s - k) and by no other.
"""

from __future__ import annotations

from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer


class LagBroker:
    """The interface of `SlotBroker` for one engine; k + 3 slots: k + 1 versions ahead of the engine, one leased, one being written."""

    def __init__(self, lag: int):
        self._free = list(range(lag + 3))
        self._queue: list[WeightsOffer] = []  # complete, oldest first
        self._leased: WeightsOffer | None = None
        self._writing: int | None = None
        self._released = 1  # versions that the engine may take: the start weights at once
        self.num_slots = lag + 3
        self.newest: Manifest | None = None

    def release_next(self) -> bool:
        """Let the engine take one more version; False where none is complete."""
        if not self._queue or self._released:
            return False
        self._released = 1
        return True

    def begin_write(self) -> int:
        if self._writing is None:
            if not self._free:
                raise WeightSyncError("the trainer is further ahead of the engine than its lag allows")
            self._writing = self._free.pop(0)
        return self._writing

    def publish(self, slot: int, manifest: Manifest) -> None:
        if slot != self._writing:
            raise WeightSyncError(
                f"weights {manifest.incarnation}.{manifest.version} were published in slot {slot}, which is not being written"
            )
        self._writing, self.newest = None, manifest
        self._queue.append(WeightsOffer(slot=slot, manifest=manifest))

    def lease(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer | None:
        if self._leased is None and self._queue and self._released:
            self._released = 0
            self._leased = self._queue.pop(0)
        return self._leased

    def give_back(self, engine_id: str, slot: int) -> Manifest:
        if self._leased is None or self._leased.slot != slot:
            raise WeightSyncError(f"engine {engine_id} gives slot {slot} back, which it does not hold")
        offer, self._leased = self._leased, None
        self._free.append(offer.slot)
        return offer.manifest

    def drop_engine(self, engine_id: str) -> None:
        if self._leased is not None:
            self._free.append(self._leased.slot)
            self._leased = None
