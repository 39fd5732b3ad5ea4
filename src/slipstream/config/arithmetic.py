"""What the settings amount to, in numbers: groups in flight, samples per step, worst staleness, tokens. Printed by `slipstream validate`.

S = buffer.max_staleness, P = trainer.groups_per_step, G = rollout.group_size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from slipstream.config.settings import Config

DEFAULT_MAX_CONTEXT = 4096  # tokens; the model's own limit if that is smaller


def max_groups_in_flight(config: Config) -> int:
    """Groups admitted and not yet trained and synced, at most: (S+1) x P."""
    from slipstream.controller.admission import num_slots  # its home; imported here to keep config a leaf

    return num_slots(config.buffer.max_staleness, config.trainer.groups_per_step)


def staleness_bound(config: Config) -> int:
    """The oldest a token can be when its batch is trained; older ones end the run."""
    from slipstream.controller.admission import default_window, worst_staleness

    stale, per_step = config.buffer.max_staleness, config.trainer.groups_per_step
    return worst_staleness(stale, per_step, config.buffer.window or default_window(stale, per_step))


def staleness_limit(config: Config) -> int:
    """The oldest token that is trained: S where older ones are masked from the loss, else the bound."""
    masked = config.buffer.on_stale == "mask_tokens"
    return min(config.buffer.max_staleness, staleness_bound(config)) if masked else staleness_bound(config)


def max_context_tokens(config: Config) -> int:
    """Longest prompt + completion in tokens, as far as the settings alone tell."""
    return config.engine.max_context or DEFAULT_MAX_CONTEXT


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The numbers of a run, derived from its settings (and the number of rows, where known)."""

    groups_per_step: int
    group_size: int
    samples_per_step: int
    steps: int
    samples: int  # of the whole run
    groups: int  # trained in the whole run
    max_groups_in_flight: int
    max_rollouts_in_flight: int
    window: int
    worst_staleness: int  # of any token; one that is older ends the run
    staleness_limit: int  # of a trained token: older ones are masked
    engine_slots: int
    max_new_tokens_per_rollout: int
    max_new_tokens_per_step: int
    max_context_tokens: int
    kv_pool_tokens: int  # at most, all slots full
    checkpoints: int  # written in the whole run
    evaluations: int  # at least the first and the last; 0 without evaluation data
    rows: int | None = None
    epochs: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The same for people, one sentence a line."""
        return [
            f"{_count(self.groups_per_step, 'group')} x {_count(self.group_size, 'rollout')} = {self.samples_per_step:,} samples per "
            f"optimizer step, at most {_count(self.max_groups_in_flight, 'group')} in flight, worst staleness {self.worst_staleness}"
            f"{self._masked_note()}",
            f"{_count(self.steps, 'step')}: {self.groups:,} groups, {self.samples:,} samples{self._epochs()}",
            f"at most {self.max_rollouts_in_flight:,} rollouts in flight for {_count(self.engine_slots, 'engine slot')}"
            f"{self._slots_note()}, window {self.window}",
            f"at most {self.max_new_tokens_per_rollout:,} new tokens per rollout, {self.max_new_tokens_per_step:,} per step; "
            f"context {self.max_context_tokens:,} tokens, KV pool at most {self.kv_pool_tokens:,} tokens",
            f"{_count(self.checkpoints, 'checkpoint')}, "
            + (f"{_count(self.evaluations, 'evaluation')}" if self.evaluations else "no evaluation (data.eval is not set)"),
        ]

    def _epochs(self) -> str:
        return f", {self.epochs:.2f} epochs over {self.rows:,} rows" if self.rows and self.epochs is not None else ""

    def _masked_note(self) -> str:
        return f", tokens older than {self.staleness_limit} are masked" if self.staleness_limit < self.worst_staleness else ""

    def _slots_note(self) -> str:
        if self.engine_slots > self.max_rollouts_in_flight:
            return f" ({self.engine_slots - self.max_rollouts_in_flight} slots would stay free)"
        return ""


def arithmetic(config: Config, num_rows: int | None = None) -> Arithmetic:
    """The numbers of this run. `num_rows`: training rows, when the data has been read."""
    from slipstream.controller.admission import default_window

    stale, per_step, size = config.buffer.max_staleness, config.trainer.groups_per_step, config.rollout.group_size
    steps, groups = config.trainer.steps, config.trainer.steps * per_step
    window = config.buffer.window or default_window(stale, per_step)
    new_tokens = config.rollout.max_new_tokens * config.rollout.max_turns
    return Arithmetic(
        groups_per_step=per_step,
        group_size=size,
        samples_per_step=per_step * size,
        steps=steps,
        samples=groups * size,
        groups=groups,
        max_groups_in_flight=max_groups_in_flight(config),
        max_rollouts_in_flight=max_groups_in_flight(config) * size,
        window=window,
        worst_staleness=staleness_bound(config),
        staleness_limit=staleness_limit(config),
        engine_slots=config.engine.slots,
        max_new_tokens_per_rollout=min(new_tokens, max_context_tokens(config) - 1),
        max_new_tokens_per_step=per_step * size * min(new_tokens, max_context_tokens(config) - 1),
        max_context_tokens=max_context_tokens(config),
        kv_pool_tokens=config.engine.slots * max_context_tokens(config),
        checkpoints=ceil(steps / config.checkpoint.every),
        evaluations=ceil(steps / config.evaluation.every) + 1 if config.data.eval is not None else 0,
        rows=num_rows,
        epochs=groups / num_rows if num_rows else None,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
