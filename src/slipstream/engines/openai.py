"""A server with an OpenAI-compatible API, which can only be sampled: eval, generate and rollout measure other models on a run's own task.

Such a server takes a conversation in words and answers in words, through its own chat template; it tells neither exact tokens nor the
weights that made them, so nothing can be trained from it. Its answers are given the ids that the run's own tokenizer has for their text,
which is how they are counted and shown; their logprobs are unknown, and 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from slipstream.errors import EngineRefused, RunFailed
from slipstream.openai_api import NUM_RETRIES, REFUSES_ALL, ChatServer, advice, said
from slipstream.protocols import Generation
from slipstream.types import GenerateRequest, RequestKey, Sampling, StopReason

ENGINE_ID = "openai"
URL_KEY, MODEL_KEY = "engine.urls", "engine.model"  # the settings that name server and model

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
        self._servers = [ChatServer(url, timeout_s, num_retries) for url in urls]
        self._turns = asyncio.Semaphore(slots)
        self._encode, self._stop_token_id = encode, stop_token_id

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
        server, sampling = self._servers[request.group_id % len(self._servers)], request.sampling
        messages = [_message(message) for message in request.messages]
        try:
            return await server.complete(self.model, messages, sampling.max_new_tokens, **_options(sampling))
        except REFUSES_ALL as error:
            raise RunFailed(f"{server.url}: {said(error)}{advice(error, URL_KEY, MODEL_KEY)}") from error
        except openai.OpenAIError as error:
            raise EngineRefused(f"{server.url}: {said(error)}") from error


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A tool's answer goes as the user's: the call that it answers was made in words, so the API knows of none."""
    return {"role": "user", "content": message["content"]} if message["role"] == "tool" else message


def _options(sampling: Sampling) -> dict[str, Any]:
    """What differs from the API's defaults; `top_k` and `min_p` are no part of it, but most servers of one's own know them."""
    found: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.top_p < 1:
        found["top_p"] = sampling.top_p
    if sampling.stop_strings:
        found["stop"] = list(sampling.stop_strings)
    extra = {key: value for key, value in (("top_k", sampling.top_k), ("min_p", sampling.min_p)) if value}
    return found | ({"extra_body": extra} if extra else {})
