"""A real vLLM server takes a base and an adapter per version, computes with them what peft does, and never mixes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_server import LABELS, PROMPT, VOCABULARY, LiveServer, live_server, needs_vllm, small_model
from ways import context_of

from slipstream.engines.frames import FrameRouter
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.adapter_engine import AdapterEngine
from slipstream.engines.vllm.labels import adapter_name
from slipstream.engines.vllm.server import MODEL, AdapterRoom
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.errors import WeightSyncError
from slipstream.launch.assemble_adapters import give_base
from slipstream.launch.assemble_weights import build_publisher
from slipstream.launch.page import NullProgress
from slipstream.launch.processes import Child, ChildSpec
from slipstream.models.loading import load_model
from slipstream.models.lora import Adapter
from slipstream.models.tiny import make_tokenizer
from slipstream.protocols import Generation, WeightsOffer
from slipstream.trainer.probe import ProbedPublisher
from slipstream.types import GenerateRequest, Purpose, Sampling, StopReason
from slipstream.weight_sync.memory import MemoryFile

pytestmark = needs_vllm
PLACES = 3
ROOM = AdapterRoom(PLACES, 3, ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"))
LORA = {"rank": 3, "alpha": 12.0}


class Adapters:
    """The trainer's side, with an adapter of these settings, and the driver's, as a run builds them; the server is given the base."""

    def __init__(
        self, live: LiveServer, folder: Path, policy: InterruptPolicy, transport: str = "shared_memory", quantize: str | None = None,
        **lora: object,
    ):  # fmt: skip
        folder.mkdir()
        make_tokenizer().save_pretrained(live.folder)
        base = {"name": str(live.folder), "quantize": quantize}
        context = context_of(folder, transport, "adapter", model=base, lora=LORA | lora)
        slots = [MemoryFile.create("adapter")] if transport == "shared_memory" else []
        model, _, _ = load_model(context.config.model, device="cpu", keep_codes=True)
        self.live, self.trainer = live, Adapter.of(model, context.config.lora, context.config.model)
        self.publisher = ProbedPublisher(build_publisher(context, model, self.trainer, slots), model)
        self.engine = AdapterEngine(
            live.client,
            labels=LABELS,
            engine_id="engine-0",
            model=MODEL,
            slots=4,
            max_context=128,
            vocab_size=VOCABULARY,
            policy=policy,
            places=PLACES,
        )
        spec = ChildSpec(role="engine-0", roles=(), run_folder=str(folder), threads=1, socket_folder=str(folder), lifeline=-1, page=-1)
        weights = ServerWeights(live.client, MODEL, VOCABULARY, LABELS)
        self.ways = live.run(give_base(Child(spec, NullProgress(), slots), context, self.engine, live.client, weights))

    def close(self) -> None:
        self.live.run(self.engine.close())
        self.publisher.close()

    @torch.no_grad()
    def move(self) -> None:
        for tensor in self.trainer.tensors.values():
            tensor.add_(torch.randn_like(tensor) * 0.1)

    def offer(self) -> WeightsOffer:
        self.live.version += 1
        return WeightsOffer(slot=0, manifest=self.publisher.pack(0, 1, self.live.version))

    async def take(self, offer: WeightsOffer) -> str:
        await self.ways.bring(offer)
        return (await self.ways.adopt(offer)).checksum

    def sync(self) -> str:
        """The adapter as it is now, as a version; its name."""
        offer = self.offer()
        assert self.live.run(self.take(offer)) == offer.manifest.checksum
        return adapter_name((1, offer.manifest.version))

    def peft(self, tokens: list[int], prompt: list[int] | None = None) -> list[float]:
        """Logprobs of the tokens after the prompt, by the merged weights in transformers."""
        prompt = PROMPT if prompt is None else prompt
        plain = small_model("qwen3", tie_word_embeddings=True).eval()
        plain.load_state_dict(self.trainer.merged())
        plain.set_attn_implementation("eager")
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    """A tied head."""
    with live_server(small_model("qwen3", tie_word_embeddings=True), room=ROOM) as live:
        yield live


@pytest.mark.parametrize(
    "options",
    [{}, {"rank": 1, "rslora": True}, {"targets": ["q_proj", "down_proj"]}, {"transport": "collective"}],
    ids=["all linear", "rank 1, rslora", "two layers", "messages"],
)
def test_every_version_is_what_peft_computes_beside_those_before(live: LiveServer, tmp_path: Path, options: dict) -> None:
    check_versions(live, Adapters(live, tmp_path / "adapters", InterruptPolicy("drain"), **options))


def check_versions(live: LiveServer, adapters: Adapters) -> None:
    """The first one is the base itself; perturbed and reverted, the tokens and logprobs are those of before."""
    try:
        base = live.greedy(PROMPT)
        said = []
        for round_ in range(PLACES + 2):
            if round_ == 3:
                saved = {name: tensor.clone() for name, tensor in adapters.trainer.tensors.items()}
            name = adapters.sync()
            tokens, logprobs = live.greedy(PROMPT, model=name)
            assert np.allclose(logprobs, adapters.peft(tokens), atol=2e-4)
            said.append((name, tokens, logprobs))
            if round_ == 0:
                assert (tokens, logprobs) == base
            else:
                assert (tokens, logprobs) != said[-2][1:]
                assert live.greedy(PROMPT, model=said[-2][0]) == said[-2][1:], "the one before is as it was"
            adapters.move()
        for name, tensor in saved.items():
            adapters.trainer.tensors[name].copy_(tensor)
        assert live.greedy(PROMPT, model=adapters.sync()) == said[3][1:]
        assert len((live.run(live.client.get("/v1/models")))["data"]) == 1 + PLACES
    finally:
        adapters.close()


def _request(group: int, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        group_id=group, sample=0, attempt=0, turn=0, purpose=Purpose.TRAIN, token_ids=np.array(PROMPT, np.int32), prompt_length=len(PROMPT),
        num_sampled=0, sampling=Sampling(max_new_tokens=tokens), stop_token_ids=(),
    )  # fmt: skip


@pytest.mark.parametrize("interrupt", ["in_flight", "drain"])
def test_each_token_is_of_the_adapter_that_its_version_names(live: LiveServer, tmp_path: Path, interrupt: str) -> None:
    """Versions come while sequences run; each token's logprob is what peft says of it with the adapter of its version."""
    adapters = Adapters(live, tmp_path / "adapters", InterruptPolicy(interrupt, "recompute" if interrupt == "in_flight" else "keep"))
    adapters.move()
    copies: dict[int, dict[str, torch.Tensor]] = {}

    def next_offer() -> WeightsOffer:
        adapters.move()
        offer = adapters.offer()
        copies[offer.manifest.version] = {name: tensor.clone() for name, tensor in adapters.trainer.tensors.items()}
        return offer

    async def scenario() -> list[Generation]:
        engine, router = adapters.engine, FrameRouter()
        await adapters.take(next_offer())
        opened = []
        for group in range(3):
            into = Generation(len(PROMPT))
            opened.append((into, router.open(engine.submit(_request(group, 100)), into)))
        for wanted in (10, 30):
            while len(opened[0][0].token_ids) < wanted:
                await _frames(engine, router)
            await adapters.take(next_offer())
        while not all(ended.done() for _, ended in opened):
            await _frames(engine, router)
        return [into for into, _ in opened]

    try:
        for into in live.run(scenario()):
            assert into.stop_reason is StopReason.LENGTH and len(into.token_ids) == 100
            assert len(into.spans) == (3 if interrupt == "in_flight" else 1), "or the server was too fast for this test"
            for span in into.spans:
                for name, tensor in copies[span.version].items():
                    adapters.trainer.tensors[name].copy_(tensor)
                first, last = span.start - len(PROMPT), span.end - len(PROMPT)
                expected = adapters.peft(into.token_ids[first:last], PROMPT + into.token_ids[:first])
                assert np.allclose(into.logprobs[first:last], expected, atol=2e-4)
    finally:
        adapters.close()


async def _frames(engine: AdapterEngine, router: FrameRouter) -> None:
    async with asyncio.timeout(60.0):
        await engine.wake.wait()
    engine.wake.clear()
    for frame in engine.take_frames():
        router.feed(frame)


def test_what_is_refused_leaves_the_server_what_it_has(live: LiveServer, tmp_path: Path) -> None:
    larger = Adapters(live, tmp_path / "larger", InterruptPolicy("drain"), rank=9)  # there is room for 8
    adapters = Adapters(live, tmp_path / "adapters", InterruptPolicy("drain"))
    try:
        adapters.move()
        before = live.greedy(PROMPT, model=(name := adapters.sync()))
        with pytest.raises(WeightSyncError, match=r"the server refuses adapter .*rank"):
            larger.sync()
    finally:
        adapters.close()
        larger.close()
    assert live.greedy(PROMPT, model=name) == before
