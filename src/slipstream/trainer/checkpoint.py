"""Checkpoints: weights, optimizer, step and random state, as safetensors and JSON. Never pickle, never `torch.load`.

A set of tensors is a folder with an index and one or more safetensors files:

    index.json   {"tensors": {name: {"dtype", "shape", "shards": [{"file", "key", "offset", "shape"}]}}, "aliases": {tied name: name}}

Where an adapter is trained, its tensors are in a folder of peft's own format instead (`models/lora.py`).

Each shard says which part of the global tensor it holds (offset and shape per dimension), so that many ranks can write a checkpoint and
another number of ranks can read it. Here one rank writes one shard per tensor.

The trainer writes into checkpoints/.tmp-<step>-<incarnation>, syncs it and reports its manifest; the controller verifies and renames it.
Killed anywhere, it leaves at most a folder whose name nobody takes for a checkpoint.
"""

from __future__ import annotations

import base64
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slipstream.checkpoint_files import describe_files, fsync, verify_checkpoint, write_bytes, write_manifest
from slipstream.errors import CheckpointError
from slipstream.protocols import CheckpointManifest
from slipstream.tensors import distinct, dtype_name, dtype_of, overwrite
from slipstream.trainer.trainer import Trainer

INDEX = "index.json"
ADAPTER = "adapter"  # in place of model/ where an adapter is trained: a folder as peft writes it
TRAINER = "trainer.json"


class Shard(msgspec.Struct, frozen=True):
    """The part of a tensor that one file holds."""

    file: str
    key: str  # its name in the file
    offset: tuple[int, ...]  # of its first element in the global tensor
    shape: tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True):
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]  # of the global tensor
    shards: tuple[Shard, ...]


class TensorIndex(msgspec.Struct, frozen=True):
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = {}


class TrainerState(msgspec.Struct, frozen=True):
    """What trainer.json holds."""

    step: int  # batches finished; the learning-rate schedule is a function of it
    skipped_in_a_row: int
    torch_rng: str  # base64 of torch's CPU generator state
    base_checksum: str | None = None  # of the frozen weights that the adapter lies on; None: the whole weights are trained


# ---- writing ---------------------------------------------------------------------------------------------------------------------


def write_checkpoint(
    checkpoints: Path, trainer: Trainer, *, run_id: str, incarnation: int, ledger_seq: int, weights_checksum: str
) -> tuple[str, CheckpointManifest]:
    """Write the trainer's state to a temporary folder in `checkpoints`, durable when this returns: (its name, its manifest).

    A leftover of the same name is replaced. OSError where the disk refuses.
    """
    name = f".tmp-{trainer.step}-{incarnation}"
    folder = checkpoints / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if trainer.adapter is not None:
        trainer.adapter.write(folder / ADAPTER)
    else:
        tensors, aliases = distinct(trainer.model.state_dict())
        write_tensors(folder / "model", tensors, aliases)
    write_tensors(folder / "optimizer", trainer.optimizer.state_tensors())
    base = None if trainer.adapter is None else trainer.adapter.base_checksum
    state = TrainerState(trainer.step, trainer.skipped_in_a_row, base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(), base)
    write_bytes(folder / TRAINER, msgspec.json.encode(state))
    manifest = CheckpointManifest(
        run_id=run_id,
        incarnation=incarnation,
        step=trainer.step,
        ledger_seq=ledger_seq,
        weights_checksum=weights_checksum,
        files=describe_files(folder),
        numerics=trainer.numerics(),
    )
    write_manifest(folder, manifest)
    fsync(checkpoints)
    return name, manifest


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str] | None = None) -> None:
    """A new folder with these tensors and their index, synced to disk."""
    folder.mkdir()
    file = "rank-00000.safetensors"
    entries = {
        name: TensorEntry(dtype_name(t.dtype), tuple(t.shape), (Shard(file, name, (0,) * t.ndim, tuple(t.shape)),))
        for name, t in tensors.items()
    }
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / file)
    except SafetensorError as error:  # a full disk, as safetensors says it
        raise OSError(f"{folder / file}: {error}") from error
    fsync(folder / file)
    write_bytes(folder / INDEX, msgspec.json.encode(TensorIndex(entries, dict(aliases or {}))))
    fsync(folder)


# ---- reading ---------------------------------------------------------------------------------------------------------------------


def load_checkpoint(folder: str | Path, trainer: Trainer) -> CheckpointManifest:
    """Put the trainer where the checkpoint was made, bit for bit. CheckpointError names the file that is damaged or does not fit.

    Everything is verified and read before the trainer is touched.
    """
    folder = Path(folder)
    manifest = verify_checkpoint(folder)
    optimizer = read_tensors(folder / "optimizer")
    state = _decode(folder / TRAINER, TrainerState)
    if state.step != manifest.step:
        raise CheckpointError(f"{folder / TRAINER} is of step {state.step}, its manifest of step {manifest.step}")
    if trainer.adapter is None:
        overwrite(trainer.model.state_dict(), read_tensors(folder / "model"), folder / "model")
    else:
        if state.base_checksum != trainer.adapter.base_checksum:
            raise CheckpointError(
                f"{folder / ADAPTER} lies on a base of checksum {state.base_checksum}, model.name has {trainer.adapter.base_checksum}: "
                "the files of the model have changed since"
            )
        trainer.adapter.load(folder / ADAPTER)
    try:
        trainer.optimizer.load_state_tensors(optimizer)
    except KeyError as error:
        raise CheckpointError(f"{folder / 'optimizer'} has no tensor {error}: model.dtype differs from the run that wrote it") from error
    rng = bytearray(base64.b64decode(state.torch_rng))
    torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
    trainer.step, trainer.skipped_in_a_row = state.step, state.skipped_in_a_row
    return manifest


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """The global tensors of a folder written by `write_tensors`, aliases included. CheckpointError where a part is missing."""
    folder = Path(folder)
    index = _decode(folder / INDEX, TensorIndex)
    files = {shard.file for entry in index.tensors.values() for shard in entry.shards}
    try:
        out = {name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype)) for name, entry in index.tensors.items()}
    except ValueError as error:
        raise CheckpointError(f"{folder / INDEX}: {error}") from error
    filled = dict.fromkeys(out, 0)
    for file in sorted(files):
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name, entry in index.tensors.items():
                    for shard in (shard for shard in entry.shards if shard.file == file):
                        place = tuple(slice(at, at + size) for at, size in zip(shard.offset, shard.shape, strict=True))
                        out[name][place] = opened.get_tensor(shard.key)
                        filled[name] += math.prod(shard.shape)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
    for name, tensor in out.items():
        if filled[name] != tensor.numel():
            raise CheckpointError(f"{folder / INDEX}: the shards of {name} hold {filled[name]} of its {tensor.numel()} elements")
    for name, target in index.aliases.items():
        out[name] = out[target]
    return out


def _decode(path: Path, kind):
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
