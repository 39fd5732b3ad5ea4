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


def load_trained(settings: ModelSettings, checkpoint: Path | None) -> tuple[Any, Any, ModelInfo]:
    """(model, tokenizer, info): the model of the settings, with the weights of a checkpoint (verified first) if one is given.

    The model has the settings' dtype: that of the engine, which is what was sampled from.
    """
    import torch

    from slipstream.checkpoint_files import verify_checkpoint
    from slipstream.models.loading import load_model

    if checkpoint is None:
        return load_model(settings)
    from slipstream.trainer.checkpoint import load_weights, read_tensors

    verify_checkpoint(checkpoint)
    model, tokenizer, info = load_model(settings, dtype="float32")  # the trainer's own weights are float32 whatever the engine computes in
    load_weights(model, read_tensors(checkpoint / "model"), checkpoint / "model")
    return model.to(getattr(torch, settings.dtype)), tokenizer, info
