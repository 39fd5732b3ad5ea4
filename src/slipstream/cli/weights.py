"""The model that a run file or a run folder means: the untrained one, or a checkpoint's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.settings import ModelSettings
from slipstream.errors import CheckpointError

if TYPE_CHECKING:
    from slipstream.models.loading import ModelInfo


def kept_checkpoints(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run folder, ascending."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in (folder / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def checkpoint_folder(folder: Path, step: int | None) -> Path:
    """The checkpoint of this step, by default the newest; CheckpointError that lists those kept where it is absent."""
    kept = kept_checkpoints(folder)
    if not kept:
        raise CheckpointError(f"{folder} has no checkpoint yet")
    if step is not None and step not in kept:
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; kept are: {', '.join(map(str, kept))}")
    return folder / "checkpoints" / f"step-{kept[-1] if step is None else step}"


def load_trained(settings: ModelSettings, checkpoint: Path) -> tuple[Any, Any, ModelInfo]:
    """(model, tokenizer, info): the model of the settings with the checkpoint's weights."""
    from slipstream.models.loading import load_model

    model, tokenizer, info = load_model(settings)
    put_weights(model, checkpoint)
    return model, tokenizer, info


def put_weights(model: Any, checkpoint: Path) -> None:
    """Overwrite the model's weights with a checkpoint's, which is verified first, in the model's own dtypes; an adapter's are merged.

    A checkpoint of a bfloat16 run holds bfloat16 weights, or the float32 ones they were rounded from: rounding gives the same either way.
    """
    from slipstream.checkpoint_files import verify_checkpoint
    from slipstream.tensors import overwrite
    from slipstream.trainer.checkpoint import ADAPTER, read_tensors

    verify_checkpoint(checkpoint)
    if (checkpoint / ADAPTER).is_dir():
        weights = _merged(model, checkpoint / ADAPTER)
    else:
        weights = read_tensors(checkpoint / "model")
    own = model.state_dict()
    overwrite(own, {name: t.to(own[name].dtype) if name in own else t for name, t in weights.items()}, checkpoint)


def _merged(model: Any, folder: Path) -> dict[str, Any]:
    """The whole weights that the adapter in this folder makes of the model, which stays as it is."""
    from slipstream.models.lora import Adapter

    adapter = Adapter.read(model, folder)
    weights = dict(adapter.merged())
    adapter.remove()
    return weights
