"""A vLLM server whose base weights stay, and which is given a LoRA adapter per version, each under a name of its own.

    a version comes     it is loaded and probed beside what runs, nothing is paused; then requests start on it
    what runs           drain           ends on the adapter it started with, and keeps nobody from starting on the new one
                        in_flight       its stream is closed and asked for again from its last token, by the name of the new adapter
                        abort_*         ends with INTERRUPT, as on other engines
    an evaluation       runs on the adapter that was pinned; newer ones come meanwhile

A stream asks for one adapter by name, so all of its tokens are of that version. The label that the server puts on them is that of the base.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from slipstream.engines.vllm.engine import VllmEngine, _Request
from slipstream.engines.vllm.labels import Version, adapter_name
from slipstream.engines.vllm.shelf import Shelf
from slipstream.types import Purpose, StopReason


class AdapterEngine(VllmEngine):
    """`places`: adapters that the server may hold at a time."""

    def __init__(self, *args: Any, places: int, **options: Any):
        super().__init__(*args, **options)
        self.shelf = Shelf(places)
        self._pin_holds = ExitStack()

    # ---- weights

    def may_adopt(self) -> bool:
        return True

    def adopt(self, version: Version, checksum: str) -> None:
        """The server holds the version, proved. What starts from now on starts on it; what runs does as the policy says."""
        self.shelf.put(version)
        self.version, self.checksum = version, checksum
        for request in list(self._running.values()):
            if request.on is None or request.reason is not None or request.request.purpose is Purpose.EVAL:  # not sent; ended; pinned
                continue
            if self.policy.aborts(request.on[1] if request.oldest is None else request.oldest, version[1]):
                self._end(request, StopReason.INTERRUPT)
            elif self.policy.recomputes:
                self._start_anew(request)
        self._start_ready()
        self.wake.set()

    def pin(self) -> tuple[int, int, str]:
        pinned = super().pin()
        self._pin_holds.enter_context(self.shelf.needing(self.version))
        return pinned

    def unpin(self) -> float:
        self._pin_holds.close()
        return super().unpin()

    # ---- streams

    async def _run(self, request: _Request) -> None:
        """On one adapter to its end, also where its stream breaks off in between."""
        pinned = self._pinned if request.request.purpose is Purpose.EVAL else None
        request.on = self.version if pinned is None else pinned[0]
        with self.shelf.needing(request.on):
            await super()._run(request)

    def _start_anew(self, request: _Request) -> None:
        """In a task of its own: the one there was takes nothing more, and lets go of its adapter when its stream is closed."""
        assert request.task is not None, "it runs"
        request.task.cancel()
        request.on = None
        self._start(request)

    def _asked(self, request: _Request) -> tuple[str, Version]:
        assert request.on is not None, "it has been started"
        return adapter_name(request.on), request.on

    def _made_by(self, label: str, sent_under: Version) -> Version:
        if label != self.labels.base:
            raise self.labels.not_ours(label)
        return sent_under
