"""Which settings may change when a run is resumed, key by key, in one table."""

from __future__ import annotations

from typing import Any

from slipstream.config.settings import Config
from slipstream.errors import ResumeError

# May change at any resume: they bound, watch or extend the run, and change no sample and no loss.
FREE = (
    "launch",
    "run.name",
    "run.folder",
    "run.stop_grace_s",
    "engine.max_restarts",
    "reward.N.timeout_s",
    "rollout.tool_timeout_s",
    "rollout.timeout_s",
    "rollout.max_attempts",
    "buffer.max_barren_groups",
    "trainer.steps",
    "trainer.learning_rate",
    "trainer.warmup_steps",
    "trainer.schedule",
    "trainer.max_skipped_steps",
    "trainer.step_timeout_s",
    "checkpoint.every",
    "checkpoint.keep",
    "evaluation.every",
    "evaluation.samples",
    "evaluation.temperature",
    "evaluation.limit",
    "evaluation.timeout_s",
    "threshold.N.metric",
    "threshold.N.above",
    "threshold.N.below",
    "threshold.N.steps",
    "threshold.N.action",
    "rollout.max_interrupts",
    "metrics.sinks",
    "metrics.samples_per_step",
    "ledger.keep",
    "weight_sync.directory",
    "weight_sync.bucket_mib",
)

# Speed and place: the same mathematics, other rounding or another order of events. A deterministic run must keep them.
FREE_UNLESS_DETERMINISTIC = (
    "model.device",
    "engine.replicas",
    "engine.slots",
    "engine.saved_states",
    "engine.saved_mib",
    "engine.threads",
    "engine.device",
    "engine.python",
    "engine.urls",
    "engine.model",
    "engine.server_args",
    "trainer.max_tokens_per_micro_batch",
    "trainer.logprob_chunk_tokens",
    "trainer.gradient_checkpointing",
    "trainer.threads",
    "trainer.device",
    "weight_sync.transport",
)

# Everything else decides what is sampled, scored or learned: a run that changes it is another run.
FIXED = (
    "run.seed",
    "run.deterministic",
    "model.name",
    "model.revision",
    "model.dtype",
    "model.quantize",
    "model.chat_template",
    "data.train",
    "data.eval",
    "data.prompt_template",
    "data.system_prompt",
    "data.columns",
    "data.options",
    "data.limit",
    "reward.N.function",
    "reward.N.name",
    "reward.N.weight",
    "reward.N.options",
    "rollout.group_size",
    "rollout.oversample",
    "rollout.selection",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.top_p",
    "rollout.min_p",
    "rollout.stop",
    "rollout.interrupt",
    "rollout.kv",
    "rollout.interrupt_after",
    "rollout.keep_routing",
    "rollout.environment",
    "rollout.tools",
    "rollout.max_turns",
    "engine.type",
    "engine.max_context",
    "buffer.max_staleness",
    "buffer.window",
    "buffer.max_groups",
    "buffer.on_stale",
    "buffer.stale_level",
    "buffer.stale_decay",
    "buffer.filter_zero_variance",
    "trainer.groups_per_step",
    "trainer.weight_decay",
    "trainer.betas",
    "trainer.max_grad_norm",
    "trainer.updates_per_batch",
    "trainer.minibatches",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "lora.modules_to_save",
    "lora.rslora",
    "lora.dora",
    "lora.dropout",
    "loss.preset",
    "loss.clip_low",
    "loss.clip_high",
    "loss.policy",
    "loss.options",
    "loss.advantage",
    "loss.aggregation",
    "loss.old_logprobs",
    "loss.correction",
    "loss.entropy_coefficient",
    "loss.kl_coefficient",
    "loss.kl_estimator",
    "loss.kl_in",
    "loss.reference",
    "loss.teacher",
    "loss.teacher_coefficient",
    "loss.teacher_kl",
    "loss.overlong_tokens",
    "weight_sync.payload",
    "weight_sync.every",
    "weight_sync.lag",
)


def compare_for_resume(old: Config, new: Config) -> list[str]:
    """The changes that a resume refuses, one line each with both values; empty if the run may go on."""
    deterministic = old.run.deterministic or new.run.deterministic
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    refusals = []
    for path in dict.fromkeys((*before, *after)):
        if before.get(path) == after.get(path):
            continue
        key = ".".join("N" if part.isdecimal() else part for part in path.split("."))
        given = f"{path} was {_show(before, path)} and is now {_show(after, path)}"
        if key in FREE:
            continue
        if key in FREE_UNLESS_DETERMINISTIC:
            if deterministic:
                refusals.append(f"{given}; a deterministic run must keep it")
            continue
        refusals.append(given)
    return refusals


def changed_settings(old: Config, new: Config) -> dict[str, Any]:
    """Dotted key -> new value (None: no longer set) of every setting that differs.

    >>> from slipstream.config.settings import TrainerSettings
    >>> changed_settings(Config(), Config(trainer=TrainerSettings(steps=7)))
    {'trainer.steps': 7}
    """
    before, after = _flat(old.model_dump()), _flat(new.model_dump())
    return {path: after.get(path) for path in dict.fromkeys((*before, *after)) if before.get(path) != after.get(path)}


def check_resume(old: Config, new: Config, folder: str) -> None:
    """Raise ResumeError with every refused change."""
    refusals = compare_for_resume(old, new)
    if refusals:
        raise ResumeError(
            f"the run in {folder} cannot go on with these settings:\n"
            + "\n".join(f"  - {line}" for line in refusals)
            + "\nSet them back or start a new run; steps, learning rate, schedule, "
            "thresholds, evaluation, checkpoint, metrics and timeouts may change."
        )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted path -> value; tables of `reward` by index, free tables (options, columns) as one value."""
    free = path.endswith((".options", ".columns"))
    if isinstance(value, dict) and not free:
        items = value.items()
    elif path in ("reward", "threshold"):
        items = enumerate(value)
    else:
        return {path: value}
    out: dict[str, Any] = {}
    for name, item in items:
        out |= _flat(item, f"{path}.{name}" if path else str(name))
    return out


def _show(values: dict[str, Any], path: str) -> str:
    return repr(values[path]) if path in values else "absent"
