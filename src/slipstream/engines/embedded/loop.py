"""The engine's working loop, where an engine has a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from slipstream.beside import beside
from slipstream.protocols import ControllerAPI, Progress, WeightsOffer
from slipstream.types import EngineReport, Frame
from slipstream.weight_sync.ends import Reader

if TYPE_CHECKING:
    from slipstream.engines.embedded.engine import EmbeddedEngine

TURNS = 3  # of the event loop, 5 us each: one finds what came while it ticked, one reads it, one runs the task that waits for it
TICK_DEADLINE_S = 300.0  # one prefill budget and one decode pass; a model that needs longer is hung


async def run_engine(
    engine: EmbeddedEngine,
    controller: ControllerAPI,
    load_weights: Reader,
    send_frame: Callable[[Frame], Awaitable[None]],
    wake: asyncio.Event,
    page: Progress,
    fetch: Callable[[WeightsOffer], None] | None = None,
) -> None:
    """Tick for ever; ends by cancellation or with the first error.

        controller.next_weights ──► one offer ──►┌────────────────────────┐
                                                 │ adopt, between ticks,  │──► controller.confirm_weights
                                                 │ as soon as it may      │
        requests (engine.submit, sets wake) ────►│ tick                   │──► send_frame
                                                 └────────────────────────┘

    consumes    offers, one at a time, and the requests that were submitted to `engine`
    produces    one frame per tick, one report per adopted version
    waits for   work when there is none: a new offer, or `wake`; and for a worker that has not read what it was sent. It then owes
                nothing, so these waits have no deadline here: a lost controller raises PeerLost out of `next_weights`
    unblocked   by `wake.set()` after submit, cancel and unpin, by the offer, or by a worker that reads or is lost

    `load_weights` copies an offer's bytes into `engine.weights` and gives the checksum of the engine's own copy. Where they have to be
    brought here first, `fetch` does it, in a thread beside the ticks; it keeps its own deadlines.
    """
    offer = _next_offer(engine, controller, fetch)
    try:
        while True:
            if offer.done() and (weights := offer.result()) and engine.may_adopt():
                page.working("adopt weights", TICK_DEADLINE_S)
                await _adopt(engine, controller, load_weights, weights)
                offer = _next_offer(engine, controller, fetch)
            if engine.has_work():
                page.working("tick", TICK_DEADLINE_S)
                frame = engine.tick()
                page.idle()  # a worker that does not read is not this engine's fault: the controller's wait for a batch ends that
                await send_frame(frame)
                for _ in range(TURNS):
                    await asyncio.sleep(0)  # let requests, cancellations and the offer in
            else:
                page.idle()
                await _wait_for_work(offer, wake)
    finally:
        offer.cancel()
        await asyncio.gather(offer, return_exceptions=True)


def _next_offer(
    engine: EmbeddedEngine, controller: ControllerAPI, fetch: Callable[[WeightsOffer], None] | None
) -> asyncio.Task[WeightsOffer]:
    async def arrived() -> WeightsOffer:
        offer = await controller.next_weights(engine.engine_id, *engine.version)
        if fetch is not None:
            await beside(fetch, offer)
        return offer

    return asyncio.create_task(arrived(), name="engine: next weights")


async def _adopt(engine: EmbeddedEngine, controller: ControllerAPI, load_weights: Reader, offer: WeightsOffer) -> None:
    """Copy, hash, report. The report says what the engine's own copy hashes to; the controller compares."""
    began = time.perf_counter()
    manifest = offer.manifest
    checksum = load_weights(offer)
    engine.set_version(manifest.incarnation, manifest.version, checksum)
    report = EngineReport(
        engine_id=engine.engine_id,
        incarnation=manifest.incarnation,
        version=manifest.version,
        checksum=checksum,
        sync_s=time.perf_counter() - began,
        repaired=load_weights.refused,
    )
    await controller.confirm_weights(offer.slot, report)


async def _wait_for_work(offer: asyncio.Task[WeightsOffer], wake: asyncio.Event) -> None:
    wake.clear()
    woken = asyncio.create_task(wake.wait(), name="engine: wait for work")
    try:
        await asyncio.wait({offer, woken}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        woken.cancel()
