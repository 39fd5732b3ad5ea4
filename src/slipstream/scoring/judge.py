"""The built-in reward "judge": a language model behind an OpenAI-compatible API gives every answer a mark.

The answers of a group are judged side by side, each alone. The mark is the last number of the judge's reply; the score is the mark over
the best one, so from 0 to 1. A reply without a mark is a failure of the group, as any reward's error is: never a score of 0.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.data.prompts import prompt_text
from slipstream.errors import ConfigError, ScoringDeadline, ScoringError
from slipstream.openai_api import NUM_RETRIES, ChatServer, advice, find_model, said
from slipstream.scoring.builtin import last_number
from slipstream.types import Group, Rollout, Score

QUESTION = """Judge how well an answer does what was asked.

### Asked
{prompt}

### Answer
{completion}

### Your verdict
Think briefly. Then give a whole number from 0 (wrong, or no answer) to {best} (could not be better), alone in the last line."""
SHOWN_CHARS = 200


class JudgeOptions(BaseModel):
    """`reward.options` of a judge."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(description="Base URL of the server, http://host:port/v1. Its key is OPENAI_API_KEY.")
    model: str | None = Field(default=None, description="The name that it knows the model by; by default the only one that it lists.")
    question: str = Field(default=QUESTION, description="What it is asked, with {prompt}, {completion}, {best} and columns by name.")
    best: float = Field(default=10.0, gt=0, description="The best mark.")
    max_new_tokens: int = Field(default=512, ge=1, description="Of its reply.")
    at_a_time: int = Field(default=16, ge=1, description="Answers that are being judged at once, of all groups.")


class JudgeScorer:
    """`protocols.Scorer`. `timeout_s` is the deadline of one group, waiting for its turn included."""

    def __init__(self, options: dict[str, Any], *, name: str = "judge", weight: float = 1.0, timeout_s: float = 30.0):
        self.name, self.weight, self.timeout_s = name, weight, timeout_s
        self._options = _read(options, name)
        self._server = ChatServer(self._options.url, timeout_s, NUM_RETRIES)
        self._model: str | None = None
        self._turns = asyncio.Semaphore(self._options.at_a_time)

    async def start(self) -> None:
        """Find the model. ConfigError where the server is not there, or which model is meant is not clear."""
        keys = (f"reward {self.name!r}, options.url", f"reward {self.name!r}, options.model")
        self._model = await find_model(self._options.url, self._options.model, *keys)

    async def score(self, group: Group) -> list[Score]:
        try:
            async with asyncio.timeout(self.timeout_s):
                marks = await self._marks(group)
        except TimeoutError as error:
            raise ScoringDeadline(f"reward {self.name!r}: not every mark from {self._options.url} within {self.timeout_s:g} s") from error
        return [Score(name=self.name, value=mark / self._options.best, weight=self.weight) for mark in marks]

    async def close(self) -> None:
        await self._server.close()

    async def _marks(self, group: Group) -> list[float]:
        try:
            async with asyncio.TaskGroup() as tasks:  # the first error takes the other questions back
                marks = [tasks.create_task(self._mark(group, rollout)) for rollout in group.rollouts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [mark.result() for mark in marks]

    async def _mark(self, group: Group, rollout: Rollout) -> float:
        assert self._model is not None, "score before start"
        messages = [{"role": "user", "content": self._question(group, rollout)}]
        try:
            async with self._turns:
                answer = await self._server.complete(self._model, messages, self._options.max_new_tokens, temperature=0.0)
        except openai.OpenAIError as error:
            hint = advice(error, "options.url", "options.model")
            raise ScoringError(f"reward {self.name!r}: {self._options.url}: {said(error)}{hint}") from error
        reply = answer.choices[0].message.content or ""
        mark = last_number(reply)
        if mark is None or not 0 <= mark <= self._options.best:
            cut = " (cut off: more max_new_tokens?)" if answer.choices[0].finish_reason == "length" else ""
            raise ScoringError(
                f"reward {self.name!r} wants a mark from 0 to {self._options.best:g} at the end of the judge's reply{cut}, which was "
                f"{reply[-SHOWN_CHARS:]!r}"
            )
        return float(mark)

    def _question(self, group: Group, rollout: Rollout) -> str:
        given = {**group.row, "prompt": prompt_text(group.prompt), "completion": rollout.completion, "best": f"{self._options.best:g}"}
        try:
            return self._options.question.format_map(given)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            there = ", ".join(sorted(given))
            why = f"{type(error).__name__}: {error}"
            raise ScoringError(f"reward {self.name!r}: options.question cannot be filled in ({why}); it may name: {there}") from error


def _read(options: dict[str, Any], name: str) -> JudgeOptions:
    try:
        read = JudgeOptions(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("options", *first["loc"])))
        known = ", ".join(JudgeOptions.model_fields)
        wrong = "no such option" if first["type"] == "extra_forbidden" else first["msg"]
        raise ConfigError(f"reward {name!r}: {where}: {wrong}; a judge takes {known}, of which url is required") from error
    if "{completion}" not in read.question:
        raise ConfigError(f"reward {name!r}: options.question does not hold {{completion}}, so the judge would not see the answer")
    return read
