"""What a reward function may return, and what is not a reward. No torch: tensors are read through their own `.item()`."""

from __future__ import annotations

import math
from typing import Any

from slipstream.errors import ScoringError
from slipstream.types import Score

_SHOWN_CHARS = 200


def shown(value: Any) -> str:
    """The value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def reward_value(value: Any, name: str, sample: int) -> float | None:
    """A finite float, or None (not applicable); ScoringError with the value shown for everything else."""
    if value is None:
        return None
    number = value
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)):  # numpy and torch scalars
        try:
            number = value.item()
        except Exception as error:  # more than one element
            raise ScoringError(f"reward {name!r} returned {shown(value)} for sample {sample}: not a single number") from error
    if not isinstance(number, int | float):  # bool is an int
        kind = type(value).__name__
        raise ScoringError(f"reward {name!r} returned {shown(value)} ({kind}) for sample {sample}; a number or None is expected")
    if not math.isfinite(number):
        raise ScoringError(f"reward {name!r} returned {number} for sample {sample}; rewards must be finite")
    return float(number)


def make_score(value: Any, name: str, weight: float, sample: int) -> Score:
    """The Score in a returned value: a number, None, or a dict with "score" and named parts."""
    if not isinstance(value, dict):
        return Score(name=name, value=reward_value(value, name, sample), weight=weight)
    if "score" not in value:
        raise ScoringError(f"reward {name!r} returned {shown(value)} for sample {sample}: a dict needs the key 'score'")
    parts = {}
    for key, part in value.items():
        number = None if key == "score" else reward_value(part, f"{name}/{key}", sample)
        if number is not None:
            parts[str(key)] = number
    return Score(name=name, value=reward_value(value["score"], name, sample), weight=weight, parts=parts)


def make_scores(values: Any, name: str, weight: float, num_samples: int) -> list[Score]:
    """One Score per sample from what a group-level function returned: a sequence of the right length."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        kind = type(values).__name__
        raise ScoringError(f"reward {name!r} returned {shown(values)} ({kind}); a list of {num_samples} rewards is expected")
    items = list(values)
    if len(items) != num_samples:
        raise ScoringError(f"reward {name!r} returned {len(items)} rewards for {num_samples} samples: {shown(items)}")
    return [make_score(value, name, weight, sample) for sample, value in enumerate(items)]
