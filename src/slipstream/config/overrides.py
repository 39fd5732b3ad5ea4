"""Command-line overrides: `--section.key value`, `--section.key=value`, `--section.flag`, `--no-section.flag`.

Hyphens and underscores are the same in our own names. A value is read as TOML (numbers, true, lists, tables), and as plain text where
TOML or the key's type says so (`--model.name 7b` needs no quotes). `none` clears a key that may be empty.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any

from slipstream.config.keys import KeyPath, Place, accepts, allows_none, dotted, find, nearest

COMMAND_LINE = "command line"


@dataclass(slots=True)
class Overrides:
    values: list[tuple[KeyPath, Any]] = field(default_factory=list)  # in the order given; a later one wins
    problems: list[str] = field(default_factory=list)


def parse_overrides(arguments: list[str]) -> Overrides:
    """The overrides in these arguments; unknown keys and missing values are collected, not raised."""
    out = Overrides()
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        if not argument.startswith("--") or argument == "--":
            out.problems.append(f"{COMMAND_LINE}: {argument!r} is neither a run file nor an option (--section.key value)")
            continue
        try:
            out.values.append(_read_option(argument, rest))
        except _Wrong as wrong:
            out.problems.append(str(wrong))
    return out


class _Wrong(Exception):
    """One option that cannot be read."""


def _read_option(argument: str, rest: list[str]) -> tuple[KeyPath, Any]:
    """One option and, where it takes one, its value from the end of `rest` (the arguments after it, reversed)."""
    name, equals, text = argument[2:].partition("=")
    path, negated = _path_of(name)
    place = find(path)
    value_follows = not equals and bool(rest) and not rest[-1].startswith("--")
    if place is None:
        if value_follows:
            rest.pop()
        raise _Wrong(unknown_key(COMMAND_LINE, f"--{name}", dotted(path)))
    if negated:
        if not place.is_flag or equals:
            raise _Wrong(f"{COMMAND_LINE}: --{name}: --no- takes a true/false setting and no value")
        return path, False
    if place.is_flag and not equals and not (value_follows and rest[-1].lower() in ("true", "false")):
        return path, True
    if not equals and not value_follows:
        raise _Wrong(f"{COMMAND_LINE}: --{name} needs a value")
    return path, read_value(text if equals else rest.pop(), place)


def _path_of(name: str) -> tuple[KeyPath, bool]:
    """The key a flag means, and whether it is a `--no-` flag (a key whose own name starts with `no` comes first)."""
    path = _normal(name)
    if name.startswith(("no-", "no_")) and find(path) is None:
        return _normal(name[3:]), True
    return path, False


def _normal(name: str) -> KeyPath:
    """Underscores in our own names; names below a free table stay as they are typed."""
    parts: list[str | int] = []
    for part in name.split("."):
        ours = part.replace("-", "_")
        place = find((*parts, ours))
        parts.append(part if place and place.free else int(part) if part.isdecimal() else ours)
    return tuple(parts)


def read_value(text: str, place: Place) -> Any:
    """A command-line value as the key's type reads it: TOML where that fits, else the text itself."""
    annotation = place.annotation
    if text.lower() == "none" and allows_none(annotation):
        return None
    if place.is_flag and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = text if "\n" in text else tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if not accepts(annotation, value) and accepts(annotation, text) else value


def unknown_key(source: str, shown: str, path: str) -> str:
    """The line that names an unknown key and the one that was probably meant."""
    near = nearest(path)
    hint = f"did you mean {near}?" if near else "see docs/settings.md for all keys"
    return f"{source}: {shown}: unknown key; {hint}"
