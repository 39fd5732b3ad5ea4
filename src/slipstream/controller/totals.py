"""Sums over a run: what was trained, what was wasted, and why. `state` makes them; summary, step lines and `inspect` read them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slipstream.controller import events as ev

MAX_CAUSES = 50  # distinct failure causes counted apart; the rest is "other"

# Why a group was dropped, and why its tokens were wasted. Further causes of waste: "failed", "filtered", "bad data", "not selected".
REWOUND = "rewound"
STALE = "stale"  # finished, and too old for the next batch
CANCELLED = "cancelled"  # the same, still running
INTERRUPTED = "interrupted"
SKIPPED = "skipped"  # of tokens alone: their batch was trained, but its update was not applied


def short_cause(cause: str) -> str:
    """What failures are counted under: the cause up to its first colon or line end."""
    return cause.splitlines()[0].split(":")[0].strip()[:60] if cause.strip() else "unknown"


@dataclass(slots=True)
class Totals:
    """Sums over the surviving events. Work that a resume threw away is not in the trained ones, its time is."""

    trained_groups: int = 0
    trained_samples: int = 0
    trained_tokens: int = 0
    several_versions: int = 0  # trained samples with more than one version
    masked_tokens: int = 0  # stale ones, out of the loss mask
    down_weighted_tokens: int = 0  # stale ones, trained with less weight
    trained: ev.Tally = field(default_factory=ev.Tally)  # rollouts that were trained
    stale: ev.Tally = field(default_factory=ev.Tally)  # rollouts that were dropped because they were stale, to be held against those
    skipped_steps: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # staleness -> trained tokens
    filtered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> groups
    failures: Counter[str] = field(default_factory=Counter)  # short cause -> failed attempts, and failed rollouts that a group could spare
    generated_tokens: int = 0
    wasted_tokens: Counter[str] = field(default_factory=Counter)  # cause -> tokens
    active_s: float = 0.0
    rollout_idle_s: float = 0.0
    trainer_active_s: float = 0.0
    trainer_wait_s: float = 0.0

    def count_failure(self, cause: str) -> None:
        key = short_cause(cause)
        self.failures[key if key in self.failures or len(self.failures) < MAX_CAUSES else "other"] += 1

    def count_waste(self, cause: str, num_tokens: int) -> None:
        """Tokens that were not counted so far, and that no step will train."""
        self.generated_tokens += num_tokens
        self.wasted_tokens[cause] += num_tokens

    def count_left_out(self, left_out: ev.LeftOut | None) -> int:
        """Count what an oversampled group's selection left out; how many tokens that were."""
        if left_out is None:
            return 0
        for cause in left_out.failures:
            self.count_failure(cause)
        for cause, num_tokens in left_out.tokens.items():
            self.count_waste(cause, num_tokens)
        return left_out.num_tokens

    def count_batch(self, record: ev.BatchRecorded, *, skipped: bool, sign: int = 1) -> None:
        """Add a finished batch, or with sign = -1 take it out again. A skipped update trained nothing, but its groups are spent."""
        self.trained_groups += sign * len(record.group_ids)
        if record.dropped.rollouts:
            self.wasted_tokens[STALE] += sign * record.dropped.tokens
            self.stale = self.stale.plus(record.dropped, sign)
        if skipped:
            self.skipped_steps += sign
            self.wasted_tokens[SKIPPED] += sign * (record.num_loss_tokens + record.num_masked_tokens)
            return
        self.trained = self.trained.plus(record.kept, sign)
        self.trained_samples += sign * record.num_samples
        self.trained_tokens += sign * record.num_loss_tokens
        self.several_versions += sign * record.num_several_versions
        self.masked_tokens += sign * record.num_masked_tokens
        self.down_weighted_tokens += sign * record.num_down_weighted_tokens
        for staleness, tokens in record.staleness:
            self.staleness[staleness] += sign * tokens

    def uncount_covered(self) -> None:
        """Back to the initial model: of batches that every kept checkpoint covered the state holds no groups any more, only what the totals
        still count as trained after all others were taken out."""
        self.dropped[REWOUND] += self.trained_groups
        self.wasted_tokens[REWOUND] += self.generated_tokens - sum(self.wasted_tokens.values())
        self.trained_groups = self.trained_samples = self.trained_tokens = 0
        self.several_versions = self.masked_tokens = self.down_weighted_tokens = self.skipped_steps = 0
        self.trained = ev.Tally()
        self.staleness.clear()
