"""What the fake server of the unit tests streams, and what the engine sends, are vLLM's own protocol: held against its classes."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fake_vllm import LOGPROB, NUM_EXPERTS, NUM_LAYERS, TOP_K, FakeVllm, _npy, routed
from vllm_server import LABELS, needs_vllm, vllm_python

from slipstream.engines.vllm.arrays import Tells
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.environment import clean_environment, find_environment
from slipstream.types import GenerateRequest, Purpose, Sampling

pytestmark = needs_vllm

CHECK = """
import json, sys
from types import SimpleNamespace
import torch
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest, GenerateTokensStreamResponse
from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturing
from vllm.utils.serial_utils import numpy2base64

given = json.load(sys.stdin)
for chunk in given["chunks"]:
    absent = {"prompt_token_ids", "mm_placeholders", "metrics"}
    assert json.loads(GenerateTokensStreamResponse.model_validate(chunk).model_dump_json(exclude=absent)) == chunk, chunk
for body in given["bodies"]:
    asked = GenerateRequest.model_validate(body)
    for name, value in body["sampling_params"].items():
        assert getattr(asked.sampling_params, name) == value, name
layers, experts, k = given["sizes"]
sizes = SimpleNamespace(get_total_num_hidden_layers=lambda: layers, get_num_experts=lambda: experts, get_num_experts_per_tok=lambda: k,
                        hf_text_config=SimpleNamespace(model_type=""))
parallel = SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1)
capturer = capturing.RoutedExpertsCapturer(len(given["routed"]), SimpleNamespace(model_config=sizes, parallel_config=parallel))
capturing.get_forward_context = lambda: SimpleNamespace(dp_metadata=None)
for layer in range(layers):
    capturer.capture(layer, torch.tensor(given["routed"])[:, layer])
assert numpy2base64(capturer.snapshot_routing_data(len(given["routed"])).numpy()) == given["npy"]
"""


def chunks() -> list[dict[str, Any]]:
    fake = FakeVllm()
    fake.has_experts = fake.tells_masks = True
    spans = [{"version": LABELS.of((1, 0)), "start": 0, "end": 1}]
    cut = {"request_id": "one", "sampling_params": {"top_k": 5, "logprobs": 8}}
    return [
        fake._chunk(cut, [100], None, spans, LOGPROB, routed(4)),
        fake._chunk(cut, [101, 102], "stop", spans, LOGPROB, routed(6)),
        fake._chunk(cut, [], "abort", spans, LOGPROB, routed(6)),
    ]


async def bodies() -> list[dict[str, Any]]:
    made = []
    for tells, sampling in (
        (Tells(), Sampling()),
        (Tells(), Sampling(top_k=5, top_p=0.9, min_p=0.1)),
        (Tells(masks=True), Sampling(top_k=5)),
        (Tells(masks=True), Sampling(temperature=0.0)),
    ):
        engine = VllmEngine(FakeVllm(), labels=LABELS, engine_id="e", model="m", slots=0, max_context=64, vocab_size=1000, tells=tells)  # type: ignore[arg-type]
        engine.begin_update((1, 0), "")
        engine.end_update()
        engine.pin()
        request = GenerateRequest(
            group_id=0, sample=0, attempt=0, turn=0, purpose=Purpose.EVAL, token_ids=np.array([1, 2], np.int32), prompt_length=2,
            num_sampled=0, sampling=msgspec.structs.replace(sampling, max_new_tokens=8), stop_token_ids=(7,),
        )  # fmt: skip
        waiting = engine._waiting[engine.submit(request)]
        made += [engine._body(waiting, "m", (1, 0)), engine._body(waiting, "m", (1, 0), again=True)]
    return made


def test_the_fake_and_the_engine_speak_as_vllm_does(tmp_path: Path) -> None:
    environment = asyncio.run(find_environment(vllm_python()))
    tokens = routed(7)
    given = {
        "chunks": chunks(),
        "bodies": asyncio.run(bodies()),
        "sizes": [NUM_LAYERS, NUM_EXPERTS, TOP_K],
        "routed": tokens.tolist(),
        "npy": _npy(tokens),
    }
    subprocess.run(
        [str(environment.python), "-c", CHECK],
        input=json.dumps(given).encode(),
        env=clean_environment(environment.paths(tmp_path / "path")),
        check=True,
    )
