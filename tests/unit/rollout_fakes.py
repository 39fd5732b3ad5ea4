"""A tokenizer of characters, an engine that says what a test tells it to, and a controller that keeps what it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.config.settings import Config, RewardSettings
from slipstream.protocols import Generation
from slipstream.types import (
    Assignment,
    Draw,
    EvalResult,
    EvalTask,
    GenerateRequest,
    Group,
    PrefixChunk,
    Rollout,
    SealedChunk,
    StopReason,
    Work,
    decode,
)

END = 1  # the end-of-turn token


class CharTokenizer:
    """One id per character; "<end>" is one token."""

    chat_template = "chars"
    eos_token_id = END
    all_special_ids = [END]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = False, **ignored: Any) -> str:
        text = "".join(f"[{m['role'][0]}]{m['content']}<end>" for m in messages)
        return text + ("[a]" if add_generation_prompt else "")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [END if piece is None else ord(piece) for piece in _pieces(text)]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i != END)


def _pieces(text: str) -> list[str | None]:
    out: list[str | None] = []
    for number, part in enumerate(text.split("<end>")):
        out += [None] if number else []
        out += list(part)
    return out


def ids_of(text: str) -> list[int]:
    return CharTokenizer().encode(text)


class FakeEngine:
    """Says `reply(request)`, a token per turn of the event loop; `before_token(request, index)` may make it wait.

    Where `interrupt(request, index)` is true, new weights come instead of that token: the next version, which ends the request.
    """

    def __init__(self, reply: Callable[[GenerateRequest], Sequence[int]], version: int = 0):
        self.reply, self.version = reply, version
        self.before_token: Callable[[GenerateRequest, int], Any] | None = None
        self.interrupt: Callable[[GenerateRequest, int], bool] = lambda request, index: False
        self.state: int | None = None  # saved at an interrupt
        self.remakes = False  # keys and values of a request that goes on
        self.logprob = -0.5
        self.requests: list[GenerateRequest] = []
        self.active = self.most_active = 0
        self.pins = self.unpins = 0

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        self.requests.append(request)
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        into.prefill_version = (1, self.version)
        into.recomputed |= self.remakes and request.oldest_version is not None
        try:
            for index, token in enumerate(list(self.reply(request))[: request.sampling.max_new_tokens]):
                if self.before_token is not None:
                    await self.before_token(request, index)
                if self.interrupt(request, index):
                    self.version += 1
                    into.state, into.stop_reason = self.state, StopReason.INTERRUPT
                    for _ in range(5):  # others run before the worker is told
                        await asyncio.sleep(0)
                    return
                await asyncio.sleep(0)
                into.append(token, self.logprob, 1, self.version, "fake")
            ended = bool(into.token_ids) and into.token_ids[-1] in request.stop_token_ids
            into.stop_reason = StopReason.STOP if ended else StopReason.LENGTH
        finally:
            self.active -= 1

    async def pin(self) -> tuple[int, int, str]:
        self.pins += 1
        return (1, self.version, "sum")

    async def unpin(self) -> float:
        self.unpins += 1
        return 0.25


class FakeController:
    """Hands out what the test put in; keeps chunks, groups and evaluations."""

    def __init__(self, assignments: Sequence[Assignment] = (), evaluations: Sequence[EvalTask] = ()):
        self.waiting, self.evaluations = list(assignments), list(evaluations)
        self.rooms: list[int] = []
        self.chunks: list[PrefixChunk] = []
        self.groups: list[Group] = []
        self.results: list[EvalResult] = []
        self.lost_evaluations: list[int] = []
        self.stopping = False
        self.interruptions: list[tuple[int, int, int, int]] = []  # (group_id, sample, attempt, num_tokens)
        self.max_interrupts = 8
        self.cancel: list[tuple[int, int]] = []
        self.changed = asyncio.Condition()

    async def admit(self, room: int) -> Work:
        self.rooms.append(room)
        async with self.changed:
            await self.changed.wait_for(lambda: self.stopping or self.evaluations or self.cancel or (room and self.waiting))
            if self.stopping:
                return Work(stop=True)
            evaluation = self.evaluations.pop(0) if self.evaluations else None
            taken, self.waiting = self.waiting[:room], self.waiting[room:]
            cancel, self.cancel = tuple(self.cancel), []
            return Work(assignments=tuple(taken), evaluation=evaluation, cancel=cancel)

    async def interrupted(self, group_id: int, sample: int, attempt: int, num_tokens: int) -> bool:
        async with self.changed:
            self.interruptions.append((group_id, sample, attempt, num_tokens))
            self.changed.notify_all()
            return sum(i[:2] == (group_id, sample) for i in self.interruptions) <= self.max_interrupts

    async def drop(self, *keys: tuple[int, int]) -> None:
        """Tell the worker that these (group_id, attempt) are dropped."""
        async with self.changed:
            self.cancel += keys
            self.changed.notify_all()

    async def progress(self, chunks: list[SealedChunk]) -> None:
        async with self.changed:
            self.chunks.extend(decode(chunk.data, PrefixChunk) for chunk in chunks)
            self.changed.notify_all()

    async def finish_group(self, group: Group) -> None:
        async with self.changed:
            self.groups.append(group)
            self.changed.notify_all()

    async def finish_evaluation(self, result: EvalResult) -> None:
        async with self.changed:
            self.results.append(result)
            self.changed.notify_all()

    async def evaluation_lost(self, number: int) -> None:
        async with self.changed:
            self.lost_evaluations.append(number)
            self.changed.notify_all()

    async def until(self, what: Callable[[], Any]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(what)

    async def stop(self) -> None:
        async with self.changed:
            self.stopping = True
            self.changed.notify_all()


def assignment(group_id: int = 0, prompt: str = "hi", **changes: Any) -> Assignment:
    settings: dict[str, Any] = {"attempt": 0, "row": {"prompt": prompt, "answer": "ok"}, "min_version": 0} | changes
    return Assignment(group_id=group_id, draw=Draw(number=group_id, row=group_id, epoch=0, dataset="d"), **settings)


def config(group_size: int = 2, slots: int = 8, **rollout: Any) -> Config:
    base = Config(reward=[RewardSettings(function="exact")])
    return base.model_copy(
        update={
            "rollout": base.rollout.model_copy(update={"group_size": group_size, "max_new_tokens": 16} | rollout),
            "engine": base.engine.model_copy(update={"slots": slots}),
        }
    )


def finished_group(completions: Sequence[str], row: dict[str, Any] | None = None, prompt_length: int = 2) -> Group:
    """A group whose rollouts said these texts, not scored yet."""
    rollouts = []
    for sample, text in enumerate(completions):
        length = prompt_length + len(text)
        rollouts.append(
            Rollout(
                group_id=3,
                sample=sample,
                prompt_length=prompt_length,
                token_ids=np.arange(length, dtype=np.int32),
                logprobs=np.zeros(length, dtype=np.float32),
                loss_mask=np.arange(length) >= prompt_length,
                completion=text,
            )
        )
    row = {"prompt": "say it", "answer": "ok"} if row is None else row
    return Group(group_id=3, draw=Draw(number=3, row=0, epoch=0, dataset="d"), row=row, rollouts=tuple(rollouts))
