"""The engines of a local run: their processes are started, started anew, added and dropped here, and whoever asks is told of them.

    supervisor ──► gone, start_anew, given_up       an engine's process has ended: out of service at once
    `slipstream engines` ──► list_engines, add_engine, drop_engine      (`launch/control.py`)

Which engines are *in service* the controller decides (`state.engines`); the rollout worker follows it (`engines/pool.py`).

A weight slot costs memory only once it is written, and the broker writes the lowest that is free. So a run has the slots of MAX_ENGINES
from the start, as descriptors that every role inherits, and an engine that is added later finds its own among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from slipstream.config.engine_problems import SERVER_URLS
from slipstream.config.settings import MAX_ENGINES, Config
from slipstream.controller.controller import Controller
from slipstream.deadlines import LOAD_S, START_S
from slipstream.errors import ConfigError, RoleFailed, SlipstreamError
from slipstream.launch.control import EngineFacts
from slipstream.launch.supervisor import Supervisor
from slipstream.launch.wire import Server

ENGINES = tuple(f"engine-{number}" for number in range(MAX_ENGINES))
SERVE_DEADLINE_S = START_S + LOAD_S + 60.0  # from the start of an engine's process to its first confirmed weights


class Engines:
    """`control.EngineControl`, and what the supervisor asks. `start` starts the process of an engine of this id; with a URL, that server is
    the engine, and is told whether it was it before.

    Experiments share their engine's process: it is one in each of the runs of these controllers. What a person asks is for one run alone.
    """

    def __init__(self, config: Config, controllers: Sequence[Controller], start: Callable[[str, str, bool], Awaitable[None]]):
        self._config, self._controllers, self._start_process = config, controllers, start
        self._controller = controllers[0]
        self._urls = dict(zip(ENGINES, config.engine.urls, strict=False))  # of those that are servers which run already
        self._running: set[str] = set()  # ids whose process runs, or is about to
        self._joining: dict[str, SlipstreamError | None] = {}  # added and not in service yet -> why it never will be
        self.servers: list[Server] = []  # of the controllers
        self.supervisor: Supervisor | None = None

    async def start(self) -> None:
        """Start as many as the settings say."""
        for engine_id in ENGINES[: self._config.engine.replicas]:
            self._running.add(engine_id)
            await self._start(engine_id)

    async def _start(self, engine_id: str, *, again: bool = False) -> None:
        await self._start_process(engine_id, self._urls.get(engine_id, ""), again)

    # ---- the supervisor's side

    def max_restarts(self, role: str) -> int:
        """An engine that never came into service would fail again: none."""
        was_in_service = role in ENGINES and all(role in controller.core.state.engine_starts for controller in self._controllers)
        return self._config.engine.max_restarts if was_in_service and role not in self._joining else 0

    def expendable(self, role: str) -> bool:
        """Whether the run goes on without it: it was added, and has not come into service."""
        return role in self._joining

    def gone(self, role: str, reason: str = "its process has ended") -> None:
        """Slots and lease are free at once, and what the engine still asked for is not answered."""
        if role in ENGINES:
            for server, controller in zip(self.servers, self._controllers, strict=True):
                server.drop(role, reason)
                controller.engine_gone(role, reason)

    async def start_anew(self, role: str, error: SlipstreamError) -> None:
        what = str(error).partition("\n")[0].rstrip(".")
        for controller in self._controllers:
            controller.core.observer.note(f"{what}. It is started anew; its rollouts go on from their tokens (log/{role}.log)")
        await self._start(role, again=True)

    def given_up(self, role: str, error: SlipstreamError) -> None:
        """An added engine has failed before it came into service."""
        self._running.discard(role)
        self._joining[role] = error
        self._controller.wake()

    # ---- the person's side

    async def list_engines(self) -> list[EngineFacts]:
        state, now = self._controller.core.state, self._controller.core.engine_times.now()
        return [
            EngineFacts(
                engine_id=engine_id,
                version=state.engines.get(engine_id),
                version_s=now.get(engine_id, 0.0),
                restarts=max(0, state.engine_starts.get(engine_id, 0) - 1),
            )
            for engine_id in sorted(self._running, key=ENGINES.index)
        ]

    async def add_engine(self, url: str) -> str:
        self._check_url(url)
        free = [engine_id for engine_id in ENGINES if engine_id not in self._running]
        if not free:
            raise SlipstreamError(f"{MAX_ENGINES} engines run already, as many as a run can have; drop one first")
        engine_id, began = free[0], asyncio.get_running_loop().time()
        self._running.add(engine_id)
        self._joining[engine_id] = None
        self._urls[engine_id] = url
        try:
            await self._start(engine_id)
            version = await self._joined(engine_id)
        except OSError:  # its process could not even be started
            self._running.discard(engine_id)
            raise
        finally:
            del self._joining[engine_id]
        return f"{engine_id} serves at version {version} after {asyncio.get_running_loop().time() - began:.1f} s"

    def _check_url(self, url: str) -> None:
        """ConfigError for a URL that means nothing here, or where one is missing."""
        engine = self._config.engine
        if url and engine.type != "vllm":
            raise ConfigError(f'--url is of a vLLM server, and this run\'s engines are of type "{engine.type}"; leave it out')
        if url and not url.startswith(SERVER_URLS):
            raise ConfigError(f'"{url}" is neither http://host:port nor unix:/path/of/socket')
        if engine.urls and not url:
            raise ConfigError(
                "this run's engines are servers that somebody else started (engine.urls); start one more and name it with --url"
            )
        same = url.rstrip("/")
        if taken := [engine_id for engine_id in self._running if url and self._urls.get(engine_id, "").rstrip("/") == same]:
            raise ConfigError(f"the server at {url} is {taken[0]} already")

    async def _joined(self, engine_id: str) -> int:
        """The version with which the added engine has come into service; RoleFailed where it has not."""
        try:
            async with asyncio.timeout(SERVE_DEADLINE_S):
                while (version := self._controller.core.state.engines.get(engine_id, -1)) < 0:
                    error = self._joining[engine_id]
                    if error is not None:
                        raise RoleFailed(engine_id, f"the run goes on without it: {error}")
                    if self._ending:
                        raise SlipstreamError(f"the run ended before {engine_id} came into service")
                    await self._controller.changed()
                return version
        except TimeoutError:
            await self._end(engine_id)
            raise RoleFailed(engine_id, f"it did not come into service within {SERVE_DEADLINE_S:.0f} s; see its log") from None

    @property
    def _ending(self) -> bool:
        core = self._controller.core
        return core.stopping or core.finished or core.journal.error is not None

    async def _end(self, engine_id: str) -> None:
        assert self.supervisor is not None
        await self.supervisor.end(engine_id)
        self._running.discard(engine_id)

    async def drop_engine(self, engine_id: str) -> str:
        in_service = [name for name, version in self._controller.core.state.engines.items() if version >= 0]
        if engine_id not in self._running:
            raise SlipstreamError(f"no engine {engine_id} runs; there are {', '.join(sorted(self._running, key=ENGINES.index))}")
        if engine_id not in in_service:
            raise SlipstreamError(f"{engine_id} is not in service: it is starting, or about to be started anew; try again once it serves")
        if in_service == [engine_id]:
            raise SlipstreamError(f"{engine_id} is the only engine in service, and without one the run cannot go on; add another first")
        self.gone(engine_id, "dropped by request")
        await self._end(engine_id)
        others = [name for name in in_service if name != engine_id]
        return f"{engine_id} has left; what it was generating goes on, from the tokens it had, on {' and '.join(others)}"
