"""A real vLLM server takes our weights whole or not at all, computes with them what transformers does, and says which sampled what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from interrupted import POLICIES, check_interrupted
from vllm_server import LABELS, PROMPT, LiveServer, live_server, needs_vllm, perturb, small_model
from ways import WAYS, check_perturb_and_revert, way_to

from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.server import MODEL
from slipstream.errors import WeightSyncError

pytestmark = [*needs_vllm, pytest.mark.core]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A dense model with a tied head."""
    with live_server(small_model("qwen3", tie_word_embeddings=True)) as live:
        yield live


def test_every_update_is_what_the_server_computes_with(live: LiveServer) -> None:
    """Also the tied head, which vLLM packs apart from the embedding."""
    for _ in range(3):
        live.run(live.weights.probe(live.sync()))
        live.check_same_as_transformers()
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
    live.check_same_as_transformers()


def test_versions_change_between_two_tokens_of_a_running_sequence(live: LiveServer) -> None:
    async def scenario() -> list[str]:
        labels: list[str] = []
        sampling = {"max_tokens": 100, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling, "stream": True, "cache_salt": first}
        started = asyncio.Event()

        async def read() -> None:
            async for chunk in live.client.stream(body):  # of one token, or of several where we were slow to read
                (choice,) = chunk["choices"]
                spans, new = choice["weight_versions"], len(choice["token_ids"])
                labels.extend([span["version"] for span in spans for _ in range(span["start"], span["end"])][-new:])
                started.set()

        reading = asyncio.create_task(read())
        await started.wait()
        await live.load(manifest)
        assert labels[-1] == first, "paused: nothing of the new version yet" if len(labels) < 100 else "too fast for this test"
        await reading
        return labels

    first = LABELS.of((1, live.sync().version))
    perturb(live.model)
    manifest = live.pack()
    labels = live.run(scenario())
    assert len(labels) == 100 and sorted(labels, key=LABELS.version_of) == labels
    assert set(labels) == {first, LABELS.of((1, manifest.version))}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.interrupt}, {policy.kv}")
def test_weights_come_while_sequences_run(live: LiveServer, policy: InterruptPolicy) -> None:
    """Every token is from the version that it names, and none is lost."""
    gaps, others = check_interrupted(live, policy)
    assert gaps.max() < 2e-4, gaps.max()
    assert others is None or np.median(others) > 100 * 2e-4, "another version would not be seen"


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_perturb_and_revert_over_what_the_driver_copies(live: LiveServer, tmp_path: Path, way: tuple[str, str]) -> None:
    with way_to(live, *way, tmp_path) as through:
        assert bool(check_perturb_and_revert(through).manifest.deltas) == (way[1] == "delta")


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_what_the_driver_copies_comes_while_sequences_run(live: LiveServer, tmp_path: Path, way: tuple[str, str]) -> None:
    """The copy is written over while the server samples with the version before."""
    with way_to(live, *way, tmp_path) as through:
        gaps, others = check_interrupted(live, POLICIES[0], through)
    assert gaps.max() < 2e-4, gaps.max()
    assert others is not None and np.median(others) > 100 * 2e-4, "another version would not be seen"


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
