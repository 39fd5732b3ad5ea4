"""One run from settings to summary: the Python entry point, which the `train` verb calls too. Imports no torch by itself.

settings ─► data ─► memory ─► run folder (locked) ─► ledger and controller ─► launcher (inline | local) ─► summary
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from slipstream.beside import beside
from slipstream.config.load import LoadedConfig, check_config, load_config, load_tables
from slipstream.config.resume import changed_settings, check_resume
from slipstream.config.settings import MAX_ENGINES, Config
from slipstream.controller.controller import Controller, open_controller
from slipstream.controller.run_folder import RunFolder
from slipstream.controller.versions import Broker
from slipstream.data.dataset import Data, load_data
from slipstream.data.prompts import render_messages
from slipstream.data.rows import PYTHON_ROWS
from slipstream.errors import ConfigError, RunFolderError
from slipstream.launch.context import RunContext
from slipstream.launch.fingerprint import code_version, numerics
from slipstream.models.memory import check_memory
from slipstream.observe.observer import RunObserver, open_observer
from slipstream.observe.samples import prompt_text
from slipstream.observe.summary import summarize
from slipstream.protocols import Observer
from slipstream.types import EvalResult, Group
from slipstream.weight_sync.lag import LagBroker
from slipstream.weight_sync.slots import SlotBroker, slots_for

T = TypeVar("T")
Reward = Callable[..., Any]
OnStep = Callable[[dict[str, Any]], None]
NEWEST = "newest"
STOP_S = 10.0  # a run in a thread of its own is given so long to end at a second Ctrl-C


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    run_folder: Path
    metrics: dict[str, Any]  # the object of `train --json`


def train(
    config: Config | LoadedConfig | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    data: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    on_step: OnStep | None = None,
    resume: str | Path | None = None,
    rewind: int | None = None,
    stream: IO[str] | None = None,
    started: float | None = None,
    **tables: Any,
) -> Result:
    """Train, and return when the run has ended.

    Either a `Config`, or the short form: `model` and `data` are names as in a run file, or whole tables (`data={"train": ...,
    "eval": ...}`); `data` may also be a list of rows. `reward` is one or more functions; further tables are keywords, e.g.
    `trainer={"steps": 20}`. Reward functions given here run in threads of this process, so closures work. `on_step` gets the metric line
    of every step. `resume` is a run folder or "newest"; `rewind` goes back to that step's checkpoint on purpose. `stream` is where the
    display goes (None: nowhere), `started` the monotonic second from which `wall_s` counts.

    Works inside a running event loop (a notebook): the run then has a thread of its own. The first Ctrl-C saves and ends the run with what
    it has; the second stops at once (KeyboardInterrupt).

    Raises ConfigError for wrong settings, and otherwise the error of the part that ended the run.
    """
    rewards: tuple[Reward, ...] = () if reward is None else (reward,) if callable(reward) else tuple(reward)
    rows = None if data is None or isinstance(data, str | Mapping) else list(data)
    for table, name, value in (("model", "name", model), ("data", "train", data if isinstance(data, str | Mapping) else None)):
        if value is not None:
            tables[table] = {name: value} if isinstance(value, str) else dict(value)
    loaded = _settings(config, tables, reward_given=bool(rewards))
    if rows is not None:
        loaded = _with_python_rows(loaded)
    run = _Run(loaded, rewards, rows, on_step, stream, time.monotonic() if started is None else started)
    return _run_blocking(lambda: run.run(resume, rewind), run)


def _settings(config: Config | LoadedConfig | None, tables: dict[str, Any], *, reward_given: bool) -> LoadedConfig:
    if config is None:
        return load_tables(tables, reward_given=reward_given)
    if tables:
        raise ConfigError("give either a Config or model, data and tables, not both")
    if isinstance(config, LoadedConfig):
        return config
    check_config(config, reward_given=reward_given)
    return LoadedConfig(config, {}, Path.cwd())


def _with_python_rows(loaded: LoadedConfig) -> LoadedConfig:
    """The settings that are recorded say so, and name no data set that was not used."""
    config = loaded.config
    data = config.data.model_copy(update={"train": PYTHON_ROWS})
    return dataclasses.replace(loaded, config=config.model_copy(update={"data": data}))


class _Run:
    """One call of `train`: what it was given, and how it is stopped."""

    def __init__(
        self,
        loaded: LoadedConfig,
        rewards: tuple[Reward, ...],
        rows: list[Mapping[str, Any]] | None,
        on_step: OnStep | None,
        stream: IO[str] | None,
        started: float,
    ):
        self._loaded, self._config = loaded, loaded.config
        self._rewards, self._rows, self._on_step = rewards, rows, on_step
        self._stream, self._started = stream, started
        self._controller: Controller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._interrupts = 0

    async def run(self, resume: str | Path | None, rewind: int | None) -> Result:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        config = self._config
        with contextlib.ExitStack() as held:
            folder, changes = None, {}
            if resume is not None:
                folder, changes = _folder_to_resume(config, resume)
                _hold(held, folder)
            data = load_data(config, self._loaded.base_folder, self._rows)
            await beside(check_memory, config)
            if folder is None:  # only now: what is wrong with data or machine leaves no empty folder behind
                folder = _hold(held, RunFolder.create(config.run.name, config.run.folder))
                folder.save_config(config)  # before the ledger: whatever happens now, the run can be gone on with
            observer = open_observer(folder.path, config, stream=self._stream, describe_item=_item_text(config, data))
            held.callback(observer.close)
            return await self._launch(folder, data, observer, rewind, changes)

    async def _launch(self, folder: RunFolder, data: Data, observer: RunObserver, rewind: int | None, changes: dict[str, Any]) -> Result:
        config, broker = self._config, _broker(self._config)
        for note in data.notes():
            observer.note(note)
        controller = open_controller(
            folder,
            config,
            rows=data.train,
            eval_rows=data.eval,
            data_fingerprint=data.fingerprint,
            eval_fingerprint=data.eval_fingerprint or "",
            broker=broker,
            observer=_CallsBack(observer, self._on_step) if self._on_step else observer,
            fingerprint=numerics(config),
            code_version=code_version(),
            rewind=rewind,
        )
        if changes:
            controller.settings_changed(changes, "resume")
        self._controller = controller
        context = RunContext(
            config, self._loaded.base_folder, folder.path, controller.incarnation, controller.start_step, controller.core.state.run_id
        )
        try:
            if context.weights is not None:
                context.weights.prepare()
            folder.save_config(config)  # the roles read it; a resume that was refused has left it as it was
            if config.launch == "inline":
                from slipstream.launch.inline import run_inline

                await run_inline(context, controller, self._rewards)
            else:
                from slipstream.launch.local import run_local

                await run_local(context, controller, self._rewards)
            if context.weights is not None:
                with contextlib.suppress(RunFolderError):  # the run is whole; what stays is removed when it is started again
                    context.weights.clear()
            state = controller.core.state
        finally:
            self._controller = None
            controller.close()
        return Result(folder.path, summarize(state, config, str(folder.path), time.monotonic() - self._started))

    def interrupt(self) -> None:
        """A signal arrived, in the main thread: the first time the run saves and ends; the second time, or while there is nothing to save
        yet, KeyboardInterrupt stops whatever runs there at once."""
        self._interrupts += 1
        if self._interrupts > 1 or self._controller is None or self._loop is None:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._controller is not None:
            saved = "the last checkpoint is where it goes on" if self._config.run.deterministic else "a checkpoint is saved"
            self._controller.core.observer.note(f"stopping: this step ends, {saved}; Ctrl-C again stops at once")
            self._controller.request_stop("interrupted")

    def cancel(self) -> None:
        """From another thread: end the run as soon as its loop comes to it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            if self._loop is not None and self._main is not None:
                self._loop.call_soon_threadsafe(self._main.cancel)


class _CallsBack:
    """An observer that also calls `on_step`. The caller's exception is its own affair and ends the run."""

    def __init__(self, observer: Observer, on_step: OnStep):
        self._observer, self._on_step = observer, on_step

    def step(self, line: dict[str, Any], groups: tuple[Group, ...]) -> None:
        self._observer.step(line, groups)
        self._on_step(line)

    def evaluation(self, line: dict[str, Any], result: EvalResult) -> None:
        self._observer.evaluation(line, result)

    def note(self, text: str) -> None:
        self._observer.note(text)


def _folder_to_resume(config: Config, resume: str | Path) -> tuple[RunFolder, dict[str, Any]]:
    """The run folder to go on with, whose recorded settings must allow the new ones, and what has changed in them. The newest run of a run
    file that names a folder is the one there."""
    if str(resume) != NEWEST:
        folder = RunFolder.open(resume)
    elif config.run.folder is not None:
        folder = RunFolder.open(config.run.folder)
    else:
        folder = RunFolder.newest(config.run.name)
    recorded = load_config([folder.config], reward_given=True, checked=False).config
    check_resume(recorded, config, str(folder.path))
    return folder, changed_settings(recorded, config)


def _hold(held: contextlib.ExitStack, folder: RunFolder) -> RunFolder:
    """Lock the folder before anything in it is touched, until the run has ended."""
    held.callback(folder.lock().release)
    return folder


def _broker(config: Config) -> Broker:
    lag = config.weight_sync.lag
    if lag is not None:
        return LagBroker(lag)
    return SlotBroker(slots_for(MAX_ENGINES if config.launch == "local" else 1))  # engines may be added


def _item_text(config: Config, data: Data) -> Callable[[int], str]:
    """The prompt of an evaluation row, for samples.jsonl and the display."""
    return lambda index: prompt_text(render_messages(data.eval[index], config.data)[-1:])


# ---- threads and signals ---------------------------------------------------------------------------------------------------------


def _run_blocking(main: Callable[[], Coroutine[Any, Any, T]], run: _Run) -> T:
    """Run a coroutine function to its end: in this thread, or beside a running event loop in a thread of its own."""
    here = threading.current_thread() is threading.main_thread()
    with _signals(run) if here else contextlib.nullcontext():
        return _in_a_thread(main, run) if _loop_runs_here() else _until_done(main)


def _in_a_thread(main: Callable[[], Coroutine[Any, Any, T]], run: _Run) -> T:
    outcome: list[tuple[Any, BaseException | None]] = []
    context = contextvars.copy_context()

    def target() -> None:
        try:
            outcome.append((context.run(_until_done, main), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=target, name="slipstream run", daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        run.cancel()
        thread.join(STOP_S)
        raise
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _until_done(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine in a loop of its own. KeyboardInterrupt, which may strike in any of its tasks, ends the coroutine as a
    cancellation does: what it started is ended and what it holds is given back before the loop goes."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main(), name="slipstream run")
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()  # it struck in another task
            while not task.done():  # every task that waited for the one struck raises it too, which stops the loop
                with contextlib.suppress(Exception, asyncio.CancelledError, KeyboardInterrupt):
                    loop.run_until_complete(task)
            raise


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the run in good order; the handlers found are put back."""
    before = {number: signal.signal(number, lambda *_: run.interrupt()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
