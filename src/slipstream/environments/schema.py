"""A Python function as a tool: its JSON schema, from signature and docstring, in the form that chat templates take."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object"}
_JSON_TYPES = {**_NAMES, type(None): "null"}
_PARAMETER_LINE = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
_SECTION_LINE = re.compile(r"^\s*(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?)\s*:\s*$")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {name, description, parameters}}.

    Descriptions come from a Google-style docstring (text, then "Args:" with "name: meaning" lines). A parameter without annotation takes
    anything; one without default is required; *args and **kwargs are not shown.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations that name what is not importable: show the parameter without a type
        hints = {}
    description, meanings = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = json_type(hints.get(name, Any)) | ({"description": meanings[name]} if name in meanings else {})
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": function.__name__, "description": description, "parameters": parameters}}


def json_type(hint: Any) -> dict[str, Any]:
    """The JSON schema of an annotation; {} (anything) for those it does not know."""
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        options = [json_type(argument) for argument in arguments if argument is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if origin in (list, tuple):
        return {"type": "array"} | ({"items": json_type(arguments[0])} if arguments else {})
    return {"type": "object"} if origin is dict else {}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what comes before the first section, meaning by parameter name)."""
    description: list[str] = []
    meanings: dict[str, str] = {}
    section = None
    for line in text.splitlines():
        if heading := _SECTION_LINE.match(line):
            section = heading.group(1)
        elif section is None:
            description.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and (found := _PARAMETER_LINE.match(line)):
            meanings[found.group(1)] = found.group(2).strip()
    return " ".join(part for part in description if part), meanings
