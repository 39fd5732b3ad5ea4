"""The task of `vs_trl_sync`: sums and differences of two one-digit numbers, worded alike and scored alike for every side.

Imports nothing, so that it runs in each side's own environment.
"""

from __future__ import annotations

ASK = " Answer with only the number."


def score(completion: str, answer: str) -> float:
    """1.0 if the completion begins with the answer, 0.3 if the answer occurs in it, else 0.0."""
    words = completion.split()
    if words and words[0].rstrip(".") == answer:
        return 1.0
    return 0.3 if answer in completion else 0.0


def messages(row: dict, examples: list[dict] | None = None) -> list[dict[str, str]]:
    """The chat of one row; `examples` are shown before it as earlier turns."""
    turns = []
    for example in examples or []:
        turns += [{"role": "user", "content": example["question"] + ASK}, {"role": "assistant", "content": example["answer"]}]
    return [*turns, {"role": "user", "content": row["question"] + ASK}]
