"""What the settings amount to, in numbers: groups in flight, samples per step, worst staleness, tokens. Printed by `slipstream validate`.

S = buffer.max_staleness, P = trainer.groups_per_step, G = rollout.group_size, W = buffer.window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from slipstream.config.settings import BufferSettings, Config

DEFAULT_MAX_CONTEXT = 4096  # tokens; the model's own limit if that is smaller
_TREATED = {"mask_tokens": "masked", "drop": "dropped", "cancel_early": "dropped, also while they run"}


def pull_window(config: Config) -> int | None:
    """W: the setting, or its default; None where it is unbounded."""
    from slipstream.controller.admission import default_window  # its home; imported here to keep config a leaf

    stale, given = config.buffer.max_staleness, config.buffer.window
    if given == "unbounded":
        return None
    return 1 if stale == 0 else given or default_window(stale, config.trainer.groups_per_step)


def max_groups_in_flight(config: Config) -> int:
    """Groups admitted and not yet trained and synced, at most: (S+1) x P, or what is set where the window is unbounded."""
    from slipstream.controller.admission import num_slots

    if pull_window(config) is None:
        return config.buffer.max_groups or 0  # given, checked when the settings are loaded
    return num_slots(config.buffer.max_staleness, config.trainer.groups_per_step)


def staleness_bound(config: Config) -> int | None:
    """The oldest a token can be when its batch is trained; older ones end the run. None: there is no worst case."""
    from slipstream.controller.admission import worst_staleness

    return worst_staleness(config.buffer.max_staleness, config.trainer.groups_per_step, pull_window(config))


def staleness_limit(config: Config) -> int | None:
    """The oldest token that is trained: S where older ones are masked or dropped, else the bound."""
    bound, stale = staleness_bound(config), config.buffer.max_staleness
    if config.buffer.on_stale not in ("mask_tokens", "drop", "cancel_early"):
        return bound
    return stale if bound is None else min(stale, bound)


def stale_level(settings: BufferSettings) -> str:
    """What is judged by its age: the setting, or the default of `on_stale`."""
    return settings.stale_level or ("group" if settings.on_stale in ("drop", "cancel_early") else "token")


def lowest_staleness(config: Config) -> int:
    """What max_staleness cannot be lowered beyond: with weights every k steps, k - 1 (see `admission`)."""
    return config.weight_sync.every - 1


def publishes(config: Config, version: int) -> bool:
    """Whether the trainer hands this version to the engines: every k-th and the last, and in deterministic runs that of a checkpoint, since
    a resume starts from it.

    >>> [v for v in range(1, 8) if publishes(Config.model_validate({"weight_sync": {"every": 3}, "trainer": {"steps": 7}}), v)]
    [3, 6, 7]
    """
    at_checkpoint = config.run.deterministic and version % config.checkpoint.every == 0
    return version % config.weight_sync.every == 0 or version == config.trainer.steps or at_checkpoint


def max_context_tokens(config: Config) -> int:
    """Longest prompt + completion in tokens, as far as the settings alone tell."""
    return config.engine.max_context or DEFAULT_MAX_CONTEXT


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The numbers of a run, derived from its settings (and the number of rows, where known)."""

    groups_per_step: int
    group_size: int
    sampled_per_group: int  # of which group_size are kept
    samples_per_step: int
    steps: int
    samples: int  # of the whole run
    groups: int  # trained in the whole run
    max_groups_in_flight: int
    max_rollouts_in_flight: int
    window: int | None  # None: unbounded
    worst_staleness: int | None  # of any token; one that is older ends the run. None: there is no worst case
    worst_updates: int | None  # the same in optimizer updates
    updates_per_step: int  # optimizer updates made of one batch
    published_every: int  # steps
    staleness_limit: int | None  # of a trained token: older ones are masked or dropped
    on_stale: str
    stale_level: str
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
            f"optimizer step, at most {_count(self.max_groups_in_flight, 'group')} in flight, {self._staleness()}",
            *self._selection(),
            *self._publication(),
            f"{_count(self.steps, 'step')}: {self.groups:,} groups, {self.samples:,} samples{self._epochs()}",
            f"at most {self.max_rollouts_in_flight:,} rollouts in flight for {_count(self.engine_slots, 'engine slot')}"
            f"{self._slots_note()}, a batch is {self.samples_per_step / self.engine_slots:.2g} times the slots, window "
            f"{'unbounded' if self.window is None else self.window}",
            f"at most {self.max_new_tokens_per_rollout:,} new tokens per rollout, {self.max_new_tokens_per_step:,} per step; "
            f"context {self.max_context_tokens:,} tokens, KV pool at most {self.kv_pool_tokens:,} tokens",
            f"{_count(self.checkpoints, 'checkpoint')}, "
            + (f"{_count(self.evaluations, 'evaluation')}" if self.evaluations else "no evaluation (data.eval is not set)"),
        ]

    def _epochs(self) -> str:
        return f", {self.epochs:.2f} epochs over {self.rows:,} rows" if self.rows and self.epochs is not None else ""

    def _staleness(self) -> str:
        """The worst case, in versions and where they differ in optimizer updates, and what happens to what is too old."""
        bound, limit = self.worst_staleness, self.staleness_limit
        updates = f" ({_count(self.worst_updates or 0, 'optimizer update')})" if self.updates_per_step > 1 else ""
        text = "no worst case of staleness (unbounded window)" if bound is None else f"worst staleness {bound}{updates}"
        if limit is not None and (bound is None or limit < bound):
            what = "tokens" if self.stale_level == "token" else f"{self.stale_level}s with trained tokens"
            text += f", {what} older than {limit} are {_TREATED[self.on_stale]}"
        elif self.on_stale == "down_weight":
            text += ", older data is weighed less"
        return text

    def _selection(self) -> list[str]:
        more = self.sampled_per_group > self.group_size
        return [f"of each {self.sampled_per_group} rollouts sampled {self.group_size} are kept"] if more else []

    def _publication(self) -> list[str]:
        every = self.published_every
        behind = _count(every - 1, "version")
        return [f"weights are published every {every} steps: a group may start {behind} behind the trainer"] if every > 1 else []

    def _slots_note(self) -> str:
        if self.engine_slots > self.max_rollouts_in_flight:
            return f" ({self.engine_slots - self.max_rollouts_in_flight} slots would stay free)"
        return ""


def arithmetic(config: Config, num_rows: int | None = None) -> Arithmetic:
    """The numbers of this run. `num_rows`: training rows, when the data has been read."""
    from slipstream.controller.admission import worst_updates

    per_step, size = config.trainer.groups_per_step, config.rollout.group_size
    steps, groups = config.trainer.steps, config.trainer.steps * per_step
    updates = config.trainer.updates_per_batch * config.trainer.minibatches
    new_tokens = config.rollout.max_new_tokens * config.rollout.max_turns
    return Arithmetic(
        groups_per_step=per_step,
        group_size=size,
        samples_per_step=per_step * size,
        steps=steps,
        samples=groups * size,
        groups=groups,
        max_groups_in_flight=max_groups_in_flight(config),
        max_rollouts_in_flight=max_groups_in_flight(config) * config.rollout.num_samples,
        sampled_per_group=config.rollout.num_samples,
        window=pull_window(config),
        worst_staleness=staleness_bound(config),
        worst_updates=worst_updates(staleness_bound(config), updates),
        updates_per_step=updates,
        published_every=config.weight_sync.every,
        staleness_limit=staleness_limit(config),
        on_stale=config.buffer.on_stale,
        stale_level=stale_level(config.buffer),
        engine_slots=config.engine.replicas * config.engine.slots,
        max_new_tokens_per_rollout=min(new_tokens, max_context_tokens(config) - 1),
        max_new_tokens_per_step=per_step * config.rollout.num_samples * min(new_tokens, max_context_tokens(config) - 1),
        max_context_tokens=max_context_tokens(config),
        kv_pool_tokens=config.engine.replicas * config.engine.slots * max_context_tokens(config),
        checkpoints=ceil(steps / config.checkpoint.every),
        evaluations=ceil(steps / config.evaluation.every) + 1 if config.data.eval is not None else 0,
        rows=num_rows,
        epochs=groups / num_rows if num_rows else None,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def adapter_places(config: Config) -> int:
    """Adapters that a server must have room for: of the versions that running sequences may be on, from the oldest that is still trained to
    the newest; of the next one; and of one that an evaluation pins. With fewer, a new version waits until an old one is needed no more."""
    bound = staleness_bound(config)
    return (config.buffer.max_staleness if bound is None else bound) + 2 + (config.data.eval is not None)


def drivers_copy(config: Config) -> bool:
    """Whether each engine has a copy of the weights beside its own: a server reads whole ones alone, in the trainer's memory or files, and
    its driver the rest for it. (Of adapters, every driver writes folders.)"""
    read_there = config.payload == "full" and config.weight_sync.transport != "collective"
    return config.engine.type == "vllm" and config.payload != "adapter" and not read_there
