"""Weights as one block of bytes: what lies where (layout), the hash that proves it, and the model that they overwrite (WeightSet).

This is what every transport shares; how the bytes travel is a file of its own (`shared_memory.py`, `files.py`, `collective.py`).

A layout is built from `state_dict()`: each tensor once, tied names as aliases, persistent buffers included, non-persistent ones (rotary
frequencies) neither sent nor cast. Entries start at multiples of 64 bytes; the gaps are zero, so the block's hash is a function of the
weights. Writer and reader derive their layouts from their own models; they must be equal, entry by entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest, ManifestEntry
from slipstream.tensors import LazyTensors, distinct, dtype_name, dtype_of
from slipstream.weight_sync.hashed_copy import Hasher, NoHash, hashed_copy, hashed_write

ALIGNMENT = 64  # bytes: `Tensor.view(dtype)` needs offsets divisible by the item size, and vector loads like cache lines


class OnBase(dict[str, Tensor]):
    """Named tensors that mean something only on top of frozen ones, which have this checksum: an adapter's."""

    def __init__(self, tensors: Mapping[str, Tensor], base_checksum: str):
        super().__init__(tensors)
        self.base_checksum = base_checksum


Source = nn.Module | Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]  # a callable makes its tensors when they are asked for


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Where each tensor lies in a packed block."""

    entries: tuple[ManifestEntry, ...]
    aliases: dict[str, str]  # tied name -> the name its bytes are sent under
    total_bytes: int  # a multiple of 64
    base_checksum: str | None = None  # of what an adapter's tensors lie on

    @classmethod
    def of(cls, source: Source, dtype: torch.dtype | None = None) -> WeightLayout:
        """The layout of a model (or of named tensors), its floating parameters cast to `dtype`; buffers and integers keep theirs."""
        tensors = named_tensors(source)
        tensors = tensors.outlines() if isinstance(tensors, LazyTensors) else tensors
        cast = _castable(source, tensors)
        sent, aliases = distinct(tensors)
        entries: list[ManifestEntry] = []
        at = 0
        for name, tensor in sent.items():
            wire = dtype if dtype is not None and name in cast else tensor.dtype
            nbytes = tensor.numel() * wire.itemsize
            entries.append(ManifestEntry(name=name, dtype=dtype_name(wire), shape=tuple(tensor.shape), offset=at, nbytes=nbytes))
            at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), aliases, at, source.base_checksum if isinstance(source, OnBase) else None)

    def manifest(self, incarnation: int, version: int, checksum: str) -> Manifest:
        return Manifest(
            incarnation=incarnation,
            version=version,
            checksum=checksum,
            base_checksum=self.base_checksum,
            total_bytes=self.total_bytes,
            entries=self.entries,
            aliases=self.aliases,
        )


class Fill(Protocol):
    """How one tensor's bytes arrive: written to `target`, uint8[entry.nbytes], and what that then holds fed to `hasher`."""

    def __call__(self, target: np.ndarray, entry: ManifestEntry, hasher: Hasher, /) -> None: ...


class WeightSet:
    """The engine's side: a model whose tensors are overwritten in place, so ties, views and references to them stay."""

    def __init__(self, model: Source):
        self._model = model
        self.layout = WeightLayout.of(model)

    def apply(self, block: np.ndarray, manifest: Manifest) -> str:
        """Copy `block` (uint8, at least `manifest.total_bytes`) into the model and return the hash of the model's own copy.

        The manifest is checked whole against the model before anything is touched. Raises WeightSyncError that names the first difference,
        or what `overwrite` raises.
        """
        self.check(manifest)
        if len(block) < manifest.total_bytes:
            raise WeightSyncError(
                f"weights {name_of(manifest)}: the slot holds {len(block)} bytes, the manifest says {manifest.total_bytes}"
            )

        def fill(target: np.ndarray, entry: ManifestEntry, hasher: Hasher) -> None:
            hashed_copy(target, inside(block, entry), hasher)

        return self.overwrite(manifest, fill)

    @torch.no_grad()
    def overwrite(self, manifest: Manifest, fill: Fill, *, over_own: bool = False) -> str:
        """Overwrite every tensor with what `fill` brings, in the manifest's order, and return the hash of the model's own copy.

        With `over_own`, `fill` finds in its target what the model holds, and need not write all of it.

        The manifest must fit (`check`). Raises WeightSyncError where the own copy does not hash to the manifest's checksum, and what `fill`
        raises: the model then holds neither version and must not be used.
        """
        tensors = named_tensors(self._model)
        hasher, zeros = xxhash.xxh3_128(), bytes(ALIGNMENT)
        for entry, end in with_ends(self.layout):
            _overwrite(tensors[entry.name], entry, fill, hasher, over_own)
            hasher.update(zeros[: end - entry.offset - entry.nbytes])
        # A tensor that overlaps another was overwritten after it was hashed.
        checksum = self.checksum() if _overlap(tensors[entry.name] for entry in self.layout.entries) else hasher.hexdigest()
        if checksum != manifest.checksum:
            raise WeightSyncError(
                f"weights {name_of(manifest)}: this engine's copy hashes to {checksum}, the trainer packed {manifest.checksum}; "
                "the weights were damaged on their way or written while they were read"
            )
        return checksum

    def check(self, manifest: Manifest) -> None:
        """Raise WeightSyncError that names the first tensor in which manifest and model differ."""
        ours, theirs = {e.name: e for e in self.layout.entries}, {e.name: e for e in manifest.entries}
        for name in [*ours, *theirs]:
            problem = _difference(ours.get(name), theirs.get(name))
            if problem:
                raise WeightSyncError(f"weights {name_of(manifest)} do not fit this engine's model: {name}: {problem}")
        if self.layout.aliases != manifest.aliases:
            name, one = next(iter(self.layout.aliases.items() ^ manifest.aliases.items()))
            where = "only here" if self.layout.aliases.get(name) == one else "only at the trainer"
            raise WeightSyncError(f"weights {name_of(manifest)} do not fit this engine's model: {name} is tied to {one} {where}")
        if self.layout.base_checksum != manifest.base_checksum:
            raise WeightSyncError(
                f"weights {name_of(manifest)} lie on a base that hashes to {manifest.base_checksum}, this engine's to "
                f"{self.layout.base_checksum}: trainer and engine did not load the same files of model.name"
            )
        if self.layout.total_bytes != manifest.total_bytes:
            raise WeightSyncError(
                f"weights {name_of(manifest)}: the block has {manifest.total_bytes} bytes, "
                f"this engine's model needs {self.layout.total_bytes}"
            )

    def checksum(self) -> str:
        """The hash of the model's own tensors as they are now, as if packed."""
        return send(self.layout, self._model)


@torch.no_grad()
def checksum(source: Source, dtype: torch.dtype | None = None) -> str:
    """The xxh3-128 that a manifest of these weights, cast to `dtype`, names."""
    return send(WeightLayout.of(source, dtype), source)


@torch.no_grad()
def send(layout: WeightLayout, source: Source, write: Callable[[memoryview], object] | None = None) -> str:
    """The xxh3-128 of the block that `source` packs into, without that block: streamed tensor by tensor.

    `write` gets the same bytes, cast included, chunk by chunk, without the gaps between tensors.
    """

    def take(entry: ManifestEntry, tensor: Tensor, hasher: Hasher) -> None:
        data = packed_bytes(tensor, entry)
        if write is None:
            hasher.update(data.data)
        else:
            hashed_write(write, data, hasher)

    return fold(layout, source, take)


def fold(layout: WeightLayout, source: Source, take: Callable[[ManifestEntry, Tensor, Hasher], None]) -> str:
    """The xxh3-128 of the packed block, gaps zero: `take` gets one whole tensor after the other and feeds its packed bytes to the hash.

    Of sharded weights nobody holds the tensor before any more when the next one is gathered; every other rank calls `block.lend_shards`.
    """
    tensors = named_tensors(source)
    hasher, zeros = xxhash.xxh3_128(), bytes(ALIGNMENT)
    for entry, end in with_ends(layout):
        take(entry, whole(tensors[entry.name], entry), hasher)
        hasher.update(zeros[: end - entry.offset - entry.nbytes])
    return hasher.hexdigest()


def whole(tensor: Tensor, entry: ManifestEntry) -> Tensor:
    """The tensor itself; a DTensor is cast before it is gathered, so that no more bytes travel than are packed."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.to(dtype_of(entry.dtype)).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


# ---- pieces --------------------------------------------------------------------------------------------------------------------


def named_tensors(source: Source) -> Mapping[str, Tensor]:
    """Name -> detached tensor that shares the live memory, in a fixed order; asked for at each use, since `.to()` replaces them.

    Tensors that are made when asked for are made only then.
    """
    if not isinstance(source, nn.Module):
        tensors = source() if callable(source) else source
        return tensors if isinstance(tensors, LazyTensors) else {name: tensor.detach() for name, tensor in tensors.items()}
    state = source.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise WeightSyncError(f"{name} of the model's state is a {type(value).__name__}: only tensors can be sent to engines")
    return dict(state)


def _castable(source: Source, tensors: Mapping[str, Tensor]) -> set[str]:
    names: Iterable[str] = (
        (name for name, _ in source.named_parameters(remove_duplicate=False)) if isinstance(source, nn.Module) else tensors
    )
    return {name for name in names if name in tensors and tensors[name].is_floating_point()}


def with_ends(layout: WeightLayout) -> Iterable[tuple[ManifestEntry, int]]:
    """Each entry with where the next one starts (or the block ends)."""
    starts = [e.offset for e in layout.entries[1:]]
    return zip(layout.entries, [*starts, layout.total_bytes], strict=True)


def inside(block: np.ndarray, entry: ManifestEntry) -> np.ndarray:
    """Where the tensor lies in a packed block, uint8[entry.nbytes]."""
    return block[entry.offset : entry.offset + entry.nbytes]


def tensors_in(block: np.ndarray, layout: WeightLayout | Manifest) -> dict[str, Tensor]:
    """What lies in a packed block, as tensors that share its memory, tied names included. ValueError where the layout does not add up."""
    try:
        tensors = {e.name: torch.from_numpy(inside(block, e)).view(dtype_of(e.dtype)).view(e.shape) for e in layout.entries}
        return tensors | {name: tensors[target] for name, target in layout.aliases.items()}
    except (RuntimeError, KeyError) as error:  # torch's, for sizes; no such name
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _overwrite(target: Tensor, entry: ManifestEntry, fill: Fill, hasher: xxhash.xxh3_128, over_own: bool) -> None:
    """Fill the tensor, which has the entry's dtype and shape, and hash what it holds then."""
    if plain(target):
        fill(raw_bytes(target), entry, hasher)
    else:
        staging = packed_bytes(target, entry).copy() if over_own else np.empty(entry.nbytes, np.uint8)
        fill(staging, entry, NoHash())
        target.copy_(torch.from_numpy(staging).view(target.dtype).view(target.shape))
        hasher.update(raw_bytes(target.cpu().contiguous()).data)


def plain(tensor: Tensor) -> bool:
    """Whether its bytes lie in main memory as they are sent."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def packed_bytes(tensor: Tensor, entry: ManifestEntry) -> np.ndarray:
    """uint8[entry.nbytes]: the tensor as it is sent. Its own memory, where it lies there like that; else a copy."""
    return raw_bytes(tensor.to("cpu", dtype_of(entry.dtype)).contiguous())


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 view of a contiguous CPU tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether any two of them may share memory."""
    spans = sorted((t.data_ptr(), _extent(t)) for t in tensors if t.numel())
    return any(start + nbytes > following for (start, nbytes), (following, _) in itertools.pairwise(spans))


def _extent(tensor: Tensor) -> int:
    """Bytes from its first to behind its last element; strides are never negative."""
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize


def _difference(ours: ManifestEntry | None, theirs: ManifestEntry | None) -> str | None:
    if ours is None:
        return "the trainer sends it, this model does not have it"
    if theirs is None:
        return "this model has it, the trainer does not send it"
    for what in ("shape", "dtype", "offset", "nbytes"):
        a, b = getattr(ours, what), getattr(theirs, what)
        if a != b:
            return f"{what} is {a} here and {b} at the trainer"
    return None


def name_of(manifest: Manifest) -> str:
    return f"{manifest.incarnation}.{manifest.version}"
