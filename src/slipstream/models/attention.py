"""The one attention function, registered with transformers as "slipstream", that engine and trainer share.

It dispatches on the `layout` argument. transformers builds no mask for an implementation whose name has no mask function, so
sliding windows, soft caps and sinks arrive here as the layer's own arguments and are honoured per layer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from slipstream.errors import ModelError
from slipstream.models.layout import PackedLayout, PagedLayout

NAME = "slipstream"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, K, T, D]
    value: torch.Tensor,  # [B, K, T, D]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [H], attention sinks
    layout: PackedLayout | PagedLayout | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [B, T, H, D] and no weights. ModelError without a layout, with a mask, or with dropout."""
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} brought its own attention mask; the layout alone says who sees whom")
    if dropout:
        raise ModelError(f"{type(module).__name__} has attention dropout {dropout}; set it to 0: the sampler has none")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": s_aux}
    if isinstance(layout, PagedLayout):
        from slipstream.models.paged_attention import paged_attention

        return paged_attention(module, query, key, value, layout, **options), None
    if isinstance(layout, PackedLayout):
        from slipstream.models.packed_attention import packed_attention

        return packed_attention(module, query, key, value, layout, **options), None
    raise ModelError(
        f"{type(module).__name__} was called without a layout. Either this model does not pass its keyword arguments on to the attention "
        "function, or it was called outside slipstream: then set_attn_implementation('sdpa') first"
    )


def attach(model: PreTrainedModel) -> None:
    """Make `model` use the shared attention function; ModelError where the model cannot switch."""
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ModelError(
            f"{type(model).__name__} does not route its attention through transformers' attention interface, which slipstream needs"
        )
