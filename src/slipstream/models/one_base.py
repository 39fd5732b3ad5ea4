"""One copy of a model's weights for several that only read them: experiments, whose adapters lie beside it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from slipstream.config.settings import ModelSettings
    from slipstream.models.loading import ModelInfo


class OneBase:
    """`loading.load_model` for several users in one process: the files are read once, and each user gets modules of its own over the very
    same parameters and buffers. None of them may write those; peft puts its layers into the modules, beside them.
    """

    def __init__(self) -> None:
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelInfo] | None = None
        self._asked: tuple[ModelSettings, str | None, bool] | None = None

    def __call__(
        self, settings: ModelSettings, *, device: str | None = None, keep_codes: bool = False
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelInfo]:
        from slipstream.models.loading import load_model  # here: a role's process makes one of these before its slow imports

        if self._loaded is None:
            self._asked = (settings, device, keep_codes)
            self._loaded = load_model(settings, device=device, keep_codes=keep_codes)
        assert self._asked == (settings, device, keep_codes), "experiments have their model and its device in common"
        model, tokenizer, info = self._loaded
        return over_same_tensors(model), tokenizer, info


def over_same_tensors(model: PreTrainedModel) -> PreTrainedModel:
    """New modules over the parameters and buffers of this model."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
