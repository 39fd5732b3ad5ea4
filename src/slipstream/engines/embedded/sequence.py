"""One request in the engine: its tokens, its blocks, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.engines.embedded.sampling import rollout_key
from slipstream.engines.embedded.versions import VersionMarks
from slipstream.types import GenerateRequest, StopReason

Decode = Callable[[list[int]], str]


class Sequence:
    """A request from submission to its end. It waits, holds a slot, or has ended; `Stream` moves it."""

    __slots__ = ("blocks", "handle", "key", "limit", "marks", "oldest", "prompt_key", "request", "slot", "stops", "tokens")

    def __init__(self, handle: int, request: GenerateRequest, *, engine_seed: int, max_context: int, decode: Decode | None):
        self.handle = handle
        self.request = request
        self.tokens: list[int] = request.token_ids.tolist()
        self.limit = min(len(self.tokens) + request.sampling.max_new_tokens, max_context)  # tokens at which it ends by length
        self.key = rollout_key(engine_seed, request.seed, request.purpose, request.group_id, request.sample, request.attempt)
        self.prompt_key = (request.group_id, request.token_ids[: request.prompt_length].tobytes())
        self.slot: int | None = None
        self.blocks: list[int] = []  # block i holds positions [16 i, 16 i + 16)
        self.marks = VersionMarks()  # whose weights made its keys and values
        self.oldest = request.oldest_version  # of the tokens that were sampled; None: none yet
        self.stops = _make_stops(request, decode)

    @property
    def num_new(self) -> int:
        """Tokens sampled by this engine for this request."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def draw_index(self) -> int:
        """Number of the next draw of its random stream."""
        return self.request.num_sampled + self.num_new

    def append(self, token: int) -> StopReason | None:
        """Add a sampled token; why the sequence ends with it, or None. The token stays in the sequence either way."""
        self.tokens.append(token)
        if token in self.request.stop_token_ids or (self.stops is not None and self.stops.ends_with(token)):
            return StopReason.STOP
        return StopReason.LENGTH if len(self.tokens) >= self.limit else None


class StopStrings:
    """Whether the sampled text now contains a stop string. Decodes only a tail long enough to hold the longest one."""

    def __init__(self, strings: tuple[str, ...], decode: Decode, sampled: list[int]):
        self._strings = strings
        self._decode = decode
        # A character is at most 4 tokens (bytes); 4 more so that the tail may begin inside a character.
        self._max_tokens = 4 * max(len(s) for s in strings) + 4
        self._tail = sampled[-self._max_tokens :]

    def ends_with(self, token: int) -> bool:
        self._tail = [*self._tail, token][-self._max_tokens :]
        text = self._decode(self._tail)
        return any(s in text for s in self._strings)


def _make_stops(request: GenerateRequest, decode: Decode | None) -> StopStrings | None:
    strings = request.sampling.stop_strings
    if not strings:
        return None
    if decode is None:
        raise ValueError("stop strings need an engine that was given a tokenizer")
    # A turn that goes on: a stop string may straddle where it was left.
    return StopStrings(strings, decode, request.token_ids[len(request.token_ids) - request.num_sampled_in_turn :].tolist())


def check_request(request: GenerateRequest, max_context: int, vocabulary: int) -> None:
    """ValueError that says what is wrong with a request the engine cannot serve."""
    length, where = len(request.token_ids), f"group {request.group_id} sample {request.sample} turn {request.turn}"
    if not 1 <= request.prompt_length <= length:
        raise ValueError(f"{where}: prompt_length {request.prompt_length} is not within 1 and the {length} tokens given")
    if length >= max_context:
        raise ValueError(f"{where}: {length} tokens leave no room for a new one within engine.max_context = {max_context}")
    if not 0 <= request.num_sampled_in_turn <= request.num_sampled:
        raise ValueError(
            f"{where}: num_sampled_in_turn {request.num_sampled_in_turn} is not within 0 and num_sampled {request.num_sampled}"
        )
    if request.sampling.max_new_tokens < 1:
        raise ValueError(f"{where}: max_new_tokens {request.sampling.max_new_tokens} is below 1")
    low, high = int(np.min(request.token_ids)), int(np.max(request.token_ids))
    if low < 0 or high >= vocabulary:
        raise ValueError(f"{where}: token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary}")
    if request.purpose == "train" and request.sampling.temperature == 0:
        raise ValueError(f"{where}: temperature 0 is for evaluation: a greedy token comes from no distribution that could be trained")
