"""From frames to generations: who awaits which handle. Used by the in-process client and by the one over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slipstream.protocols import Generation
from slipstream.types import Frame, StopReason


class FrameRouter:
    """Takes an engine's frames apart and fills each request's `Generation`.

    A handle is opened before the frame that first names it is fed; frames' entries for handles that are not open (cancelled ones)
    are dropped. `open` gives a future that resolves when the generation ends, or raises what `fail` was given. `free_state` is called
    with the id of a state that was saved for a request that nobody awaits any more.
    """

    def __init__(self, free_state: Callable[[int], None] = lambda state: None) -> None:
        self._free_state = free_state
        self._open: dict[int, tuple[Generation, asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: int, into: Generation) -> asyncio.Future[None]:
        """Expect tokens for `handle`. ValueError if somebody awaits it already."""
        if handle in self._open:
            raise ValueError(f"request {handle} is awaited already: the same (group, sample, attempt, turn) was asked for twice")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[handle] = (into, future)
        return future

    def close(self, handle: int) -> None:
        """Nobody awaits `handle` any more."""
        self._open.pop(handle, None)

    def feed(self, frame: Frame) -> None:
        """Hand out one tick's tokens, then resolve the generations that ended."""
        for handle, incarnation, version in frame.prefilled:
            if (entry := self._open.get(handle)) is not None:
                entry[0].prefill_version = (incarnation, version)
        for handle in frame.recomputed:
            if (entry := self._open.get(handle)) is not None:
                entry[0].recomputed = True
        for handle, state in frame.saved:
            if (entry := self._open.get(handle)) is not None:
                entry[0].state = state
            else:
                self._free_state(state)
        kept_sets = frame.kept or (b"",) * len(frame.handles)
        rows = zip(frame.handles.tolist(), frame.token_ids.tolist(), frame.logprobs.tolist(), kept_sets, strict=True)
        entries, incarnation, version, engine_id = self._open, frame.incarnation, frame.version, frame.engine_id
        for handle, token, logprob, kept in rows:
            if (entry := entries.get(handle)) is not None:
                entry[0].append(token, logprob, incarnation, version, engine_id, kept)
        for handle, routing in frame.routing.items():
            if (entry := self._open.get(handle)) is not None:
                entry[0].routing = routing
        for handle, reason in frame.finished:
            self._finish(handle, reason)

    def fail(self, error: BaseException) -> None:
        """The engine has ended: everybody who awaits it gets this error."""
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(error)

    def _finish(self, handle: int, reason: StopReason) -> None:
        entry = self._open.get(handle)
        if entry is not None and not entry[1].done():
            entry[0].stop_reason = StopReason(reason)
            entry[1].set_result(None)
