"""Which evaluation is due, and the line that reports one. Pure functions."""

from __future__ import annotations

import math
from typing import Any

from slipstream.types import EvalResult


def pending(handled: dict[int, int], confirmed: int, every: int, steps: int) -> list[int]:
    """Due versions that some engine can serve and that were neither evaluated nor skipped, ascending.

    Due are version 0, every multiple of `every`, and the last version. `handled`: due version -> what became of it.

    >>> pending({}, 0, 25, 60), pending({0: 0}, 55, 25, 60), pending({0: 0, 25: 26, 50: 50}, 60, 25, 60)
    ([0], [25, 50], [60])
    """
    last = max(handled, default=-1)
    due = list(range(0 if last < 0 else (last // every + 1) * every, min(confirmed, steps) + 1, every))
    if confirmed >= steps > last and due[-1:] != [steps]:
        due.append(steps)
    return due


def choose(due: list[int]) -> tuple[int | None, list[int]]:
    """(the one to order now, those it makes obsolete). Version 0 is always evaluated; otherwise the newest due wins.

    >>> choose([0, 25]), choose([25, 50]), choose([])
    ((0, []), (50, [25]), (None, []))
    """
    if not due:
        return None, []
    return (0, []) if due[0] == 0 else (due[-1], due[:-1])


def rewards_of(result: EvalResult) -> list[float]:
    return [r for item in result.items for r in item.rewards if r is not None]


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def evaluation_line(result: EvalResult, due: int, samples: int) -> dict[str, Any]:
    """The flat line of one evaluation, for metrics.jsonl and the display."""
    rewards = rewards_of(result)
    center = mean(rewards)
    spread = None if center is None else math.sqrt(math.fsum((r - center) ** 2 for r in rewards) / len(rewards))
    return {
        "step": due,
        "version": result.version,
        "incarnation": result.incarnation,
        "eval_reward": center,
        "eval_reward_std": spread,
        "num_items": len(result.items),
        "samples": samples,
        "failed": sum(r is None for item in result.items for r in item.rewards),
        "duration_s": result.duration_s,
        "engine_s": result.engine_s,
        "completion_tokens_mean": mean([float(n) for item in result.items for n in item.num_tokens]),
    }
