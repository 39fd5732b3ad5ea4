"""Transport `files`: weights as safetensors files in a directory. Trainer and engine share a file system and nothing else.

    trainer   .tmp: tensors, hashed on their way ─► header with the checksum ─► fsync ─► rename        complete before it is published
    engine    header against manifest ─► each chunk read into the model's own memory and hashed there

Tensors lie one after the other, as the format asks; the checksum is that of the packed block, gaps included as zeros, so the same weights
have the same checksum over every transport. A slot is one file: the broker says when it may go. The engine reads instead of mapping: a file
that shrinks or a server that goes away is then an error that says so, and not the process's end by SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import RunFolderError, WeightSyncError
from slipstream.protocols import Manifest, ManifestEntry, WeightsOffer
from slipstream.weight_sync.ends import Publisher, Reader
from slipstream.weight_sync.hashed_copy import CHUNK_BYTES, Hasher
from slipstream.weight_sync.packing import Fill, Source, WeightLayout, WeightSet, name_of, send
from slipstream.weight_sync.safetensors_header import Header, TensorPlace, places, read_header, write_header
from slipstream.weight_sync.weight_directory import RUN, WeightDirectory, check_room

_CHECKSUM_LENGTH = 32  # xxh3-128 in hex


class FilePublisher(Publisher):
    """The trainer's side: writes the weights, cast included, into a file of their own."""

    def __init__(self, source: Source, directory: WeightDirectory, num_slots: int, dtype: torch.dtype | None = None):
        """`directory` is prepared. Raises RunFolderError where `num_slots` versions do not fit into it, WeightSyncError for a dtype that
        the format does not know."""
        self._source, self._directory = source, directory
        self.layout = WeightLayout.of(source, dtype)
        try:
            self._places = places(self.layout.entries)
        except ValueError as error:
            raise WeightSyncError(f'{error}; use weight_sync.transport = "shared_memory"') from error
        self._written: dict[int, Path] = {}  # slot -> its file
        check_room(directory.path, num_slots * self.layout.total_bytes)

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write the current weights (`write`). The caller owns the slot: the file that was in it is removed."""
        manifest = self.write(incarnation, version, instead_of=self._written.pop(slot, None))
        self._written[slot] = self._directory.file(incarnation, version)
        return manifest

    def write(self, incarnation: int, version: int, instead_of: Path | None = None) -> Manifest:
        """Write the current weights, whole and on disk when this returns. `instead_of` is removed before.

        Raises RunFolderError where the disk refuses; a file that is not whole never has the name of one.
        """
        path = self._directory.file(incarnation, version)
        try:
            if instead_of is not None:
                instead_of.unlink(missing_ok=True)
            manifest = self._write(incarnation, version)
            os.replace(self._directory.temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._directory.temporary.unlink(missing_ok=True)
            raise RunFolderError(
                f"weights {incarnation}.{version} cannot be written to {path}: {error.strerror or error}. "
                "Free space there or name another weight_sync.directory, and --resume"
            ) from error
        return manifest

    def _write(self, incarnation: int, version: int) -> Manifest:
        """The header, which holds the checksum, comes last: a file that was left amid its writing does not even look like one."""
        with open(self._directory.temporary, "wb") as file:
            file.seek(len(self._header(self.layout.manifest(incarnation, version, "0" * _CHECKSUM_LENGTH))))
            manifest = self.layout.manifest(incarnation, version, send(self.layout, self._source, file.write))
            file.seek(0)
            file.write(self._header(manifest))
            file.flush()
            os.fsync(file.fileno())
        return manifest

    def _header(self, manifest: Manifest) -> bytes:
        """Tied names stand in the metadata as `safetensors.torch.save_model` has them."""
        return write_header(self._places, {**manifest.aliases, "format": "pt", RUN: self._directory.run_id, **_identity(manifest)})


class FileWeights(Reader):
    """The engine's side: applies an offer to its model."""

    def __init__(self, model: Source, directory: WeightDirectory):
        self._weights = WeightSet(model)
        self._directory = directory

    def __call__(self, offer: WeightsOffer) -> str:
        """The checksum of the engine's own copy.

        Raises WeightSyncError, before anything is touched, for a manifest that does not fit the model and for a file that is missing, cut
        short, or not what the manifest says; and what `WeightSet.overwrite` raises.
        """
        manifest = offer.manifest
        self._weights.check(manifest)
        path = self._directory.file(manifest.incarnation, manifest.version)
        try:
            with path.open("rb") as file:
                _check(file, manifest, path)
                return self._weights.overwrite(manifest, _fill_from(file, manifest, path))
        except FileNotFoundError as error:
            raise _refused(manifest, path, f"it is missing; is {path.parent} the same directory for trainer and engine?") from error
        except OSError as error:
            raise _refused(manifest, path, f"it cannot be read ({error.strerror or error})") from error


# ---- pieces ------------------------------------------------------------------------------------------------------------------------


def _identity(manifest: Manifest) -> dict[str, str]:
    return {"incarnation": str(manifest.incarnation), "version": str(manifest.version), "checksum": manifest.checksum}


def _check(file: BufferedReader, manifest: Manifest, path: Path) -> None:
    """Refuse a file that is not these weights, whole. It then stands at the first tensor's bytes."""
    try:
        header = read_header(file)
    except ValueError as error:
        raise _refused(manifest, path, f"it is not a safetensors file: {error}") from error
    problem = _difference(header, manifest)
    if problem is None and (size := os.fstat(file.fileno()).st_size) != header.file_bytes:
        problem = f"it has {size} bytes, its header tells of {header.file_bytes}: it was cut short or written to"
    if problem is not None:
        raise _refused(manifest, path, problem)


def _difference(header: Header, manifest: Manifest) -> str | None:
    """The first thing in which the header is not what the manifest says."""
    for key, value in _identity(manifest).items():
        if header.metadata.get(key) != value:
            return f"it is of other weights: {key} is {header.metadata.get(key)}, published was {value}"
    expected = places(manifest.entries)
    for name in expected.keys() ^ header.tensors.keys():
        return f"{name} is in it and not in the manifest" if name in header.tensors else f"{name} is not in it"
    for name, place in expected.items():
        if header.tensors[name] != place:
            return f"{name} is {_shown(header.tensors[name])} in it and {_shown(place)} in the manifest"
    return None


def _shown(place: TensorPlace) -> str:
    return f"{place.dtype}{list(place.shape)} at bytes {place.start} to {place.end}"


def _fill_from(file: BufferedReader, manifest: Manifest, path: Path) -> Fill:
    """What `WeightSet.overwrite` asks: the file's tensors lie in the manifest's order, so it is read from front to back."""

    def fill(target: np.ndarray, entry: ManifestEntry, hasher: Hasher) -> None:
        for at in range(0, len(target), CHUNK_BYTES):
            chunk = target[at : at + CHUNK_BYTES].data
            if file.readinto(chunk) != len(chunk):
                raise _refused(manifest, path, f"it ended within {entry.name} while it was read: something else writes to it")
            hasher.update(chunk)

    return fill


def _refused(manifest: Manifest, path: Path, problem: str) -> WeightSyncError:
    return WeightSyncError(
        f"weights {name_of(manifest)} in {path} are refused: {problem}. Nothing but this run's trainer may write or delete there; "
        "--resume writes the weights of the last checkpoint anew"
    )
