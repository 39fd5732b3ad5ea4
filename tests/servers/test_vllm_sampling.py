"""Truncated sampling on a real vLLM server: what it says it kept is what the logits say. And an abort ends a stream with a last chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm_server import LABELS, PROMPT, VOCABULARY, LiveServer, live_server, needs_vllm, small_model

from slipstream.engines.embedded.sampling import _truncate
from slipstream.engines.frames import FrameRouter
from slipstream.engines.vllm.arrays import NOTHING_TOLD, Tells
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.server import MODEL
from slipstream.protocols import Generation
from slipstream.sampling_mask import decode_kept
from slipstream.types import GenerateRequest, Purpose, Sampling

pytestmark = needs_vllm
CUTS = (Sampling(top_k=10, max_new_tokens=24), Sampling(top_k=10, top_p=0.8, min_p=0.02, temperature=0.7, max_new_tokens=24))


async def sample(live: LiveServer, sampling: tuple[Sampling, ...], tells: Tells = NOTHING_TOLD) -> list[Generation]:
    """A generation of each kind, side by side, through the engine."""
    engine = VllmEngine(
        live.client, labels=LABELS, engine_id="engine-0", model=MODEL, slots=8, max_context=128, vocab_size=VOCABULARY, tells=tells,
        decode=lambda ids: "".join(f"<{i}>" for i in ids),
    )  # fmt: skip
    engine.begin_update((1, live.version), "")
    engine.end_update()
    router, prompt, opened = FrameRouter(), np.array(PROMPT, np.int32), []
    for index, one in enumerate(sampling):
        request = GenerateRequest(
            group_id=0, sample=index, attempt=0, turn=0, purpose=Purpose.TRAIN, token_ids=prompt, prompt_length=len(prompt), num_sampled=0,
            sampling=one, stop_token_ids=(),
        )  # fmt: skip
        into = Generation(len(prompt))
        opened.append((into, router.open(engine.submit(request), into)))
    while not all(ended.done() for _, ended in opened):
        await engine.wake.wait()
        engine.wake.clear()
        for frame in engine.take_frames():
            router.feed(frame)
    await engine.close()
    return [into for into, _ in opened]


def left_by(cut: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """[V] log-probabilities, -inf where cut off: as vLLM cuts, min-p first."""
    likely = _truncate(torch.log_softmax(logits / cut.temperature, -1), Sampling(min_p=cut.min_p))
    return _truncate(likely, Sampling(top_k=cut.top_k, top_p=cut.top_p))


def test_what_was_kept_is_what_the_logits_say_and_an_abort_ends_a_stream() -> None:
    """One server for both: float32, so that no two logits are alike."""
    with live_server(small_model("llama")) as live:
        live.sync()
        for into, cut in zip(live.run(sample(live, CUTS)), CUTS, strict=True):
            logits = live.logits(PROMPT, into.token_ids)
            expected = [left_by(cut, row) for row in logits]
            assert [decode_kept(kept).tolist() for kept in into.kept] == [torch.isfinite(row).nonzero()[:, 0].tolist() for row in expected]
            assert max(len(decode_kept(kept)) for kept in into.kept) == cut.top_k or cut.top_p < 1
            said = torch.tensor([float(row[token]) for row, token in zip(expected, into.token_ids, strict=True)])
            assert torch.allclose(torch.tensor(into.logprobs), said, atol=2e-4)
        chunks = live.run(abort_after_a_chunk(live))
        last = chunks[-1]["choices"][0]
        assert last["finish_reason"] == "abort" and "routed_experts" in last and len(chunks) < 100


async def abort_after_a_chunk(live: LiveServer) -> list[dict[str, Any]]:
    sampling = {"max_tokens": 100, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    body = {"model": MODEL, "request_id": "one", "token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    chunks: list[dict[str, Any]] = []
    async for chunk in live.client.stream(body):
        if not chunks:
            await live.client.post("/abort_requests", {"request_ids": ["generate-tokens-one"]})
        chunks.append(chunk)
    return chunks
