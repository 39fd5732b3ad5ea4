"""A real vLLM server in bfloat16, as recipes run it: every token is from the version that it names, up to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from interrupted import POLICIES, check_interrupted
from vllm_server import LiveServer, live_server, needs_vllm, small_model

from slipstream.engines.interrupts import InterruptPolicy

pytestmark = needs_vllm

ROUNDING = 0.05  # nats per token, mean


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(small_model("qwen3", tie_word_embeddings=True), torch.bfloat16) as live:
        yield live


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.interrupt}, {policy.kv}")
def test_weights_come_while_sequences_run(live: LiveServer, policy: InterruptPolicy) -> None:
    gaps, others = check_interrupted(live, policy)
    print(f"gap to float32 mean {gaps.mean():.4f} max {gaps.max():.3f}")
    assert gaps.mean() < ROUNDING
    assert others is None or np.median(others) > 5 * ROUNDING, "another version would not be seen"
