"""Gives a vLLM server what adapters need: room, the base that they lie on, and the way for versions. `assemble_vllm.py` uses it.

The base travels as merged weights do, once, before anything is sampled: read from the model's files as the trainer reads it, and proved by
the same hash. So each adapter's manifest, which names its base by checksum, is held against what the server received.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.beside import beside
from slipstream.config.arithmetic import adapter_places
from slipstream.config.settings import Config
from slipstream.engines.vllm.adapter_engine import AdapterEngine
from slipstream.engines.vllm.adapter_files import AdapterFiles
from slipstream.engines.vllm.adapters import ServerAdapters
from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.server import AdapterRoom
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.launch.assemble_weights import build_reader
from slipstream.launch.context import RunContext
from slipstream.launch.processes import Child
from slipstream.models.loading import ModelInfo, load_model
from slipstream.models.lora import Adapter, find_targets
from slipstream.protocols import Manifest
from slipstream.weight_sync.files import FilePublisher
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher
from slipstream.weight_sync.weight_directory import WeightDirectory


def adapter_room(config: Config, info: ModelInfo) -> AdapterRoom | None:
    """What a server needs; None for a run that sends whole weights."""
    if config.payload != "adapter":
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(info.source, trust_remote_code=False))
    targets = {name.rpartition(".")[2] for name in find_targets(model, config.lora)}
    return AdapterRoom(adapter_places(config), config.lora.rank, tuple(sorted(targets)))


async def give_base(child: Child, context: RunContext, engine: AdapterEngine, client: Client, weights: ServerWeights) -> ServerAdapters:
    """Put the base into the server; the way for adapters. WeightSyncError where the server refuses it."""
    folder = _own_folder(child, context)
    adapter = await beside(_read_adapter, context.config)
    files = AdapterFiles(adapter, folder, lambda own: build_reader(context, own, engine.engine_id, child.slots))
    adapters = ServerAdapters(engine, client, weights, files)
    await adapters.clear()
    with _packed(adapter.base, context, folder) as (path, manifest):
        assert manifest.checksum == adapter.base_checksum, "the same tensors in the same layout"
        await weights.update(path, manifest, recompute=True, label=engine.labels.base)
    return adapters


def _read_adapter(config: Config) -> Adapter:
    model, _, _ = load_model(config.model, device="cpu")
    return Adapter.of(model, config.lora, config.model)


def _own_folder(child: Child, context: RunContext) -> Path:
    """Empty: beside the files that weights travel as; or private, on this machine."""
    engine_id, files = child.spec.role, context.weights
    folder = Path(child.spec.socket_folder) / f"{engine_id}.adapters" if files is None else files.of_engine(engine_id)
    shutil.rmtree(folder, ignore_errors=True)  # of this engine's last process
    folder.mkdir()
    return folder


@contextmanager
def _packed(base: Mapping[str, torch.Tensor], context: RunContext, folder: Path) -> Iterator[tuple[str, Manifest]]:
    """Whole weights as the server may open them, for the time that it takes: a memory file, or one in `folder`."""
    if context.weights is None:
        memory = MemoryFile.create("base")
        try:
            yield f"/proc/{os.getpid()}/fd/{memory.fileno()}", MemoryPublisher(base, [memory]).pack(0, context.incarnation, 0)
        finally:
            memory.close()
    else:
        directory = WeightDirectory(folder, context.run_id)
        manifest = FilePublisher(base, directory, 1).pack(0, context.incarnation, 0)
        yield str(directory.file(context.incarnation, 0).absolute()), manifest
        directory.clear()
