"""A model, an engine and the scorers of a run in one process, without training: what rollout, eval and generate work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream.cli.weights import put_weights
from slipstream.config.settings import Config
from slipstream.engines.embedded.client import InProcessClient
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.environments import make_environment
from slipstream.launch.assemble import build_engine
from slipstream.launch.assemble_worker import context_limit
from slipstream.models.loading import ModelInfo, load_tokenizer
from slipstream.protocols import EngineClient
from slipstream.rollout.external import FreeCalls
from slipstream.rollout.group import GroupRunner
from slipstream.rollout.rendering import Renderer
from slipstream.rollout.rollout import RolloutJob, RolloutRunner
from slipstream.scoring.score import close_scorers, start_scorers
from slipstream.scoring.scorers import make_scorers
from slipstream.types import Draw, Group, Purpose, Rollout, Sampling


class Session:
    """Samples and scores groups. Made by `open_session`."""

    def __init__(self, info: ModelInfo, rollouts: RolloutRunner, groups: GroupRunner, slots: int):
        self.info, self._rollouts, self._groups, self._slots = info, rollouts, groups, slots

    async def run(
        self, rows: Sequence[dict[str, Any]], num_samples: int, sampling: Sampling, on_group: Callable[[Group], None] = lambda _: None
    ) -> list[Group]:
        """One group of `num_samples` rollouts per row, scored, in the order of the rows; `on_group` hears of each as it ends.

        The engine's slots are kept full. A rollout that fails is in its group's record; what raises is not a rollout's fault.
        """
        turns = asyncio.Semaphore(max(1, -(-self._slots // num_samples) + 1))

        async def one(index: int) -> Group:
            draw = Draw(number=index, row=index, epoch=0, dataset="")
            group = Group(group_id=index, draw=draw, row=rows[index], purpose=Purpose.EVAL)
            async with turns:
                group = await self._groups.run(group, num_samples, sampling)
            on_group(group)
            return group

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(index), name=f"row {index}") for index in range(len(rows))]
        return [task.result() for task in running]

    async def complete(self, rows: Sequence[dict[str, Any]], num_samples: int, sampling: Sampling) -> list[Rollout]:
        """Rollouts without scores: row by row, `num_samples` of each."""
        jobs = [
            RolloutJob(group_id=index, sample=sample, attempt=0, purpose=Purpose.EVAL, row=row, sampling=sampling)
            for index, row in enumerate(rows)
            for sample in range(num_samples)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._rollouts.run(job), name=f"row {job.group_id} sample {job.sample}") for job in jobs]
        return [task.result() for task in running]


@asynccontextmanager
async def open_session(config: Config, checkpoint: Path | None = None, *, scored: bool = True) -> AsyncIterator[Session]:
    """Load the model (a checkpoint's weights, where one is given), prove it, start the scorers; close all in the end.

    With `engine.type = "openai"` only the tokenizer is. Raises ModelError, CheckpointError, ConfigError (a reward that does not load).
    """
    tokenizer, info = load_tokenizer(config.model)
    async with AsyncExitStack() as held:
        if config.engine.type == "openai":
            renderer = Renderer(tokenizer, context_limit(config, info))
            client: EngineClient = await open_server(config, renderer, info, held)
        else:
            client, max_context = open_engine(config, checkpoint, held)
            renderer = Renderer(tokenizer, max_context)
        runner = RolloutRunner(
            client,
            renderer,
            config,
            FreeCalls(),
            lambda row: make_environment(config, row),
            stop_token_ids=tuple(sorted({*info.stop_token_ids, *renderer.stop_token_ids()})),
            seed=config.run.seed,
            in_words=config.engine.type == "openai",
        )
        scorers = make_scorers(config.reward) if scored else []
        held.push_async_callback(close_scorers, scorers)
        await start_scorers(scorers)
        yield Session(info, runner, GroupRunner(runner, scorers, FreeCalls()), config.engine.slots)


async def open_server(config: Config, renderer: Renderer, info: ModelInfo, held: AsyncExitStack) -> EngineClient:
    """The servers of `engine.urls`."""
    from slipstream.engines.openai import MODEL_KEY, URL_KEY, OpenAIClient
    from slipstream.openai_api import find_model

    engine, tokenizer = config.engine, renderer.tokenizer
    client = OpenAIClient(
        engine.urls,
        await find_model(engine.urls[0], engine.model, URL_KEY, MODEL_KEY),
        slots=engine.slots,
        timeout_s=config.rollout.timeout_s,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        stop_token_id=(renderer.stop_token_ids() or info.stop_token_ids)[0],
    )
    held.push_async_callback(client.close)
    return client


def open_engine(config: Config, checkpoint: Path | None, held: AsyncExitStack) -> tuple[EngineClient, int]:
    """The embedded engine with these weights, ticking in this event loop; and the longest prompt + completion that it takes."""
    torch.set_num_threads(config.engine.threads)
    engine = build_engine(config, evaluates_only=True)
    if checkpoint is not None:
        put_weights(engine.model, checkpoint)
    engine.set_version(0, 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-")), "")
    engine.pin(share=True)  # nothing changes these weights
    wake = asyncio.Event()
    client = InProcessClient(engine, on_submit=wake.set)
    ticking = asyncio.create_task(tick_for_ever(engine, client, wake), name="engine")

    async def stop() -> None:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)

    held.push_async_callback(stop)
    return client, engine.max_context


async def tick_for_ever(engine: EmbeddedEngine, client: InProcessClient, wake: asyncio.Event) -> None:
    """The engine's loop: tick while there is work, else wait for a request. An error ends it and every request that waits."""
    try:
        while True:
            if engine.has_work():
                client.feed(engine.tick())
                await asyncio.sleep(0)  # let the rollouts take their tokens and ask for more
            else:
                wake.clear()
                await wake.wait()  # nothing is owed here: the session's own work submits requests, or ends this task
    except Exception as error:
        client.fail(error)
