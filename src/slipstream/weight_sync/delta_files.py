"""Payload `delta` over files: a file of what changed per version, and whole weights only where no chain of those leads on.

    1.4.safetensors   1.5.delta.safetensors   1.6.delta.safetensors   1.7.delta.safetensors
    whole weights     what changed ..                                                           = version 7: `manifest.whole` names 4

An engine that holds 6 reads one small file. One that is new, or far behind, reads the whole weights that the manifest names and all that
changed since. Once the parts that are kept (`delta.HISTORY`) do not reach back to them, whole weights are written anew.

Memory: the trainer holds one packed block, from which whole weights are written and with which the next version is compared. A file lies
in the directory while a slot's version needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch

from slipstream.errors import RunFolderError, WeightSyncError
from slipstream.protocols import Manifest, ManifestEntry, WeightsOffer, WholeWeights
from slipstream.weight_sync.delta import DeltaPublisher, DeltaWeights, place_of
from slipstream.weight_sync.ends import Publisher
from slipstream.weight_sync.files import FilePublisher, FileWeights
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, name_of, tensors_in
from slipstream.weight_sync.safetensors_header import places, read_header, write_header
from slipstream.weight_sync.weight_directory import RUN, WeightDirectory


class FileDeltaPublisher(Publisher):
    """The trainer's side."""

    def __init__(self, source: Source, directory: WeightDirectory, num_slots: int, dtype: torch.dtype | None = None):
        """Raises what `FilePublisher` raises."""
        self._block, self._directory = MemoryFile.create("packed"), directory
        self._deltas = DeltaPublisher(source, [self._block], dtype)
        self.layout = self._deltas.layout
        self._files = FilePublisher(self._packed, directory, num_slots)
        self._whole: WholeWeights | None = None
        self._needed: dict[int, set[Path]] = {}  # slot -> the files of its version

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write what changed, or whole weights: on disk when this returns. The caller owns the slot; what only it needed is removed.

        Raises MemoryNeedError where the packed block's memory cannot be had, RunFolderError where the disk refuses.
        """
        manifest = self._deltas.pack(0, incarnation, version)
        if manifest.deltas and manifest.deltas[-1].version == version:
            self._write_part(manifest)
        if self._whole is None or not _leads_on(self._whole, manifest):
            self._files.write(incarnation, version)
            self._whole = WholeWeights(incarnation=incarnation, version=version, checksum=manifest.checksum)
        self._keep(slot, {self._directory.file(self._whole.incarnation, self._whole.version), *_part_files(self._directory, manifest)})
        return msgspec.structs.replace(manifest, whole=self._whole)

    def close(self) -> None:
        self._block.close()

    def _packed(self) -> dict[str, torch.Tensor]:
        """The packed block as tensors, tied names included."""
        if not self._block.nbytes:
            self._block.resize(self.layout.total_bytes)
        return tensors_in(self._block.map(writable=True), self.layout)

    def _write_part(self, manifest: Manifest) -> None:
        data = self._block.map(writable=True)[place_of(manifest, len(manifest.deltas) - 1)]
        path, temporary = self._directory.part(manifest.incarnation, manifest.version), self._directory.temporary
        try:
            with open(temporary, "wb") as file:
                file.write(write_header(places([_entry(len(data))]), {RUN: self._directory.run_id}))
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise RunFolderError(
                f"what changed up to {name_of(manifest)} cannot be written to {path}: {error.strerror or error}. "
                "Free space there or name another weight_sync.directory, and --resume"
            ) from error

    def _keep(self, slot: int, files: set[Path]) -> None:
        before = set().union(*self._needed.values())
        self._needed[slot] = files
        for path in before - set().union(*self._needed.values()):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise RunFolderError(f"{path} cannot be removed, and no engine needs it any more: {error.strerror or error}") from error


def file_delta_weights(model: Source, directory: WeightDirectory) -> DeltaWeights:
    """The engine's side."""

    def read(offer: WeightsOffer, first: int) -> Iterator[np.ndarray]:
        manifest = offer.manifest
        for delta in manifest.deltas[first:]:
            path = directory.part(manifest.incarnation, delta.version)
            try:
                with path.open("rb") as file:
                    read_header(file)
                    data = np.frombuffer(file.read(), np.uint8)
            except (OSError, ValueError) as error:
                raise WeightSyncError(f"weights {name_of(manifest)}: what changed is not to be had from {path}: {error}") from error
            yield data

    return DeltaWeights(model, FileWeights(model, directory), read)


# ---- pieces ----------------------------------------------------------------------------------------------------------------------


def _leads_on(whole: WholeWeights, manifest: Manifest) -> bool:
    """Whether the parts that are kept begin at these whole weights, or before."""
    return manifest.checksum == whole.checksum or any(delta.base_checksum == whole.checksum for delta in manifest.deltas)


def _part_files(directory: WeightDirectory, manifest: Manifest) -> set[Path]:
    return {directory.part(manifest.incarnation, delta.version) for delta in manifest.deltas}


def _entry(num_bytes: int) -> ManifestEntry:
    return ManifestEntry(name="delta", dtype="uint8", shape=(num_bytes,), offset=0, nbytes=num_bytes)
