"""Perturb, sync, revert, sync: over every transport and payload, chosen as a run chooses them, greedy output comes back to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, prompt, request, run, tiny_model

from slipstream.config.settings import Config
from slipstream.launch.assemble_weights import build_publisher, build_reader
from slipstream.launch.context import RunContext
from slipstream.models.attention import attach
from slipstream.models.lora import Adapter
from slipstream.models.memory import num_weight_slots
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import Purpose, decode, encode
from slipstream.weight_sync.memory import weight_slots
from slipstream.weight_sync.packing import checksum

PAYLOADS = {  # -> the tables that ask for it
    "full": {},
    "delta": {"weight_sync": {"payload": "delta"}},
    "adapter": {"lora": {"rank": 2}},
    "merged": {"lora": {"rank": 2}, "weight_sync": {"payload": "full"}},
}


def context_of(payload: str, transport: str, folder: Path) -> RunContext:
    tables = PAYLOADS[payload]
    config = Config.model_validate({**tables, "weight_sync": {"transport": transport, **tables.get("weight_sync", {})}})
    context = RunContext(config, folder, folder, incarnation=1, start_step=0, run_id="run-a", sockets=str(folder))
    if context.weights is not None:
        context.weights.prepare()
    return context


def adapted(model, config: Config, seed: int) -> Adapter:
    adapter = Adapter.of(model, config.lora, config.model)
    adapter.perturb(seed)
    return adapter


@torch.no_grad()
def perturb(tensors: dict[str, torch.Tensor]) -> None:
    """The signs of a twentieth of the rows: few enough that they travel as what changed."""
    for tensor in tensors.values():
        tensor[::20] *= -1


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("transport", ["shared_memory", "files", "collective"])
def test_perturb_and_revert_give_the_same_greedy_output(transport: str, payload: str, tmp_path: Path) -> None:
    context = context_of(payload, transport, tmp_path)
    ours, theirs = tiny_model(seed=0), tiny_model(seed=0 if payload == "adapter" else 1)  # an adapter's base does not travel
    for model in (ours, theirs):
        attach(model)
    adapter = adapted(ours, context.config, seed=0) if "lora" in PAYLOADS[payload] else None
    engine = make_engine(theirs.requires_grad_(False), adapter=adapted(theirs, context.config, seed=1) if payload == "adapter" else None)
    trained = adapter.tensors if adapter is not None else dict(ours.state_dict())
    start, seen = {name: tensor.clone() for name, tensor in trained.items()}, []
    with weight_slots(transport, num_weight_slots(context.config)) as slots:
        publisher = build_publisher(context, ours, adapter, slots)
        weights = build_reader(context, engine.weights, engine.engine_id, slots)
        for version in range(3):
            if version == 1:
                perturb(trained)
            else:
                for name, tensor in trained.items():
                    tensor.copy_(start[name])
            manifest = decode(encode(publisher.pack(version, 1, version)), Manifest)
            assert weights(WeightsOffer(slot=version, manifest=manifest)) == manifest.checksum == checksum(engine.weights)
            assert weights.refused == "" and (len(manifest.deltas) == version if payload == "delta" else not manifest.deltas)
            engine.set_version(1, version, manifest.checksum)
            engine.pin()
            (out,) = run(engine, request(version, 0, prompt(9), new=16, temperature=0.0, purpose=Purpose.EVAL))
            engine.unpin()
            seen.append((out.token_ids, out.logprobs))
        weights.close()
        publisher.close()
    assert seen[0] == seen[2] != seen[1] and seen[0][0] != seen[1][0]
