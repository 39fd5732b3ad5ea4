"""The two processes of `weight_sync.py`: what moves the weights is shipped code, what makes and uses them is only as much as it needs.

    trainer    no optimizer: every weight changes its sign per version, or a share of them a bit, and packing starts with the caches in
               the state that an optimizer step leaves
    engine-0   the embedded engine in its own loop, served to a rollout worker

Started by `processes.spawn`, as a role of a run is. An engine that is a vLLM server has the shipped role instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from weight_sync_decoding import BATCH, NEW_TOKENS, PROMPT_TOKENS

from slipstream.config.settings import Config
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.embedded.loop import run_engine
from slipstream.launch.assemble_weights import build_publisher, build_reader
from slipstream.launch.engine_socket import serve, socket_path
from slipstream.launch.processes import Child, child_setup
from slipstream.launch.role import context_of, controller_socket
from slipstream.launch.wire import RemoteController, connect
from slipstream.models.loading import load_model
from slipstream.models.lora import Adapter
from slipstream.trainer.probe import ProbedPublisher
from slipstream.types import StepReport
from slipstream.weight_sync.ends import Publisher

LAYOUTS = {
    "135M": {  # SmolLM2-135M
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1B": {  # Llama-3.2-1B's layers, 15 of its 16, and a quarter of its vocabulary: 0.98e9
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 15,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


class Case(msgspec.Struct, frozen=True):
    """What the roles are told beside the run's settings."""

    layout: str
    share: float  # of the weights that change per version


def random_model(layout: str, dtype: str) -> PreTrainedModel:
    """A Llama of this layout with tied embeddings; its parameters are one million normal numbers, repeated."""
    config = LlamaConfig(**LAYOUTS[layout], tie_word_embeddings=True, max_position_embeddings=2048)
    config.dtype = getattr(torch, dtype)
    with no_init_weights():
        model = LlamaForCausalLM._from_config(config, dtype=config.dtype)
    model.tie_weights()
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(config.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            for part in parameter.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)])
    return model.eval()


def make_model(config: Config, layout: str) -> tuple[PreTrainedModel, Adapter | None]:
    """What is trained. Where a vLLM server computes with it, it has to make sense: the server's answers are held against the trainer's."""
    vllm = config.engine.type == "vllm"
    model = load_model(config.model, device="cpu")[0] if vllm else random_model(layout, config.model.dtype)
    if not config.lora.on:
        return model, None
    adapter = Adapter.of(model, config.lora, config.model)
    adapter.perturb()
    return model, adapter


# ---- trainer ---------------------------------------------------------------------------------------------------------------------


async def run_trainer(child: Child, controller: RemoteController, case: Case) -> None:
    """`trainer.loop.run_trainer` with an optimizer that turns signs."""
    context = context_of(child)
    model, adapter = make_model(context.config, case.layout)
    publisher = build_publisher(context, model, adapter, child.slots)
    if context.config.engine.type == "vllm":
        publisher = ProbedPublisher(publisher, model)
    version = 0
    await _publish(controller, publisher, context.incarnation, version)
    while await controller.get_batch(version) is not None:
        change(model.parameters() if adapter is None else adapter.tensors.values(), case.share, version)
        version += 1
        checksum = await _publish(controller, publisher, context.incarnation, version)
        await controller.finish_step(StepReport(step=version - 1, version=version, checksum=checksum))


@torch.no_grad()
def change(weights: Iterable[Tensor], share: float, version: int) -> None:
    """The signs of all weights, or the lowest bits of a share of them, drawn with repetition."""
    for tensor in weights:
        if share == 1:
            tensor.neg_()
            continue
        bits = tensor.view(-1).view(torch.uint8)[:: tensor.itemsize]
        bits[torch.randint(len(bits), (round(share * len(bits)),), generator=torch.Generator().manual_seed(version))] ^= 1


async def _publish(controller: RemoteController, publisher: Publisher, incarnation: int, version: int) -> str:
    slot = await controller.begin_write()
    manifest = publisher.pack(slot, incarnation, version)
    await controller.publish(slot, manifest)
    return manifest.checksum


# ---- engine ----------------------------------------------------------------------------------------------------------------------


async def run_engine_role(child: Child, controller: RemoteController, case: Case) -> None:
    """`launch.role.run_engine_role` with a model of this benchmark's own."""
    context = context_of(child)
    model, adapter = make_model(context.config, case.layout)
    engine = EmbeddedEngine(model.requires_grad_(False), slots=BATCH, max_context=PROMPT_TOKENS + NEW_TOKENS, adapter=adapter)
    wake = asyncio.Event()
    server = await serve(engine, socket_path(child.spec.socket_folder, engine.engine_id), wake.set)
    weights = build_reader(context, engine.weights, engine.engine_id, child.slots)
    await run_engine(engine, controller, weights, server.send_frame, wake, child.progress, weights.fetch)


async def run_role(child: Child) -> None:
    controller = await connect(controller_socket(child.spec.socket_folder), child.spec.role)
    play = run_trainer if child.spec.role == "trainer" else run_engine_role
    try:
        await play(child, controller, msgspec.convert(child.spec.options, Case, strict=False))
    finally:
        await controller.close()


if __name__ == "__main__":
    asyncio.run(run_role(child_setup()))
