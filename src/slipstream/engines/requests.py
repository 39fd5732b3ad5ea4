"""What every engine makes of a request: whether it can be served, and when its text ends it. No torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.types import GenerateRequest

Decode = Callable[[list[int]], str]


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


def make_stops(request: GenerateRequest, decode: Decode | None) -> StopStrings | None:
    """The watch for the request's stop strings; None where it has none."""
    strings = request.sampling.stop_strings
    if not strings:
        return None
    if decode is None:
        raise ValueError("stop strings need an engine that was given a tokenizer")
    # A turn that goes on: a stop string may straddle where it was left.
    return StopStrings(strings, decode, request.token_ids[len(request.token_ids) - request.num_sampled_in_turn :].tolist())


def check_request(request: GenerateRequest, max_context: int, vocabulary: int) -> None:
    """ValueError that says what is wrong with a request that an engine cannot serve."""
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
