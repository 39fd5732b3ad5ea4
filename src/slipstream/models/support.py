"""Which models the embedded engine and the trainer can run, told from the configuration alone: before any weight is read.

What passes here is still proved by `probe.py`, against plain forwards of the loaded model.
"""

from __future__ import annotations

from typing import Any

from slipstream.errors import ModelError

_LAYERS = {"full_attention", "sliding_attention"}
_REASONS = {
    "chunked_attention": "chunked attention",
    "linear_attention": "recurrent (linear attention or state space) layers",
    "hybrid": "hybrid layers (attention beside a recurrent state)",
    "hybrid_sliding": "hybrid layers (attention beside a recurrent state)",
    "conv": "convolution layers, which keep a recurrent state",
}
_RECURRENT_TYPES = {"rwkv", "xlstm"}
_RECURRENT_KEYS = ("conv_L_cache", "ssm_state_size", "mamba_d_state", "lru_width", "linear_num_key_heads", "linear_attn_alpha_factor")
_ALIBI_TYPES = {"bloom", "mpt"}
_DYNAMIC_ROPE = {"dynamic", "longrope"}


def unsupported_reason(config: Any) -> str | None:
    """Why a model with this transformers configuration cannot run here, as the end of "it has ..."; None if nothing speaks against it."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder beside its decoder"
    config = config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if layers:
        return " and ".join(sorted({_REASONS.get(layer, f"{layer} layers") for layer in layers}))
    if getattr(config, "attention_chunk_size", None):
        return _REASONS["chunked_attention"]
    if config.model_type in _RECURRENT_TYPES or any(getattr(config, key, None) for key in _RECURRENT_KEYS):
        return "recurrent layers"
    if config.model_type in _ALIBI_TYPES or getattr(config, "alibi", False):
        return "alibi position biases"
    return None


def check_supported(config: Any) -> None:
    """ModelError with the reason where the model cannot run here."""
    reason = unsupported_reason(config)
    if reason is not None:
        raise ModelError(
            f"{config.model_type} models are not supported: this one has {reason}, which the shared attention function cannot express. "
            "Models with full or sliding-window attention and rotary or learned positions are (Llama, Qwen, Gemma, Mistral, GPT-2, ...)"
        )


def context_limit(config: Any) -> int | None:
    """Most tokens a sequence may have, None where the configuration does not say.

    With dynamic or long rotary scaling it is the length before scaling sets in: past it, positions would be scaled by the longest
    sequence of a pass, so a row's result would depend on its neighbours.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [getattr(config, "max_position_embeddings", None)]
    for parameters in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if parameters.get("rope_type") in _DYNAMIC_ROPE:
            limits.append(parameters.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)


def num_embeddings(model: Any) -> int:
    """Rows of a model's input embedding: the token ids it takes are below this."""
    return int(model.get_input_embeddings().weight.shape[0])
