"""Command-line overrides: `--section.key value`, `--section.key=value`, `--section.flag`, `--no-section.flag`.

Hyphens and underscores are the same in our own names. A value is read as TOML (numbers, true, lists, tables), and as plain text where
TOML or the key's type says so (`--model.name 7b` needs no quotes). `none` clears a key that may be empty.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from slipstream.config.keys import accepts, allows_none, dotted, find, nearest

Path = tuple[str | int, ...]  # ("reward", 0, "weight")


@dataclass(slots=True)
class Overrides:
    values: list[tuple[Path, Any]] = field(default_factory=list)  # in the order given; a later one wins
    problems: list[str] = field(default_factory=list)


def parse_overrides(arguments: list[str]) -> Overrides:
    """The overrides in these arguments; unknown keys and missing values are collected, not raised."""
    out = Overrides()
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        if not argument.startswith("--") or argument == "--":
            out.problems.append(f"command line: {argument!r} is neither a run file nor an option (--section.key value)")
            continue
        name, equals, text = argument[2:].partition("=")
        path, negated = _path_of(name)
        target = find(path)
        if target is None:
            out.problems.append(unknown_key("command line", f"--{name}", dotted(path)))
            if not equals and at < len(arguments) and not arguments[at].startswith("--"):
                at += 1  # its value
            continue
        is_flag = isinstance(target, FieldInfo) and target.annotation is bool
        if negated:
            if not is_flag or equals:
                out.problems.append(f"command line: --{name}: --no- takes a true/false setting and no value")
            else:
                out.values.append((path, False))
            continue
        if not equals:
            follows = at < len(arguments) and not arguments[at].startswith("--")
            if is_flag and not (follows and arguments[at].lower() in ("true", "false")):
                out.values.append((path, True))
                continue
            if not follows:
                out.problems.append(f"command line: --{name} needs a value")
                continue
            text = arguments[at]
            at += 1
        out.values.append((path, read_value(text, target)))
    return out


def _path_of(name: str) -> tuple[Path, bool]:
    """The key a flag means, and whether it is a `--no-` flag (a key whose own name starts with `no` comes first)."""
    path = _normal(name)
    if name.startswith(("no-", "no_")) and find(path) is None:
        return _normal(name[3:]), True
    return path, False


def _normal(name: str) -> Path:
    """Underscores in our own names; names below a free table stay as they are typed."""
    parts: list[str | int] = []
    for part in name.split("."):
        ours = find((*parts, part.replace("-", "_")))
        parts.append(part if ours is Any else int(part) if part.isdecimal() else part.replace("-", "_"))
    return tuple(parts)


def read_value(text: str, target: Any) -> Any:
    """A command-line value as the key's type reads it: TOML where that fits, else the text itself."""
    annotation = target.annotation if isinstance(target, FieldInfo) else Any
    if text.lower() == "none" and allows_none(annotation):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text.strip() else text
    except tomllib.TOMLDecodeError:
        value = _python_flag(text, annotation)
    if isinstance(target, FieldInfo) and not accepts(annotation, value) and accepts(annotation, text):
        return text
    return value


def _python_flag(text: str, annotation: Any) -> Any:
    return text.lower() == "true" if annotation is bool and text.lower() in ("true", "false") else text


def unknown_key(source: str, shown: str, path: str) -> str:
    """The line that names an unknown key and the one that was probably meant."""
    near = nearest(path)
    hint = f"did you mean {near}?" if near else "see docs/settings.md for all keys"
    return f"{source}: {shown}: unknown key; {hint}"
