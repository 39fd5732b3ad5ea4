"""The two processes of `weight_sync.py`: what moves the weights is shipped code, what makes and uses them is only as much as it needs.

    trainer   no optimizer: every weight changes its sign per version, or a share of them a bit, and packing starts with the caches in the
              state that an optimizer step leaves
    engine    the embedded engine in its own loop, without work until version `decode_from`, then with a full batch of endless sequences;
              it notes what every tick of decoding took

Started by `processes.spawn`, as a role of a run is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from weight_sync_pair import weight_directory

from slipstream.config.settings import WeightSyncSettings
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.embedded.loop import run_engine
from slipstream.launch.processes import Child, child_setup
from slipstream.launch.role import controller_socket
from slipstream.launch.wire import RemoteController, connect
from slipstream.protocols import WeightsOffer
from slipstream.types import Frame, GenerateRequest, Purpose, Sampling, StepReport
from slipstream.weight_sync.collective import CollectivePublisher, CollectiveWeights
from slipstream.weight_sync.delta import DeltaPublisher, memory_delta_weights
from slipstream.weight_sync.delta_collective import CollectiveDeltaWeights
from slipstream.weight_sync.delta_files import FileDeltaPublisher, file_delta_weights
from slipstream.weight_sync.ends import Publisher, Reader
from slipstream.weight_sync.files import FilePublisher, FileWeights
from slipstream.weight_sync.shared_memory import MemoryPublisher, MemoryWeights
from slipstream.weight_sync.slots import slots_for

LAYOUTS = {
    "135M": {  # SmolLM2-135M
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1B": {  # Llama-3.2-1B's layers, 15 of its 16, and a quarter of its vocabulary: 0.98e9, four copies of which fit into 8 GiB
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 15,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
BATCH = 32
PROMPT_TOKENS = 52
NEW_TOKENS = 128  # then the batch starts anew
NUM_SLOTS = slots_for(1)
BUCKET_BYTES = WeightSyncSettings().bucket_mib << 20


class Case(msgspec.Struct, frozen=True):
    """What is measured, as the roles are told it."""

    layout: str
    dtype: str
    transport: str
    payload: str
    share: float
    decode_from: int  # version


@dataclass(frozen=True, slots=True)
class Transport:
    """How weights travel: who writes them on the trainer's side, who applies an offer on the engine's."""

    publisher: Callable[[PreTrainedModel, Child], Publisher]
    weights: Callable[[EmbeddedEngine, Child], Reader]


def collective_publisher(model: PreTrainedModel, child: Child, packer: type[MemoryPublisher | DeltaPublisher]) -> CollectivePublisher:
    return CollectivePublisher(model, child.spec.socket_folder, NUM_SLOTS, model.dtype, packer=packer, bucket_bytes=BUCKET_BYTES)


def collective_weights(engine: EmbeddedEngine, child: Child) -> CollectiveWeights:
    return CollectiveWeights(engine.model, child.spec.socket_folder, child.spec.role, bucket_bytes=BUCKET_BYTES)


WAYS = {  # transport, payload
    ("shared memory", "full"): Transport(
        lambda model, child: MemoryPublisher(model, child.slots, model.dtype),
        lambda engine, child: MemoryWeights(engine.model, child.slots),
    ),
    ("shared memory", "delta"): Transport(
        lambda model, child: DeltaPublisher(model, child.slots, model.dtype),
        lambda engine, child: memory_delta_weights(engine.model, child.slots),
    ),
    ("files", "delta"): Transport(
        lambda model, child: FileDeltaPublisher(model, weight_directory(child.spec.run_folder), NUM_SLOTS, model.dtype),
        lambda engine, child: file_delta_weights(engine.model, weight_directory(child.spec.run_folder)),
    ),
    ("collective", "full"): Transport(
        lambda model, child: collective_publisher(model, child, MemoryPublisher),
        collective_weights,
    ),
    ("collective", "delta"): Transport(
        lambda model, child: collective_publisher(model, child, DeltaPublisher),
        lambda engine, child: CollectiveDeltaWeights(engine.model, collective_weights(engine, child)),
    ),
    ("files", "full"): Transport(
        lambda model, child: FilePublisher(model, weight_directory(child.spec.run_folder), NUM_SLOTS, model.dtype),
        lambda engine, child: FileWeights(engine.model, weight_directory(child.spec.run_folder)),
    ),
}


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


# ---- trainer ---------------------------------------------------------------------------------------------------------------------


async def run_trainer(child: Child, controller: RemoteController, case: Case) -> None:
    """`trainer.loop.run_trainer` with an optimizer that turns signs."""
    model = random_model(case.layout, case.dtype)
    publisher = WAYS[case.transport, case.payload].publisher(model, child)
    _, incarnation, _ = await controller.checkpoint_context()
    version = 0
    await _publish(controller, publisher, incarnation, version)
    while await controller.get_batch(version) is not None:
        change(model, case.share, version)
        version += 1
        checksum = await _publish(controller, publisher, incarnation, version)
        await controller.finish_step(StepReport(step=version - 1, version=version, checksum=checksum))


@torch.no_grad()
def change(model: PreTrainedModel, share: float, version: int) -> None:
    """The signs of all weights, or the lowest bits of a share of them, drawn with repetition."""
    for parameter in model.parameters():
        if share == 1:
            parameter.neg_()
            continue
        bits = parameter.view(-1).view(torch.uint8)[:: parameter.itemsize]
        bits[torch.randint(len(bits), (round(share * len(bits)),), generator=torch.Generator().manual_seed(version))] ^= 1


async def _publish(controller: RemoteController, publisher: Publisher, incarnation: int, version: int) -> str:
    slot = await controller.begin_write()
    manifest = publisher.pack(slot, incarnation, version)
    await controller.publish(slot, manifest)
    return manifest.checksum


# ---- engine ----------------------------------------------------------------------------------------------------------------------


class TimedEngine(EmbeddedEngine):
    """Remembers what its last tick took."""

    last_tick_s = 0.0

    def tick(self) -> Frame:
        began = time.perf_counter()
        frame = super().tick()
        self.last_tick_s = time.perf_counter() - began
        return frame


class Watched(Reader):
    """A reader that tells which versions were taken."""

    def __init__(self, reader: Reader, adopted: Callable[[int], None]):
        self._reader, self._adopted, self.fetch = reader, adopted, reader.fetch

    def __call__(self, offer: WeightsOffer) -> str:
        checksum = self._reader(offer)
        self.refused = self._reader.refused
        self._adopted(offer.manifest.version)
        return checksum


async def run_engine_role(child: Child, controller: RemoteController, case: Case) -> None:
    model = random_model(case.layout, case.dtype).requires_grad_(False)
    engine = TimedEngine(model, slots=BATCH, max_context=PROMPT_TOKENS + NEW_TOKENS)
    wake = asyncio.Event()

    def decode() -> None:
        for sample in range(BATCH):
            engine.submit(decode_request(sample, NEW_TOKENS))
        wake.set()

    def adopted(version: int) -> None:
        if version == case.decode_from:
            asyncio.get_running_loop().call_soon(decode)  # not within the time of this sync

    async def send_frame(frame: Frame) -> None:
        if len(frame.handles) == BATCH and not frame.num_prefill_tokens:
            await controller.note(str(engine.last_tick_s))
        if not engine.has_work():
            decode()

    weights = Watched(WAYS[case.transport, case.payload].weights(engine, child), adopted)
    await run_engine(engine, controller, weights, send_frame, wake, child.progress, weights.fetch)


def decode_request(sample: int, new_tokens: int) -> GenerateRequest:
    """One of a batch that decodes while weights come: a prompt of random tokens, and no token that ends it."""
    ids = np.random.default_rng(sample).integers(3, 1000, PROMPT_TOKENS).astype(np.int32)
    return GenerateRequest(
        group_id=0,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=Purpose.TRAIN,
        token_ids=ids,
        prompt_length=len(ids),
        num_sampled=0,
        sampling=Sampling(max_new_tokens=new_tokens),
        stop_token_ids=(),
    )


ROLES = {"trainer": run_trainer, "engine": run_engine_role}


async def run_role(child: Child) -> None:
    controller = await connect(controller_socket(child.spec.socket_folder), child.spec.role)
    try:
        await ROLES[child.spec.role](child, controller, msgspec.convert(child.spec.options, Case, strict=False))
    finally:
        await controller.close()


if __name__ == "__main__":
    asyncio.run(run_role(child_setup()))
