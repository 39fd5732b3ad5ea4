"""Random tiny mixtures of experts."""

from __future__ import annotations

from engine_harness import tiny_model

from slipstream.models.attention import attach

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES: dict[str, dict] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
}


def tiny_mixture(kind: str, seed: int = 0, **overrides):
    """With slipstream's attention."""
    model = tiny_model(kind, seed, **{**MIXTURES[kind], **overrides})
    attach(model)
    return model
