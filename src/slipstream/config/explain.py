"""Pydantic's validation errors as lines for people: source, key, what was given, what is allowed, the nearest valid key."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from slipstream.config.keys import KeyPath, describe, dotted, find
from slipstream.config.layers import Layers, at_path, copy_tree
from slipstream.config.overrides import unknown_key
from slipstream.config.settings import Config


def explain(error: ValidationError, layers: Layers) -> dict[KeyPath, str]:
    """One line per wrong key (pydantic reports each member of a union apart)."""
    lines: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        path = _key_of(item, layers.tree)
        lines.setdefault(path, _line(path, item, layers))
    return lines


def without(tree: dict[str, Any], wrong: set[KeyPath]) -> Config | None:
    """The config with the wrong keys at their defaults, so that the rest can be judged; None if even that fails."""
    tree = copy_tree(tree)
    for path in sorted(wrong, key=len, reverse=True):
        if path[:1] in (("reward",), ("threshold",)):
            tree.pop(str(path[0]), None)  # a list keeps its meaning only whole
        elif path and isinstance(parent := at_path(tree, path[:-1]), dict):
            parent.pop(path[-1], None)
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def _key_of(item: ErrorDetails, tree: dict[str, Any]) -> KeyPath:
    """Pydantic's location without the names of union members, and no deeper than our own keys."""
    here: Any = tree
    path: KeyPath = ()
    for part in item["loc"]:
        place = find(path)
        if place and place.table is None and not place.is_list_of_tables:
            return path  # a leaf: what follows is inside its value
        if isinstance(here, dict) and part not in here:
            return (*path, part) if item["type"] == "missing" else path
        here = here[part]
        path = (*path, part)
    return path


def _line(path: KeyPath, item: ErrorDetails, layers: Layers) -> str:
    source, name, kind, place = layers.source_of(path), dotted(path), item["type"], find(path)
    if kind == "missing":
        return f"{source}: {name}: missing; {_allowed(path)} is needed"
    given = shown(layers.get(path))
    if kind == "extra_forbidden":
        return unknown_key(source, f"{name} = {given}", name)
    if place and place.is_list_of_tables:
        return f"{source}: {name} = {given}: a list of tables is allowed: write [[{name}]] over each"
    allowed = _allowed(path) or item["msg"]
    if kind == "finite_number":
        allowed += ", and finite"
    if kind == "string_pattern_mismatch" and place and place.field:
        allowed += f" ({place.field.description})"
    return f"{source}: {name} = {given}: allowed is {allowed}{_did_you_mean(layers.get(path), allowed)}"


def _did_you_mean(given: Any, allowed: str) -> str:
    """The nearest of the texts that a key allows."""
    near = difflib.get_close_matches(given, re.findall(r'"(\w+)"', allowed), n=1) if isinstance(given, str) else []
    return f'; did you mean "{near[0]}"?' if near else ""


def _allowed(path: KeyPath) -> str:
    place = find(path)
    return describe(place.field) if place and place.field else "a table" if place and place.table else ""


def shown(value: Any) -> str:
    """A value as TOML would have it, shortened."""
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
