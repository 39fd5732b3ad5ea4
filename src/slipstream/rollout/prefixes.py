"""Sampled tokens of running rollouts are recorded as they come, so that a crash of the run does not lose them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from slipstream.protocols import ControllerAPI, Generation
from slipstream.types import PrefixChunk, Span, StopReason

PREFIX_CHUNK_TOKENS = 64

PrefixKey = tuple[int, int, int]  # (group_id, sample, attempt)


class WatchedGeneration(Generation):
    """A generation that tells of each token that it gets."""

    __slots__ = ("_on_token",)

    def __init__(self, start: int, on_token: Callable[[], None]):
        super().__init__(start)
        self._on_token = on_token

    def append(self, token_id: int, logprob: float, incarnation: int, version: int, engine_id: str, kept: bytes = b"") -> None:
        super().append(token_id, logprob, incarnation, version, engine_id, kept)
        self._on_token()


class Prefix:
    """What is sampled and what is recorded of one running rollout. Counts are of tokens after the prompt."""

    __slots__ = ("ended", "generation", "key", "num_before", "num_recorded", "prompt_length")

    def __init__(self, key: PrefixKey, prompt_length: int, num_before: int, generation: Generation):
        self.key, self.prompt_length, self.num_before, self.generation = key, prompt_length, num_before, generation
        self.num_recorded = num_before  # of a resumed rollout: those recorded before it went on
        self.ended = False  # the end itself is recorded

    @property
    def num_unrecorded(self) -> int:
        return self.num_before + len(self.generation.token_ids) - self.num_recorded

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the turn has ended; None while it goes on, be it after an interrupt."""
        reason = self.generation.stop_reason
        return None if reason is StopReason.INTERRUPT else reason

    @property
    def due(self) -> bool:
        return not self.ended and (self.num_unrecorded >= PREFIX_CHUNK_TOKENS or self.stop_reason is not None)

    def chunk(self) -> PrefixChunk:
        """Everything sampled since the last chunk."""
        skipped = self.num_recorded - self.num_before
        start = self.prompt_length + self.num_recorded  # rollout coordinates
        group_id, sample, attempt = self.key
        generation = self.generation
        return PrefixChunk(
            group_id=group_id,
            sample=sample,
            attempt=attempt,
            prompt_length=self.prompt_length,
            start=self.num_recorded,
            token_ids=np.asarray(generation.token_ids[skipped:], dtype=np.int32),
            logprobs=np.asarray(generation.logprobs[skipped:], dtype=np.float32),
            kept=tuple(generation.kept[skipped:]) if any(generation.kept) else (),
            spans=tuple(Span(max(s.start, start), s.end, s.incarnation, s.version, s.engine_id) for s in generation.spans if s.end > start),
            prefill_version=generation.prefill_version,
            recomputed=generation.recomputed,
            stop_reason=self.stop_reason,
            routing=generation.routing,
        )


class PrefixRecorder:
    """Sends chunks to the controller: PREFIX_CHUNK_TOKENS after PREFIX_CHUNK_TOKENS, and what is left when a generation ends.

        consumes   tokens that arrive in open prefixes
        produces   controller.progress
        waits for  a prefix that is due; unblocked by `tell` and by `stop`

    One call at a time is under way, for all rollouts together, so generation never waits and chunks arrive in order.
    """

    def __init__(self, controller: ControllerAPI):
        self._controller = controller
        self.reset()

    def reset(self) -> None:
        """Forget everything: nothing runs yet."""
        self._open: dict[PrefixKey, Prefix] = {}
        self._due = asyncio.Event()
        self._sending = asyncio.Lock()
        self._stopped = False

    def open(self, prefix: Prefix) -> None:
        """Record this rollout from now on."""
        self._open[prefix.key] = prefix

    def tell(self, prefix: Prefix) -> None:
        """A token came, or the generation ended."""
        if prefix.due:
            self._due.set()

    def end(self, key: PrefixKey, prompt_length: int) -> None:
        """A rollout is over whose tokens are not recorded: an empty chunk says just that."""
        nothing = Generation(prompt_length)
        nothing.stop_reason = StopReason.STOP
        prefix = Prefix(key, prompt_length, 0, nothing)
        self.open(prefix)
        self.tell(prefix)

    async def discard(self, key: PrefixKey, num_tokens: int) -> bool:
        """New weights stopped this attempt at a rollout, and its tokens are thrown away. Whether the rollout may start anew.

        No chunk of the attempt is sent any more.
        """
        async with self._sending:  # held for one call to the controller, which has a deadline of its own
            self._open.pop(key, None)
            return await self._controller.interrupted(*key, num_tokens)

    async def close_group(self, group_id: int) -> None:
        """Forget a group whose rollouts have all ended; no chunk of it is under way afterwards."""
        async with self._sending:
            self.forget_group(group_id)

    def forget_group(self, group_id: int) -> None:
        """Send nothing more of this group; what is under way arrives."""
        self._open = {key: prefix for key, prefix in self._open.items() if key[0] != group_id}

    async def run(self) -> None:
        while not self._stopped:
            await self._due.wait()
            self._due.clear()
            await self._send(only_due=True)

    def stop(self) -> None:
        """`run` returns after the call that is under way."""
        self._stopped = True
        self._due.set()

    async def flush(self) -> None:
        """Record all that is sampled."""
        await self._send(only_due=False)

    async def _send(self, only_due: bool) -> None:
        async with self._sending:
            prefixes = [prefix for _, prefix in sorted(self._open.items())]
            if only_due:
                prefixes = [prefix for prefix in prefixes if prefix.due]
            else:
                prefixes = [prefix for prefix in prefixes if prefix.due or prefix.num_unrecorded]
            if not prefixes:
                return
            chunks = [prefix.chunk() for prefix in prefixes]
            await self._controller.progress(chunks)
            for prefix, chunk in zip(prefixes, chunks, strict=True):
                prefix.num_recorded += len(chunk.token_ids)
                prefix.ended = chunk.stop_reason is not None
