"""Builds each role's parts from the settings: the same for every launcher. Components never import this file.

Nothing is pickled: a role in another process starts from a run folder and a few numbers (`context.RunContext`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from slipstream.config.arithmetic import max_context_tokens
from slipstream.config.settings import Config
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import ModelError
from slipstream.launch import engine_socket
from slipstream.launch.context import RunContext
from slipstream.launch.page import Progress
from slipstream.models.loading import ModelInfo, load_model, load_tokenizer
from slipstream.models.probe import probe
from slipstream.protocols import ControllerAPI, EngineClient, Scorer, WeightsOffer
from slipstream.rollout.external import ExternalCalls
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.checkpoint import load_checkpoint
from slipstream.trainer.trainer import Trainer
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Publisher, WeightSet

ENGINE_ID = "engine-0"


def context_limit(config: Config, info: ModelInfo) -> int:
    """Longest prompt + completion in tokens that engine, renderer and trainer agree on."""
    limit = min(max_context_tokens(config), info.context_tokens)
    if config.engine.max_context is not None and config.engine.max_context > info.context_tokens:
        raise ModelError(f"engine.max_context = {config.engine.max_context}, but {info.name} has {info.context_tokens} positions")
    return limit


def build_trainer(context: RunContext, slots: Sequence[MemoryFile]) -> tuple[Trainer, Publisher]:
    """The trainer at the step that the run goes on from, and what packs its weights into the slots."""
    config = context.config
    torch.manual_seed(config.run.seed)
    model, _, _ = load_model(config.model, device=config.trainer.device)
    trainer = Trainer(config, model)
    if context.start_step:
        load_checkpoint(context.checkpoints / f"step-{context.start_step}", trainer)
    return trainer, Publisher(model, list(slots), getattr(torch, config.model.dtype))


class EngineWeights:
    """Applies an offer to the engine's model: the callable that the engine's loop wants."""

    def __init__(self, engine: EmbeddedEngine, slots: Sequence[MemoryFile]):
        self._weights = WeightSet(engine.model)
        self._slots = slots

    def __call__(self, offer: WeightsOffer) -> str:
        return self._weights.apply(self._slots[offer.slot].map(), offer.manifest)


def build_engine(config: Config) -> EmbeddedEngine:
    """The embedded engine over a model that was proved against plain forwards. Its weights are still to come."""
    model, tokenizer, info = load_model(config.model, device=config.engine.device)
    max_context = context_limit(config, info)
    proof = probe(model, slots=config.engine.slots, max_context=max_context)
    return EmbeddedEngine(
        model.requires_grad_(False),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
        engine_id=ENGINE_ID,
        slots=config.engine.slots,
        max_context=max_context,
        seed=config.run.seed,
        min_rows=proof.min_rows,
    )


async def build_worker(
    context: RunContext,
    controller: ControllerAPI,
    engine: EngineClient,
    scorers: Sequence[Scorer],
    model: tuple[PreTrainedTokenizerBase, ModelInfo],
    *,
    external: ExternalCalls | None = None,
    progress: Progress | None = None,
) -> RolloutWorker:
    """The rollout worker over the model's tokenizer; what people should know of the model is noted."""
    tokenizer, info = model
    worker = RolloutWorker(
        controller,
        engine,
        tokenizer,
        context.config,
        scorers,
        max_context=context_limit(context.config, info),
        external=external,
        progress=progress,
        stop_token_ids=info.stop_token_ids,
    )
    for note in dict.fromkeys((*info.notes, *worker.notes)):
        await controller.note(note)
    return worker


async def run_rollout_worker(
    context: RunContext, controller: ControllerAPI, scorers: Sequence[Scorer], socket_folder: str, progress: Progress
) -> None:
    """Work until stopped, on the engine that the controller names, over its socket."""
    model = load_tokenizer(context.config.model)
    progress.idle()
    engine_id = await controller.next_engine()
    engine = await engine_socket.connect(engine_socket.socket_path(socket_folder, engine_id), peer=engine_id)
    try:
        worker = await build_worker(context, controller, engine, scorers, model, progress=progress)
        try:
            await worker.run()
        finally:
            await worker.close()
    finally:
        await engine.close()
