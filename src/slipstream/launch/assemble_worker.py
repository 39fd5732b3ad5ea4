"""Builds the rollout worker from the settings, over a tokenizer alone: nothing here imports a model's code.

On a machine with few cores that is seconds of a run's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from slipstream.beside import beside
from slipstream.config.arithmetic import max_context_tokens
from slipstream.config.frozen_models import stage_models
from slipstream.config.settings import Config
from slipstream.engines.pool import EnginePool
from slipstream.errors import ModelError
from slipstream.launch import engine_socket, logprob_socket
from slipstream.launch.context import RunContext
from slipstream.models.loading import ModelInfo, load_tokenizer
from slipstream.protocols import ControllerAPI, EngineClient, LogprobClient, Progress, Scorer
from slipstream.rollout.external import ExternalCalls
from slipstream.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


QUEUED_GROUPS = 2  # in an engine's own queue at most: as many as a worker asks for beyond the slots, so that one engine alone gets all


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
    engine_slots: Callable[[], int] | None = None,
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
        engine_slots=engine_slots,
    )
    for note in info.notes:
        await controller.note(note)
    return worker


async def run_rollout_worker(
    context: RunContext, controller: ControllerAPI, scorers: Sequence[Scorer], socket_folder: str, progress: Progress
) -> None:
    """Work until stopped, on the engines that the controller names, over their sockets, and with the logprob stage if the run has one."""
    config = context.config
    model = await beside(load_tokenizer, config.model)  # perhaps a download; the loop may be the controller's, too
    progress.idle()
    async with AsyncExitStack() as held:
        engines = EnginePool(
            controller.next_engines,
            lambda engine_id: engine_socket.connect(engine_socket.socket_path(socket_folder, engine_id), peer=engine_id),
            slots=config.engine.slots,
            ahead=QUEUED_GROUPS * config.rollout.num_samples,
        )
        held.push_async_callback(engines.close)
        logprobs = await logprob_socket.connect(socket_folder, config) if stage_models(config) else None
        if logprobs is not None:
            held.push_async_callback(logprobs.close)
        worker = await build_worker(
            context, controller, engines, scorers, model, logprobs=logprobs, progress=progress, engine_slots=lambda: engines.num_slots
        )
        held.push_async_callback(worker.close)
        engines.on_change = worker.engines_changed

        async def work() -> None:
            await engines.ready()
            await worker.run()

        await _first_to_end(asyncio.create_task(work(), name="work"), asyncio.create_task(engines.follow(), name="follow the engines"))


async def _first_to_end(work: asyncio.Task[None], beside_it: asyncio.Task[None]) -> None:
    """Until the work has ended, or what goes on beside it has failed; the other one is cancelled."""
    try:
        await asyncio.wait({work, beside_it}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in (work, beside_it) if task.done()]
        for task in (work, beside_it):
            task.cancel()
        await asyncio.gather(work, beside_it, return_exceptions=True)
    for task in ended:
        task.result()
