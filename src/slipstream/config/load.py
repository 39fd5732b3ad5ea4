"""From files and the command line to one checked `Config`: every problem at once, each with its source, key, value and what is allowed.

run file ─┐
overlays ─┼─► merge (later wins, key by key) ─► types and limits (pydantic) ─► cross-field checks ─► LoadedConfig
overrides ┘                     └─► once more with each [[experiment]] table on top
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.config.checks import Conflict, check
from slipstream.config.experiments import Experiment, as_run, experiment_problems, name_problem
from slipstream.config.explain import explain, without
from slipstream.config.keys import KeyPath, dotted
from slipstream.config.layers import Layers, with_absolute_files
from slipstream.config.paths import resolve_path
from slipstream.config.settings import Config
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings of a run, and where each came from."""

    config: Config
    sources: dict[str, str]  # dotted key -> the file, or "command line"; keys left at their default are absent
    base_folder: Path  # of the run file (the working directory without one): what relative files are relative to
    experiments: tuple[Experiment, ...] = ()  # the runs of a file with [[experiment]] tables; `config` then is what they start from

    def resolve(self, value: str) -> Path:
        """The file that a setting names."""
        return resolve_path(value, self.base_folder)


def load_config(
    paths: Sequence[Path | str],
    overrides: Sequence[str] = (),
    *,
    reward_given: bool = False,
    checked: bool = True,
    trains: bool = True,
) -> LoadedConfig:
    """Read a run file, overlays over it, and command-line overrides over both.

    A path may also be a run folder, whose `config.toml` is meant. Tables merge key by key; lists, and tables whose `type` changes,
    are replaced. [[experiment]] tables lie over everything else, the command line included. `reward_given`: a callable comes as the reward,
    so that the file needs none. `checked = False` leaves out the cross-field checks, for what neither trains nor scores (export, inspect);
    `trains = False` those that concern training alone.

    Raises ConfigError with every problem found: syntax, unknown keys, wrong types, limits, settings that exclude each other.

    >>> loaded = load_config([], ["--trainer.steps", "5", "--reward", "[{function = 'exact'}]"])
    >>> loaded.config.trainer.steps, loaded.sources["trainer.steps"]
    (5, 'command line')
    """
    layers = Layers()
    files = [_config_file(Path(p)) for p in paths]
    for file in files:
        layers.add_file(file)
    layers.add_overrides(list(overrides))
    base_folder = files[0].absolute().parent if files else Path.cwd()
    return _finish(layers, base_folder, reward_given, checked, trains)


def load_tables(tables: Mapping[str, Any], *, reward_given: bool = False) -> LoadedConfig:
    """The same for settings given as a tree of plain values from Python; files are relative to the working directory.

    >>> load_tables({"trainer": {"steps": 5}}, reward_given=True).config.trainer.steps
    5
    """
    layers = Layers()
    layers.add(with_absolute_files(_plain(tables), (), Path.cwd()), "settings")
    return _finish(layers, Path.cwd(), reward_given, True, True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def check_config(config: Config, *, reward_given: bool = False, base_folder: Path | None = None) -> None:
    """The cross-field checks on settings made in Python; raises ConfigError with all of them."""
    conflicts = check(config, reward_given=reward_given, base_folder=base_folder or Path.cwd())
    if conflicts:
        raise ConfigError([f"{', '.join(c.keys)}: {c.text}" for c in conflicts])


def _config_file(path: Path) -> Path:
    return path / "config.toml" if path.is_dir() else path


def _finish(layers: Layers, base_folder: Path, reward_given: bool, checked: bool, trains: bool) -> LoadedConfig:
    config, experiments = None, []
    if not layers.unreadable:
        alone = not layers.experiments  # what only experiments make whole is judged with each of them
        config = _validate(layers, base_folder, reward_given, checked and alone, trains)
        experiments = _experiments(layers, base_folder, reward_given, checked, trains)
    if config is None or layers.problems:
        raise ConfigError(list(dict.fromkeys(layers.problems)))  # of the settings that experiments share: once
    sources = {dotted(path): source for path, source in layers.sources.items()}
    return LoadedConfig(config, sources, base_folder, tuple(experiments))


def _experiments(layers: Layers, base_folder: Path, reward_given: bool, checked: bool, trains: bool) -> list[Experiment]:
    """The runs of the [[experiment]] tables; what is wrong with them is added to `layers.problems`."""
    out: list[Experiment] = []
    first: Config | None = None
    for number, table in enumerate(layers.experiments, start=1):
        values = dict(table.values)
        name = values.pop("name", None)
        if problem := name_problem(name, [experiment.name for experiment in out]):
            layers.problems.append(f"{table.source}: experiment {number}: {problem}")
            name = f"number-{number}"
        own = layers.with_table(values, f"{table.source}, experiment {name}")
        config = _validate(own, base_folder, reward_given, checked, trains)
        if config is not None:
            first = first or config
            if checked:
                found = experiment_problems(config, first)
                own.problems += [_line(Conflict((key,), text), own) for key, text in found]
            out.append(Experiment(name, values, as_run(config, name)))
        layers.problems += own.problems
    return out


def _validate(layers: Layers, base_folder: Path, reward_given: bool, checked: bool, trains: bool) -> Config | None:
    """The config; what is wrong with it is added to `layers.problems`.

    Cross-field checks run even when some keys are wrong: on the config with those at their defaults, leaving out what concerns them.
    """
    wrong: dict[KeyPath, str] = {}
    try:
        config = Config.model_validate(layers.tree)
    except ValidationError as error:
        wrong = explain(error, layers)
        layers.problems += wrong.values()
        config = without(layers.tree, set(wrong))
    if config is not None and checked:
        reward_wrong = any(path[:1] == ("reward",) for path in wrong)
        conflicts = check(config, reward_given=reward_given or reward_wrong, base_folder=base_folder, trains=trains)
        names = [dotted(path) for path in wrong]
        layers.problems += [_line(c, layers) for c in conflicts if not any(_touches(key, name) for key in c.keys for name in names)]
    return config


def _line(conflict: Conflict, layers: Layers) -> str:
    parts = tuple(int(part) if part.isdecimal() else part for part in conflict.keys[0].split("."))
    return f"{layers.source_of(parts)}: {', '.join(conflict.keys)}: {conflict.text}"


def _touches(key: str, name: str) -> bool:
    return key == name or key.startswith(name + ".") or name.startswith(key + ".")
