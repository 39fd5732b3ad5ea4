"""Builds the rollout worker from the settings, over a tokenizer alone: nothing here imports a model's code.

On a machine with few cores that is seconds of a run's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from slipstream.beside import beside
from slipstream.config.arithmetic import max_context_tokens
from slipstream.config.frozen_models import stage_models
from slipstream.config.settings import Config
from slipstream.errors import ModelError
from slipstream.launch import engine_socket, logprob_socket
from slipstream.launch.context import RunContext
from slipstream.models.loading import ModelInfo, load_tokenizer
from slipstream.protocols import ControllerAPI, EngineClient, LogprobClient, Progress, Scorer
from slipstream.rollout.external import ExternalCalls
from slipstream.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def context_limit(config: Config, info: ModelInfo) -> int:
    """Longest prompt + completion in tokens that engine, renderer and trainer agree on."""
    limit = min(max_context_tokens(config), info.context_tokens)
    if config.engine.max_context is not None and config.engine.max_context > info.context_tokens:
        raise ModelError(f"engine.max_context = {config.engine.max_context}, but {info.name} has {info.context_tokens} positions")
    return limit


async def build_worker(
    context: RunContext,
    controller: ControllerAPI,
    engine: EngineClient,
    scorers: Sequence[Scorer],
    model: tuple[PreTrainedTokenizerBase, ModelInfo],
    *,
    logprobs: LogprobClient | None = None,
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
        logprobs=logprobs,
        external=external,
        progress=progress,
        stop_token_ids=info.stop_token_ids,
    )
    for note in info.notes:
        await controller.note(note)
    return worker


async def run_rollout_worker(
    context: RunContext, controller: ControllerAPI, scorers: Sequence[Scorer], socket_folder: str, progress: Progress
) -> None:
    """Work until stopped, on the engine that the controller names, over its socket, and with the logprob stage where the run has one."""
    model = await beside(load_tokenizer, context.config.model)  # perhaps a download; the loop may be the controller's, too
    progress.idle()
    engine_id = await controller.next_engine()
    async with AsyncExitStack() as held:
        engine = await engine_socket.connect(engine_socket.socket_path(socket_folder, engine_id), peer=engine_id)
        held.push_async_callback(engine.close)
        logprobs = await logprob_socket.connect(socket_folder, context.config) if stage_models(context.config) else None
        if logprobs is not None:
            held.push_async_callback(logprobs.close)
        worker = await build_worker(context, controller, engine, scorers, model, logprobs=logprobs, progress=progress)
        held.push_async_callback(worker.close)
        await worker.run()
