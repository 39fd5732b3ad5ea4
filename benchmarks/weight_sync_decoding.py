"""Sequences that an engine decodes, as a rollout worker sees them: when each of their tokens came, and how long none did.

Times are those at which the worker's side of the engine's socket hands a frame's tokens to the generation that waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.protocols import EngineClient, Generation
from slipstream.types import GenerateRequest, Purpose, Sampling

BATCH = 32
PROMPT_TOKENS = 52
NEW_TOKENS = 256  # at most
OLD_TOKENS = 128  # a batch with so many makes room for a new one, between two syncs


def decode_request(sample: int, new_tokens: int, batch: int = 0) -> GenerateRequest:
    """One of a batch that decodes while weights come: a prompt of random tokens, and no token that ends it."""
    ids = np.random.default_rng([batch, sample]).integers(3, 1000, PROMPT_TOKENS).astype(np.int32)
    return GenerateRequest(
        group_id=batch,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=Purpose.TRAIN,
        token_ids=ids,
        prompt_length=len(ids),
        num_sampled=0,
        sampling=Sampling(max_new_tokens=new_tokens),
        stop_token_ids=(),
    )


class Timed(Generation):
    """A generation that notes when its tokens came."""

    __slots__ = ("_arrived", "times")

    def __init__(self, arrived: asyncio.Event):
        super().__init__(PROMPT_TOKENS)
        self.times: list[float] = []
        self._arrived = arrived

    def append(self, *token: Any) -> None:
        super().append(*token)
        self.times.append(time.perf_counter())
        self._arrived.set()


class Decoding:
    """A batch of sequences on one engine: `start`, measure, and start the next one when it `is_old`, before any comes to its end."""

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._arrived = asyncio.Event()
        self._numbers = itertools.count()
        self._running: list[asyncio.Task[None]] = []
        self.sequences: list[Timed] = []

    async def start(self, count: int = BATCH) -> None:
        """A new batch in place of the one there is; returns when each sequence has a token."""
        await self.stop()
        number = next(self._numbers)
        self.sequences = [Timed(self._arrived) for _ in range(count)]
        self._running = [
            asyncio.create_task(self._engine.generate(decode_request(sample, NEW_TOKENS, number), into), name=f"sequence {sample}")
            for sample, into in enumerate(self.sequences)
        ]
        await self.more(1)

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def is_old(self) -> bool:
        """Whether it is time for a new batch; also where there is none."""
        return not self.sequences or max(len(each.times) for each in self.sequences) >= OLD_TOKENS

    async def more(self, tokens: int) -> None:
        """Wait until each has so many more than now."""
        wanted = {id(each): len(each.times) + tokens for each in self.sequences}
        await self._until(lambda each: len(each.times) >= wanted[id(each)])

    async def after(self, moment: float) -> None:
        """Wait until each has a token that came after this moment (`time.perf_counter`)."""
        await self._until(lambda each: bool(each.times) and each.times[-1] > moment)

    async def _until(self, reached: Callable[[Timed], bool]) -> None:
        """Sequences that have ended wait for nothing. The deadline is the caller's: an engine that has died sends nothing."""
        while not all(each.stop_reason is not None or reached(each) for each in self.sequences):
            self._arrived.clear()
            await self._arrived.wait()

    async def rate(self, tokens: int) -> float:
        """Tokens per second, while each sequence gets so many more."""
        before, began = self._num_tokens, time.perf_counter()
        await self.more(tokens)
        return (self._num_tokens - before) / (time.perf_counter() - began)

    @property
    def _num_tokens(self) -> int:
        return sum(len(each.times) for each in self.sequences)

    def gaps_within(self, began: float, ended: float) -> list[float]:
        """Seconds between successive tokens of a sequence, where both came between these moments."""
        return [later - earlier for earlier, later in self._pairs() if began <= earlier and later <= ended]

    def longest_gap_across(self, began: float, ended: float) -> float:
        """The longest time from token to token of a sequence of which any part lies between these moments."""
        return max(later - earlier for earlier, later in self._pairs() if later > began and earlier < ended)

    def _pairs(self) -> Sequence[tuple[float, float]]:
        return [pair for each in self.sequences for pair in itertools.pairwise(each.times)]
