"""What keeps gates, interrupts and publication from going together or from getting on, with the arithmetic. No torch.

S = buffer.max_staleness, P = trainer.groups_per_step. Why the numbers are what they are: `controller.admission`.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.config.arithmetic import lowest_staleness, max_groups_in_flight, staleness_bound
from slipstream.config.problem import Problem
from slipstream.config.settings import BufferSettings, Config, CorrectionSettings, RolloutSettings


def gate_problems(config: Config) -> Iterator[Problem]:
    """Everything about window, stale data, interrupts, lag and publication that does not go together."""
    yield from _unbounded(config) if config.buffer.window == "unbounded" else _window(config)
    yield from _stale(config.buffer)
    yield from _filter(config)
    yield from _interrupts(config)
    yield from _publication(config)
    yield from _minibatches(config)
    yield from _lag(config)


def gate_advice(config: Config) -> Iterator[str]:
    """What is allowed and probably not meant, one sentence each."""
    stale, on_stale, interrupt = config.buffer.max_staleness, config.buffer.on_stale, config.rollout.interrupt
    lowers = any(limit.action == "lower_max_staleness" for limit in config.threshold)
    if on_stale != BufferSettings().on_stale and staleness_bound(config) == stale and not lowers:
        yield (f'buffer.on_stale = "{on_stale}" has nothing to do: with buffer.window = 1 no token gets older than max_staleness = {stale}')
    if interrupt != "in_flight" and stale == 0:
        yield f'rollout.interrupt = "{interrupt}" has nothing to do: with buffer.max_staleness = 0 nothing runs when new weights come'
    elif interrupt == "abort_retry":
        yield (
            'rollout.interrupt = "abort_retry": a rollout that takes longer than the time between two updates never ends, so what is '
            "trained is shorter than what the model would write; wasted_tokens/interrupted and dropped_groups/interrupted show how much"
        )


def _window(config: Config) -> Iterator[Problem]:
    window, stale, slots = config.buffer.window, config.buffer.max_staleness, max_groups_in_flight(config)
    if config.buffer.max_groups is not None:
        yield (
            ("buffer.max_groups", "buffer.window"),
            f"max_groups = {config.buffer.max_groups} without an unbounded window: (max_staleness + 1) x groups_per_step = {slots} groups "
            'are in flight then; leave it out, or use window = "unbounded"',
        )
    if window is None or window == 1:
        return
    if stale == 0:
        yield (
            ("buffer.window", "buffer.max_staleness"),
            f"window = {window} with max_staleness = 0: a synchronous run trains the groups it admitted, so there is nothing to reorder; "
            "use window = 1 or leave it out",
        )
    elif int(window) > slots:
        yield (
            ("buffer.window", "buffer.max_staleness", "trainer.groups_per_step"),
            f"window = {window} is wider than the {slots} groups in flight at most ((max_staleness + 1) x groups_per_step = {stale + 1} x "
            f"{config.trainer.groups_per_step}); use a window of at most {slots}",
        )


def _unbounded(config: Config) -> Iterator[Problem]:
    buffer, per_step, every = config.buffer, config.trainer.groups_per_step, config.weight_sync.every
    if buffer.max_staleness == 0:
        yield (
            ("buffer.window", "buffer.max_staleness"),
            'window = "unbounded" with max_staleness = 0: only the groups of the next batch may start on its version, and whatever else is '
            "admitted is too old for the batch after it; use max_staleness >= 1, or leave window out",
        )
    if buffer.max_groups is None:
        yield (
            ("buffer.max_groups", "buffer.window"),
            'window = "unbounded" without max_groups: any finished group may be trained, so nothing but a number of groups in flight '
            f"bounds the buffer; set max_groups, e.g. {2 * per_step * max(every, buffer.max_staleness + 1)}",
        )
    elif buffer.max_groups < per_step * every:
        held = f", and those of {every} batches hold their slots until a version that contains them is published" if every > 1 else ""
        yield (
            ("buffer.max_groups", "trainer.groups_per_step", "weight_sync.every"),
            f"max_groups = {buffer.max_groups} is too few: a batch is groups_per_step = {per_step} groups{held}; use max_groups >= "
            f"{per_step * every}",
        )
    if buffer.on_stale == "keep":
        yield (
            ("buffer.on_stale", "buffer.window"),
            'on_stale = "keep" with window = "unbounded": nothing bounds the age of what is trained; use another on_stale, or a window',
        )


def _stale(buffer: BufferSettings) -> Iterator[Problem]:
    level = buffer.stale_level
    if buffer.on_stale == "keep" and level is not None:
        yield (
            ("buffer.stale_level", "buffer.on_stale"),
            f'stale_level = "{level}" with on_stale = "keep", which judges nothing; leave one of them out',
        )
    if buffer.on_stale == "drop" and level == "token":
        yield (
            ("buffer.stale_level", "buffer.on_stale"),
            'stale_level = "token" with on_stale = "drop": tokens that are not trained are masked; use on_stale = "mask_tokens", or drop '
            'at level "rollout" or "group"',
        )
    if buffer.on_stale == "cancel_early" and level in ("token", "rollout"):
        yield (
            ("buffer.stale_level", "buffer.on_stale"),
            f'stale_level = "{level}" with on_stale = "cancel_early": only a whole group gives its slot to another prompt; use "group" or '
            "leave it out",
        )
    if buffer.on_stale != "down_weight" and buffer.stale_decay != BufferSettings().stale_decay:
        yield (
            ("buffer.stale_decay", "buffer.on_stale"),
            f'stale_decay = {buffer.stale_decay:g} with on_stale = "{buffer.on_stale}", which weighs nothing; use on_stale = '
            '"down_weight" or leave it out',
        )


def _filter(config: Config) -> Iterator[Problem]:
    if config.buffer.filter_zero_variance and config.rollout.group_size == 1:
        yield (
            ("buffer.filter_zero_variance", "rollout.group_size"),
            "filter_zero_variance = true with group_size = 1: the reward of a single rollout is equal to itself, so every group would be "
            "filtered; leave it out, or use group_size >= 2",
        )


def _interrupts(config: Config) -> Iterator[Problem]:
    rollout, bound = config.rollout, staleness_bound(config)
    interrupt, after = rollout.interrupt, rollout.interrupt_after
    reasons = {
        "drain": "running sequences end on the weights they started with",
        "barrier": "no sequence runs while weights change",
        "abort_retry": "an interrupted rollout starts anew, so nothing is left of its keys and values",
    }
    if rollout.kv == "recompute" and interrupt in reasons:
        yield (
            ("rollout.kv", "rollout.interrupt"),
            f'kv = "recompute" with interrupt = "{interrupt}": {reasons[interrupt]}; leave kv out',
        )
    if after is not None and not interrupt.startswith("abort_"):
        yield (
            ("rollout.interrupt_after", "rollout.interrupt"),
            f'interrupt_after = {after} with interrupt = "{interrupt}", which aborts nothing; use "abort_resume" or "abort_retry", or '
            "leave it out",
        )
    elif after is not None and bound is not None and after >= max(bound, 1):
        yield (
            ("rollout.interrupt_after", "buffer.max_staleness", "buffer.window"),
            f"interrupt_after = {after}: a running rollout is never more than {bound} versions old, since its group is trained by then, so "
            f"nothing would be aborted; use interrupt_after < {max(bound, 1)}, or leave it out to abort at every update",
        )
    if interrupt != "abort_retry" and rollout.max_interrupts != RolloutSettings().max_interrupts:
        yield (
            ("rollout.max_interrupts", "rollout.interrupt"),
            f'max_interrupts = {rollout.max_interrupts} with interrupt = "{interrupt}", which starts no rollout anew; use "abort_retry" or '
            "leave it out",
        )


def _publication(config: Config) -> Iterator[Problem]:
    every, stale, per_step = config.weight_sync.every, config.buffer.max_staleness, config.trainer.groups_per_step
    if every > stale + 1:
        yield (
            ("weight_sync.every", "buffer.max_staleness"),
            f"every = {every} with max_staleness = {stale}: groups hold their slots until a published version contains them, so after "
            f"{_batches(stale + 1)} all (max_staleness + 1) x groups_per_step = {(stale + 1) * per_step} slots are taken, and no batch can "
            f"be formed before the version that {every} batches make; use every <= {stale + 1} or max_staleness >= {every - 1}",
        )
        return
    for index, limit in enumerate(config.threshold):
        if limit.action == "lower_max_staleness" and 0 < stale == lowest_staleness(config):
            yield (
                (f"threshold.{index}.action", "weight_sync.every", "buffer.max_staleness"),
                f'the threshold on "{limit.metric}" lowers max_staleness = {stale}, which weights published every {every} steps need; use '
                f'action = "stop" or every < {every}',
            )


def _minibatches(config: Config) -> Iterator[Problem]:
    parts, per_step = config.trainer.minibatches, config.trainer.groups_per_step
    if parts > per_step:
        yield (
            ("trainer.minibatches", "trainer.groups_per_step"),
            f"minibatches = {parts} of {per_step} groups: a group is not split, so some would be empty; use minibatches <= {per_step}",
        )


def _lag(config: Config) -> Iterator[Problem]:
    lag = config.weight_sync.lag
    if lag is None:
        return
    if config.launch != "inline":
        yield (
            ("weight_sync.lag", "launch"),
            f'lag = {lag} with launch = "{config.launch}": only one process can hold the engine at exactly that distance; '
            'use launch = "inline" or leave lag out',
        )
    if lag != config.buffer.max_staleness:
        yield (
            ("weight_sync.lag", "buffer.max_staleness"),
            f"lag = {lag} with max_staleness = {config.buffer.max_staleness}: the gate lets exactly max_staleness + 1 batches start on one "
            f"version, and only then is each batch sampled exactly lag versions behind; use max_staleness = {lag}",
        )
    if config.buffer.window == "unbounded":
        yield (
            ("weight_sync.lag", "buffer.window"),
            f'lag = {lag} with window = "unbounded": max_groups then says how many groups start on one version, not the lag; leave one of '
            "them out",
        )
    if config.run.deterministic:
        yield (
            ("weight_sync.lag", "run.deterministic"),
            f"lag = {lag} with deterministic = true: a resume has the weights of its checkpoint, not the versions behind it that the "
            "uninterrupted run samples with; use one of the two (an inline run that is not resumed repeats itself anyway)",
        )
    gates = [c.high for c in config.loss.correction or () if isinstance(c, CorrectionSettings) and c.type == "version_gate"]
    gate = min((high for high in gates if high is not None), default=lag)
    if gate < lag:
        yield (
            ("weight_sync.lag", "loss.correction"),
            f"lag = {lag} with version_gate high = {gate:g}: from step {lag} on every token is {lag} versions old and none is trained; "
            f"use a gate of at least {lag}, or a smaller lag",
        )
    if config.buffer.filter_zero_variance:
        yield (
            ("weight_sync.lag", "buffer.filter_zero_variance"),
            f"lag = {lag} with filter_zero_variance: the group that takes a filtered one's place would be sampled at another distance; "
            "use one of the two",
        )
    if config.weight_sync.every > 1:
        yield (
            ("weight_sync.lag", "weight_sync.every"),
            f"lag = {lag} with every = {config.weight_sync.every}: batch s needs version s - lag, which is not published; use one of them",
        )
    if config.rollout.interrupt != "in_flight" or config.rollout.kv != "keep":
        key = "interrupt" if config.rollout.interrupt != "in_flight" else "kv"
        yield (
            ("weight_sync.lag", f"rollout.{key}"),
            f'lag = {lag} with {key} = "{getattr(config.rollout, key)}": the engine takes new weights only when nothing runs, so no '
            f"generation is ever interrupted; leave rollout.{key} out",
        )


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"
