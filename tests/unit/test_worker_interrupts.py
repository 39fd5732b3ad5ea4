"""The rollout worker over a socket to a real engine: updates, dropped groups and a stop in random order, under every interrupt.

Nothing stays behind in engine, server, client or worker, and what was recorded of a rollout is what its record says.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_harness import make_engine, tiny_model
from rollout_fakes import CharTokenizer, FakeController, assignment, config

from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.launch import engine_socket
from slipstream.launch.framing import private_directory
from slipstream.protocols import EnvironmentReply, Message
from slipstream.rollout.worker import RolloutWorker
from slipstream.scoring.scorers import make_scorers
from slipstream.types import Rollout, merge_chunks

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = [
    ("in_flight", "keep", None),
    ("in_flight", "recompute", None),
    ("abort_resume", "keep", None),
    ("abort_resume", "keep", 1),
    ("abort_resume", "recompute", None),
    ("abort_retry", "keep", None),
    ("abort_retry", "keep", 1),
    ("drain", "keep", None),
]


class ThreeTurns:
    """An environment that counts those that are open."""

    num_open = 0

    def __init__(self) -> None:
        self.turns = 0

    async def start(self) -> tuple[Message, ...]:
        ThreeTurns.num_open += 1
        return (Message(role="user", content="hi there you"),)

    async def step(self, message: Message) -> EnvironmentReply:
        self.turns += 1
        await asyncio.sleep(0)
        return EnvironmentReply(done=True) if self.turns == 3 else EnvironmentReply(messages=(Message(role="tool", content="7"),))

    async def close(self) -> None:
        ThreeTurns.num_open -= 1


class Ticking:
    """An engine behind a socket that ticks while it has work; at random ticks new weights (of equal bytes) are on offer."""

    def __init__(self, engine: EmbeddedEngine, server: engine_socket.EngineServer, wake: asyncio.Event, rng: random.Random):
        self.engine, self.server, self._wake, self._rng = engine, server, wake, rng

    async def run(self) -> None:
        offered = False
        while True:
            offered = offered or self._rng.random() < 0.2
            if offered and self.engine.may_adopt():
                offered = False
                self.engine.set_version(1, self.engine.version[1] + 1, "sum")
                for _ in range(self._rng.randrange(16)):  # until the controller has confirmed them
                    await asyncio.sleep(0)
            if self.engine.has_work():
                await self.server.send_frame(self.engine.tick())
                await asyncio.sleep(0)
            else:
                self._wake.clear()
                await self._wake.wait()


@asynccontextmanager
async def ticking(engine: EmbeddedEngine, rng: random.Random) -> AsyncIterator[tuple[Ticking, engine_socket.RemoteEngine]]:
    wake = asyncio.Event()
    with private_directory() as folder:
        path = os.path.join(folder, "engine")
        server = await engine_socket.serve(engine, path, wake.set)
        client = await engine_socket.connect(path)
        ticks = Ticking(engine, server, wake, rng)
        task = asyncio.create_task(ticks.run())
        yield ticks, client
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        await server.close()


async def drop_and_stop(engine: EmbeddedEngine, controller: FakeController, worker: RolloutWorker, num_groups: int) -> None:
    """Let the groups run, drop one now and then, mostly where one is being interrupted, and perhaps stop early."""
    rng = random.Random(num_groups)
    dropped: set[int] = set()
    stops_early = rng.random() < 0.4
    for _ in range(20_000):
        await asyncio.sleep(0)
        finished = {g.group_id for g in controller.groups}
        likely = 0.3 if engine._ended else 0.01
        if rng.random() < likely and (candidates := [g for g, _ in worker._running if g not in finished]):
            dropped.add(rng.choice(candidates))
            await controller.drop(*((g, 0) for g in dropped))
        if len(finished | dropped) == num_groups or (stops_early and rng.random() < 0.004):
            await controller.stop()
            return
    raise AssertionError(f"stuck: {worker._running}")


@pytest.mark.parametrize("several_turns", [False, True])
@pytest.mark.parametrize(("interrupt", "kv", "after"), POLICIES)
def test_every_order_of_events_leaves_whole_records_and_nothing_behind(
    interrupt: str, kv: str, after: int | None, several_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_harness.VOCABULARY", 130)  # the tokenizer's characters
    monkeypatch.setattr("slipstream.rollout.prefixes.PREFIX_CHUNK_TOKENS", 3)
    policy, model = InterruptPolicy(interrupt, kv, after), tiny_model()
    for seed in range(2):
        asyncio.run(_one(model, policy, several_turns, random.Random(f"{policy} {seed}")))


async def _one(model: Any, policy: InterruptPolicy, several_turns: bool, rng: random.Random) -> None:
    states, budget = rng.choice([0, 8, 8]), rng.choice([20, 1024])
    engine = make_engine(model, slots=rng.randint(1, 4), max_context=64, saved_states=states, prefill_budget=budget, policy=policy)
    settings = config(
        slots=engine.slots,
        group_size=rng.randint(1, 4),
        max_new_tokens=rng.randint(3, 12),
        interrupt=policy.interrupt,
        kv=policy.kv,
        interrupt_after=policy.after,
        **({"environment": "tools", "max_turns": 3} if several_turns else {}),
    )
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"stop_grace_s": 0.0})})
    more: dict[str, Any] = {"make_environment": lambda row: ThreeTurns()} if several_turns else {}
    num_groups = rng.randint(12, 24)
    controller = FakeController([assignment(n) for n in range(num_groups)])
    controller.max_interrupts = 3
    async with ticking(engine, rng) as (ticks, client):
        worker = RolloutWorker(controller, client, CharTokenizer(), settings, make_scorers(settings.reward), max_context=64, **more)
        running = asyncio.create_task(worker.run())
        await drop_and_stop(engine, controller, worker, num_groups)
        await asyncio.wait_for(running, 20)
        for _ in range(2):  # the second answer comes after all that the worker and the engine had to say
            await client.pin()
            await client.unpin()
        _expect_nothing_left(ticks, client, worker)
    for rollout in (r for g in controller.groups for r in g.rollouts):
        _expect_whole(rollout, controller, policy, recorded=not several_turns)


def _expect_nothing_left(ticks: Ticking, client: engine_socket.RemoteEngine, worker: RolloutWorker) -> None:
    engine, server, cache = ticks.engine, ticks.server, ticks.engine._live.cache
    assert (cache.blocks.num_taken, len(cache.prompts), len(cache.states)) == (0, 0, 0)
    assert not engine._saved and not engine._ended and not engine._handles and not engine._live._stale
    assert not server._handles and not server._ids
    assert not client._ended and not client._opening and not len(client._router)
    assert not worker._running and not worker._dropped and not worker._num_sequences
    assert ThreeTurns.num_open == 0


def _expect_whole(rollout: Rollout, controller: FakeController, policy: InterruptPolicy, *, recorded: bool) -> None:
    if not rollout.status.ok:
        assert rollout.error is not None and rollout.error.startswith("interrupted: ") and policy.interrupt == "abort_retry"
        return
    assert ((rollout.model_versions() >= 0) == rollout.loss_mask).all() and (rollout.logprobs[rollout.loss_mask] < 0).all()
    if not recorded:
        return
    if policy.drains or (policy.interrupt == "abort_retry" and policy.after is None):
        assert len(rollout.spans) == 1, "all of one version"
    key = (rollout.group_id, rollout.sample, rollout.attempt)
    chunk = merge_chunks([c for c in controller.chunks if (c.group_id, c.sample, c.attempt) == key])
    assert chunk.token_ids.tolist() == rollout.token_ids[rollout.prompt_length :].tolist()
    assert (chunk.spans, chunk.stop_reason) == (rollout.spans, rollout.stop_reason)
    assert ("recomputed" if chunk.recomputed else "kept", chunk.prefill_version) == (rollout.kv, rollout.prefill_version)
