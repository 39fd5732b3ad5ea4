"""The keys of the settings tree: walking them, describing in words what each allows, and finding the nearest one to a misspelled name.

A key is a dotted path such as `trainer.steps`. Tables of a list carry their index (`reward.0.weight`); in `all_keys` the index is
written `N`. Names below a free table (`data.options`, `data.columns`, `reward.N.options`) are the person's own.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from slipstream.config.settings import Config, Settings

KeyPath = tuple[str | int, ...]  # ("reward", 0, "weight")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting, a leaf of the tree."""

    path: str  # dotted, "N" for the index of a list of tables
    field: FieldInfo

    @property
    def allowed(self) -> str:
        return describe(self.field)


def all_keys(model: type[Settings] = Config, prefix: str = "") -> Iterator[Key]:
    """Every leaf, in the order of the file."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if (table := table_of(field.annotation)) is not None:
            yield from all_keys(table, path + ".")
        elif (table := table_of_list(field.annotation)) is not None:
            yield from all_keys(table, path + ".N.")
        else:
            yield Key(path, field)


def table_of(annotation: Any) -> type[Settings] | None:
    """The settings class of a table's annotation, None for anything else."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Settings) else None


def table_of_list(annotation: Any) -> type[Settings] | None:
    """The settings class of a list of tables, None for anything else."""
    return table_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


@dataclass(frozen=True, slots=True)
class Place:
    """What lies at a path: a leaf or table of ours (`field`, and `table` for its class), or a name below a free table (`free`)."""

    field: FieldInfo | None = None  # None for one table of a list, and below a free table
    table: type[Settings] | None = None
    free: bool = False

    @property
    def annotation(self) -> Any:
        """The type of what may stand here."""
        return self.field.annotation if self.field is not None else self.table or Any

    @property
    def is_flag(self) -> bool:
        return self.annotation is bool

    @property
    def is_list_of_tables(self) -> bool:
        return self.field is not None and table_of_list(self.field.annotation) is not None


def find(parts: KeyPath, table: type[Settings] = Config) -> Place | None:
    """What lies at this path, None for an unknown key."""
    if not parts:
        return Place(table=table)
    name, rest = str(parts[0]), parts[1:]
    field = table.model_fields.get(name)
    if field is None:
        return None
    if (inner := table_of(field.annotation)) is not None:
        return find(rest, inner) if rest else Place(field, inner)
    if not rest:
        return Place(field)
    if (inner := table_of_list(field.annotation)) is not None and str(rest[0]).isdecimal():
        return find(rest[1:], inner)
    return Place(free=True) if get_origin(field.annotation) is dict else None


def dotted(parts: KeyPath) -> str:
    return ".".join(str(part) for part in parts)


def nearest(path: str) -> str | None:
    """The valid key that was probably meant: the closest whole path, else the closest last name (`steps` -> `trainer.steps`)."""
    parts = path.split(".")
    index = next((part for part in parts if part.isdecimal()), "0")
    names = [key.path.replace(".N.", f".{index}.") for key in all_keys()]
    names += [name for name, field in Config.model_fields.items() if table_of(field.annotation) or table_of_list(field.annotation)]
    last = parts[-1]
    same_table = [n for n in names if n.rpartition(".")[0] == path.rpartition(".")[0]]
    for pool in (same_table, names):
        by_last = {name.rpartition(".")[2]: name for name in reversed(pool)}
        if found := difflib.get_close_matches(last, by_last, n=1, cutoff=0.7):
            return by_last[found[0]]
    found = difflib.get_close_matches(path, names, n=1, cutoff=0.6)
    return found[0] if found else None


# ---- what a key allows, in words ---------------------------------------------------------------------------------------------


def describe(field: FieldInfo) -> str:
    """What the key allows: `a whole number >= 1`, `"grpo" | "dapo"`, `text or nothing`."""
    words = _describe_type(field.annotation)
    limits = _limits(*field.metadata)
    return f"{words} {limits}" if limits else words


def _describe_type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in args)
    if origin in (Union, types.UnionType):
        some = [_describe_keys(a) if table_of(a) else _describe_type(a) for a in args if a is not types.NoneType]
        return " or ".join(some)
    if origin is Annotated:
        return " ".join(filter(None, (_describe_type(args[0]), _limits(*args[1:]))))
    if table_of_list(annotation):
        return "a list of tables"
    if origin is list:
        return f"a list of {_plural(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} {_plural(args[0])}"
    if origin is dict:
        return "a table" if args[1] is Any else f"a table of {_plural(args[1])}"
    if table_of(annotation):
        return "a table"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(annotation, str(annotation))


def _describe_keys(table: type[Settings]) -> str:
    """A table that may stand where something else may as well: its keys are listed nowhere else."""
    return "a table {" + ", ".join(f"{name} = {describe(field)}" for name, field in table.model_fields.items()) + "}"


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is dict:
        return "tables"
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(annotation, _describe_type(annotation))


def _limits(*metadata: Any) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    words = []
    for limit in metadata:
        if isinstance(limit, FieldInfo):
            words.append(_limits(*limit.metadata))
        words += [f"{sign} {bound}" for name, sign in signs.items() if (bound := getattr(limit, name, None)) is not None]
        if pattern := getattr(limit, "pattern", None):
            words.append(f"matching {pattern}")
    return " and ".join(words)


def accepts(annotation: Any, value: Any) -> bool:
    """Whether a value has the right type for a key (limits aside)."""
    try:
        TypeAdapter(_without_limits(annotation)).validate_python(value)
    except ValidationError:
        return False
    return True


def _without_limits(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_without_limits(a) for a in get_args(annotation))]  # noqa: UP007  built at run time
    return annotation


def allows_none(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)
