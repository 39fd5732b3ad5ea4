"""A tool-calling environment: the model may call Python functions, sees what they return, and ends with a reply that calls none.

The functions run in threads, those of one reply at the same time, each with a deadline. Calls that are malformed, unknown, late or that
raise give an error message as the tool's answer: that is data for the model. Tool output is never trained. In a deterministic run a late
call ends the run: what a clock decides cannot be repeated.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slipstream.config.settings import DataSettings
from slipstream.environments.schema import tool_schema
from slipstream.environments.single_turn import row_messages
from slipstream.environments.tool_calls import ToolCall, parse_tool_calls
from slipstream.errors import ConfigError, DeadlineExceeded, RunFailed
from slipstream.protocols import EnvironmentReply, Message
from slipstream.scoring.loading import load_function
from slipstream.scoring.threads import ThreadCalls

MAX_CALLS_PER_TURN = 16


@dataclass(frozen=True)
class Tool:
    """One function, shared by all rollouts: its lost threads are counted together."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    threads: ThreadCalls = field(repr=False)


@functools.lru_cache(maxsize=8)
def load_tools(specs: tuple[str, ...]) -> tuple[Tool, ...]:
    """The tools that settings name; ConfigError if one does not load or two have the same name."""
    tools: dict[str, Tool] = {}
    for spec in specs:
        function = load_function(spec)
        name = getattr(function, "__name__", spec)
        if name in tools:
            raise ConfigError(f"rollout.tools: two tools are called {name!r}; the model could not tell them apart")
        tools[name] = Tool(name, function, tool_schema(function), ThreadCalls(f"tool {name!r}"))
    return tuple(tools.values())


class ToolEnvironment:
    """Answers tool calls until a reply makes none. `tool_schemas` is what the model is shown of the tools."""

    def __init__(
        self, row: dict[str, Any], settings: DataSettings, tools: tuple[Tool, ...], timeout_s: float, *, deadlines_are_fatal: bool = False
    ):
        self._row, self._settings, self._timeout_s, self._deadlines_are_fatal = row, settings, timeout_s, deadlines_are_fatal
        self._tools = {tool.name: tool for tool in tools}
        self.tool_schemas = tuple(tool.schema for tool in tools)

    async def start(self) -> tuple[Message, ...]:
        return row_messages(self._row, self._settings)

    async def step(self, message: Message) -> EnvironmentReply:
        """Run the calls in the reply; done if there are none.

        RunFailed once a tool has lost too many threads; DeadlineExceeded for a late call where `deadlines_are_fatal`.
        """
        calls = parse_tool_calls(message.content)
        if not calls:
            return EnvironmentReply(done=True)
        answers = await asyncio.gather(*(self._answer(call) for call in calls[:MAX_CALLS_PER_TURN]))
        answers += [_error(f"at most {MAX_CALLS_PER_TURN} calls per reply; this one was not made")] * (len(calls) - len(answers))
        messages = (Message(role="tool", content=a.text, name=call.name or None) for call, a in zip(calls, answers, strict=True))
        return EnvironmentReply(messages=tuple(messages), error=any(a.error for a in answers))

    async def close(self) -> None:
        """Nothing to close: lost threads are daemons."""

    async def _answer(self, call: ToolCall) -> _Answer:
        tool = self._tools.get(call.name)
        if call.error is not None:
            return _error(call.error)
        if tool is None:
            return _error(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
        try:
            inspect.signature(tool.function).bind(**call.arguments)
            return _Answer(_text(await tool.threads.call(tool.function, call.arguments, self._timeout_s)))
        except RunFailed:
            raise
        except DeadlineExceeded as error:
            if self._deadlines_are_fatal:
                raise DeadlineExceeded(f"{error}; a deadline that fires ends a deterministic run") from error
            return _error(f"{call.name} did not answer within {self._timeout_s:g} s")
        except Exception as error:
            return _error(f"{type(error).__name__}: {error}")


class _Answer(NamedTuple):
    """What the model reads as the result of one call, and whether the call failed."""

    text: str
    error: bool = False


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _error(text: str) -> _Answer:
    return _Answer(json.dumps({"error": text}, ensure_ascii=False), error=True)
