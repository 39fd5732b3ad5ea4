"""What decoding is measured on, the same for every way, and the bounds that the hardware sets to it. Pure functions.

Shapes: N = requests, B = sequences that decode at a time (rows of a pass).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROMPT_TOKENS = 52  # a short question in a chat template
GROUP = 8  # samples per prompt, as in group-relative training


@dataclass(frozen=True, slots=True)
class Work:
    """Requests in the order in which they are handed in. Request i continues prompt i // GROUP by exactly `lengths[i]` tokens."""

    name: str
    prompts: tuple[tuple[int, ...], ...]  # one per group
    lengths: tuple[int, ...]

    @property
    def num_requests(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """New tokens that somebody wants."""
        return sum(self.lengths)

    def prompt(self, request: int) -> tuple[int, ...]:
        return self.prompts[request // GROUP]

    def with_other_prompts(self, round_number: int, vocabulary: int) -> Work:
        """The same for another round: a prompt that comes again may be in somebody's cache."""
        return make_work(self.name, self.lengths, vocabulary, round_number)


def make_work(name: str, lengths: Sequence[int], vocabulary: int, round_number: int = 0) -> Work:
    """Random prompts of PROMPT_TOKENS tokens for these lengths: what a prompt says costs nothing and saves nothing."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), round_number])
    num_groups = -(-len(lengths) // GROUP)
    prompts = rng.integers(vocabulary // 10, vocabulary, size=(num_groups, PROMPT_TOKENS))  # special tokens come first
    return Work(name, tuple(tuple(p) for p in prompts.tolist()), tuple(lengths))


def lognormal_lengths(num: int, mean: float, sigma: float = 1.0, cut: float = 4.0, seed: int = 1) -> list[int]:
    """Lengths of which each is at least 1 and at most `cut` times the mean of the distribution before it was cut."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, size=num)
    return np.clip(np.rint(draws), 1, int(cut * mean)).astype(int).tolist()


def static_passes(lengths: Sequence[int], batch: int) -> int:
    """Decode passes of who takes `batch` requests at a time, in order, and waits for the longest."""
    return sum(max(lengths[at : at + batch]) for at in range(0, len(lengths), batch))


def least_passes(lengths: Sequence[int], batch: int) -> int:
    """Decode passes that nobody can do without who makes one token per request and pass."""
    return max(-(-sum(lengths) // batch), max(lengths))


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of it, with a number of threads: what a pass cannot be faster than."""

    bytes_per_s: float  # reading memory in order
    products_s: float  # the matrix products of one pass with B rows and nothing else, each in the fastest form that the library has

    def bounds(self, work: Work, batch: int, weight_bytes: int) -> tuple[float, float]:
        """(by reading, by multiplying) useful tokens per second: passes that only read every weight once, or that only multiply."""
        reading_s = least_passes(work.lengths, batch) * weight_bytes / self.bytes_per_s
        return work.num_tokens / reading_s, batch / self.products_s
