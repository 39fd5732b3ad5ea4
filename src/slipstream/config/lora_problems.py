"""What does not go together in `[lora]` and with it, and why. No torch; what the model itself has is judged when it is there."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from slipstream.config.problem import Problem
from slipstream.config.settings import Config, LoraSettings


def lora_problems(config: Config) -> Iterator[Problem]:
    """Everything about `[lora]`, what it lies on and `weight_sync.payload`; keys are whole, as `lora.rank`."""
    lora, payload, quantize = config.lora, config.weight_sync.payload, config.model.quantize
    if not lora.on:
        yield from _without_rank(lora)
        if quantize is not None:
            reason = "rounded weights cannot be trained, an adapter beside them can"
            yield ("model.quantize", "lora.rank"), f'quantize = "{quantize}" without an adapter: {reason}; set lora.rank, or leave it out'
        if payload == "adapter":
            yield ("weight_sync.payload", "lora.rank"), 'payload = "adapter" without an adapter; set lora.rank, or use payload = "full"'
        return
    if find_spec("peft") is None:
        yield ("lora.rank",), f"rank = {lora.rank} needs peft, which is not installed: use pip install 'slipstream[lora]'"
    if quantize is not None and find_spec("bitsandbytes") is None:
        remedy = "use pip install 'slipstream[qlora]', or leave it out: the adapter then lies on the weights as they are stored"
        yield ("model.quantize",), f'quantize = "{quantize}" needs bitsandbytes, which is not installed: {remedy}'
    if lora.dropout > 0:
        reason = "rollouts of a group share their packed prompt, and fresh weights must give the sampler's very logprobs"
        yield ("lora.dropout",), f"dropout = {lora.dropout:g}: the trainer has all dropout off, because {reason}; leave it out"
    if lora.targets == []:
        yield ("lora.targets",), 'targets = [] adapts nothing; name linear layers, or use "all-linear"'
    if payload == "delta":
        reason = "the adapter alone is smaller than what changes in merged weights"
        yield ("weight_sync.payload", "lora.rank"), f'payload = "delta" with lora.rank: {reason}; leave payload out'
    if lora.dora and payload == "adapter":
        reason = "an engine would need the norms of all merged weights for every token"
        yield ("weight_sync.payload", "lora.dora"), f'payload = "adapter" with dora: {reason}; use payload = "full" or leave it out'


def _without_rank(lora: LoraSettings) -> Iterator[Problem]:
    for name, field in LoraSettings.model_fields.items():
        if (value := getattr(lora, name)) != field.get_default(call_default_factory=True):
            given = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
            yield (f"lora.{name}", "lora.rank"), f"{name} = {given} without an adapter; set lora.rank, or leave {name} out"


def lora_advice(config: Config) -> Iterator[str]:
    """What is allowed and probably not meant, one sentence each."""
    if config.lora.on and config.trainer.learning_rate <= 2e-5:
        yield (
            f"trainer.learning_rate = {config.trainer.learning_rate:g} is one for whole weights; an adapter usually wants ten times as much"
        )
