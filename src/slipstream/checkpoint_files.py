"""What a checkpoint folder is on disk, and how it is proved whole. No torch: the controller verifies with this before it commits.

    step-<n>/   model/      index.json, *.safetensors     (formats of the tensors: trainer/checkpoint.py; with [lora] adapter/ instead)
                optimizer/  index.json, *.safetensors
                trainer.json
                manifest.json                              written last; sizes and hashes of all the others

`manifest.json` is {"xxh3_128": hash of the manifest's own bytes, "manifest": CheckpointManifest}. So one flipped byte anywhere in the
folder, the manifest included, is found and named. Everything is synced to disk before a folder is offered for its commit by rename.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import xxhash

from slipstream.errors import CheckpointError
from slipstream.protocols import CheckpointManifest

MANIFEST = "manifest.json"
_READ_BYTES = 1 << 22


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    xxh3_128: str  # of `manifest`'s bytes as they stand in the file
    manifest: msgspec.Raw


def verify_checkpoint(folder: str | os.PathLike[str]) -> CheckpointManifest:
    """The manifest of a folder whose every file is as written; CheckpointError names the first file that is not."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest.files:
        raise CheckpointError(f"{folder / MANIFEST} names no files")
    for name, (nbytes, digest) in manifest.files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is not inside the folder")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the checkpoint is damaged and is not used")
        if path.stat().st_size != nbytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {nbytes}; the checkpoint is not used")
        if hash_file(path) != digest:
            raise CheckpointError(f"{path} does not match its checksum; the checkpoint is damaged and is not used")
    return manifest


def read_manifest(folder: str | os.PathLike[str]) -> CheckpointManifest:
    """The manifest alone, proved against its own hash; the files it names are not looked at. CheckpointError where it is no manifest."""
    path = Path(folder) / MANIFEST
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        if xxhash.xxh3_128_hexdigest(bytes(sealed.manifest)) != sealed.xxh3_128:
            raise CheckpointError(f"{path} does not match its own checksum; the checkpoint is damaged and is not used")
        return msgspec.json.decode(sealed.manifest, type=CheckpointManifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: {folder} is not a whole checkpoint") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the checkpoint is damaged and is not used") from error


def write_manifest(folder: str | os.PathLike[str], manifest: CheckpointManifest) -> None:
    """Write manifest.json, the last file of a checkpoint, and sync it and the folder."""
    body = msgspec.json.encode(manifest)
    sealed = _Sealed(xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))
    write_bytes(Path(folder) / MANIFEST, msgspec.json.encode(sealed))
    fsync(folder)


def describe_files(folder: str | os.PathLike[str]) -> dict[str, tuple[int, str]]:
    """What `CheckpointManifest.files` says of a folder: relative path -> (bytes, xxh3-128), manifest.json left out."""
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): (path.stat().st_size, hash_file(path)) for path in paths}


def hash_file(path: str | os.PathLike[str]) -> str:
    """xxh3-128 (hex) of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(_READ_BYTES):
            hasher.update(part)
    return hasher.hexdigest()


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """A new file with these bytes, synced to disk."""
    with open(path, "xb") as file:
        file.write(data)
    fsync(path)


def fsync(path: str | os.PathLike[str]) -> None:
    """Sync a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
