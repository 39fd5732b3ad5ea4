"""A question and its answer: the episode ends with the model's first turn."""

from __future__ import annotations

from typing import Any

from slipstream.config.settings import DataSettings
from slipstream.data.prompts import render_messages
from slipstream.protocols import EnvironmentReply, Message


class SingleTurn:
    """Shows the row's prompt and is done at the first reply."""

    def __init__(self, row: dict[str, Any], settings: DataSettings):
        self._row, self._settings = row, settings

    async def start(self) -> tuple[Message, ...]:
        return row_messages(self._row, self._settings)

    async def step(self, message: Message) -> EnvironmentReply:
        return EnvironmentReply(done=True)

    async def close(self) -> None:
        """Nothing to close."""


def row_messages(row: dict[str, Any], settings: DataSettings) -> tuple[Message, ...]:
    """The row's prompt as messages; DataError where the row gives none."""
    return tuple(
        Message(role=m["role"], content=m["content"] or "", name=m.get("name"), tool_calls=m.get("tool_calls"))
        for m in render_messages(row, settings)
    )
