"""Read the tool calls in a model's reply. What is malformed becomes a message to the model, never an error of the run."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    """One call, or why it is none."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` form, or in a reply that is all JSON: one such object
    or a list of them. An empty list: the reply calls nothing.

    >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error=None)]
    """
    tagged = _TAGGED.findall(text)
    if tagged:
        return [call for body in tagged for call in _calls_in(body)]
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return []
    try:
        value = json.loads(stripped)
    except ValueError:
        return []  # prose that begins with a bracket
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, dict) and "name" in item for item in items):
        return []  # JSON that is an answer
    return [_call_from(item) for item in items]


def _calls_in(body: str) -> list[ToolCall]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"the tool call is not valid JSON: {error}")]
    return [_call_from(item) for item in (value if isinstance(value, list) else [value])]


def _call_from(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a tool call is an object {"name": ..., "arguments": {...}}')
    name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(name, {}, "the arguments are not valid JSON")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not an object")
    return ToolCall(name, arguments)
