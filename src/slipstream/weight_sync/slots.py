"""Who may write which weight slot, and who reads it: a pure state machine, kept by the controller.

A slot is, at any moment, one of:

    free ──begin_write──► writing ──publish──► newest ──(a newer one is published)──► free
                                                 └─lease─► leased (also when superseded) ──give_back──► free or newest

With N engines there are N + 2 slots: N leased, one newest, one to write. So the writer never waits for an engine, a slot that an engine
reads is never written, and the newest complete weights are never overwritten. Two slots are not enough: while an engine reads one and the
other is complete but not adopted, the next version has no place.

The writer takes the lowest slot that is free. So of slots made for more engines than there are, only as many are ever written, and cost
memory, as the engines that were in service at a time need.
"""

from __future__ import annotations

from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer


def slots_for(num_engines: int) -> int:
    """Slots that let a writer and this many engines never wait for each other."""
    return num_engines + 2


class SlotBroker:
    """Hands out slots to one writer and to at most `num_slots - 2` engines, each of which holds at most one lease."""

    def __init__(self, num_slots: int = 3):
        if num_slots < 3:
            raise ValueError(f"{num_slots} weight slots: one writer and one engine need at least {slots_for(1)}")
        self._manifests: list[Manifest | None] = [None] * num_slots  # complete slots only
        self._leases: dict[str, int] = {}  # engine id -> the slot it reads
        self._writing: int | None = None
        self._newest: int | None = None

    @property
    def num_slots(self) -> int:
        return len(self._manifests)

    @property
    def newest(self) -> Manifest | None:
        """The newest complete weights; None before the first `publish`."""
        return None if self._newest is None else self._manifests[self._newest]

    def leased(self, engine_id: str) -> WeightsOffer | None:
        """What this engine holds a lease on."""
        slot = self._leases.get(engine_id)
        return None if slot is None else self._offer(slot)

    def begin_write(self) -> int:
        """The slot to write next: neither leased nor newest; until it is published the same one again, for a writer that restarted."""
        if self._writing is None:
            taken = {self._newest, *self._leases.values()}
            self._writing = next(slot for slot in range(self.num_slots) if slot not in taken)
            self._manifests[self._writing] = None
        return self._writing

    def publish(self, slot: int, manifest: Manifest) -> None:
        """The slot being written is complete and supersedes the newest. Publishing the newest again changes nothing.

        Raises WeightSyncError for a slot that was not handed out for writing and for a version that is not newer than the newest.
        """
        newest = self.newest
        if newest is not None and slot == self._newest and slot != self._writing and _same(manifest, newest):
            return
        if slot != self._writing:
            raise WeightSyncError(
                f"weights {_name(manifest)} were published in slot {slot}, but slot {self._writing} is the one being written"
            )
        if newest is not None and _key(manifest) <= _key(newest):
            raise WeightSyncError(
                f"weights {_name(manifest)} were published after {_name(newest)}: a version must be newer than the one before"
            )
        self._manifests[slot] = manifest
        self._writing, self._newest = None, slot

    def lease(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer | None:
        """Lease the newest weights to an engine that holds (incarnation, version), -1 for none; None where there is nothing newer for it.

        A number that matches but comes from another incarnation proves nothing: those weights are offered. An engine that asks again before
        it gave its lease back gets the same slot again (its first answer was lost), unless it says that it already holds those weights.
        """
        held = self.leased(engine_id)
        if held is not None:
            if _key(held.manifest) > (incarnation, version):
                return held
            self.give_back(engine_id, held.slot)
        newest = self.newest
        if self._newest is None or newest is None or (version >= 0 and _key(newest) <= (incarnation, version)):
            return None
        if len(self._leases) >= self.num_slots - 2:
            raise WeightSyncError(
                f"engine {engine_id} asks for weights, but {self.num_slots} slots serve {self.num_slots - 2} engines at once "
                f"and {', '.join(sorted(self._leases))} hold leases"
            )
        self._leases[engine_id] = self._newest
        return self._offer(self._newest)

    def give_back(self, engine_id: str, slot: int) -> Manifest:
        """End a lease; the manifest of what was leased. Raises WeightSyncError where the engine does not hold it."""
        if self._leases.get(engine_id) != slot:
            raise WeightSyncError(f"engine {engine_id} gives slot {slot} back, but holds {self._leases.get(engine_id, 'no slot')}")
        manifest = self._offer(slot).manifest
        del self._leases[engine_id]
        return manifest

    def drop_engine(self, engine_id: str) -> None:
        """The engine is gone: nothing of it reads any more."""
        self._leases.pop(engine_id, None)

    def _offer(self, slot: int) -> WeightsOffer:
        manifest = self._manifests[slot]
        assert manifest is not None, f"slot {slot} is leased or newest without being complete"
        return WeightsOffer(slot=slot, manifest=manifest)


def _key(manifest: Manifest) -> tuple[int, int]:
    return manifest.incarnation, manifest.version


def _same(a: Manifest, b: Manifest) -> bool:
    return _key(a) == _key(b) and a.checksum == b.checksum


def _name(manifest: Manifest) -> str:
    return f"{manifest.incarnation}.{manifest.version}"
