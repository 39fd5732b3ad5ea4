"""Call a reward function by the convention that its parameter names show, and read what it returns.

    parameter      called          with
    completions    once a group    keywords, as TRL does: prompts, completions, completion_ids, every column as a list of G, trainer_state
    completion     once a rollout  keywords: completion, prompt, row, the columns and options by name
    group          once a group    the `types.Group` itself

The function may be sync or async. It gets those of the keywords that it names, and all of them where it has **kwargs; settings'
`options` come as further keywords. Returned: float, int, bool, a numpy or torch scalar, None (not applicable), or a dict with "score"
and named parts; one per rollout where the function is called once a group.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from slipstream.errors import ConfigError, ScoringError
from slipstream.scoring.values import make_score, make_scores, reward_value
from slipstream.types import Group, Rollout, Score


class Convention(StrEnum):
    COMPLETIONS = "completions"
    COMPLETION = "completion"
    GROUP = "group"


def convention_of(function: Callable[..., Any], name: str) -> Convention:
    """How `function` wants to be called; ConfigError if its parameters show none of the conventions."""
    parameters = _parameters(function, name)
    for convention in Convention:
        if convention.value in parameters:
            return convention
    if parameters.keys() & {"completion_ids", "prompts"}:  # a function written for TRL that reads ids alone
        return Convention.COMPLETIONS
    raise ConfigError(
        f"reward {name!r}: its parameters ({', '.join(parameters) or 'none'}) name none of 'completions' (called once a group, as in TRL), "
        "'completion' (once a rollout) or 'group'; rename one"
    )


class RewardFunction:
    """A loaded function with its convention: `await call(group)` gives one Score per rollout."""

    def __init__(self, function: Callable[..., Any], name: str, weight: float = 1.0, options: dict[str, Any] | None = None):
        self.name, self.weight, self.options = name, weight, dict(options or {})
        self._function = function
        self._convention = convention_of(function, name)
        parameters = _parameters(function, name)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._accepted = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._required = {n for n in self._accepted if parameters[n].default is inspect.Parameter.empty}
        unknown = set(self.options) - self._accepted
        if unknown and not self._takes_all:
            raise ConfigError(
                f"reward {name!r} does not take the option {sorted(unknown)[0]!r}; it takes: {', '.join(sorted(self._accepted))}"
            )

    async def call(self, group: Group) -> list[Score]:
        """Scores of the group's rollouts, in order; ScoringError with the cause (and its traceback) if there are none."""
        try:
            if self._convention is Convention.COMPLETION:
                return await self._call_per_rollout(group)
            return await self._call_once(group)
        except ScoringError:
            raise
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            raise ScoringError(f"reward {self.name!r} raised {type(error).__name__}: {error}\n{trace}") from error

    async def _call_per_rollout(self, group: Group) -> list[Score]:
        calls = (self._invoke(self._rollout_arguments(group, rollout), group) for rollout in group.rollouts)
        values = await asyncio.gather(*calls)
        return [make_score(value, self.name, self.weight, sample) for sample, value in enumerate(values)]

    async def _call_once(self, group: Group) -> list[Score]:
        logged: dict[str, list[float | None]] = {}
        if self._convention is Convention.GROUP:
            arguments: dict[str, Any] = {"group": group}
        else:
            arguments = self._group_arguments(group, logged)
        scores = make_scores(await self._invoke(arguments, group), self.name, self.weight, len(group.rollouts))
        return [_with_parts(score, {k: v[i] for k, v in logged.items()}) for i, score in enumerate(scores)] if logged else scores

    async def _invoke(self, arguments: dict[str, Any], group: Group) -> Any:
        arguments |= self.options
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._accepted}
        if missing := sorted(self._required - set(arguments)):
            columns = ", ".join(sorted(group.row)) or "none"
            raise ScoringError(
                f"reward {self.name!r} needs {', '.join(map(repr, missing))}, which is no column of the row; its columns: {columns}"
            )
        try:
            result = self._function(**arguments)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # it would pass through the event loop
            raise ScoringError(f"reward {self.name!r} raised SystemExit: {error}") from error

    def _rollout_arguments(self, group: Group, rollout: Rollout) -> dict[str, Any]:
        arguments = {**group.row, "completion": rollout.completion, "prompt": group.row.get("prompt", group.prompt)}
        for name, value in (("row", group.row), ("completion_ids", _completion_ids(rollout))):  # only to those who name them
            if name in self._accepted:
                arguments.setdefault(name, value)
        return arguments

    def _group_arguments(self, group: Group, logged: dict[str, list[float | None]]) -> dict[str, Any]:
        """TRL's keywords: conversational prompts get conversational completions, plain ones text."""
        prompt = group.row.get("prompt", group.prompt)
        texts = [rollout.completion for rollout in group.rollouts]
        count = len(texts)
        arguments: dict[str, Any] = {column: [value] * count for column, value in group.row.items() if column != "prompt"}
        arguments["prompts"] = [prompt] * count
        arguments["completions"] = texts if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in texts]
        arguments["completion_ids"] = [_completion_ids(rollout) for rollout in group.rollouts]
        arguments["trainer_state"] = None
        for name, log in (("log_extra", _extra_logger(self.name, count, logged)), ("log_metric", _metric_logger(self.name, count, logged))):
            if name in self._accepted:
                arguments[name] = log
        return arguments


def _parameters(function: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: its parameters cannot be read ({error}); wrap it in a Python function") from error


def _completion_ids(rollout: Rollout) -> list[int]:
    return rollout.token_ids[rollout.prompt_length :].tolist()


def _extra_logger(name: str, count: int, logged: dict[str, list[float | None]]) -> Callable[[str, Any], None]:
    """TRL's log_extra(column, values): numbers become parts of the scores; texts have no place in the records and are left out."""

    def log_extra(column: str, values: Any) -> None:
        values = list(values)
        if len(values) == count and not any(isinstance(value, str) for value in values):
            logged[column] = [reward_value(value, f"{name}/{column}", sample) for sample, value in enumerate(values)]

    return log_extra


def _metric_logger(name: str, count: int, logged: dict[str, list[float | None]]) -> Callable[[str, Any], None]:
    """TRL's log_metric(name, value): one number, a part of every score of the group."""

    def log_metric(metric: str, value: Any) -> None:
        logged[metric] = [reward_value(value, f"{name}/{metric}", 0)] * count

    return log_metric


def _with_parts(score: Score, parts: dict[str, float | None]) -> Score:
    more = {name: value for name, value in parts.items() if value is not None}
    return Score(name=score.name, value=score.value, weight=score.weight, parts={**score.parts, **more})
