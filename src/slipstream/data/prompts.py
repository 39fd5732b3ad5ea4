"""From a row to the chat messages that the model is shown."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.config.settings import DataSettings
from slipstream.data.rows import Row, absent_column, canonical
from slipstream.errors import DataError

Messages = list[dict[str, Any]]

ROLES = ("system", "user", "assistant", "tool")


def render_messages(row: Row, settings: DataSettings, where: str = "row") -> Messages:
    """The messages of one row: `data.system_prompt`, then `data.prompt_template` over its columns or else its column `prompt`.

    The column is a text (one user message) or a list of {role, content}. `where` names the row in errors. Raises DataError: absent or
    null column, empty prompt, messages that end with the assistant, roles that do not exist.

    >>> settings = DataSettings(system_prompt="Be brief.", prompt_template="{question} Answer with a number.")
    >>> render_messages({"question": "2 + 2 =", "answer": "4"}, settings)
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2 = Answer with a number.'}]
    """
    if settings.prompt_template is None:
        messages = _from_column(row, where)
    elif isinstance(settings.prompt_template, str):
        messages = [{"role": "user", "content": fill_template(settings.prompt_template, row, where)}]
    else:
        messages = [_filled(message, row, where) for message in settings.prompt_template]
    if settings.system_prompt is not None:
        if messages and messages[0]["role"] == "system":
            raise DataError(f"{where}: its prompt has a system message of its own, and data.system_prompt is set; drop one of the two")
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    _check(messages, where)
    return messages


def prompt_key(messages: Messages) -> str:
    """What makes two prompts the same: the messages in canonical JSON."""
    return canonical(messages)


def prompt_text(messages: Messages) -> str:
    """The conversation as a person reads it: the text alone where there is one message, else one `role: text` per message."""
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)


def fill_template(template: str, row: Row, where: str) -> str:
    """`str.format` over the row's columns; `{metadata[expression]}` and `{metadata.expression}` reach inside a column."""
    try:
        return _RowFormatter(where).vformat(template, (), row)
    except DataError:
        raise
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"data.prompt_template {template!r} cannot be filled: {error or 'empty braces'}; name a column in each {{...}}, and write "
            "{{ and }} for braces that are meant as such"
        ) from error


class _RowFormatter(string.Formatter):
    """str.format that reads items only (never attributes of Python objects) and refuses absent and null columns."""

    def __init__(self, where: str):
        self.where = where

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        first, rest = _split_field(field_name)
        if first in ("", *"0123456789"):
            raise ValueError("empty or numbered braces")
        if first not in kwargs:
            raise DataError(absent_column(first, dict(kwargs), self.where, "data.prompt_template"))
        value, path = kwargs[first], first
        for name in rest:
            value, path = self._inside(value, name, path), f"{path}[{name}]"
        if value is None:
            raise DataError(f"{self.where}: column {path!r} is empty (null), which data.prompt_template needs")
        return value, first

    def _inside(self, value: Any, name: str, path: str) -> Any:
        if isinstance(value, dict) and name in value:
            return value[name]
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            return value[int(name)]
        have = ", ".join(value) if isinstance(value, dict) else f"a list of {len(value)}" if isinstance(value, list) else f"{value!r}"
        raise DataError(f"{self.where}: no {name!r} inside column {path!r}, which data.prompt_template needs; it has {have}")


def _split_field(name: str) -> tuple[str, list[str]]:
    """`metadata[a].b` -> ("metadata", ["a", "b"])."""
    first, *rest = name.replace("[", ".").replace("]", "").split(".")
    return first, rest


def _from_column(row: Row, where: str) -> Messages:
    if "prompt" not in row:
        raise DataError(
            absent_column("prompt", row, where, "a run without data.prompt_template")
            + "; name it with data.columns = {prompt = '...'} or write a data.prompt_template"
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
        return [dict(message) for message in prompt]
    kind = "null" if prompt is None else type(prompt).__name__
    raise DataError(f"{where}: its prompt is {kind}; a prompt is a text or a list of messages {{role, content}}")


def _filled(message: dict[str, str], row: Row, where: str) -> dict[str, Any]:
    return message | {"content": fill_template(message.get("content", ""), row, where)}


def _check(messages: Messages, where: str) -> None:
    for message in messages:
        if message.get("role") not in ROLES:
            raise DataError(f"{where}: a message has role {message.get('role')!r}; allowed are {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(f"{where}: the content of a {message['role']} message is {type(content).__name__}; only text is trained on")
    asked = [message for message in messages if message["role"] != "system"]
    if not asked or not (asked[-1]["content"] or "").strip():
        raise DataError(f"{where}: its prompt is empty")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: its messages end with the assistant, so there is nothing to answer; a prompt ends with a user (or tool) message: "
            "drop the last message, or name the right column with data.columns"
        )
    if messages[-1]["role"] == "system":
        raise DataError(f"{where}: its messages end with a system message; a prompt ends with a user (or tool) message")
