"""Builds engine and trainer from the settings: the same for every launcher. Components never import this file.

Nothing is pickled: a role in another process starts from a run folder and a few numbers (`context.RunContext`).
The rollout worker is built in `assemble_worker.py`, which needs no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.config.frozen_models import stage_models, trainer_teacher
from slipstream.config.settings import Config
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.launch.assemble_weights import build_publisher
from slipstream.launch.assemble_worker import context_limit
from slipstream.launch.context import RunContext
from slipstream.logprobs.loading import load_frozen_model, load_stage
from slipstream.logprobs.stage import LogprobStage
from slipstream.models.loading import ModelInfo, load_model
from slipstream.models.lora import Adapter
from slipstream.models.probe import probe
from slipstream.models.routing import kept_routers
from slipstream.trainer.checkpoint import load_checkpoint
from slipstream.trainer.probe import ProbedPublisher
from slipstream.trainer.trainer import Trainer
from slipstream.weight_sync.ends import Publisher
from slipstream.weight_sync.memory import MemoryFile

ENGINE_ID = "engine-0"  # of the only one
Load = Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelInfo]]  # `load_model`, or what reads a model once for several


def build_trainer(context: RunContext, slots: Sequence[MemoryFile], load: Load = load_model) -> tuple[Trainer, Publisher]:
    """The trainer at the step that the run goes on from, and what sends its weights. `slots`: see `memory.weight_slots`."""
    config = context.config
    model, _, _ = load(config.model, device=config.trainer.device, keep_codes=True)
    teacher = trainer_teacher(config)
    torch.manual_seed(config.run.seed)  # a new adapter is drawn, the same whatever was loaded before
    adapter = Adapter.of(model, config.lora, config.model) if config.lora.on else None
    trainer = Trainer(config, model, None if teacher is None else load_frozen_model(teacher, config), adapter)
    if context.start_step:
        load_checkpoint(context.checkpoints / f"step-{context.start_step}", trainer)
    publisher = build_publisher(context, model, adapter, slots)
    return trainer, publisher if config.engine.type == "embedded" else ProbedPublisher(publisher, model)


def build_logprobs(config: Config) -> LogprobStage | None:
    """The logprob stage over its frozen models; None for a run that asks for none."""
    return load_stage(config) if stage_models(config) else None


def build_engine(config: Config, engine_id: str = ENGINE_ID, *, evaluates_only: bool = False, load: Load = load_model) -> EmbeddedEngine:
    """The embedded engine over a model that was proved against plain forwards. Its weights are still to come."""
    model, tokenizer, info = load(config.model, device=config.engine.device)
    max_context = context_limit(config, info)
    adapter = None
    if config.payload == "adapter" and not evaluates_only:
        adapter = Adapter.of(model, config.lora, config.model)
        adapter.perturb()  # for the proof; the first version overwrites it
    proof = probe(model, slots=config.engine.slots, max_context=max_context)
    for note in proof.notes:
        print(f"note: {note}", file=sys.stderr)  # of an engine process: log/<its id>.log
    return EmbeddedEngine(
        model.requires_grad_(False),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        engine_id=engine_id,
        slots=config.engine.slots,
        max_context=max_context,
        seed=config.run.seed,
        min_rows=proof.min_rows,
        policy=InterruptPolicy.of(config.rollout),
        saved_states=config.engine.saved_states,
        saved_bytes=config.engine.saved_mib << 20,
        routers=None if evaluates_only else kept_routers(model, config.rollout.keep_routing),
        adapter=adapter,
    )
