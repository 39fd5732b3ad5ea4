"""What a simulated run is made of: its settings, its sequences, and an engine that gives each running one a token per tick."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from schedule_audit import Audit

from slipstream.config import Config
from slipstream.types import Span


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. The first block is the controller's settings, the second the world that it lives in; times are in engine ticks."""

    S: int = 1
    P: int = 2
    G: int = 2
    window: int | str | None = 1
    interrupt: str = "in_flight"
    interrupt_after: int | None = None
    on_stale: str = "mask_tokens"
    stale_level: str | None = None
    every: int = 1
    oversample: int | None = None
    selection: str = "uniform"
    filters: bool = False
    steps: int = 12

    slots: int = 8
    length: float = 20.0  # mean tokens of a sequence
    sigma: float = 0.5  # of the logarithm of that
    straggler: float = 0.0  # sequences that are 10 to 50 times longer
    failed: float = 0.0  # rollouts
    flat: float = 0.0  # groups whose rewards are all equal
    skipped: float = 0.0  # updates
    step_ticks: float = 20.0
    step_sigma: float = 0.0
    sync_ticks: int = 1  # between an engine's request for weights and their adoption, at most
    score_ticks: int = 3  # at most
    records: bool = True  # prefixes; False: as with rollouts of several turns
    crashes: int = 0
    lowered: int = 0  # times that max_staleness is lowered
    max_barren: int = 10**6  # groups in a row
    max_interrupts: int = 3
    max_tokens: int = 5000

    @property
    def max_groups(self) -> int:
        """With window = "unbounded"."""
        return (self.S + 2) * self.P

    def fate(self, seed: int, group: int, sample: int, attempt: int) -> tuple[int, bool]:
        """(the length, whether it fails) of a sequence."""
        dice = random.Random(f"{seed} {group} {sample} {attempt}")
        tokens = self.length * math.exp(self.sigma * dice.gauss(0, 1) - self.sigma**2 / 2)
        if dice.random() < self.straggler:
            tokens *= dice.uniform(10, 50)
        return min(self.max_tokens, max(1, round(tokens))), dice.random() < self.failed

    def config(self, seed: int) -> Config:
        return Config.model_validate(
            {
                "launch": "inline",
                "run": {"seed": seed},
                "rollout": {
                    "group_size": self.G,
                    "oversample": self.oversample,
                    "selection": self.selection,
                    "interrupt": self.interrupt,
                    "interrupt_after": self.interrupt_after,
                    "max_attempts": 6,
                    **({"max_interrupts": self.max_interrupts} if self.interrupt == "abort_retry" else {}),
                },
                "engine": {"slots": self.slots},
                "buffer": {
                    "max_staleness": self.S,
                    "window": self.window,
                    "max_groups": self.max_groups if self.window == "unbounded" else None,
                    "on_stale": self.on_stale,
                    "stale_level": self.stale_level,
                    "filter_zero_variance": self.filters,
                    "max_barren_groups": self.max_barren,
                },
                "trainer": {"steps": self.steps, "groups_per_step": self.P, "max_skipped_steps": 1000},
                "weight_sync": {"every": self.every},
                "checkpoint": {"every": 4, "keep": 2},
            }
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """A rollout at the worker and at the engine."""

    group: int
    sample: int
    attempt: int
    length: int  # tokens when it has ended
    fails: bool
    min_version: int
    ids: list[int] = field(default_factory=list)  # numbers of its tokens
    spans: list[Span] = field(default_factory=list)  # of those, in rollout coordinates (one prompt token)
    recorded: int = 0  # tokens that the controller has
    since: int | None = None  # the tick up to which its tokens are counted; None: it is in no slot
    run: int = 0  # times it was put into a slot
    interrupts: int = 0
    ended: bool = False
    error: str | None = None


@dataclass(slots=True)
class Task:
    assignment: Any
    sequences: list[Sequence]


class Engine:
    """One token per tick for each running sequence."""

    def __init__(self, slots: int, audit: Audit):
        self.slots, self.audit = slots, audit
        self.version = (0, -1)
        self.waiting: list[Sequence] = []
        self.running: dict[Sequence, None] = {}
        self.offer: Any = None
        self.draining = False  # nothing starts, so that new weights can come
        self.holding = False  # nothing starts, so that those who were interrupted can come back first

    def catch_up(self, now: int, sequences: Any = None) -> None:
        """Count the tokens that running sequences have got since."""
        for sequence in list(self.running) if sequences is None else sequences:
            if sequence.since is None or (num := now - sequence.since) == 0:
                continue
            start = 1 + len(sequence.ids)
            sequence.ids += self.audit.sampled((sequence.group, sequence.sample, sequence.attempt), self.version, num)
            last = sequence.spans[-1] if sequence.spans else None
            if last and (last.incarnation, last.version) == self.version:
                sequence.spans[-1] = Span(last.start, start + num, *self.version, "e0")
            else:
                sequence.spans.append(Span(start, start + num, *self.version, "e0"))
            sequence.since = now

    def start_ready(self, now: int) -> list[Sequence]:
        """Put into free slots what may start: those with tokens first."""
        ready = [] if self.draining or self.holding else [s for s in self.waiting if s.min_version <= self.version[1] >= 0]
        started = sorted(ready, key=lambda s: not s.ids)[: self.slots - len(self.running)]
        for sequence in started:
            self.waiting.remove(sequence)
            self.running[sequence] = None
            sequence.since, sequence.run = now, sequence.run + 1
        return started

    def remove(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.running.pop(sequence, None)
        sequence.since = None
