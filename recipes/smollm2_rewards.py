"""Rewards of the SmolLM2 recipes: called once a rollout, with the row's columns by name."""

import re


def answer_only(completion: str, answer: str) -> float:
    """1.0 if the completion is the number and nothing else; surrounding space and one final full stop are forgiven."""
    return float(completion.strip().removesuffix(".").rstrip() == answer)


def last_number(completion: str, answer: str) -> float:
    """1.0 if the last number in the completion is the answer, whatever the words around it."""
    # A minus sign counts only where it is not a subtraction: "3 - 4" ends in 4, "3 - 4 = -1" ends in -1.
    numbers = re.findall(r"(?<![\d.])(?<!\d\s)-?\d+(?:\.\d+)?|\d+(?:\.\d+)?", completion.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(answer))
