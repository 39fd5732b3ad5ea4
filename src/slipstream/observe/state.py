"""What the displays show: the newest lines of a run and how its numbers are written for people."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.config.arithmetic import max_groups_in_flight, staleness_limit
from slipstream.config.settings import Config

BARS = "▁▂▃▄▅▆▇█"
HISTORY = 48  # steps in the sparkline


def sparkline(values: list[float], width: int = HISTORY, low: float | None = None, high: float | None = None) -> str:
    """The last values as one character each, from `low` to `high` (of the values by default)."""
    values = values[-width:]
    if not values:
        return ""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    if high <= low:
        return BARS[0] * len(values)
    top = len(BARS) - 1
    return "".join(BARS[max(0, min(top, round((v - low) / (high - low) * top)))] for v in values)


def number(value: float | None, digits: int = 3) -> str:
    """The value with so many decimals; a dash where it does not apply; large values with thin groups of thousands."""
    if value is None:
        return "–"
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def milliseconds(value_s: float | None) -> str:
    return "–" if value_s is None else f"{1000 * value_s:.0f} ms"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shown(path: Path) -> str:
    """The path as a person would type it here: relative where it lies below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def bound_text(limit: int | None, bound: int | None) -> str:
    """How old trained tokens may be, and how old any token may be: two numbers only where older tokens are masked or dropped.

    >>> bound_text(1, 1), bound_text(1, 2), bound_text(1, None), bound_text(None, None)
    ('(bound 1)', '(limit 1, bound 2)', '(limit 1, no worst case)', '(no worst case)')
    """
    worst = "no worst case" if bound is None else f"bound {bound:g}"
    return f"(limit {limit}, {worst})" if limit is not None and (bound is None or limit < bound) else f"({worst})"


def one_line(text: str, width: int) -> str:
    """The text on one line, cut to `width` characters with an ellipsis."""
    text = " ⏎ ".join(part.strip() for part in text.strip().splitlines() if part.strip())
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


@dataclass(slots=True)
class DisplayState:
    """The run as last reported. Fed by the observer, read by the displays (from rich's refresh thread too: whole values are swapped)."""

    name: str
    folder: str
    steps: int
    slots: int  # groups that may be in flight: (S + 1) x P
    staleness_limit: int | None  # of a trained token at the start; None: none beside the bound
    now: Callable[[], float] = time.monotonic
    started: float = 0.0
    line: dict[str, Any] = field(default_factory=dict)  # newest step line
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    first_evaluation: dict[str, Any] | None = None
    last_evaluation: dict[str, Any] | None = None
    answer: tuple[str, str, float | None] | None = None  # prompt, completion, reward of a rollout of the newest step
    first_step_at: float | None = None  # when this process saw its first step line, and which step that was
    first_step: int = 0

    @classmethod
    def of(cls, config: Config, folder: str, now: Callable[[], float] = time.monotonic) -> DisplayState:
        folder = shown(Path(folder))
        slots = max_groups_in_flight(config)
        limit = None if config.buffer.on_stale in ("keep", "down_weight") else staleness_limit(config)
        return cls(config.run.name, folder, config.trainer.steps, slots, limit, now, now())

    def on_step(self, line: dict[str, Any]) -> None:
        self.line = line
        if line.get("reward_mean") is not None:
            self.rewards.append(line["reward_mean"])
        if self.first_step_at is None:
            self.first_step_at, self.first_step = self.now(), self.done

    def on_evaluation(self, line: dict[str, Any]) -> None:
        self.first_evaluation = self.first_evaluation or line
        self.last_evaluation = line

    @property
    def limit(self) -> int | None:
        """The oldest token that is trained now: thresholds may have lowered it."""
        start = self.staleness_limit
        return None if start is None else min(start, self.line.get("max_staleness", start))

    @property
    def done(self) -> int:
        """Batches finished."""
        return int(self.line.get("version", 0))

    @property
    def elapsed_s(self) -> float:
        return self.now() - self.started

    @property
    def remaining_s(self) -> float | None:
        """At the pace of the steps seen so far; None before the second, and when all are done."""
        if self.first_step_at is None or self.done <= self.first_step or self.done >= self.steps:
            return None
        return (self.now() - self.first_step_at) / (self.done - self.first_step) * (self.steps - self.done)
