"""The engine as a rollout worker in the same process sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.engines.frames import FrameRouter
from slipstream.protocols import Generation
from slipstream.types import Frame, GenerateRequest, RequestKey

if TYPE_CHECKING:
    from slipstream.engines.embedded.engine import EmbeddedEngine


class InProcessClient:
    """`protocols.EngineClient` by direct calls. Whoever ticks the engine hands each frame to `feed`; `on_submit` tells it to tick."""

    def __init__(self, engine: EmbeddedEngine, on_submit: Callable[[], None] = lambda: None):
        self._engine = engine
        self._on_submit = on_submit
        self._router = FrameRouter(engine.free)

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        """Fill `into` until the request ends. Cancelling the awaiting task takes the request out of the engine."""
        handle = self._engine.submit(request)
        future = self._router.open(handle, into)
        self._on_submit()
        try:
            await future  # its deadline is the caller's rollout deadline
        except BaseException:
            if into.state is not None:  # nobody goes on from it
                self._engine.free(into.state)
            raise
        finally:
            self._router.close(handle)
            self._engine.cancel(handle)  # nothing where it has ended by itself

    async def save(self, key: RequestKey) -> int | None:
        handle = self._engine.handle(key)
        return None if handle is None else self._engine.save(handle)

    async def free(self, state: int) -> None:
        self._engine.free(state)

    async def pin(self) -> tuple[int, int, str]:
        return self._engine.pin()

    async def unpin(self) -> float:
        seconds = self._engine.unpin()
        self._on_submit()  # the aborts must be told
        return seconds

    def feed(self, frame: Frame) -> None:
        """Hand out what a tick produced."""
        self._router.feed(frame)

    def fail(self, error: BaseException) -> None:
        """The engine has ended with this error; every awaiting request raises it."""
        self._router.fail(error)
