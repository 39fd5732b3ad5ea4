"""What a rollout talks to. An environment is used once, for one rollout; `make_environment` makes it from the settings and a row."""

from __future__ import annotations

from typing import Any

from slipstream.config.settings import Config
from slipstream.environments.single_turn import SingleTurn
from slipstream.environments.tools import ToolEnvironment, load_tools
from slipstream.protocols import Environment

__all__ = ["SingleTurn", "ToolEnvironment", "make_environment"]


def make_environment(config: Config, row: dict[str, Any]) -> Environment:
    """A new environment for one rollout of this row. DataError for a row that gives no prompt, ConfigError for tools that do not load."""
    if config.rollout.environment == "single_turn":
        return SingleTurn(row, config.data)
    rollout = config.rollout
    tools = load_tools(tuple(rollout.tools))
    return ToolEnvironment(row, config.data, tools, rollout.tool_timeout_s, deadlines_are_fatal=config.run.deterministic)
