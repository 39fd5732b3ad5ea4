"""The keys and values of group prompts, made once and shared by the group's samples."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engines.embedded.blocks import BlockAllocator
from slipstream.engines.embedded.sequence import Sequence
from slipstream.engines.embedded.versions import Version


@dataclass
class Prompt:
    """Keys and values of a prompt without its last token, which every sample feeds itself to get its first logits."""

    blocks: list[int]  # the last one may be partly filled: a sample copies it instead of sharing it
    num_tokens: int
    version: Version  # whose weights made them


class PromptStore:
    """Prompts by (group, tokens); each is kept while any sequence that uses it waits or runs.

    One may be taken back when blocks run out: it is made again for the next sequence that starts.
    """

    def __init__(self, blocks: BlockAllocator):
        self._blocks = blocks
        self._prompts: dict[tuple, Prompt] = {}
        self._waiting: dict[tuple, int] = {}
        self._running: dict[tuple, int] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, sequence: Sequence) -> Prompt | None:
        """The sequence's prompt, if made by weights at least as new as the request demands."""
        prompt = self._prompts.get(sequence.prompt_key)
        return prompt if prompt is not None and prompt.version[1] >= sequence.request.min_version else None

    def put(self, sequence: Sequence, prompt: Prompt) -> None:
        self.drop(sequence.prompt_key)
        self._prompts[sequence.prompt_key] = prompt

    def drop(self, key: tuple) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            self._blocks.give_back(prompt.blocks)

    def drop_all(self) -> None:
        """Let go of every prompt: those still needed are made again, by newer weights."""
        for key in list(self._prompts):
            self.drop(key)

    def evict_one(self, keep: tuple | None) -> bool:
        """Take one prompt's blocks back, never that of `keep`; those that no running sequence uses first. False if there is none."""
        for key in sorted((k for k in self._prompts if k != keep), key=lambda k: k in self._running):
            self.drop(key)
            return True
        return False

    def wait(self, sequence: Sequence) -> None:
        _add(self._waiting, sequence.prompt_key, 1)

    def start(self, sequence: Sequence) -> None:
        _add(self._waiting, sequence.prompt_key, -1)
        _add(self._running, sequence.prompt_key, 1)

    def leave(self, sequence: Sequence, *, was_running: bool) -> None:
        key = sequence.prompt_key
        _add(self._running if was_running else self._waiting, key, -1)
        if key not in self._running and key not in self._waiting:
            self.drop(key)


def _add(counts: dict[tuple, int], key: tuple, by: int) -> None:
    count = counts.get(key, 0) + by
    assert count >= 0, "a sequence left twice"
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)
