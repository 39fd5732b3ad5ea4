"""A mixture of experts on a real vLLM server."""

from __future__ import annotations

from vllm_server import live_server, needs_vllm, perturb, small_model

pytestmark = needs_vllm


def test_a_mixture_of_experts_on_a_cpu() -> None:
    """transformers holds the experts of a layer as two tensors; vLLM's CPU build packs them anew at every load."""
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
    with live_server(small_model("qwen3_moe", **changes)) as live:
        for _ in range(2):
            live.run(live.weights.probe(live.sync()))
            live.check_same_as_transformers()
            perturb(live.model)
