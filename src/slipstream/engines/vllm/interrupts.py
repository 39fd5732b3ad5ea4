"""What new weights do to the sequences that run on a server: `rollout.interrupt` and `rollout.kv` as a server can follow them.

    in_flight      the server pauses between two steps, keeps every sequence and its keys and values, and they go on under the new weights
      recompute    the same, but the keys and values are dropped and made again (kv = "recompute")
    abort_resume   sequences are taken off the paused server; the worker sends their tokens again, which the new weights read anew
    abort_retry    the same; the worker throws their tokens away and starts them anew
    drain          they end by themselves first; nothing that waits starts before the new weights are in
    barrier        the controller hands weights over only while nothing runs

The server is paused in each case, so that no step is made half before and half after an update.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config.settings import RolloutSettings


@dataclass(frozen=True, slots=True)
class ServerInterrupts:
    """The rule that `VllmEngine` follows at an update."""

    interrupt: str = "in_flight"
    kv: str = "keep"
    after: int | None = None  # abort only where the oldest token would be more than so many versions old; None: always

    @classmethod
    def of(cls, rollout: RolloutSettings) -> ServerInterrupts:
        return cls(rollout.interrupt, rollout.kv, rollout.interrupt_after)

    @property
    def drains(self) -> bool:
        return self.interrupt == "drain"

    @property
    def recomputes(self) -> bool:
        """Whether the sequences that go on get their keys and values made again by the new weights."""
        return self.interrupt == "in_flight" and self.kv == "recompute"

    def aborts(self, oldest: int, version: int) -> bool:
        """Whether a sequence whose oldest sampled token is of version `oldest` is taken off the server when `version` comes."""
        if self.interrupt not in ("abort_resume", "abort_retry"):
            return False
        return self.after is None or version - oldest > self.after
