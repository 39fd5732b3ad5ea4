"""From messages to token ids, through the tokenizer's chat template; and which tokens end a turn.

A conversation is rendered once, as the prompt. What follows grows by exact ids: sampled tokens are kept as they were sampled, and only the
messages that an environment adds are rendered. Their ids are the difference that they make in a stand-in conversation:

    render([..., assistant "X"])                  = head X close
    render([..., assistant "X", tool "reply"])    = head X close reply-and-next-header      -> ids(close reply-and-next-header)

where a sampled end-of-turn token already is the first token of `close`. A template for which that difference depends on what came before
(it is not prefix-stable) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.errors import DataError, ModelError
from slipstream.protocols import Message

_STAND_IN = "SLIPSTREAM"  # a reply that no template rewrites
_ASKED = {"role": "user", "content": "Hello"}

Messages = Sequence[dict[str, Any]]
ToolSchemas = Sequence[dict[str, Any]]


class PromptDoesNotFit(DataError):
    """A prompt with no room for its completion in the engine's context: its group is dropped, never truncated in silence."""


class Renderer:
    """Renders for one tokenizer, which has a chat template (`models.loading` sets a plain one for models without)."""

    def __init__(self, tokenizer: Any, max_context: int):
        self.tokenizer, self.max_context = tokenizer, max_context
        self._takes_tools: bool | None = None

    def prompt(self, messages: Messages, max_new_tokens: int, tools: ToolSchemas = ()) -> np.ndarray:
        """int32[n]: the prompt, up to where the model begins to speak.

        DataError: no messages, an empty prompt, or messages that end with the assistant. PromptDoesNotFit: n + max_new_tokens > context.
        """
        if not messages or not any(str(message.get("content") or "").strip() for message in messages if message["role"] != "system"):
            raise DataError("the prompt is empty")
        if messages[-1]["role"] == "assistant":
            raise DataError("the messages end with the assistant: there is nothing to answer")
        ids = self._ids(self._render(messages, tools, add_generation_prompt=True))
        if len(ids) + max_new_tokens > self.max_context:
            raise PromptDoesNotFit(f"prompt of {len(ids)} tokens + max_new_tokens {max_new_tokens} exceed the context {self.max_context}")
        return ids

    def continuation(self, last_token: int, messages: Messages, tools: ToolSchemas = ()) -> np.ndarray:
        """int32[n]: what comes between the model's last sampled token and its next turn, given the messages that were added.

        ModelError if the template cannot render them or is not prefix-stable.
        """
        before = self._stand_in([], tools)
        after = self._stand_in(messages, tools)
        if not after.startswith(before):
            raise ModelError(
                "the chat template is not prefix-stable: adding messages changes the text before them, so turns cannot be continued by "
                "exact token ids; use rollout.max_turns = 1 or another model.chat_template"
            )
        ids = self._ids(after[before.rindex(_STAND_IN) + len(_STAND_IN) :])
        return ids[1:] if len(ids) and ids[0] == last_token else ids

    def decode(self, token_ids: Any) -> str:
        """The text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn: the tokenizer's end token and the template's own end of turn."""
        ids = {getattr(self.tokenizer, "eos_token_id", None), self._closing_token()}
        return tuple(sorted(token for token in ids if token is not None))

    def _closing_token(self) -> int | None:
        """The special token with which the template ends an assistant turn, if it does."""
        try:
            text = self._stand_in([], (), generation_prompt=False)
        except ModelError:
            return None
        ids = self._ids(text[text.rindex(_STAND_IN) + len(_STAND_IN) :])
        special = set(getattr(self.tokenizer, "all_special_ids", ()))
        return int(ids[0]) if len(ids) and int(ids[0]) in special else None

    def _stand_in(self, added: Messages, tools: ToolSchemas, generation_prompt: bool = True) -> str:
        """A stand-in conversation with these messages added; the generation prompt only where there are any."""
        conversation = [_ASKED, {"role": "assistant", "content": _STAND_IN}, *added]
        try:
            text = self._render(conversation, tools, add_generation_prompt=generation_prompt and bool(added))
        except Exception as error:
            roles = ", ".join(message["role"] for message in added) or "none"
            raise ModelError(f"the chat template cannot render a reply to the model (messages added: {roles}): {error}") from error
        if _STAND_IN not in text:
            raise ModelError("the chat template leaves out or rewrites assistant messages, so turns cannot be continued")
        return text

    def _render(self, messages: Messages, tools: ToolSchemas, add_generation_prompt: bool) -> str:
        if tools and not self._template_takes(tools):
            messages, tools = with_described_tools(messages, tools), ()
        return self._apply(messages, tools, add_generation_prompt)

    def _apply(self, messages: Messages, tools: ToolSchemas, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    def _template_takes(self, tools: ToolSchemas) -> bool:
        """Whether the template shows tools to the model: it does if their names turn up."""
        if self._takes_tools is None:
            name = tools[0]["function"]["name"]
            try:
                self._takes_tools = name in self._apply([_ASKED], tools, True) and name not in self._apply([_ASKED], (), True)
            except Exception:  # a template may raise on what it does not know
                self._takes_tools = False
        return self._takes_tools

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def as_template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: dicts without absent keys."""
    out = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_calls is not None:
            entry["tool_calls"] = message.tool_calls
        out.append(entry)
    return out


def with_described_tools(messages: Messages, tools: ToolSchemas) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message: for templates that take none."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{lines}\n"
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>; the result comes in the next message.'
    )
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
