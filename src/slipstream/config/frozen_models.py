"""Which frozen models a run holds beside the one that learns, and who computes with them. Torch-free.

loss.kl_coefficient > 0                      reference    the logprob stage, for `reference_logprobs`
  and [lora], reference = the start model    none         the trainer, over its own base with the adapter off
loss.teacher, loss.teacher_kl = "sampled"    teacher      the logprob stage, for `teacher_logprobs`
loss.teacher, loss.teacher_kl = "full"       teacher      the trainer: it needs every logit, not one per token
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.settings import Config, ModelSettings
from slipstream.types import REFERENCE_LOGPROBS, TEACHER_LOGPROBS


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """One frozen model, and what it is there for."""

    key: str  # the setting that names it, for errors: "loss.reference" | "loss.teacher"
    settings: ModelSettings
    array: str | None  # the array that the logprob stage makes with it; None: the trainer computes with it


def frozen_models(config: Config) -> list[FrozenModel]:
    """The frozen models of this run; empty for most.

    >>> from slipstream.config.settings import LossSettings
    >>> [(m.key, m.array) for m in frozen_models(Config(loss=LossSettings(kl_coefficient=0.1, teacher="big", teacher_kl="full")))]
    [('loss.reference', 'reference_logprobs'), ('loss.teacher', None)]
    """
    models = []
    if config.loss.kl_coefficient > 0 and not base_is_reference(config):
        models.append(FrozenModel("loss.reference", _settings(config, config.loss.reference or config.model.name), REFERENCE_LOGPROBS))
    if config.loss.teacher is not None:
        array = TEACHER_LOGPROBS if config.loss.teacher_kl == "sampled" else None
        models.append(FrozenModel("loss.teacher", _settings(config, config.loss.teacher), array))
    return models


def base_is_reference(config: Config) -> bool:
    """The reference is the very model that the adapter lies on: no second copy is loaded, the trainer takes its own, adapter off."""
    return config.lora.on and config.loss.kl_coefficient > 0 and config.loss.reference in (None, config.model.name)


def loss_arrays(config: Config) -> tuple[str, ...]:
    """The logprobs under other models that the loss needs of every trained rollout."""
    return (*stage_models(config), *([REFERENCE_LOGPROBS] if base_is_reference(config) else []))


def stage_models(config: Config) -> dict[str, FrozenModel]:
    """Array -> the model that makes it: what the logprob stage computes. Empty: the run has no such stage."""
    return {model.array: model for model in frozen_models(config) if model.array is not None}


def trainer_teacher(config: Config) -> FrozenModel | None:
    """The teacher that the trainer holds itself."""
    return next((model for model in frozen_models(config) if model.array is None), None)


def only_teacher(config: Config, *, reward_given: bool) -> bool:
    """Pure distillation: a teacher, and no reward with a weight. Every rollout's reward is then 0 by definition of the task, and rewards of
    weight 0 are measured, not learned from."""
    return config.loss.teacher is not None and not reward_given and all(reward.weight == 0 for reward in config.reward)


def _settings(config: Config, name: str) -> ModelSettings:
    """The start model of the run itself where the name is its own; a run that is resumed has the same reference as before.

    Another model is read as it is stored: `model.quantize` is about the base of the adapter.
    """
    other = {"name": name, "revision": None, "quantize": None}
    return config.model if name == config.model.name else config.model.model_copy(update=other)
