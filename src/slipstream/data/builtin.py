"""Data sets that come with the package: no download, made on the fly, the same rows on every machine. No torch.

`builtin:sort_digits` is the quickstart's task: write four different digits in ascending order. The answer depends on the whole prompt:
a policy that ignores it scores below 1 %, one that misses a digit at most 1 in 7. The 5040 possible prompts are dealt once, in a fixed
order, to three disjoint parts:

    warm    the supervised warm start of `builtin:tiny` (never used for reinforcement learning)
    train   `builtin:sort_digits`
    eval    `builtin:sort_digits:eval`, held out
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from typing import Any

from slipstream.errors import DataError

SORT_DIGITS = "sort_digits"
NUM_DIGITS = 4
PARTS = {"eval": (0, 200), "warm": (200, 700), "train": (700, 5040)}  # half-open stretches of the dealt order


def builtin_names() -> list[str]:
    """What may follow `builtin:` in data.train and data.eval."""
    return [SORT_DIGITS, f"{SORT_DIGITS}:eval"]


def builtin_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a built-in data set, each {prompt, answer}; `name` is what follows `builtin:`. DataError for an unknown name."""
    if name not in builtin_names():
        near = difflib.get_close_matches(name, builtin_names(), n=1)
        hint = f"; did you mean 'builtin:{near[0]}'?" if near else ""
        raise DataError(f"data source 'builtin:{name}': there is no such data set, only {', '.join(builtin_names())}{hint}")
    return sort_digits(name.partition(":")[2] or "train")


def sort_digits(part: str) -> list[dict[str, Any]]:
    """The rows of one part (warm | train | eval), e.g. {"prompt": "sort 7391", "answer": "1379"}."""
    start, end = PARTS[part]
    return [{"prompt": f"sort {digits}", "answer": "".join(sorted(digits))} for digits in _dealt_order()[start:end]]


def _dealt_order() -> list[str]:
    """All strings of different digits in an order fixed by a hash, hence the same under every Python and on every machine."""
    every = ("".join(digits) for digits in itertools.permutations("0123456789", NUM_DIGITS))
    return sorted(every, key=lambda digits: hashlib.sha256(f"{SORT_DIGITS}/{digits}".encode()).digest())
