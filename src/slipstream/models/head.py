"""The two halves of a causal LM: its body (tokens to hidden states) and its head (hidden states to logits).

A head is more than `lm_head`: soft caps (gemma2) and logit scales (cohere, granite) live in the causal LM's own forward, and a
head rebuilt from `lm_head` alone is wrong by nats. So `head_logits` runs that forward itself, with the body replaced by a stub
that hands its `inputs_embeds` through as hidden states. The hidden states travel as an argument and no state is kept, so the
function may be recomputed by `torch.utils.checkpoint`.

Shapes: N = selected positions, T = packed tokens, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from slipstream.errors import ModelError


def base_model(model: nn.Module) -> nn.Module:
    """The transformer body of a causal LM: token ids in, `last_hidden_state` [1, T, d] out. Raises ModelError where there is none."""
    return model._modules[_body_name(model)]  # type: ignore[return-value]


def head_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] of hidden states [N, d] (the body's last ones), by the model's own head code."""
    head = copy.copy(model)  # shares the parameters; only its table of children is its own
    head._modules = dict(model._modules)
    head._modules[_body_name(model)] = _PassThrough()
    return head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)  # whose gradient is a view; that of [0] is a copy


def _body_name(model: nn.Module) -> str:
    name = getattr(model, "base_model_prefix", "")
    if not name or model._modules.get(name) is None:
        raise ModelError(
            f"{type(model).__name__} has no separate body (base_model_prefix {name!r} names no child); a transformers causal LM is needed"
        )
    return name


class _PassThrough(nn.Module):
    """Stands where the body was: gives its `inputs_embeds` back as hidden states."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    @property
    def decoder(self) -> _PassThrough:
        return self  # opt calls `self.model.decoder`


class _BodyOutput:
    """A body's output that holds hidden states and nothing else: caches, attentions and router logits read as None."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != 0:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
