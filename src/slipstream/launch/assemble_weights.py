"""Builds the two ends of weight sync from the settings: what sends the trainer's weights, and what an engine reads them with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from slipstream.config.settings import MAX_ENGINES
from slipstream.launch.context import RunContext
from slipstream.models.lora import Adapter
from slipstream.models.memory import num_weight_slots
from slipstream.weight_sync.collective import CollectivePublisher, CollectiveWeights
from slipstream.weight_sync.delta import DeltaPublisher, memory_delta_weights
from slipstream.weight_sync.delta_collective import CollectiveDeltaWeights
from slipstream.weight_sync.delta_files import FileDeltaPublisher, file_delta_weights
from slipstream.weight_sync.ends import Publisher, Reader
from slipstream.weight_sync.files import FilePublisher, FileWeights
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source
from slipstream.weight_sync.shared_memory import MemoryPublisher, MemoryWeights
from slipstream.weight_sync.slots import slots_for


def build_publisher(context: RunContext, model: PreTrainedModel, adapter: Adapter | None, slots: Sequence[MemoryFile]) -> Publisher:
    """What packs the trainer's weights, or those of its adapter, for the engines."""
    config = context.config
    source: Source = model
    dtype = getattr(torch, config.model.dtype)
    if adapter is not None:  # in the dtypes that it computes with: float32 products, merged weights as the base
        source, dtype = adapter.sent if config.payload == "adapter" else adapter.merged, None
    if context.weights is not None:
        files = FileDeltaPublisher if config.payload == "delta" else FilePublisher
        return files(source, context.weights, num_weight_slots(config), dtype)
    packer = DeltaPublisher if config.payload == "delta" else MemoryPublisher
    if config.weight_sync.transport == "collective":
        num_slots = max(num_weight_slots(config), slots_for(MAX_ENGINES))  # engines may be added
        bucket_bytes = config.weight_sync.bucket_mib << 20
        return CollectivePublisher(source, context.sockets, num_slots, dtype, packer=packer, bucket_bytes=bucket_bytes)
    return packer(source, slots, dtype)


def build_reader(context: RunContext, own: Source, engine_id: str, slots: Sequence[MemoryFile]) -> Reader:
    """What applies an offer to `own`, an engine's model or named tensors, and gives the checksum of what that then holds."""
    delta = context.config.payload == "delta"
    if context.weights is not None:
        return file_delta_weights(own, context.weights) if delta else FileWeights(own, context.weights)
    if context.config.weight_sync.transport == "collective":
        bucket_bytes = context.config.weight_sync.bucket_mib << 20
        whole = CollectiveWeights(own, context.sockets, engine_id, bucket_bytes=bucket_bytes)
        return CollectiveDeltaWeights(own, whole) if delta else whole
    return memory_delta_weights(own, slots) if delta else MemoryWeights(own, slots)
