"""Adding and dropping engines of a run: what is refused, what is told, and how a command finds the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cli.engines import in_words
from slipstream.cli.main import main as slipstream
from slipstream.config.settings import MAX_ENGINES, Config, EngineSettings
from slipstream.controller.engine_times import EngineTimes
from slipstream.errors import ConfigError, RoleFailed, SlipstreamError
from slipstream.launch import control
from slipstream.launch.control import EngineFacts
from slipstream.launch.engines import ENGINES, Engines
from slipstream.launch.framing import private_directory
from slipstream.weight_sync.slots import SlotBroker, slots_for


class Clock:
    time = 0.0

    def now(self) -> float:
        return self.time


class FakeRun:
    """A controller, a supervisor, and processes that come into service when the test says so."""

    def __init__(self, *versions: int, **engine: Any):
        self.state = SimpleNamespace(engines={}, engine_starts={})
        self.core = SimpleNamespace(state=self.state, stopping=False, finished=False, journal=SimpleNamespace(error=None))
        self.core.engine_times = EngineTimes(Clock())
        self.event = asyncio.Event()
        self.started: list[str] = []
        self.urls: list[str] = []
        self.again: list[bool] = []  # whether the process was told that its server had been this engine before
        self.ended: list[str] = []
        self.gone: list[tuple[str, str]] = []
        self.engines = Engines(Config(engine=EngineSettings(replicas=len(versions), **engine)), [self], self.start)  # type: ignore[arg-type]
        self.engines.servers = [SimpleNamespace(drop=lambda role, cause: self.gone.append((role, cause)))]  # type: ignore[list-item]
        self.engines.supervisor = SimpleNamespace(end=self.end)  # type: ignore[assignment]
        for number, version in enumerate(versions):
            self.serve(ENGINES[number], version)

    async def start(self, engine_id: str, url: str, again: bool) -> None:
        self.started.append(engine_id)
        self.urls.append(url)
        self.again.append(again)

    async def end(self, role: str) -> None:
        self.ended.append(role)

    def serve(self, engine_id: str, version: int) -> None:
        self.state.engines[engine_id] = version
        self.state.engine_starts[engine_id] = self.state.engine_starts.get(engine_id, 0) + 1
        self.wake()

    # the controller's calls

    def engine_gone(self, engine_id: str, reason: str) -> None:
        self.state.engines.pop(engine_id, None)
        self.wake()

    def wake(self) -> None:
        self.event.set()
        self.event = asyncio.Event()

    async def changed(self) -> None:
        await self.event.wait()


def run(main: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main

    asyncio.run(bounded())


def test_an_added_engine_takes_the_lowest_free_id_and_is_told_of_once_it_serves() -> None:
    async def main() -> None:
        fake = FakeRun(4, 4)
        await fake.engines.start()
        adding = asyncio.create_task(fake.engines.add_engine(""))
        while fake.started != ["engine-0", "engine-1", "engine-2"]:  # noqa: ASYNC110  # everything happens in this loop
            await asyncio.sleep(0)
        assert fake.engines.expendable("engine-2") and fake.engines.max_restarts("engine-2") == 0
        fake.serve("engine-2", -1)  # no weights yet
        await asyncio.sleep(0)
        assert not adding.done()
        fake.serve("engine-2", 5)
        assert (await adding).startswith("engine-2 serves at version 5 after ")
        assert not fake.engines.expendable("engine-2") and fake.engines.max_restarts("engine-2") == 3
        assert fake.engines.max_restarts("trainer") == fake.engines.max_restarts("engine-9") == 0

    run(main())


def test_an_added_engine_that_fails_leaves_its_id_and_the_run() -> None:
    async def main() -> None:
        fake = FakeRun(4)
        await fake.engines.start()
        adding = asyncio.create_task(fake.engines.add_engine(""))
        await asyncio.sleep(0)
        fake.engines.given_up("engine-1", RoleFailed("engine-1", "no memory"))
        with pytest.raises(RoleFailed, match="the run goes on without it: no memory"):
            await adding
        adding = asyncio.create_task(fake.engines.add_engine(""))
        await asyncio.sleep(0)
        assert fake.started == ["engine-0", "engine-1", "engine-1"]
        fake.core.stopping = True
        fake.wake()
        with pytest.raises(SlipstreamError, match="the run ended before engine-1"):
            await adding

    run(main())


def test_running_servers_are_added_by_their_url_and_keep_it() -> None:
    async def main() -> None:
        fake = FakeRun(4, 4, type="vllm", urls=["http://a", "unix:/b"])
        await fake.engines.start()
        with pytest.raises(ConfigError, match=r"somebody else started.*--url"):
            await fake.engines.add_engine("")
        with pytest.raises(ConfigError, match="http://a/ is engine-0 already"):
            await fake.engines.add_engine("http://a/")
        with pytest.raises(ConfigError, match='"c" is neither'):
            await fake.engines.add_engine("c")
        adding = asyncio.create_task(fake.engines.add_engine("http://c"))
        await asyncio.sleep(0)
        fake.serve("engine-2", 5)
        assert (await adding).startswith("engine-2 serves")
        await fake.engines.drop_engine("engine-0")
        adding = asyncio.create_task(fake.engines.add_engine("http://d"))
        await asyncio.sleep(0)
        fake.serve("engine-0", 5)
        await adding
        fake.core.observer = SimpleNamespace(note=lambda text: None)
        await fake.engines.start_anew("engine-2", RoleFailed("engine-2", "gone"))
        assert fake.urls == ["http://a", "unix:/b", "http://c", "http://d", "http://c"]
        assert fake.again == [False, False, False, False, True], "an id that comes again may have another server"
        with pytest.raises(ConfigError, match='engines are of type "embedded"'):
            await FakeRun(4).engines.add_engine("http://a")

    run(main())


def test_a_dropped_engine_leaves_service_first_and_the_last_one_stays() -> None:
    async def main() -> None:
        fake = FakeRun(4, 4)
        await fake.engines.start()
        assert await fake.engines.drop_engine("engine-0") == (
            "engine-0 has left; what it was generating goes on, from the tokens it had, on engine-1"
        )
        assert fake.gone == [("engine-0", "dropped by request")] and fake.ended == ["engine-0"] and "engine-0" not in fake.state.engines
        with pytest.raises(SlipstreamError, match="engine-1 is the only engine in service"):
            await fake.engines.drop_engine("engine-1")
        with pytest.raises(SlipstreamError, match="no engine engine-0 runs; there are engine-1"):
            await fake.engines.drop_engine("engine-0")
        fake.state.engines["engine-1"] = -1
        with pytest.raises(SlipstreamError, match="engine-1 is not in service"):
            await fake.engines.drop_engine("engine-1")

    run(main())


def test_there_are_slots_for_as_many_engines_as_a_run_can_have_and_no_more_engines() -> None:
    async def main() -> None:
        fake = FakeRun(*[0] * MAX_ENGINES)
        await fake.engines.start()
        with pytest.raises(SlipstreamError, match="16 engines run already"):
            await fake.engines.add_engine("")

    run(main())
    broker = SlotBroker(slots_for(MAX_ENGINES))
    assert broker.num_slots == MAX_ENGINES + 2


def test_a_command_finds_the_run_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")

    async def main() -> None:
        fake = FakeRun(4, 4)
        await fake.engines.start()
        fake.state.engine_starts["engine-1"] = 2
        with private_directory() as folder:
            async with control.serving(fake.engines, folder, tmp_path):
                code = await asyncio.to_thread(slipstream, ["engines", "list", str(tmp_path)])
                assert code == 0 and capsys.readouterr().out.splitlines() == [
                    "engine-0  at version 4 for 0.0 s",
                    "engine-1  at version 4 for 0.0 s, started anew 1 time",
                ]
                assert await asyncio.to_thread(slipstream, ["engines", "drop", str(tmp_path), "engine-1", "--json"]) == 0
                assert '{"done": "engine-1 has left; ' in capsys.readouterr().out
                assert await asyncio.to_thread(slipstream, ["engines", "drop", str(tmp_path), "engine-0"]) == 1
                assert "the only engine in service" in capsys.readouterr().err
        assert not (tmp_path / control.PATH_FILE).exists()

    run(main())
    assert slipstream(["engines", "list", str(tmp_path)]) == 1 and "no run trains here now" in capsys.readouterr().err
    (tmp_path / control.PATH_FILE).write_text(str(tmp_path / "nobody.sock"))  # of a run that was killed
    assert slipstream(["engines", "add", str(tmp_path)]) == 1 and "no run trains here now" in capsys.readouterr().err
    assert slipstream(["engines", "drop", str(tmp_path)]) == 2
    assert slipstream(["engines", "list", str(tmp_path), "--url", "http://a"]) == 2


def test_what_is_listed_of_an_engine_that_does_not_serve() -> None:
    starting = EngineFacts(engine_id="engine-3", version=None, version_s=0.0, restarts=2)
    assert in_words(starting) == "engine-3  is starting, started anew 2 times"
    empty = EngineFacts(engine_id="engine-3", version=-1, version_s=0.0, restarts=0)
    assert in_words(empty) == "engine-3  waits for its first weights"


def test_seconds_on_each_version() -> None:
    clock = Clock()
    times = EngineTimes(clock)
    times.confirmed("engine-0")
    clock.time = 2.0
    assert times.now() == {"engine-0": 2.0}
    assert times.line({"engine-0": 0}, {"engine-0": 1}) == {
        "engine/engine-0/version": 0,
        "engine/engine-0/previous_version_s": None,
        "engine/engine-0/restarts": 0,
    }
    times.confirmed("engine-0")
    clock.time = 2.5
    line = times.line({"engine-0": 1}, {"engine-0": 3})
    assert line["engine/engine-0/previous_version_s"] == 2.0 and line["engine/engine-0/restarts"] == 2
    times.gone("engine-0")
    assert times.now() == {} and times.line({}, {}) == {}
