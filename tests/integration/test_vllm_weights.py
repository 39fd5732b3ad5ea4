"""A real vLLM server takes our weights whole or not at all, computes with them what transformers does, and says which sampled what."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm_server import LiveServer, live_server, needs_vllm

from slipstream.engines.vllm.server import MODEL, ServerDied
from slipstream.errors import WeightSyncError

pytestmark = needs_vllm
PROMPT = [5, 9, 23, 40, 7, 7, 31]
VOCABULARY = 262  # vLLM pads it to a multiple of 64


def small_model(kind: str, **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    special = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **special, initializer_range=0.2, **changes))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A dense model with a tied head."""
    with live_server(small_model("qwen3", tie_word_embeddings=True)) as live:
        yield live


def perturb(model: PreTrainedModel, scale: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def check_same_as_transformers(live: LiveServer) -> None:
    tokens, logprobs = live.greedy(PROMPT)
    likeliest, expected = live.plain(PROMPT, tokens)
    assert tokens == likeliest and torch.allclose(torch.tensor(logprobs), torch.tensor(expected), atol=2e-4)


def test_every_update_is_what_the_server_computes_with(live: LiveServer) -> None:
    """Also the tied head, which vLLM packs apart from the embedding."""
    for _ in range(3):
        live.run(live.weights.probe(live.sync()))
        check_same_as_transformers(live)
        perturb(live.model)


def test_perturb_and_revert_gives_the_same_bytes(live: LiveServer) -> None:
    live.sync()
    before, saved = live.greedy(PROMPT), {name: value.clone() for name, value in live.model.state_dict().items()}
    perturb(live.model)
    live.sync()
    assert live.greedy(PROMPT) != before
    live.model.load_state_dict(saved)
    live.sync()
    assert live.greedy(PROMPT) == before


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a part of a fused group is missing", "fused groups"),
        ("a whole layer is missing", "fused groups"),
        ("the last tensor has another name", "do not fit"),
        ("a shape is another", "do not fit"),
        ("the bytes are damaged", "hash to"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(live: LiveServer, fault: str, words: str) -> None:
    live.sync()
    before = live.greedy(PROMPT)
    perturb(live.model)
    manifest = live.pack()
    entries = list(manifest.entries)
    if fault.startswith("a part"):
        entries = [e for e in entries if "layers.2.self_attn.k_proj" not in e.name]
    elif fault.startswith("a whole"):
        entries = [e for e in entries if "layers.1.mlp" not in e.name]
    elif fault.startswith("the last"):
        entries[-1] = msgspec.structs.replace(entries[-1], name="model.layers.99.mlp.up_proj.weight")
    elif fault.startswith("a shape"):
        entries = [msgspec.structs.replace(e, shape=e.shape[::-1]) if "layers.2.mlp.up_proj" in e.name else e for e in entries]
    else:
        live.slot.map(writable=True)[1000] ^= 1
    with pytest.raises(WeightSyncError, match=words):
        live.run(live.load(msgspec.structs.replace(manifest, entries=tuple(entries))))
    live.version -= 1
    assert live.greedy(PROMPT) == before, "it goes on with what it had"
    live.sync()
    check_same_as_transformers(live)


def test_versions_change_between_two_tokens_of_a_running_sequence(live: LiveServer) -> None:
    async def scenario() -> list[str]:
        labels: list[str] = []
        sampling = {"max_tokens": 100, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling, "stream": True, "cache_salt": first}
        started = asyncio.Event()

        async def read() -> None:
            async for chunk in live.client.stream(body):
                labels.append(chunk["choices"][0]["weight_versions"][-1]["version"])
                started.set()

        reading = asyncio.create_task(read())
        await started.wait()
        await live.load(manifest)
        assert labels[-1] == first, "paused: nothing of the new version yet" if len(labels) < 100 else "too fast for this test"
        await reading
        return labels

    first = f"1.{live.sync().version}"
    perturb(live.model)
    manifest = live.pack()
    labels = live.run(scenario())
    assert len(labels) == 100 and sorted(labels, key=lambda label: int(label[2:])) == labels
    assert set(labels) == {first, f"1.{manifest.version}"}


def test_the_probe_sees_a_head_that_stayed_old(live: LiveServer) -> None:
    live.run(live.weights.probe(live.sync()))
    manifest = live.pack()
    wrong = msgspec.structs.replace(manifest, probe=tuple(value - 0.1 for value in manifest.probe))
    live.run(live.load(manifest))
    with pytest.raises(WeightSyncError, match="probe of weights"):
        live.run(live.weights.probe(wrong))


def test_no_port_is_open_and_the_socket_is_private(live: LiveServer) -> None:
    assert live.private.stat().st_mode & 0o777 == 0o700
    assert live.server.socket.parent == live.private


def test_a_mixture_of_experts_on_a_cpu() -> None:
    """transformers holds the experts of a layer as two tensors; vLLM's CPU build packs them anew at every load."""
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
    with live_server(small_model("qwen3_moe", **changes)) as live:
        for _ in range(2):
            live.run(live.weights.probe(live.sync()))
            check_same_as_transformers(live)
            perturb(live.model)


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return [*children, *(each for child in children for each in descendants(child))]


def test_a_killed_server_is_reported_at_once_with_its_log() -> None:
    """Its engine core and workers outlive it; in a run they end with the role's process group, here by hand."""
    with live_server(small_model("llama")) as live, ExitStack() as held:
        for pid in descendants(live.server.pid):
            held.callback(end, pid)

        async def scenario() -> None:
            died = asyncio.create_task(live.server.died())
            live.server._process.kill()
            async with asyncio.timeout(10):
                await died

        with pytest.raises(ServerDied, match=r"killed by signal 9[\s\S]*Last lines of its log"):
            live.run(scenario())
