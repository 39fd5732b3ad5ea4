"""From settings to open runs: one, or the experiments of a file, which are trained together. Imports no torch.

settings ─► folder to go on with ─► data ─► memory ─► new folder, locked ─► observer, ledger and controller ─► OpenRun
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from slipstream.beside import beside
from slipstream.config.load import LoadedConfig, load_config
from slipstream.config.resume import changed_settings, check_resume
from slipstream.config.settings import MAX_ENGINES, Config
from slipstream.controller.controller import open_controller
from slipstream.controller.run_folder import ExperimentsFolder, RunFolder
from slipstream.controller.versions import Broker
from slipstream.data.dataset import Data, load_data
from slipstream.data.prompts import prompt_text, render_messages
from slipstream.errors import ConfigError
from slipstream.launch.context import OpenRun, RunContext
from slipstream.launch.fingerprint import code_version, numerics
from slipstream.models.memory import check_memory
from slipstream.observe.observer import open_observer
from slipstream.protocols import Observer
from slipstream.types import EvalResult, Group
from slipstream.weight_sync.lag import LagBroker
from slipstream.weight_sync.slots import SlotBroker, slots_for

NEWEST = "newest"

OnStep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call of `train` asks for."""

    loaded: LoadedConfig
    rows: list[Mapping[str, Any]] | None = None  # training rows from Python
    resume: str | Path | None = None  # a folder, or NEWEST
    rewind: int | None = None  # to this step's checkpoint
    on_step: OnStep | None = None
    stream: IO[str] | None = None  # of the display


@dataclass(slots=True)
class _Plan:
    """A run that is to be opened."""

    config: Config
    experiment: str = ""
    folder: RunFolder | None = None  # it goes on there; None: it gets a new one
    changes: dict[str, Any] = field(default_factory=dict)  # of settings, since it was there


async def open_runs(asked: Asked, held: contextlib.ExitStack) -> tuple[Path, list[OpenRun]]:
    """The folder of it all, and its runs. `held` gives back what they hold: it is closed once they have ended, however they did.

    Raises the errors of `train` that come before anything runs. A refused resume has changed nothing, and what is wrong with data or
    machine leaves no empty folder behind.
    """
    loaded, home = asked.loaded, None
    if loaded.experiments:
        home, plans = _plan_experiments(asked)
    else:
        plans = [_plan_run(loaded.config, asked.resume)]
    for plan in plans:
        if plan.folder is not None:
            _hold(held, plan.folder)
    data = [load_data(plan.config, loaded.base_folder, asked.rows) for plan in plans]
    await beside(check_memory, *(plan.config for plan in plans))
    if loaded.experiments and home is None:
        home = ExperimentsFolder.create(loaded.config.run.name, loaded.config.run.folder)
        home.save_config(loaded.config, loaded.experiments)
    for plan in plans:
        if plan.folder is None:
            run = plan.config.run
            plan.folder = RunFolder.create(run.name, run.folder if home is None else home.path / plan.experiment)
            _hold(held, plan.folder)
            plan.folder.save_config(plan.config)  # before the ledger: whatever happens now, the run can be gone on with
    runs = [_open(asked, plan, its, len(plans), held) for plan, its in zip(plans, data, strict=True)]
    if home is None:
        return runs[0].context.run_folder, runs
    home.save_config(loaded.config, loaded.experiments)  # here a resume may have changed it
    return home.path, runs


def _open(asked: Asked, plan: _Plan, data: Data, num_together: int, held: contextlib.ExitStack) -> OpenRun:
    config, folder, name = plan.config, plan.folder, plan.experiment
    assert folder is not None, "it has one by now"
    observer = open_observer(
        folder.path, config, stream=asked.stream, describe_item=_item_text(config, data), prefix=f"{name}: " if name else ""
    )
    held.callback(observer.close)
    for note in data.notes():
        observer.note(note)
    controller = open_controller(
        folder,
        config,
        rows=data.train,
        eval_rows=data.eval,
        data_fingerprint=data.fingerprint,
        eval_fingerprint=data.eval_fingerprint or "",
        broker=_broker(config),
        observer=_CallsBack(observer, asked.on_step, name) if asked.on_step else observer,
        fingerprint=numerics(config),
        code_version=code_version(),
        rewind=asked.rewind,
        num_together=num_together,
    )
    held.callback(controller.close)
    if plan.changes:
        controller.settings_changed(plan.changes, "resume")
    run_id = controller.core.state.run_id
    context = RunContext(
        config, asked.loaded.base_folder, folder.path, controller.incarnation, controller.start_step, run_id, experiment=name
    )
    if context.weights is not None:
        context.weights.prepare()
    folder.save_config(config)  # the roles read it; a resume that was refused has left it as it was
    return OpenRun(context, controller)


# ---- where runs go on --------------------------------------------------------------------------------------------------------


def _plan_run(config: Config, resume: str | Path | None) -> _Plan:
    """The newest run of a run file that names a folder is the one there."""
    if resume is None:
        return _Plan(config)
    if str(resume) != NEWEST:
        folder = RunFolder.open(resume)
    elif config.run.folder is not None:
        folder = RunFolder.open(config.run.folder)
    else:
        folder = RunFolder.newest(config.run.name)
    return _goes_on(_Plan(config, folder=folder))


def _plan_experiments(asked: Asked) -> tuple[ExperimentsFolder | None, list[_Plan]]:
    """The folder that they go on in (None: a new one), and each of them: one that has no folder there starts."""
    loaded, resume = asked.loaded, asked.resume
    plans = [_Plan(experiment.config, experiment.name) for experiment in loaded.experiments]
    if resume is None:
        return None, plans
    if asked.rewind is not None:
        raise ConfigError("--rewind goes back within one run: give the folder of the experiment with --resume")
    if str(resume) != NEWEST:
        home = ExperimentsFolder.open(resume)
    elif loaded.config.run.folder is not None:
        home = ExperimentsFolder.open(loaded.config.run.folder)
    else:
        home = ExperimentsFolder.newest(loaded.config.run.name)
    for plan in plans:
        plan.folder = home.run_folder(plan.experiment)
    return home, [_goes_on(plan) for plan in plans]


def _goes_on(plan: _Plan) -> _Plan:
    """The plan with what has changed since; ResumeError where the run's recorded settings do not allow that."""
    if plan.folder is not None:
        recorded = load_config([plan.folder.config], reward_given=True, checked=False).config
        check_resume(recorded, plan.config, str(plan.folder.path))
        plan.changes = changed_settings(recorded, plan.config)
    return plan


def _hold(held: contextlib.ExitStack, folder: RunFolder) -> None:
    """Lock the folder before anything in it is touched, until the run has ended."""
    held.callback(folder.lock().release)


# ---- pieces ------------------------------------------------------------------------------------------------------------------


def _broker(config: Config) -> Broker:
    lag = config.weight_sync.lag
    if lag is not None:
        return LagBroker(lag)
    return SlotBroker(slots_for(MAX_ENGINES if config.launch == "local" else 1))  # engines may be added


def _item_text(config: Config, data: Data) -> Callable[[int], str]:
    """The prompt of an evaluation row, for samples.jsonl and the display."""
    return lambda index: prompt_text(render_messages(data.eval[index], config.data)[-1:])


class _CallsBack:
    """An observer that also calls `on_step`. The caller's exception is its own affair and ends the run."""

    def __init__(self, observer: Observer, on_step: OnStep, experiment: str):
        self._observer, self._on_step = observer, on_step
        self._named = {"experiment": experiment} if experiment else {}

    def step(self, line: dict[str, Any], groups: tuple[Group, ...]) -> None:
        self._observer.step(line, groups)
        self._on_step(self._named | line)

    def evaluation(self, line: dict[str, Any], result: EvalResult) -> None:
        self._observer.evaluation(line, result)

    def note(self, text: str) -> None:
        self._observer.note(text)
