"""A server with an OpenAI-compatible API: asked for a chat completion, whatever it calls its limit, and understood in its refusals.

Requests, retries (connection errors, 408, 409, 429, 5xx, with growing pauses) and the key, which is OPENAI_API_KEY, are the `openai`
package's. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from slipstream.errors import ConfigError

NUM_RETRIES = 5
CONTROL_S = 60.0
REFUSES_ALL = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)  # not this request: every one


class ChatServer:
    """One server, by its base URL (http://host:port/v1). Each try of a request may take `timeout_s`."""

    def __init__(self, url: str, timeout_s: float, num_retries: int = NUM_RETRIES):
        self.url = url
        # servers of one's own want no key, but the package wants one
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, timeout=timeout_s, max_retries=num_retries)
        self._limit_key = "max_tokens"  # which most servers know

    async def complete(self, model: str, messages: Sequence[dict[str, Any]], max_new_tokens: int, **options: Any) -> ChatCompletion:
        """The answer to a conversation; `options` are further fields of the request. Raises openai.OpenAIError."""
        try:
            return await self._create(model, messages, max_new_tokens, options)
        except openai.BadRequestError as error:
            if error.param != "max_tokens" or self._limit_key != "max_tokens":
                raise
            self._limit_key = "max_completion_tokens"  # what OpenAI's newer models want in its place
            return await self._create(model, messages, max_new_tokens, options)

    async def models(self) -> list[str]:
        """The names that it lists. Raises openai.OpenAIError."""
        return [model.id async for model in self._client.models.list()]

    async def close(self) -> None:
        await self._client.close()

    async def _create(self, model: str, messages: Sequence[dict[str, Any]], max_new_tokens: int, options: dict[str, Any]) -> ChatCompletion:
        limit = {self._limit_key: max_new_tokens}
        return await self._client.chat.completions.create(model=model, messages=list(messages), **limit, **options)  # type: ignore[call-overload]


async def find_model(url: str, wanted: str | None, url_key: str, model_key: str) -> str:
    """The name by which the server knows its model: `wanted`, or the only one that it lists. ConfigError, by the names of the settings
    that gave `url` and `wanted`, where there is no such."""
    if wanted is not None:
        return wanted  # the first request tells
    server = ChatServer(url, CONTROL_S, num_retries=1)
    try:
        names = await server.models()
    except openai.OpenAIError as error:
        why = f"{said(error)}){advice(error, url_key, model_key)}"
        raise ConfigError(f"{url_key}: {url} does not say which models it has ({why}") from error
    finally:
        await server.close()
    if len(names) != 1:
        listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"{model_key}: {url} has {len(names)} models ({listed}); name the one that is meant")
    return names[0]


def said(error: openai.OpenAIError) -> str:
    """The error in one line, with its cause."""
    return " ".join(str(error).split()) + (f" ({cause})" if (cause := error.__cause__) else "")


def advice(error: openai.OpenAIError, url_key: str, model_key: str) -> str:
    """What to do about it, to be put behind `said`; empty where that says all."""
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return "; set the environment variable OPENAI_API_KEY to its key"
    if isinstance(error, openai.NotFoundError):
        return f"; {url_key} takes base URLs, as http://localhost:8000/v1, and {model_key} a name that the server lists"
    if isinstance(error, openai.APIConnectionError):
        return "; is it running, and is this its base URL, as http://localhost:8000/v1?"
    return ""
