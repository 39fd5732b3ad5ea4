"""vLLM's model runner V2 tells how it routed tokens and what sampling kept: read as it means it. On a CPU, its kernels interpreted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from test_vllm_sampling import left_by, sample
from transformers import AutoModelForCausalLM
from vllm_server import PROMPT, VOCABULARY, LiveServer, live_server, needs_vllm, small_model, vllm_python

from slipstream.engines.vllm.arrays import Routing, Tells, Wants
from slipstream.engines.vllm.attach import ask_what_it_tells
from slipstream.engines.vllm.environment import VllmEnvironment
from slipstream.sampling_mask import decode_kept
from slipstream.types import Sampling, StopReason

pytestmark = needs_vllm

OPTIONS = ("--enable-return-routed-experts", "--return-sampling-mask")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
TOLD = Tells(Routing(layers=(0, 2), num_layers=3, num_experts=4, top_k=2), masks=True, max_logprobs=VOCABULARY)
CUTS = (Sampling(top_k=10, max_new_tokens=24), Sampling(top_k=10, max_new_tokens=100, stop_strings=("><",)))  # the second ends at once


class Interpreting(VllmEnvironment):
    def paths(self, folder: Path) -> list[str]:
        return [*super().paths(folder), str(Path(__file__).parent / "interpreted_triton")]


def chosen(live: LiveServer, tokens: list[int]) -> torch.Tensor:
    """[tokens, layers with experts, k] ascending: the experts that transformers' routers choose."""
    plain = AutoModelForCausalLM.from_config(live.model.config, attn_implementation="eager").eval()
    plain.load_state_dict(live.model.state_dict())
    with torch.no_grad():
        scores = plain(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices.sort().values for layer in scores], 1)


def test_routing_and_masks_of_the_real_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, the experts are those that transformers chooses. The second layer has none; the second sequence is aborted there."""
    if subprocess.run([str(vllm_python()), "-c", "import triton"], capture_output=True).returncode:
        pytest.skip("vLLM's environment has no triton, whose interpreter runs the kernels of model runner V2: pip install triton there")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with live_server(small_model("qwen3_moe", **EXPERTS), extra=OPTIONS, kind=Interpreting) as live:
        live.run(live.weights.probe(live.sync()))
        tells = live.run(ask_what_it_tells(live.client, Wants(True, 10, VOCABULARY, samples_evaluations=False), 128))
        assert tells == TOLD
        for into, cut in zip(live.run(sample(live, CUTS, tells)), CUTS, strict=True):
            tokens = PROMPT + into.token_ids
            assert len(into.token_ids) == (2 if cut.stop_strings else cut.max_new_tokens)
            assert into.stop_reason is (StopReason.STOP if cut.stop_strings else StopReason.LENGTH)
            assert into.routing is not None
            told = torch.from_numpy(into.routing.astype("int64")).unflatten(1, (2, 2)).sort().values
            assert told.tolist() == chosen(live, tokens)[:-1].tolist()
            expected = [left_by(cut, row) for row in live.logits(PROMPT, into.token_ids)]
            assert [decode_kept(kept).tolist() for kept in into.kept] == [torch.isfinite(row).nonzero()[:, 0].tolist() for row in expected]
            said = torch.tensor([float(row[token]) for row, token in zip(expected, into.token_ids, strict=True)])
            assert torch.allclose(torch.tensor(into.logprobs), said, atol=2e-4)
