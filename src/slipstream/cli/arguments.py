"""What the verbs' arguments have in common: run files and folders, `--section.key value`, `--json`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config.keys import find, table_of
from slipstream.config.settings import Config
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.config.load import LoadedConfig

OVERRIDES_HELP = "Any setting can follow as --section.key value (hyphen or underscore), e.g. --trainer.steps 20."
TOP_LEVEL = tuple(name for name, field in Config.model_fields.items() if table_of(field.annotation) is None)  # launch, reward


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the verb's own arguments, the setting overrides with their values), each in the order given.

    argparse cannot do this: it would read the value of a setting as one more run file.

    >>> split_overrides(["run.toml", "--trainer.steps", "5", "--json", "--launch=inline"])
    (['run.toml', '--json'], ['--trainer.steps', '5', '--launch=inline'])
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*own, argument, *rest], overrides
        if not _is_override(argument):
            own.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument and rest and _takes(argument, rest[0]):
            overrides.append(rest.pop(0))
    return own, overrides


def _is_override(argument: str) -> bool:
    name = argument[2:].partition("=")[0]
    return argument.startswith("--") and ("." in name or name in TOP_LEVEL)


def _takes(argument: str, following: str) -> bool:
    """Whether `following` is this setting's value: a flag (true/false setting) takes only `true` or `false`."""
    if following.startswith("--"):
        return False
    field = find(tuple(argument[2:].replace("-", "_").split(".")))
    no_flag = argument.startswith(("--no-", "--no_")) and field is None
    is_flag = no_flag or getattr(field, "annotation", None) is bool
    return not is_flag or following.lower() in ("true", "false")


def add_run(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The positional RUN: a run file or a run folder, then overlay files."""
    parser.add_argument("run", metavar="RUN", nargs="*" if optional else "+", type=Path, help="run file or run folder, then overlay files")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object; everything else goes to stderr")


def load_run(
    paths: Sequence[Path], overrides: Sequence[str], *, checked: bool = True, trains: bool = True, experiments: bool = False
) -> LoadedConfig:
    """The settings that a verb works with; recipes that came with the package are found by their path, `recipes/quickstart.toml`.

    `checked = False` is for verbs that neither train nor score: a run whose reward was a Python function has none in its settings.
    `trains = False` is for verbs that only sample. Only with `experiments` does the verb take a file of several runs.
    """
    from slipstream.config.load import load_config

    loaded = load_config([packaged_recipe(path) for path in paths], overrides, checked=checked, trains=trains)
    if loaded.experiments and not experiments:
        names = ", ".join(experiment.name for experiment in loaded.experiments)
        raise ConfigError(f"{paths[0]} has several runs ({names}); this needs one: the run folder of an experiment, or a file without them")
    return loaded


def run_folder(path: Path) -> Path:
    """The path as a run folder; ConfigError if it is none."""
    from slipstream.controller.run_folder import holds_experiments

    if not path.is_dir():
        what = "a file" if path.exists() else "not there"
        raise ConfigError(f"{path} is {what}; this needs a run folder, such as runs/quickstart-20250101-120000")
    if not (path / "config.toml").exists():
        raise ConfigError(f"{path} is not a run folder: it has no config.toml")
    if names := holds_experiments(path):
        raise ConfigError(f"{path} holds the run folders of experiments; this needs one of them: {', '.join(str(path / n) for n in names)}")
    return path


def packaged_recipe(path: Path) -> Path:
    """`recipes/NAME.toml` is also found where no such file is in the working directory: in the installed package."""
    if path.exists() or path.parent != Path("recipes"):
        return path
    package = Path(__file__).parents[1]
    found = [folder / path.name for folder in (package / "recipes", package.parents[1] / "recipes") if (folder / path.name).exists()]
    return found[0] if found else path
