"""One request in the engine: its tokens, its blocks, and when it ends."""

from __future__ import annotations

from slipstream.engines.embedded.sampling import rollout_key
from slipstream.engines.embedded.versions import VersionMarks
from slipstream.engines.requests import Decode, make_stops
from slipstream.types import GenerateRequest, StopReason


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
        self.stops = make_stops(request, decode)

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
