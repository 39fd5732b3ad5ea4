"""From files and the command line to one checked `Config`: every problem at once, each with its source, key, value and what is allowed.

run file ─┐
overlays ─┼─► merge (later wins, key by key) ─► types and limits (pydantic) ─► cross-field checks ─► LoadedConfig
overrides ┘
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from slipstream.config.checks import Conflict, check
from slipstream.config.keys import all_keys, describe, dotted, find, table_of, table_of_list
from slipstream.config.overrides import Path as KeyPath
from slipstream.config.overrides import parse_overrides, unknown_key
from slipstream.config.paths import FILE_KEYS, absolute_setting, resolve_path
from slipstream.config.settings import Config
from slipstream.errors import ConfigError

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings of a run, and where each came from."""

    config: Config
    sources: dict[str, str]  # dotted key -> the file, or "command line"; keys left at their default are absent
    base_folder: Path  # of the run file (the working directory without one): what relative files are relative to

    def resolve(self, value: str) -> Path:
        """The file that a setting names."""
        return resolve_path(value, self.base_folder)


def load_config(paths: Sequence[Path | str], overrides: Sequence[str] = (), *, reward_given: bool = False) -> LoadedConfig:
    """Read a run file, overlays over it, and command-line overrides over both.

    A path may also be a run folder, whose `config.toml` is meant. Tables merge key by key; lists, and tables whose `type` changes,
    are replaced. `reward_given`: a callable comes as the reward, so that the file needs none.

    Raises ConfigError with every problem found: syntax, unknown keys, wrong types, limits, settings that exclude each other.

    >>> loaded = load_config([], ["--trainer.steps", "5", "--reward", "[{function = 'exact'}]"])
    >>> loaded.config.trainer.steps, loaded.sources["trainer.steps"]
    (5, 'command line')
    """
    layers = _Layers()
    files = [_config_file(Path(p)) for p in paths]
    for file in files:
        layers.add_file(file)
    layers.add_overrides(list(overrides))
    base_folder = files[0].absolute().parent if files else Path.cwd()
    if layers.unreadable:
        raise ConfigError(layers.problems)
    config = layers.validate(reward_given, base_folder)
    if config is None or layers.problems:
        raise ConfigError(layers.problems)
    return LoadedConfig(config, {dotted(p): s for p, s in layers.sources.items()}, base_folder)


def check_config(config: Config, *, reward_given: bool = False, base_folder: Path | None = None) -> None:
    """The cross-field checks on settings made in Python; raises ConfigError with all of them."""
    conflicts = check(config, reward_given=reward_given, base_folder=base_folder or Path.cwd())
    if conflicts:
        raise ConfigError([f"{', '.join(c.keys)}: {c.text}" for c in conflicts])


def _config_file(path: Path) -> Path:
    return path / "config.toml" if path.is_dir() else path


class _Layers:
    """Settings merged so far as a plain tree, where each leaf came from, and the problems met."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.sources: dict[KeyPath, str] = {}
        self.problems: list[str] = []
        self.unreadable = False  # a file could not be read: judging the rest would only make follow-up problems

    def add_file(self, file: Path) -> None:
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._cannot_read(f"{file}: there is no such file; give a run file (.toml) or a run folder")
        except OSError as error:
            self._cannot_read(f"{file}: cannot be read: {error.strerror or error}")
        except UnicodeDecodeError as error:
            self._cannot_read(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})")
        except tomllib.TOMLDecodeError as error:
            self._cannot_read(f"{file}: not valid TOML: {error}")
        else:
            self.merge(_with_absolute_files(data, (), file.absolute().parent), str(file))

    def _cannot_read(self, problem: str) -> None:
        self.problems.append(problem)
        self.unreadable = True

    def add_overrides(self, arguments: list[str]) -> None:
        parsed = parse_overrides(arguments)
        self.problems += parsed.problems
        nested: dict[str, Any] = {}
        indexed: list[tuple[KeyPath, Any]] = []
        for path, value in parsed.values:
            value = _with_absolute_files(value, path, Path.cwd())
            if any(isinstance(part, int) for part in path):
                indexed.append((path, value))
            else:
                _merge_into(nested, _nest(path, value), replaced=lambda _: None)
        self.merge(nested, COMMAND_LINE)
        for path, value in indexed:
            self._set_in_list(path, value)

    def merge(self, data: dict[str, Any], source: str) -> None:
        _merge_into(self.tree, data, replaced=self._forget)
        for path in _leaves(data):
            self.sources[path] = source

    def _forget(self, path: KeyPath) -> None:
        for known in [p for p in self.sources if p[: len(path)] == path]:
            del self.sources[known]

    def _set_in_list(self, path: KeyPath, value: Any) -> None:
        """`--reward.0.weight 2`: change a table of a list, or start the next one."""
        at = next(i for i, part in enumerate(path) if isinstance(part, int))
        name, index, rest = dotted(path[:at]), int(path[at]), path[at + 1 :]
        tables = self.tree.setdefault(str(path[0]), [])
        if not isinstance(tables, list) or index > len(tables):
            count = len(tables) if isinstance(tables, list) else 0
            have = f"there are {count} [[{name}]] tables, counted from 0" if count else f"there is no [[{name}]] table yet"
            self.problems.append(f"{COMMAND_LINE}: --{dotted(path)}: {have}; the next new one is --{name}.{count}")
            return
        if index == len(tables):
            tables.append({})
        if rest and isinstance(tables[index], dict):
            _merge_into(tables[index], _nest(rest, value), replaced=lambda _: None)
        else:
            tables[index] = value
        self.sources[path] = COMMAND_LINE

    def source_of(self, path: KeyPath) -> str:
        """Where a key was set: its own source, else that of something inside it or of the table around it."""
        if path in self.sources:
            return self.sources[path]
        for length in range(len(path), 0, -1):
            for known, source in self.sources.items():
                if known[:length] == path[:length]:
                    return source
        return "settings"

    def validate(self, reward_given: bool, base_folder: Path) -> Config | None:
        """The config, with pydantic's and the cross-field problems added to `problems`.

        Cross-field checks run even when some keys are wrong: on the config with those at their defaults, without what concerns them.
        """
        wrong: set[KeyPath] = set()
        try:
            config = Config.model_validate(self.tree)
        except ValidationError as error:
            wrong = self._explain(error)
            config = self._without(wrong)
        if config is not None:
            conflicts = check(config, reward_given=reward_given or ("reward",) in {w[:1] for w in wrong}, base_folder=base_folder)
            names = {dotted(path) for path in wrong}
            self.problems += [self._line(c) for c in conflicts if not any(_touches(key, names) for key in c.keys)]
        return config

    def _line(self, conflict: Conflict) -> str:
        source = self.source_of(_split(conflict.keys[0]))
        return f"{source}: {', '.join(conflict.keys)}: {conflict.text}"

    def _explain(self, error: ValidationError) -> set[KeyPath]:
        """One problem per wrong key; the paths of those keys."""
        seen: dict[KeyPath, str] = {}
        for item in error.errors(include_url=False):
            path = self._real_path(item["loc"], item["type"])
            if path not in seen:
                seen[path] = self._problem(path, item["type"], item["msg"])
        self.problems += seen.values()
        return set(seen)

    def _real_path(self, location: tuple[int | str, ...], kind: str) -> KeyPath:
        """Pydantic's location without the names of union members, and no deeper than our own keys."""
        here: Any = self.tree
        path: list[int | str] = []
        for part in location:
            inside = (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int) and part < len(here))
            if not inside:
                if kind == "missing":
                    path.append(part)
                break
            if isinstance(find(tuple(path)), FieldInfo) and path and table_of_list(find(tuple(path)).annotation) is None:
                break
            here = here[part]
            path.append(part)
        return tuple(path)

    def _problem(self, path: KeyPath, kind: str, message: str) -> str:
        source, name = self.source_of(path), dotted(path)
        if kind == "missing":
            return f"{source}: {name}: missing; {_allowed(path)} is needed"
        given = _show(_get(self.tree, path))
        if kind == "extra_forbidden":
            return unknown_key(source, f"{name} = {given}", name)
        if kind == "list_type" and table_of_list(getattr(find(path), "annotation", None)):
            return f"{source}: {name} = {given}: a list of tables is allowed: write [[{name}]] over each"
        allowed = _allowed(path)
        if kind == "finite_number":
            allowed += ", and finite"
        target = find(path)
        about = f" ({target.description})" if isinstance(target, FieldInfo) and kind == "string_pattern_mismatch" else ""
        return f"{source}: {name} = {given}: allowed is {allowed}{about}" if allowed else f"{source}: {name} = {given}: {message}"

    def _without(self, wrong: set[KeyPath]) -> Config | None:
        """The config with the wrong keys at their defaults; None if even that fails."""
        tree = _copy(self.tree)
        for path in sorted(wrong, key=len, reverse=True):
            parent = _get(tree, path[:-1])
            if isinstance(parent, dict):
                parent.pop(path[-1], None)
        if any(path[:1] == ("reward",) for path in wrong):
            tree.pop("reward", None)
        try:
            return Config.model_validate(tree)
        except ValidationError:
            return None


def _merge_into(base: dict[str, Any], over: dict[str, Any], replaced: Any, at: KeyPath = ()) -> None:
    """Put `over` on `base`, key by key; `replaced(path)` is told of every value that is replaced as a whole."""
    for key, value in over.items():
        old, path = base.get(key), (*at, key)
        if isinstance(old, dict) and isinstance(value, dict):
            if not ("type" in old and "type" in value and old["type"] != value["type"]):
                _merge_into(old, value, replaced, path)
                continue
        replaced(path)
        base[key] = _copy(value)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _nest(path: KeyPath, value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {str(part): value}
    return value


def _get(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _leaves(data: Any, at: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value that is not itself a table or a list of tables."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _leaves(value, (*at, key))
    elif isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        for index, item in enumerate(data):
            yield from _leaves(item, (*at, index))
    else:
        yield at


def _with_absolute_files(value: Any, at: KeyPath, base_folder: Path) -> Any:
    """The same tree with the values of FILE_KEYS made absolute."""
    if isinstance(value, dict):
        return {key: _with_absolute_files(item, (*at, key), base_folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_absolute_files(item, (*at, index), base_folder) for index, item in enumerate(value)]
    key = ".".join("N" if isinstance(part, int) else part for part in at)
    return absolute_setting(key, value, base_folder) if isinstance(value, str) and key in FILE_KEYS else value


def _allowed(path: KeyPath) -> str:
    target = find(path)
    if isinstance(target, FieldInfo):
        return describe(target)
    return "a table" if table_of(target) else ""


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    text = {"True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 80 else text[:77] + "..."


def _split(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _touches(key: str, names: set[str]) -> bool:
    return any(key == name or key.startswith(name + ".") or name.startswith(key + ".") for name in names)


KEYS = tuple(key.path for key in all_keys())  # every key of the run file, in order, "N" for an index
