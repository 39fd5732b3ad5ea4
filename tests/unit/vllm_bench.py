"""An engine over a fake vLLM server, with its loop, a controller and what the rollout worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from fake_vllm import LOGPROB, FakeVllm

from slipstream.engines.frames import FrameRouter
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.arrays import NOTHING_TOLD, Tells
from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.labels import Labels
from slipstream.engines.vllm.loop import Weights, run_vllm_engine
from slipstream.engines.vllm.weights import ServerWeights, WholeWeights
from slipstream.launch.page import NullProgress
from slipstream.protocols import Generation, Manifest, ManifestEntry, WeightsOffer
from slipstream.types import EngineReport, Frame, GenerateRequest, Purpose, Sampling
from slipstream.weight_sync.probe import NUM_TOKENS

VOCABULARY = 1000
LABELS = Labels("a-run", "engine-0")
DEADLINE_S = 60.0


def request(group: int = 0, sample: int = 0, **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {
        "group_id": group, "sample": sample, "attempt": 0, "turn": 0, "purpose": Purpose.TRAIN, "token_ids": np.array([1, 2], np.int32),
        "prompt_length": 2, "num_sampled": 0, "sampling": Sampling(max_new_tokens=4), "stop_token_ids": (),
    } | changes  # fmt: skip
    return GenerateRequest(**values)


def manifest(version: int, probe: tuple[float, ...] = (LOGPROB,) * (NUM_TOKENS - 1)) -> Manifest:
    entry = ManifestEntry(name="w", dtype="float32", shape=(16,), offset=0, nbytes=64)
    return Manifest(incarnation=1, version=version, checksum=f"hash-{version}", total_bytes=64, entries=(entry,), probe=probe)


class FakeController:
    """Hands out the versions that a test publishes, and keeps the reports."""

    def __init__(self) -> None:
        self.offers: asyncio.Queue[WeightsOffer] = asyncio.Queue()
        self.reports: list[EngineReport] = []
        self.notes: list[str] = []
        self.confirmed = asyncio.Condition()

    def publish(self, offered: Manifest) -> None:
        self.offers.put_nowait(WeightsOffer(slot=0, manifest=offered))

    async def next_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer:
        return await self.offers.get()

    async def confirm_weights(self, slot: int, report: EngineReport) -> None:
        async with self.confirmed:
            self.reports.append(report)
            self.confirmed.notify_all()

    async def until_confirmed(self, version: int) -> None:
        async with self.confirmed:
            await self.confirmed.wait_for(lambda: any(r.version == version for r in self.reports))

    async def note(self, text: str) -> None:
        self.notes.append(text)


class Bench:
    """A fake server, the engine over it, its loop, and a router as the rollout worker's."""

    def __init__(self, fake: FakeVllm, client: Client, policy: InterruptPolicy, slots: int, tells: Tells):
        self.fake, self.client, self.controller = fake, client, FakeController()
        options: dict[str, Any] = {
            "labels": LABELS, "engine_id": "engine-0", "model": "policy", "slots": slots, "max_context": 64, "vocab_size": VOCABULARY,
            "policy": policy, "decode": lambda ids: "".join(f"<{i}>" for i in ids), "tells": tells,
        }  # fmt: skip
        self.engine, weights = self.make(options)
        self.router = FrameRouter()
        self.frames: list[Frame] = []
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.loop = asyncio.create_task(
            run_vllm_engine(
                self.engine, weights, self.controller, self._send, NullProgress(), self._died,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def make(self, options: dict[str, Any]) -> tuple[VllmEngine, Weights]:
        engine = VllmEngine(self.client, **options)
        return engine, WholeWeights(engine, ServerWeights(self.client, "policy", VOCABULARY, LABELS), lambda offer: "/the/slot")

    async def _send(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.router.feed(frame)

    async def _died(self) -> None:
        await self.dead

    def open(self, asked: GenerateRequest) -> tuple[Generation, asyncio.Future[None], int]:
        handle = self.engine.submit(asked)
        into = Generation(len(asked.token_ids))
        return into, self.router.open(handle, into), handle

    async def publish(self, version: int, **changes: Any) -> None:
        self.controller.publish(manifest(version, **changes))
        await self.until(self.controller.until_confirmed(version))

    async def until(self, awaited: Any) -> Any:
        """Wait for it, unless the loop fails first; then raise its error."""
        task = asyncio.ensure_future(awaited)
        await asyncio.wait({task, self.loop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self.loop.result()
        return task.result()

    async def until_sampled(self, into: Generation, count: int) -> None:
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if len(into.token_ids) < count:
            into.notify, into.notify_at = lambda: reached.set_result(None), count
            await self.until(reached)


def run(
    tmp_path: Path,
    body: Callable[[Any], Coroutine[Any, Any, None]],
    policy: InterruptPolicy | None = None,
    slots: int = 4,
    make: Callable[..., Bench] = Bench,
    tells: Tells = NOTHING_TOLD,
    fake: type[FakeVllm] = FakeVllm,
) -> None:
    async def main(fake: FakeVllm) -> None:
        client = Client(await fake.start(tmp_path / "s"), backoff_s=(0.0, 0.0, 0.0))
        bench = make(fake, client, policy or InterruptPolicy(), slots, tells)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await body(bench)
        finally:
            bench.loop.cancel()
            await asyncio.gather(bench.loop, return_exceptions=True)
            await client.close()
            await fake.stop()

    asyncio.run(main(fake()))
