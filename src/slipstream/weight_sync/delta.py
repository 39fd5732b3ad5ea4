"""Payload `delta`: beside whole weights, what changed since the versions before. An engine takes the parts that lie after its own version.

    slot    whole block | part v-2 | part v-1 | part v          a part: the elements in which a version differs from the one before it
                                     └── engine that holds v-2: writes these two over its weights, in this order
                          engine that is new, too far behind, or whose parts are not sound: copies the whole block

*Overwrite form.* A part is positions and new values, never differences to be added, so the result is the trainer's bytes in every dtype.
Elements are compared as integers of their width: a NaN that stays is no change, 0.0 that becomes -0.0 is one.

*Base by checksum.* Each part names the checksum of the block that it lies over. An engine looks for the one that it computed over its own
weights when it took them; names of versions and incarnations play no role. Afterwards it hashes its weights whole, and they must hash to
the trainer's block. Before it touches them it hashes the parts. Where anything is wrong the whole block, which lies in the same slot,
repairs it in the same sync: no forward pass sees what a bad part left, and nobody has to ask the trainer, which may be amid a step.

*Why a part per version* and not one since the oldest version that an engine holds: the trainer then need not know what engines hold, an
engine reads only what it lacks, and supersession, restarts and engines that come or go need no rule of their own. Parts of earlier
versions are kept while all of them together are a quarter of the whole block (`HISTORY`); the newest is kept while it is smaller than
that block. `weight_sync.every` and checkpoints of versions that are not published make parts as well; chains lead through them.

*Memory.* The trainer compares with the slot that it packed last, where it lies: no further copy of the weights. Slots grow by their parts.
The engine writes over its own weights and holds nothing besides. What moves the bytes does not matter here: `place_of` says where parts
lie in a slot.

Format of a part, for pages of at most 65,536 elements, which never cross a tensor, in the block's order:

    uint32[pages] changed elements | uint16[n] positions within the page | the n new values, one after the other

Two bytes per position, whatever the share: 4 bytes for a bfloat16 element that changed, so half of all elements is where a part is as
large as the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from msgspec import structs
from torch import Tensor

from slipstream.errors import WeightSyncError
from slipstream.protocols import Delta, Manifest, ManifestEntry, WeightsOffer
from slipstream.tensors import dtype_of
from slipstream.weight_sync.block import Write, pack_block
from slipstream.weight_sync.ends import Publisher, Reader
from slipstream.weight_sync.hashed_copy import Hasher
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, WeightLayout, WeightSet, inside, name_of, packed_bytes
from slipstream.weight_sync.shared_memory import MemoryWeights

PAGE = 1 << 16  # elements: a position within one fits into 16 bits
HISTORY = 4  # parts of earlier versions are kept up to a fourth of the whole block


class DeltaPublisher(Publisher):
    """The trainer's side: packs whole weights into a slot as `MemoryPublisher`, and behind them the parts."""

    def __init__(self, source: Source, slots: Sequence[MemoryFile], dtype: torch.dtype | None = None):
        self._source, self._slots = source, slots
        self.layout = WeightLayout.of(source, dtype)
        self._num_elements = sum(entry.nbytes // _width(entry) for entry in self.layout.entries)
        self._before: tuple[int, str] | None = None  # slot and checksum of the pack before
        self._parts: deque[tuple[Delta, np.ndarray]] = deque()  # with their bytes, oldest first

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write the current weights and the parts into this slot. The caller owns the slot (`begin_write`) until it publishes it.

        Raises MemoryNeedError where the slot's memory cannot be had.
        """
        self._slots[slot].resize(self.layout.total_bytes)
        block, fraction = self._slots[slot].map(writable=True), None
        if self._before is None:
            checksum = pack_block(self.layout, self._source, block)
        else:
            before, base_checksum = self._before
            old = self._slots[before].map(writable=True)  # may be this very slot: compared, then written
            changes = Changes(self.layout.total_bytes)
            checksum = pack_block(self.layout, self._source, block, _compared(old, changes))
            self._keep(changes.part(), version, base_checksum)
            fraction = changes.count / max(self._num_elements, 1)
        self._before = slot, checksum
        return self._with_parts(self.layout.manifest(incarnation, version, checksum), slot, fraction)

    def _keep(self, data: np.ndarray | None, version: int, base_checksum: str) -> None:
        """One part more; those that lie too far back go. Without data, whole weights are smaller, and no chain leads past this version."""
        if data is None:
            self._parts.clear()
            return
        checksum = xxhash.xxh3_128(data.data).hexdigest()
        self._parts.append((Delta(version=version, base_checksum=base_checksum, checksum=checksum, num_bytes=len(data)), data))
        while len(self._parts) > 1 and sum(len(data) for _, data in self._parts) > self.layout.total_bytes // HISTORY:
            self._parts.popleft()

    def _with_parts(self, manifest: Manifest, slot: int, changed_fraction: float | None) -> Manifest:
        self._slots[slot].resize(manifest.total_bytes + sum(len(data) for _, data in self._parts))
        block, at = self._slots[slot].map(writable=True), manifest.total_bytes
        for _, data in self._parts:
            block[at : at + len(data)] = data
            at += len(data)
        deltas = tuple(delta for delta, _ in self._parts)
        return structs.replace(manifest, deltas=deltas, changed_fraction=changed_fraction)


def _compared(old: np.ndarray, changes: Changes) -> Write:
    """What writes a tensor page by page, each compared first with the packed block `old`."""

    def write(target: np.ndarray, entry: ManifestEntry, tensor: Tensor, hasher: Hasher) -> None:
        new, before = packed_bytes(tensor, entry), inside(old, entry)
        for page in _pages(entry):
            changes.page(_elements(new[page], entry), _elements(before[page], entry))
            np.copyto(target[page], new[page])
            hasher.update(target[page].data)

    return write


class Changes:
    """Collects the elements that differ, page by page. `limit`: bytes of a part that is not worth sending."""

    def __init__(self, limit: int):
        self.count = 0  # elements that differ
        self._limit, self._num_bytes = limit, 0
        self._counts: list[int] = []
        self._positions: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def page(self, new: np.ndarray, old: np.ndarray) -> None:
        """Two states of at most `PAGE` elements, as integers."""
        differ = new != old
        count = int(np.count_nonzero(differ))
        self.count += count
        self._counts.append(count)
        self._num_bytes += 4 + count * (2 + new.itemsize)
        if count and self._num_bytes < self._limit:  # beyond, it is only counted
            at = np.flatnonzero(differ)
            self._positions.append(at.astype(np.uint16))
            self._values.append(new[at].view(np.uint8))

    def part(self) -> np.ndarray | None:
        """uint8[n]; None where it would not be smaller than the limit."""
        if self._num_bytes >= self._limit:
            return None
        pieces = [np.array(self._counts, np.uint32), *self._positions, *self._values]
        return np.concatenate([piece.view(np.uint8) for piece in pieces])


class DeltaWeights(Reader):
    """The engine's side. `whole` applies an offer's whole weights; `read` gives the bytes of its parts, one by one, from this number on.

    The model is in no other hands: what was hashed when weights were applied is what it holds.
    """

    def __init__(self, model: Source, whole: Callable[[WeightsOffer], str], read: Callable[[WeightsOffer, int], Iterable[np.ndarray]]):
        self._weights, self._whole, self._read = WeightSet(model), whole, read
        self._held = ""  # checksum of what the model holds, computed over it; "" for nothing known

    def __call__(self, offer: WeightsOffer) -> str:
        """The checksum of the engine's own copy. Raises what `whole` raises; bad parts are repaired by it, and only noted (`refused`)."""
        self._weights.check(offer.manifest)
        held, self._held, self.refused = self._held, "", ""
        try:
            if (first := first_delta(offer.manifest, held)) is not None:
                self._held = self._lead_on(offer.manifest, self._parts(offer, first))
        except WeightSyncError as error:
            self.refused = str(error)
        self._held = self._held or self._from_whole(offer)
        return self._held

    def _from_whole(self, offer: WeightsOffer) -> str:
        """Whole weights, and where those are older ones the parts that lead on from there, which are read and proved first."""
        manifest, whole = offer.manifest, offer.manifest.whole
        older, parts = manifest, list[Part]()
        if whole is not None:
            older = structs.replace(manifest, incarnation=whole.incarnation, version=whole.version, checksum=whole.checksum)
            if (first := first_delta(manifest, whole.checksum)) is None:
                raise WeightSyncError(f"weights {name_of(manifest)}: nothing leads on from the whole ones of version {whole.version}")
            parts = self._parts(offer, first)
        checksum = self._whole(WeightsOffer(slot=offer.slot, manifest=older))
        return self._lead_on(manifest, parts) if parts else checksum

    def _parts(self, offer: WeightsOffer, first: int) -> list[Part]:
        return [Part(data, offer.manifest, number) for number, data in enumerate(self._read(offer, first), first)]

    def _lead_on(self, manifest: Manifest, parts: list[Part]) -> str:
        """Write the parts over the model, hash it whole. WeightSyncError where they do not lead to the published weights."""

        def fill(target: np.ndarray, entry: ManifestEntry, hasher: Hasher) -> None:
            for page in _pages(entry):
                elements = _elements(target[page], entry)
                for part in parts:
                    part.write(elements)
                hasher.update(target[page].data)

        return self._weights.overwrite(manifest, fill, over_own=True)


class Part:
    """A part that is read page by page, in the order in which it was made."""

    def __init__(self, data: np.ndarray, manifest: Manifest, number: int):
        """WeightSyncError where the data, uint8[n], are not those that the trainer made."""
        delta = manifest.deltas[number]
        if len(data) != delta.num_bytes or xxhash.xxh3_128(data.data).hexdigest() != delta.checksum:
            raise WeightSyncError(
                f"weights {name_of(manifest)}: what changed up to version {delta.version} has {len(data)} bytes and another checksum than "
                f"the {delta.num_bytes} that the trainer made: it was damaged on its way"
            )
        num_pages = sum(1 for entry in manifest.entries for _ in _pages(entry))
        counts = data[: 4 * num_pages].view(np.uint32)
        values = 4 * num_pages + 2 * int(counts.sum())
        self._counts = iter(counts.tolist())
        self._positions, self._values = data[4 * num_pages : values].view(np.uint16), data[values:]
        self._at = self._value_at = 0

    def write(self, page: np.ndarray) -> None:
        """The next page's new values into it; its elements as integers."""
        count = next(self._counts)
        if count:
            num_bytes = count * page.itemsize
            values = self._values[self._value_at : self._value_at + num_bytes].view(page.dtype)
            page[self._positions[self._at : self._at + count].astype(np.intp)] = values
            self._at += count
            self._value_at += num_bytes


def first_delta(manifest: Manifest, held: str) -> int | None:
    """The number of the first part that an engine with these weights needs; None where it needs whole ones, or has less to read so."""
    if not held:
        return None
    if held == manifest.checksum:
        return len(manifest.deltas)
    numbers = [number for number, delta in enumerate(manifest.deltas) if delta.base_checksum == held]
    if not numbers or sum(delta.num_bytes for delta in manifest.deltas[numbers[-1] :]) >= manifest.total_bytes:
        return None
    return numbers[-1]


def place_of(manifest: Manifest, first: int) -> slice:
    """Where the parts lie, from this one to the last, in a slot that holds all."""
    sizes = [delta.num_bytes for delta in manifest.deltas]
    return slice(manifest.total_bytes + sum(sizes[:first]), manifest.total_bytes + sum(sizes))


def split(data: np.ndarray, manifest: Manifest, first: int) -> Iterator[np.ndarray]:
    """Those parts, uint8[n] each, out of the bytes that lie there."""
    at = 0
    for delta in manifest.deltas[first:]:
        yield data[at : at + delta.num_bytes]
        at += delta.num_bytes


def memory_delta_weights(model: Source, slots: Sequence[MemoryFile]) -> DeltaWeights:
    """The engine's side over shared memory."""

    def read(offer: WeightsOffer, first: int) -> Iterator[np.ndarray]:
        return split(slots[offer.slot].map()[place_of(offer.manifest, first)], offer.manifest, first)

    return DeltaWeights(model, MemoryWeights(model, slots), read)


# ---- pieces ----------------------------------------------------------------------------------------------------------------------


def _width(entry: ManifestEntry) -> int:
    """Bytes of an element as it is compared; a complex one is two."""
    return min(dtype_of(entry.dtype).itemsize, 8)


def _pages(entry: ManifestEntry) -> Iterator[slice]:
    """Bytes of the tensor, page by page."""
    size = PAGE * _width(entry)
    return (slice(at, min(at + size, entry.nbytes)) for at in range(0, entry.nbytes, size))


def _elements(data: np.ndarray, entry: ManifestEntry) -> np.ndarray:
    return data.view(f"u{_width(entry)}")
