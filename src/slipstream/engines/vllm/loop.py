"""The working loop of an engine that is a vLLM server.

controller.next_weights ──► one offer ──►┌──────────────────────────────────────┐
  bytes and adapters come beside this ──►│ as soon as it may: have the server    │──► controller.confirm_weights
                                         │ adopt it, probed                      │
requests (engine.submit, sets wake) ────►│ take what its streams brought         │──► send_frame
                                         └──────────────────────────────────────┘
server.died ──► the end, with its last lines
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from slipstream.engines.vllm.client import TOKEN_S
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.weights import UPDATE_S, Adopted
from slipstream.protocols import ControllerAPI, Progress, WeightsOffer
from slipstream.types import EngineReport, Frame
from slipstream.weight_sync.probe import Reading

GATHER_S = 0.005  # what the streams bring within this time goes into one frame
CAUSE_S = 2.0  # after a lost connection, how long the server's own end is waited for: that is the cause
NOTE_AFTER = 10  # versions; then the person is told what the probe can tell


class Weights(Protocol):
    """How versions come to the server: `weights.WholeWeights`, `driver_copy.CopiedWeights` or `adapters.ServerAdapters`."""

    async def bring(self, offer: WeightsOffer) -> None:
        """What can be done beside what runs. WeightSyncError where the server does not take it."""
        ...

    async def adopt(self, offer: WeightsOffer) -> Adopted:
        """The server samples with it from now on; probed. WeightSyncError where it does not."""
        ...


async def run_vllm_engine(
    engine: VllmEngine,
    weights: Weights,
    controller: ControllerAPI,
    send_frame: Callable[[Frame], Awaitable[None]],
    page: Progress,
    died: Callable[[], Coroutine[Any, Any, Any]],
) -> None:
    """Serve for ever; ends by cancellation, with the server's end (`died` raises it), or with the first error.

    consumes    offers, one at a time, and the requests that were submitted to `engine`
    produces    frames, and one report per adopted version
    waits for   tokens it is owed, with a deadline (`client.TOKEN_S`); or, owing nothing, for an offer or a request
    unblocked   by the server, by `engine.wake`, by the offer
    """
    work = asyncio.create_task(_Loop(engine, weights, controller, send_frame, page).run(), name="vLLM: work")
    end = asyncio.create_task(died(), name="vLLM: the server's end")
    try:
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and not end.done() and isinstance(work.exception(), ConnectionError):
            await asyncio.wait({end}, timeout=CAUSE_S)
        for task in (end, work):
            if task.done():
                task.result()
    finally:
        for task in (work, end):
            task.cancel()
        await asyncio.gather(work, end, return_exceptions=True)
        await engine.close()


class _Loop:
    def __init__(
        self,
        engine: VllmEngine,
        weights: Weights,
        controller: ControllerAPI,
        send_frame: Callable[[Frame], Awaitable[None]],
        page: Progress,
    ):
        self._engine, self._weights, self._controller = engine, weights, controller
        self._send_frame, self._page = send_frame, page
        self._num_versions = 0

    async def run(self) -> None:
        engine, offer = self._engine, self._next_offer()
        try:
            while True:
                if offer.done() and (weights := offer.result()) and engine.may_adopt():
                    await self._adopt(weights)
                    offer = self._next_offer()
                engine.wake.clear()
                for frame in engine.take_frames():
                    self._page.idle()  # a worker that does not read is not this engine's fault
                    await self._send_frame(frame)
                self._say()
                await self._wait(offer)
        finally:
            offer.cancel()
            await asyncio.gather(offer, return_exceptions=True)

    def _next_offer(self) -> asyncio.Task[WeightsOffer]:
        return asyncio.create_task(self._brought_offer(), name="vLLM: next weights")

    async def _brought_offer(self) -> WeightsOffer:
        offer = await self._controller.next_weights(self._engine.engine_id, *self._engine.version)
        await self._weights.bring(offer)
        return offer

    def _say(self) -> None:
        """Tokens are owed while anything runs; the client's own deadline is the shorter one."""
        if self._engine.num_running:
            self._page.working("generate", 2 * TOKEN_S, owed=f"tokens of {self._engine.num_running} sequences")
        else:
            self._page.idle()

    async def _wait(self, offer: asyncio.Task[WeightsOffer]) -> None:
        """Until there is something to send or to adopt, and a moment longer, so that a frame holds more than one stream's token."""
        woken = asyncio.create_task(self._engine.wake.wait(), name="vLLM: wait for tokens")
        waiting = {woken} if offer.done() else {woken, offer}  # an offer in hand waits for the engine
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        await asyncio.sleep(GATHER_S)

    async def _adopt(self, offer: WeightsOffer) -> None:
        """Have the server adopt it, report. No frame of it leaves before the controller knows."""
        manifest = offer.manifest
        self._page.working("adopt weights", 4 * UPDATE_S, owed=f"weights {manifest.incarnation}.{manifest.version}")
        adopted = await self._weights.adopt(offer)
        await self._tell(manifest.version, adopted.reading)
        report = EngineReport(
            engine_id=self._engine.engine_id,
            incarnation=manifest.incarnation,
            version=manifest.version,
            checksum=adopted.checksum,
            sync_s=adopted.seconds,
            repaired=adopted.repaired,
        )
        await self._controller.confirm_weights(offer.slot, report)

    async def _tell(self, version: int, reading: Reading) -> None:
        """A line per version in the log, and once, when the noise is known, a sentence for the person."""
        line = f"probe of version {version}: {reading.distance:.2g} nats per token from the trainer's, {reading.noise:.2g} is usual"
        if reading.updates_told is not None:
            line += f"; this update moved them by {reading.shift:.2g}, so it would notice {reading.updates_told:.0f} missed ones like it"
        print(line, file=sys.stderr, flush=True)
        self._num_versions += 1
        if self._num_versions == NOTE_AFTER:
            await self._controller.note(f"{self._engine.engine_id}: {line}")
