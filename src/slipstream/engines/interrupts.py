"""What new weights do to the sequences that run: `rollout.interrupt`, `rollout.kv` and `rollout.interrupt_after` as an engine sees them.

    in_flight      they go on, over the keys and values they have or over ones made again by the new weights
    abort_resume   they end with INTERRUPT; the worker sends their tokens again, with their saved keys and values where those are kept
    abort_retry    they end with INTERRUPT; the worker throws their tokens away and starts them anew
    drain          they end by themselves first; nothing that waits starts before the new weights are in
    barrier        the controller hands weights over only while nothing runs: nothing is left to do here

Sequences that wait are never touched, and neither are those on a pinned version. A server is paused in each case, so that no step is made
half before and half after an update; one that left it is sent again as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.settings import RolloutSettings


@dataclass(frozen=True, slots=True)
class InterruptPolicy:
    """The rule that an engine follows when it adopts weights; by default in_flight with keys and values kept."""

    interrupt: str = "in_flight"
    kv: str = "keep"
    after: int | None = None  # abort only where the oldest token would be more than so many versions old; None: always

    @classmethod
    def of(cls, rollout: RolloutSettings) -> InterruptPolicy:
        return cls(rollout.interrupt, rollout.kv, rollout.interrupt_after)

    @property
    def drains(self) -> bool:
        return self.interrupt == "drain"

    @property
    def saves(self) -> bool:
        """Whether an aborted sequence's keys and values are kept for its resumption."""
        return self.interrupt == "abort_resume" and self.kv == "keep"

    @property
    def recomputes(self) -> bool:
        """Whether running sequences get their keys and values made again."""
        return self.interrupt == "in_flight" and self.kv == "recompute"

    @property
    def keeps_old_keys(self) -> bool:
        """Whether a sequence may start, under new weights, over keys and values that older ones made: those of its group's prompt."""
        return self.interrupt in ("in_flight", "abort_resume") and self.kv == "keep"

    def aborts(self, oldest: int, version: int) -> bool:
        """Whether a running sequence whose oldest sampled token is of version `oldest` ends when `version` is adopted."""
        if self.interrupt not in ("abort_resume", "abort_retry"):
            return False
        return self.after is None or version - oldest > self.after


CONTINUE = InterruptPolicy()
