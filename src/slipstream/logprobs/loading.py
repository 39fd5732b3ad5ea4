"""Frozen models from the settings: checked against the model that learns, proved, without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.config.arithmetic import max_context_tokens
from slipstream.config.frozen_models import FrozenModel, stage_models
from slipstream.config.settings import Config, ModelSettings
from slipstream.errors import ModelError
from slipstream.logprobs.stage import LogprobStage
from slipstream.logprobs.tokens import check_same_tokens
from slipstream.models.loading import ModelInfo, load_model, load_tokenizer
from slipstream.models.probe import probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_SLOTS = 4


def check_frozen_model(frozen: FrozenModel, config: Config) -> ModelInfo:
    """Its tokens are those of the model that learns, and its context holds the run's; no weights are read. ModelError otherwise."""
    from transformers import AutoConfig

    from slipstream.models.support import check_supported

    name = frozen.settings.name
    ours, own = load_tokenizer(config.model)
    try:
        theirs, info = load_tokenizer(frozen.settings)
        check_supported(AutoConfig.from_pretrained(info.source, trust_remote_code=False))
    except ModelError as error:
        reason = str(error).removeprefix(f"model.name = '{name}': ")
        raise ModelError(f"{frozen.key} = '{name}': {reason}") from error
    check_same_tokens(frozen.key, name, theirs.get_vocab(), ours.get_vocab())
    needed = min(max_context_tokens(config), own.context_tokens)
    if info.context_tokens < needed:
        raise ModelError(
            f"{frozen.key} = '{name}' has {info.context_tokens} positions, but a rollout may have {needed} tokens; set "
            f"engine.max_context = {info.context_tokens} or take a model with a longer context"
        )
    return info


def load_frozen_model(frozen: FrozenModel, config: Config) -> PreTrainedModel:
    """The model on the trainer's device, attached to the shared attention function and proved; its parameters want no gradient."""
    if frozen.settings != config.model:  # the model that learns is checked and proved where it generates
        check_frozen_model(frozen, config)
    model, _, _ = load_model(frozen.settings, device=config.trainer.device)
    if frozen.settings != config.model:
        probe(model, slots=_PROBE_SLOTS, max_context=max_context_tokens(config))
    return model.requires_grad_(False)


def load_stage(config: Config) -> LogprobStage:
    """The logprob stage that the settings ask for; a model that stands for two is loaded once."""
    loaded: dict[ModelSettings, PreTrainedModel] = {}
    models = {}
    for array, frozen in stage_models(config).items():
        if frozen.settings not in loaded:
            loaded[frozen.settings] = load_frozen_model(frozen, config)
        models[array] = loaded[frozen.settings]
    return LogprobStage(
        models,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        chunk_rows=config.trainer.logprob_chunk_tokens,
        default_temperature=config.rollout.temperature,
    )
