"""A server with an OpenAI-compatible API, which can only be sampled: eval, generate and rollout measure other models on a run's own task.

Such a server takes a conversation in words and answers in words, through its own chat template; it tells neither exact tokens nor the
weights that made them, so nothing can be trained from it. Its answers are given the ids that the run's own tokenizer has for their text,
which is how they are counted and shown; their logprobs are unknown, and 0.

Requests, retries (connection errors, 408, 409, 429, 5xx, with growing pauses) and the key, which is OPENAI_API_KEY, are the `openai`
package's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from slipstream.errors import ConfigError, EngineRefused, RunFailed
from slipstream.protocols import Generation
from slipstream.types import GenerateRequest, RequestKey, Sampling, StopReason

NUM_RETRIES = 5
CONTROL_S = 60.0
ENGINE_ID = "openai"

_STOP_REASONS = {"length": StopReason.LENGTH, "content_filter": StopReason.ABORT}  # all else ended by itself


class OpenAIClient:
    """`protocols.EngineClient` of servers that all serve `model`; a group's requests go to one of them, which may share its prompt.

    `encode` turns text into token ids, `stop_token_id` is put behind an answer that ended by itself. At most `slots` requests are under
    way at a time, each for at most `timeout_s` a try.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        slots: int,
        timeout_s: float,
        encode: Callable[[str], list[int]],
        stop_token_id: int,
        num_retries: int = NUM_RETRIES,
    ):
        self.model = model
        self._servers = [make_client(url, timeout_s, num_retries) for url in urls]
        self._turns = asyncio.Semaphore(slots)
        self._encode, self._stop_token_id = encode, stop_token_id
        self._limit_key = "max_tokens"  # which most servers know

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        """Ask for the whole answer to the request's messages. EngineRefused where there is none to this one, RunFailed where to none."""
        async with self._turns:
            answer = await self._ask(request)
        choice = answer.choices[0]
        text, reason = choice.message.content or "", _STOP_REASONS.get(choice.finish_reason, StopReason.STOP)
        if isinstance(stop := getattr(choice, "stop_reason", None), str):
            text += stop  # vLLM and SGLang name the stop string that they cut off; here an answer ends with it
        ids = self._encode(text)
        for token in [*ids, self._stop_token_id] if reason is StopReason.STOP else ids:
            into.append(token, 0.0, 0, 0, ENGINE_ID)
        into.stop_reason = reason

    async def save(self, key: RequestKey) -> int | None:
        return None

    async def free(self, state: int) -> None: ...

    async def pin(self) -> tuple[int, int, str]:
        return (0, 0, "")  # its weights are nobody's to change

    async def unpin(self) -> float:
        return 0.0

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def _ask(self, request: GenerateRequest) -> ChatCompletion:
        server = self._servers[request.group_id % len(self._servers)]
        try:
            try:
                return await self._complete(server, request)
            except openai.BadRequestError as error:
                if error.param != "max_tokens" or self._limit_key != "max_tokens":
                    raise
                self._limit_key = "max_completion_tokens"  # what OpenAI's newer models want in its place
                return await self._complete(server, request)
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise RunFailed(f"{server.base_url}: {_said(error)}{_advice(error)}") from error
        except openai.OpenAIError as error:
            raise EngineRefused(f"{server.base_url}: {_said(error)}") from error

    async def _complete(self, server: openai.AsyncOpenAI, request: GenerateRequest) -> ChatCompletion:
        return await server.chat.completions.create(
            model=self.model,
            messages=[_message(message) for message in request.messages],  # type: ignore[misc]  # plain dicts
            **{self._limit_key: request.sampling.max_new_tokens},
            **_sampling(request.sampling),
        )


def make_client(url: str, timeout_s: float, num_retries: int = NUM_RETRIES) -> openai.AsyncOpenAI:
    """A client of one server. Servers of one's own want no key, but the package wants one."""
    key = os.environ.get("OPENAI_API_KEY") or "none"
    return openai.AsyncOpenAI(base_url=url, api_key=key, timeout=timeout_s, max_retries=num_retries)


async def find_model(url: str, wanted: str | None) -> str:
    """The name by which the server knows its model: `wanted`, or the only one that it lists. ConfigError where there is no such."""
    if wanted is not None:
        return wanted  # the first request tells
    async with make_client(url, CONTROL_S, num_retries=1) as server:
        try:
            names = [model.id async for model in server.models.list()]
        except openai.OpenAIError as error:
            raise ConfigError(f"engine.urls: {url} does not say which models it has ({_said(error)}){_advice(error)}") from error
    if len(names) != 1:
        listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"engine.model: {url} has {len(names)} models ({listed}); name the one that is meant")
    return names[0]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A tool's answer goes as the user's: the call that it answers was made in words, so the API knows of none."""
    return {"role": "user", "content": message["content"]} if message["role"] == "tool" else message


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """What differs from the API's defaults; `top_k` and `min_p` are no part of it, but most servers of one's own know them."""
    found: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.top_p < 1:
        found["top_p"] = sampling.top_p
    if sampling.stop_strings:
        found["stop"] = list(sampling.stop_strings)
    extra = {key: value for key, value in (("top_k", sampling.top_k), ("min_p", sampling.min_p)) if value}
    return found | ({"extra_body": extra} if extra else {})


def _said(error: openai.OpenAIError) -> str:
    return " ".join(str(error).split()) + (f" ({cause})" if (cause := error.__cause__) else "")


def _advice(error: openai.OpenAIError) -> str:
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return "; set the environment variable OPENAI_API_KEY to its key"
    if isinstance(error, openai.NotFoundError):
        return "; engine.urls are base URLs, as http://localhost:8000/v1, and engine.model a name that the server lists"
    if isinstance(error, openai.APIConnectionError):
        return "; is it running, and is this its base URL, as http://localhost:8000/v1?"
    return ""
