"""Evaluation of a pinned version: the same rollouts and scorers, beside training."""

from __future__ import annotations

import asyncio
import time

from slipstream.config.settings import Config
from slipstream.errors import DeadlineExceeded
from slipstream.protocols import EngineClient
from slipstream.rollout.group import GroupRunner
from slipstream.types import Draw, EvalItem, EvalResult, EvalTask, Group, Purpose, Sampling


async def run_evaluation(task: EvalTask, engine: EngineClient, groups: GroupRunner, config: Config) -> EvalResult:
    """Pin the engine's live weights, sample and score every row, unpin whatever happens.

    Samples that failed, or that `evaluation.timeout_s` cut off, have reward None (in a deterministic run the deadline raises
    DeadlineExceeded). As many sequences are asked for at a time as the engine has slots; that training goes on beside them is its part.
    """
    started = time.monotonic()
    incarnation, version, checksum = await engine.pin()
    engine_s = 0.0
    try:
        items = await _all_items(task, groups, config)
    finally:
        engine_s = await engine.unpin()  # answered between two ticks; the connection has the deadline, and names the engine
    return EvalResult(
        number=task.number,
        incarnation=incarnation,
        version=version,
        checksum=checksum,
        items=items,
        duration_s=time.monotonic() - started,
        engine_s=engine_s,
    )


async def _all_items(task: EvalTask, groups: GroupRunner, config: Config) -> tuple[EvalItem, ...]:
    turns = asyncio.Semaphore(max(1, config.engine.slots // task.samples))
    items: dict[int, EvalItem] = {}
    sampling = Sampling(temperature=task.temperature, max_new_tokens=config.rollout.max_new_tokens, stop_strings=tuple(config.rollout.stop))

    async def one(row: int) -> None:
        async with turns:
            items[row] = await _item(task, row, sampling, groups)

    deadline = asyncio.timeout(config.evaluation.timeout_s)
    try:
        async with deadline, asyncio.TaskGroup() as tasks:
            for row in range(len(task.rows)):
                tasks.create_task(one(row), name=f"evaluation {task.number} row {row}")
    except TimeoutError as error:
        if not deadline.expired():
            raise
        if config.run.deterministic:
            took = f"evaluation {task.number} took longer than {config.evaluation.timeout_s:g} s"
            raise DeadlineExceeded(f"{took}; a deadline that fires ends a deterministic run") from error
    nothing = {"rewards": (None,) * task.samples, "completions": ("",) * task.samples, "num_tokens": (0,) * task.samples}
    return tuple(items.get(row) or EvalItem(row=row, **nothing) for row in range(len(task.rows)))


async def _item(task: EvalTask, row: int, sampling: Sampling, groups: GroupRunner) -> EvalItem:
    group = Group(
        group_id=row,
        attempt=task.number,
        draw=Draw(number=row, row=row, epoch=0, dataset="eval"),
        row=task.rows[row],
        purpose=Purpose.EVAL,
    )
    group = await groups.run(group, task.samples, sampling)
    return EvalItem(
        row=row,
        rewards=tuple(rollout.reward if rollout.status.ok else None for rollout in group.rollouts),
        completions=tuple(rollout.completion for rollout in group.rollouts),
        num_tokens=tuple(rollout.num_sampled_tokens for rollout in group.rollouts),
    )
