"""Saved states: the keys and values of a sequence at one moment, kept by reference so that sequences can start from them.

A state is made when new weights interrupt a sequence (used once, by its resumption) or by `EmbeddedEngine.save` (used by any number of
forks). Their number and size are bounded: the oldest gives way, and who names a state that is gone gets its keys and values made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.engines.embedded.blocks import BlockAllocator
from slipstream.engines.embedded.versions import Version, VersionMarks
from slipstream.types import RequestKey


@dataclass(frozen=True, slots=True)
class SavedState:
    """A sequence of n tokens and the keys and values of its first n - 1 (none, where they were about to be made again)."""

    key: RequestKey  # of the request it was saved from
    tokens: tuple[int, ...]
    num_sampled: int  # how many of them the model sampled: where its random stream stood
    blocks: tuple[int, ...]  # block i holds positions [16 i, 16 i + 16); the last may be filled further by the sequence that goes on
    num_cached: int  # positions whose keys and values count
    marks: VersionMarks = field(default_factory=VersionMarks)
    once: bool = False  # goes when it has been used: a resumption

    @property
    def spans(self) -> tuple[tuple[int, int, Version], ...]:
        """(start, end, version): the weights that made the keys and values of these positions."""
        return self.marks.spans(self.num_cached)

    def num_common(self, tokens: list[int]) -> int:
        """Leading tokens that `tokens` shares with the state."""
        for at, (ours, theirs) in enumerate(zip(self.tokens, tokens, strict=False)):
            if ours != theirs:
                return at
        return min(len(self.tokens), len(tokens))


class StateStore:
    """States by id, oldest first. At most `max_states`, whose blocks (each counted once) are at most `max_bytes` large.

    `block_bytes` gives the size of a block's keys and values, which is known after the first forward pass.
    """

    def __init__(self, blocks: BlockAllocator, max_states: int, max_bytes: int, block_bytes: Callable[[], int]):
        self._blocks, self._max_states, self._max_bytes, self._block_bytes = blocks, max_states, max_bytes, block_bytes
        self._states: dict[int, SavedState] = {}
        self._held: Counter[int] = Counter()  # blocks by the number of states that hold them
        self._next_id = 0
        self.num_evicted = 0  # that gave way to the bounds, so far

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_bytes(self) -> int:
        return len(self._held) * self._block_bytes()

    def get(self, state_id: int | None) -> SavedState | None:
        """None where it was freed or has given way."""
        return None if state_id is None else self._states.get(state_id)

    def add(self, state: SavedState) -> int:
        """Keep it; its id, never used again. Older ones give way to it; where it is too large by itself, it goes too."""
        self._blocks.share(state.blocks)
        self._held.update(state.blocks)
        state_id, self._next_id = self._next_id, self._next_id + 1
        self._states[state_id] = state
        while self._states and (len(self._states) > self._max_states or self.num_bytes > self._max_bytes):
            self.free(next(iter(self._states)))
            self.num_evicted += 1
        return state_id

    def free(self, state_id: int | None) -> None:
        """Let go of it; nothing where it is gone already."""
        state = self._states.pop(state_id, None) if state_id is not None else None
        if state is None:
            return
        self._blocks.give_back(state.blocks)
        self._held.subtract(state.blocks)
        for block in state.blocks:
            if not self._held[block]:
                del self._held[block]

    def free_used(self, state_id: int | None) -> None:
        """The request that names it has started: let go of it if it was for that one alone."""
        state = self.get(state_id)
        if state is not None and state.once:
            self.free(state_id)

    def free_of(self, key: RequestKey) -> None:
        """Let go of all that were saved from the request of this key."""
        for state_id in [i for i, state in self._states.items() if state.key == key]:
            self.free(state_id)

    def free_all(self) -> None:
        for state_id in list(self._states):
            self.free(state_id)
