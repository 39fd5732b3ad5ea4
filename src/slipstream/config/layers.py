"""Run file, overlays and overrides merged into one plain tree, remembering where every value came from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.keys import KeyPath, dotted
from slipstream.config.overrides import COMMAND_LINE, parse_overrides
from slipstream.config.paths import FILE_KEYS, absolute_setting


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is kept apart from the tree, and where it stands."""

    values: dict[str, Any]
    source: str


class Layers:
    """The merged tree so far, the source of each leaf, and the problems met."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.sources: dict[KeyPath, str] = {}
        self.experiments: list[Table] = []  # the [[experiment]] tables of the last layer that has some
        self.problems: list[str] = []
        self.unreadable = False  # a file could not be read: judging the rest would only make follow-up problems

    def add_file(self, file: Path) -> None:
        """Merge a TOML file over what is there."""
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
            self.add(with_absolute_files(data, (), file.absolute().parent), str(file))

    def _cannot_read(self, problem: str) -> None:
        self.problems.append(problem)
        self.unreadable = True

    def add_overrides(self, arguments: list[str]) -> None:
        """Merge command-line options over what is there: first the keys of plain tables, then those of tables in lists."""
        parsed = parse_overrides(arguments)
        self.problems += parsed.problems
        nested: dict[str, Any] = {}
        indexed: list[tuple[KeyPath, Any]] = []
        for path, value in parsed.values:
            value = with_absolute_files(value, path, Path.cwd())
            if any(isinstance(part, int) for part in path):
                indexed.append((path, value))
            else:
                merge_into(nested, _nest(path, value))
        self.merge(nested, COMMAND_LINE)
        for path, value in indexed:
            self._set_in_list(path, value)

    def add(self, data: dict[str, Any], source: str) -> None:
        """Put `data` over the tree; its [[experiment]] tables, which are not settings of one run, are kept beside it."""
        data = dict(data)
        if "experiment" in data:
            self._keep_experiments(data.pop("experiment"), source)
        self.merge(data, source)

    def merge(self, data: dict[str, Any], source: str) -> None:
        """Put `data` over the tree."""
        for path in merge_into(self.tree, data):
            for known in [p for p in self.sources if p[: len(path)] == path]:
                del self.sources[known]
        for path in leaves(data):
            self.sources[path] = source

    def _keep_experiments(self, tables: Any, source: str) -> None:
        if isinstance(tables, list) and all(isinstance(table, dict) for table in tables):
            self.experiments = [Table(table, source) for table in tables]
        else:
            self.problems.append(f"{source}: experiment: a list of tables is allowed: write [[experiment]] over each")

    def with_table(self, values: dict[str, Any], source: str) -> Layers:
        """The tree with one more layer; the problems of these are not its own."""
        out = Layers()
        out.tree, out.sources = copy_tree(self.tree), dict(self.sources)
        out.merge(values, source)
        return out

    def _set_in_list(self, path: KeyPath, value: Any) -> None:
        """`--reward.0.weight 2`: change a table of a list, or start the next one."""
        at = next(i for i, part in enumerate(path) if isinstance(part, int))
        name, index, rest = dotted(path[:at]), int(path[at]), path[at + 1 :]
        tables = self.tree.setdefault(name, [])
        if not isinstance(tables, list):
            return  # wrong in the file, which is said there
        if index > len(tables):
            have = f"there are {len(tables)} [[{name}]] tables, counted from 0" if tables else f"there is no [[{name}]] table yet"
            self.problems.append(f"{COMMAND_LINE}: --{dotted(path)}: {have}; the next new one is --{name}.{len(tables)}")
            return
        if index == len(tables):
            tables.append({})
        if rest and isinstance(tables[index], dict):
            merge_into(tables[index], _nest(rest, value))
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

    def get(self, path: KeyPath) -> Any:
        """The value at a path that is in the tree."""
        return at_path(self.tree, path)


def merge_into(base: dict[str, Any], over: dict[str, Any], at: KeyPath = ()) -> list[KeyPath]:
    """Put `over` on `base`, key by key; the paths of the values that were replaced as a whole.

    Tables merge, unless both name a `type` and it differs: then the old table's keys belong to the old type, and go.
    """
    replaced: list[KeyPath] = []
    for key, value in over.items():
        old, path = base.get(key), (*at, key)
        if isinstance(old, dict) and isinstance(value, dict) and not ("type" in value and old.get("type", value["type"]) != value["type"]):
            replaced += merge_into(old, value, path)
        else:
            replaced.append(path)
            base[key] = copy_tree(value)
    return replaced


def copy_tree(value: Any) -> Any:
    """The same tables and lists, as new objects."""
    if isinstance(value, dict):
        return {key: copy_tree(item) for key, item in value.items()}
    return [copy_tree(item) for item in value] if isinstance(value, list) else value


def at_path(tree: Any, path: KeyPath) -> Any:
    """The value at a path that is in the tree."""
    for part in path:
        tree = tree[part]
    return tree


def leaves(data: Any, at: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value that is not itself a table or a list of tables."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*at, key))
    elif isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        for index, item in enumerate(data):
            yield from leaves(item, (*at, index))
    else:
        yield at


def with_absolute_files(value: Any, at: KeyPath, base_folder: Path) -> Any:
    """The same tree with the values of FILE_KEYS made absolute."""
    if isinstance(value, dict):
        return {key: with_absolute_files(item, (*at, key), base_folder) for key, item in value.items()}
    if isinstance(value, list):
        return [with_absolute_files(item, (*at, index), base_folder) for index, item in enumerate(value)]
    key = ".".join("N" if isinstance(part, int) else part for part in at).removeprefix("experiment.N.")
    return absolute_setting(key, value, base_folder) if isinstance(value, str) and key in FILE_KEYS else value


def _nest(path: KeyPath, value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {str(part): value}
    return value
