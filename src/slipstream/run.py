"""Runs from settings to summary: the Python entry point, which the `train` verb calls too. Imports no torch by itself.

settings ─► open runs (`opening`) ─► launcher (inline | local) ─► summary
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from slipstream.config.load import LoadedConfig, check_config, load_tables
from slipstream.config.settings import Config
from slipstream.controller.controller import Controller
from slipstream.data.rows import PYTHON_ROWS
from slipstream.errors import ConfigError, RunFolderError
from slipstream.launch.context import OpenRun
from slipstream.observe.summary import summarize
from slipstream.opening import Asked, OnStep, open_runs

T = TypeVar("T")
Reward = Callable[..., Any]
STOP_S = 10.0  # a run in a thread of its own is given so long to end at a second Ctrl-C


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to, or all experiments of a file."""

    run_folder: Path  # of experiments: the one that holds theirs
    metrics: dict[str, Any]  # the object of `train --json`; of experiments: {"experiments": {name: such an object}}
    experiments: dict[str, Result] = field(default_factory=dict)  # by name


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
    of every step; with [[experiment]] tables (`experiment=[{"name": ..., ...}, ...]`) it has the experiment's name, too. `resume` is a run
    folder or "newest"; `rewind` goes back to that step's checkpoint on purpose. `stream` is where the display goes (None: nowhere),
    `started` the monotonic second from which `wall_s` counts.

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
    run = _Run(Asked(loaded, rows, resume, rewind, on_step, stream), rewards, time.monotonic() if started is None else started)
    return _run_blocking(run.run, run)


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

    def changed(config: Config) -> Config:
        return config.model_copy(update={"data": config.data.model_copy(update={"train": PYTHON_ROWS})})

    experiments = tuple(dataclasses.replace(experiment, config=changed(experiment.config)) for experiment in loaded.experiments)
    return dataclasses.replace(loaded, config=changed(loaded.config), experiments=experiments)


class _Run:
    """One call of `train`: what it was given, and how it is stopped."""

    def __init__(self, asked: Asked, rewards: tuple[Reward, ...], started: float):
        self._asked, self._rewards, self._started = asked, rewards, started
        self._controllers: list[Controller] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._interrupts = 0

    async def run(self) -> Result:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        with contextlib.ExitStack() as held:
            folder, runs = await open_runs(self._asked, held)
            self._controllers = [run.controller for run in runs]
            try:
                await self._launch(folder, runs)
            finally:
                self._controllers = []
        wall_s = time.monotonic() - self._started
        summaries = {
            run.context.experiment: summarize(run.controller.core.state, run.config, str(run.context.run_folder), wall_s) for run in runs
        }
        if not self._asked.loaded.experiments:
            return Result(folder, summaries[""])
        experiments = {name: Result(Path(summary["run_folder"]), summary) for name, summary in summaries.items()}
        return Result(folder, {"run_folder": str(folder), "experiments": summaries}, experiments)

    async def _launch(self, folder: Path, runs: Sequence[OpenRun]) -> None:
        if runs[0].config.launch == "inline":
            from slipstream.launch.inline import run_inline

            await run_inline(runs, self._rewards)
        else:
            from slipstream.launch.local import run_local

            await run_local(runs, folder / "log", self._rewards)
        for run in runs:
            if run.context.weights is not None:
                with contextlib.suppress(RunFolderError):  # the run is whole; what stays is removed when it is started again
                    run.context.weights.clear()

    def interrupt(self) -> None:
        """A signal arrived, in the main thread: the first time the run saves and ends; the second time, or while there is nothing to save
        yet, KeyboardInterrupt stops whatever runs there at once."""
        self._interrupts += 1
        if self._interrupts > 1 or not self._controllers or self._loop is None:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for controller in self._controllers:
            saved = "the last checkpoint is where it goes on" if controller.core.config.run.deterministic else "a checkpoint is saved"
            controller.core.observer.note(f"stopping: this step ends, {saved}; Ctrl-C again stops at once")
            controller.request_stop("interrupted")

    def cancel(self) -> None:
        """From another thread: end the run as soon as its loop comes to it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            if self._loop is not None and self._main is not None:
                self._loop.call_soon_threadsafe(self._main.cancel)


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
