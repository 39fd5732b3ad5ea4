"""Idle times between two steps, measured where the waiting happens. Totals are sums of these over the ledger's step events."""

from __future__ import annotations

import time


class MonotonicClock:
    """`protocols.Clock` of the machine; a jump of the wall clock has no effect on it."""

    def now(self) -> float:
        return time.monotonic()


class Meter:
    """The time integral of a level that changes now and then."""

    def __init__(self) -> None:
        self._level, self._since, self._sum = 0.0, 0.0, 0.0

    @property
    def level(self) -> float:
        return self._level

    def set(self, now: float, level: float) -> None:
        self._sum += self._level * (now - self._since)
        self._level, self._since = level, now

    def take(self, now: float) -> float:
        """The integral since the last take."""
        self.set(now, self._level)
        taken, self._sum = self._sum, 0.0
        return taken


class StepTimes:
    """What a step event reports: how long both sides were active since the last step, and how much of it they stood idle.

    The rollout side is active from the first admission on; it is idle by the share of engine slots that are free behind the closed gate.
    The trainer side is active from its first batch on; it is idle while it waits for the next.
    """

    def __init__(self) -> None:
        self.rollout_idle = Meter()
        self._trainer_wait = 0.0
        self._rollout_mark: float | None = None
        self._trainer_mark: float | None = None

    def admitted(self, now: float) -> None:
        if self._rollout_mark is None:
            self._rollout_mark = now
            self.rollout_idle.take(now)

    def batch_arrived(self, now: float, waited_s: float) -> None:
        if self._trainer_mark is None:
            self._trainer_mark = now
        else:
            self._trainer_wait += waited_s

    def take(self, now: float) -> dict[str, float]:
        """The fields of `events.StepFinished`, since the last take."""
        times = {
            "active_s": now - (self._rollout_mark if self._rollout_mark is not None else now),
            "rollout_idle_s": self.rollout_idle.take(now) if self._rollout_mark is not None else 0.0,
            "trainer_active_s": now - (self._trainer_mark if self._trainer_mark is not None else now),
            "trainer_wait_s": self._trainer_wait,
        }
        self._trainer_wait = 0.0
        self._rollout_mark = now if self._rollout_mark is not None else None
        self._trainer_mark = now if self._trainer_mark is not None else None
        return times
