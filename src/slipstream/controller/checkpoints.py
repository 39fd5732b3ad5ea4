"""Checkpoint folders as the controller sees them: verified, made visible by one rename, found again, thrown away. It never reads weights.

checkpoints/.tmp-<s>     the trainer writes here, manifest.json last, and fsyncs
checkpoints/step-<s>     visible after the rename, which is the commit point of training
checkpoints/.old-<s>     on its way out
checkpoints/refused-<s>  did not verify at a resume; kept for a look
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec

from slipstream.checkpoint_files import MANIFEST, fsync, verify_checkpoint
from slipstream.errors import CheckpointError
from slipstream.protocols import CheckpointManifest


def verify(folder: Path, expected: CheckpointManifest | None = None) -> CheckpointManifest:
    """The manifest of a whole checkpoint (see `checkpoint_files`). Raises CheckpointError that names the first wrong file."""
    manifest = verify_checkpoint(folder)
    if expected is not None and msgspec.json.encode(manifest) != msgspec.json.encode(expected):
        raise CheckpointError(f"{folder / MANIFEST} is not the manifest that was reported")
    return manifest


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def install(checkpoints: Path, temporary: str, step: int) -> Path:
    """Rename the verified temporary folder to its name and make the rename durable. A folder already there is moved aside first."""
    source, target = checkpoints / temporary, step_folder(checkpoints, step)
    if target.exists():
        set_aside(target, "old")
    os.rename(source, target)
    fsync(checkpoints)
    return target


def discard(checkpoints: Path, steps: list[int]) -> None:
    """Remove checkpoints that are no longer kept; each vanishes from view at once."""
    for step in steps:
        folder = step_folder(checkpoints, step)
        if folder.is_dir():
            set_aside(folder, "old")
    discard_old(checkpoints)


def sweep(checkpoints: Path) -> None:
    """Delete what a crash left half written or half deleted."""
    discard_old(checkpoints)
    for folder in checkpoints.glob(".tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def discard_old(checkpoints: Path) -> None:
    """Finish deletions."""
    for folder in checkpoints.glob(".old-*"):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path, why: str) -> Path:
    """Rename a checkpoint folder out of view: `.old-<s>` to be deleted, `refused-<s>` and `rewound-<s>` to be kept for a look."""
    stem = f"{'.' if why == 'old' else ''}{why}-{folder.name.removeprefix('step-')}"
    target, number = folder.with_name(stem), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{stem}.{number}")
    os.rename(folder, target)
    fsync(folder.parent)
    return target


def found_steps(checkpoints: Path) -> list[int]:
    """Steps of the checkpoint folders in view, newest first."""
    names = (re.fullmatch(r"step-(\d+)", p.name) for p in checkpoints.iterdir() if p.is_dir())
    return sorted((int(m[1]) for m in names if m), reverse=True)
