"""Several runs from one file: `[[experiment]]` tables, each a run of its own with the file's settings and what it changes in them.

    run file's own settings ─┬─ [[experiment]] name = "a", what differs ─► the Config of run a
                             └─ [[experiment]] name = "b", what differs ─► the Config of run b

They are trained at the same time over one copy of the model, an adapter each; so what concerns the model and its place is common to all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.resume import changed_settings
from slipstream.config.settings import Config

# What experiments have in common: the base, the processes it lies in, and the folder that all of them are in.
COMMON = ("launch", "run.name", "run.folder", "model", "engine", "trainer.device", "trainer.threads")
TAKEN = ("log", "config.toml")  # the names of other things in the folder that holds the experiments' folders
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of the runs of a file."""

    name: str  # of its folder, and before its lines
    table: dict[str, Any]  # what it changes in the file's own settings
    config: Config  # the whole settings


def as_run(config: Config, name: str) -> Config:
    """The settings of an experiment: as a run, it has a name of its own, and its folder is chosen with the others'."""
    run = config.run.model_copy(update={"name": f"{config.run.name}-{name}", "folder": None})
    return config.model_copy(update={"run": run})


def name_problem(name: Any, others: Sequence[str]) -> str | None:
    """Why an experiment cannot have this name, which is that of its folder."""
    if name is None:
        return "name is missing: it names the experiment's folder"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"name = {name!r}: letters, digits, '.', '_' and '-' are allowed, the first of them a letter or a digit; it names a folder"
    if name.lower() in TAKEN:
        return f"name = '{name}': this is the name of something else in the folder of the experiments; choose another"
    if name.lower() in (other.lower() for other in others):
        return f"name = '{name}': another experiment has this name; each has a folder of its own"
    return None


def experiment_problems(config: Config, first: Config) -> Iterator[tuple[str, str]]:
    """(key, what is wrong and what to do) of one experiment's settings; `first` are those of the first experiment."""
    share = "experiments share one model, which stays as it is"
    if not config.lora.on:
        yield "lora.rank", f"{share}, and train an adapter each; set lora.rank"
    elif config.payload != "adapter":
        yield "weight_sync.payload", f'"{config.payload}", but {share}, in the engine, too; leave payload and lora.dora out'
    if config.engine.type != "embedded":
        yield "engine.type", f'"{config.engine.type}", but {share}, in the embedded engine; leave engine.type out'
    if config.engine.replicas != 1:
        yield "engine.replicas", f"{config.engine.replicas}, but {share}, in one engine; leave it out"
    if config.weight_sync.transport != "shared_memory":
        yield (
            "weight_sync.transport",
            f'"{config.weight_sync.transport}", but adapters of experiments travel by shared memory; leave it out',
        )
    if services := [sink for sink in config.metrics.sinks if sink != "tensorboard"]:
        yield "metrics.sinks", f'"{services[0]}" takes one run per process, and experiments are several; use "tensorboard"'
    for key in changed_settings(first, config):
        if any(key == common or key.startswith(f"{common}.") for common in COMMON):
            yield (
                key,
                "must be the same in all experiments, which share the model and its processes; set it above the [[experiment]] tables",
            )
