"""Sampled tokens of running rollouts are recorded as they come, so that a crash of the run does not lose them."""

from __future__ import annotations

import asyncio

import numpy as np

from slipstream.protocols import NEVER, ControllerAPI, Generation
from slipstream.types import PrefixChunk, Span, StopReason, seal

PREFIX_CHUNK_TOKENS = 64

PrefixKey = tuple[int, int, int]  # (group_id, sample, attempt)


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

    def watch(self) -> None:
        """Have the generation tell when a chunk is full."""
        self.generation.notify_at = NEVER if self.due else self.num_recorded - self.num_before + PREFIX_CHUNK_TOKENS

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
        spans = generation.spans
        return PrefixChunk(
            group_id=group_id,
            sample=sample,
            attempt=attempt,
            prompt_length=self.prompt_length,
            start=self.num_recorded,
            token_ids=np.asarray(generation.token_ids[skipped:], dtype=np.int32),
            logprobs=np.asarray(generation.logprobs[skipped:], dtype=np.float32),
            kept=tuple(generation.kept[skipped:]),
            spans=tuple(Span(max(s.start, start), s.end, s.incarnation, s.version, s.engine_id) for s in spans if s.end > start),
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
        self._open: dict[int, dict[PrefixKey, Prefix]] = {}  # by group, so that a send or the end of a group looks at nothing else
        self._due: dict[PrefixKey, Prefix] = {}  # to be sent next; some may have been forgotten since
        self._wake = asyncio.Event()
        self._sending = asyncio.Lock()
        self._stopped = False

    def open(self, prefix: Prefix) -> None:
        """Record this rollout from now on."""
        self._open.setdefault(prefix.key[0], {})[prefix.key] = prefix
        self.tell(prefix)

    def tell(self, prefix: Prefix) -> None:
        """A chunk is full, or the generation ended."""
        prefix.watch()
        if prefix.due:
            self._due[prefix.key] = prefix
            self._wake.set()

    def end(self, key: PrefixKey, prompt_length: int) -> None:
        """A rollout is over whose tokens are not recorded: an empty chunk says just that."""
        nothing = Generation(prompt_length)
        nothing.stop_reason = StopReason.STOP
        prefix = Prefix(key, prompt_length, 0, nothing)
        self.open(prefix)

    async def discard(self, key: PrefixKey, num_tokens: int) -> bool:
        """New weights stopped this attempt at a rollout, and its tokens are thrown away. Whether the rollout may start anew.

        No chunk of the attempt is sent any more.
        """
        async with self._sending:  # held for one call to the controller, which has a deadline of its own
            self._open.get(key[0], {}).pop(key, None)
            return await self._controller.interrupted(*key, num_tokens)

    async def close_group(self, group_id: int) -> None:
        """Forget a group whose rollouts have all ended; no chunk of it is under way afterwards."""
        async with self._sending:
            self.forget_group(group_id)

    def forget_group(self, group_id: int) -> None:
        """Send nothing more of this group; what is under way arrives."""
        self._open.pop(group_id, None)

    async def run(self) -> None:
        while not self._stopped:
            await self._wake.wait()
            self._wake.clear()
            await self._send(only_due=True)

    def stop(self) -> None:
        """`run` returns after the call that is under way."""
        self._stopped = True
        self._wake.set()

    async def flush(self) -> None:
        """Record all that is sampled."""
        await self._send(only_due=False)

    async def _send(self, only_due: bool) -> None:
        async with self._sending:
            due, self._due = self._due, {}
            if only_due:
                prefixes = [prefix for key, prefix in due.items() if prefix.due and self._open.get(key[0], {}).get(key) is prefix]
            else:
                opened = [prefix for group in self._open.values() for prefix in group.values()]
                prefixes = [prefix for prefix in opened if prefix.due or prefix.num_unrecorded]
            prefixes.sort(key=lambda prefix: prefix.key)
            if not prefixes:
                return
            chunks = [prefix.chunk() for prefix in prefixes]
            await self._controller.progress([seal(chunk) for chunk in chunks])
            for prefix, chunk in zip(prefixes, chunks, strict=True):
                prefix.num_recorded += len(chunk.token_ids)
                prefix.ended = chunk.stop_reason is not None
                self.tell(prefix)
