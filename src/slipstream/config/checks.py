"""Checks that need more than one setting, made when the settings are loaded: what excludes what, and why.

Each check takes the config and yields `Conflict`s; all run, so a person sees every conflict at once.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.config.arithmetic import max_context_tokens
from slipstream.config.engine_problems import engine_problems
from slipstream.config.frozen_models import only_teacher
from slipstream.config.gate_problems import gate_advice, gate_problems
from slipstream.config.lora_problems import lora_advice, lora_problems
from slipstream.config.loss_problems import loss_advice, loss_problems
from slipstream.config.loss_tables import is_own
from slipstream.config.paths import is_inline_template, resolve_path
from slipstream.config.settings import Config, WeightSyncSettings

TIMES = re.compile(r"^(?!reward/).*(_s|_idle_fraction)$")  # metrics that measure time
BUILTIN_REWARDS = ("exact", "number", "regex", "judge")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that do not go together."""

    keys: tuple[str, ...]  # the key to blame first
    text: str  # given, why not, what to do


def check(config: Config, *, reward_given: bool, base_folder: Path, trains: bool = True) -> list[Conflict]:
    """Every conflict in these settings; `reward_given`: a callable comes as the reward; `trains`: they are to train a model."""
    return [
        *(Conflict(keys, text) for keys, text in loss_problems(config, reward_given=reward_given)),
        *(Conflict(keys, text) for keys, text in gate_problems(config)),
        *(Conflict(keys, text) for keys, text in lora_problems(config)),
        *(Conflict(keys, text) for keys, text in engine_problems(config, trains=trains)),
        *_deterministic(config),
        *_replicas(config),
        *_environment(config),
        *_selection(config),
        *_thresholds(config),
        *_lengths(config),
        *_rewards(config, reward_given),
        *_only_teacher(config, reward_given),
        *_transport(config),
        *_files(config, base_folder),
    ]


def _only_teacher(config: Config, reward_given: bool) -> Iterator[Conflict]:
    """A run that learns from a teacher alone has no rewards to compare."""
    if not only_teacher(config, reward_given=reward_given):
        return
    why = "with loss.teacher and no reward that is learned from, every rollout has reward 0"
    if config.buffer.filter_zero_variance:
        yield Conflict(
            ("buffer.filter_zero_variance", "loss.teacher"),
            f"filter_zero_variance = true: {why}, so every group would be filtered; leave it out, or add a [[reward]] with a weight",
        )
    if config.rollout.selection == "roc":
        yield Conflict(
            ("rollout.selection", "loss.teacher"),
            f'selection = "roc": {why}, so there are no positives to keep; use selection = "uniform", or add a [[reward]] with a weight',
        )
    if config.data.eval is not None and not config.reward:
        yield Conflict(
            ("data.eval", "loss.teacher"),
            "data.eval with loss.teacher and no reward: nothing says how good an answer is; leave data.eval out, or add a [[reward]] "
            "(with weight = 0 it is measured and not learned from)",
        )


def _deterministic(config: Config) -> Iterator[Conflict]:
    if config.run.deterministic and config.launch != "inline":
        yield Conflict(
            ("run.deterministic", "launch"),
            f'deterministic = true with launch = "{config.launch}": processes of their own swap weights and finish groups when they '
            'happen to, not at ticks of a logical clock; use launch = "inline"',
        )


def _replicas(config: Config) -> Iterator[Conflict]:
    if config.engine.replicas > 1 and config.launch == "inline":
        yield Conflict(
            ("engine.replicas", "launch"),
            f'replicas = {config.engine.replicas} with launch = "inline": all roles share one process there, and its engine is one; use '
            'replicas = 1 or launch = "local"',
        )


def _environment(config: Config) -> Iterator[Conflict]:
    rollout = config.rollout
    if rollout.environment == "tools":
        if not rollout.tools:
            yield Conflict(
                ("rollout.tools", "rollout.environment"),
                "environment = \"tools\" without tools; name at least one, e.g. tools = ['tools.py:add']",
            )
        if rollout.max_turns < 2:
            yield Conflict(
                ("rollout.max_turns", "rollout.environment"),
                f'max_turns = {rollout.max_turns} with environment = "tools": the model could call a tool but never see its result; '
                "use max_turns >= 2",
            )
        return
    if rollout.tools:
        yield Conflict(("rollout.tools", "rollout.environment"), 'tools need environment = "tools"; "single_turn" would never call them')
    if rollout.max_turns > 1:
        yield Conflict(
            ("rollout.max_turns", "rollout.environment"),
            f'max_turns = {rollout.max_turns} with environment = "single_turn", which ends after one turn; use 1 or environment = "tools"',
        )


def _selection(config: Config) -> Iterator[Conflict]:
    rollout = config.rollout
    size, sampled = rollout.group_size, rollout.oversample
    if sampled is not None and sampled < size:
        yield Conflict(
            ("rollout.oversample", "rollout.group_size"),
            f"oversample = {sampled} with group_size = {size}: of {sampled} rollouts {size} cannot be kept; use oversample >= {size} "
            f"(twice group_size is usual) or leave it out",
        )
    elif rollout.selection == "roc" and (sampled is None or sampled == size):
        yield Conflict(
            ("rollout.selection", "rollout.oversample"),
            f'selection = "roc" with {size} rollouts sampled and {size} kept: there is nothing to select; use oversample = {2 * size}, '
            "or leave selection out",
        )
    elif rollout.selection == "roc" and size == 1:
        yield Conflict(
            ("rollout.selection", "rollout.group_size"),
            'selection = "roc" with group_size = 1: it keeps positives and negatives side by side, which needs room for one of each; '
            'use group_size >= 2 or selection = "uniform"',
        )


def _thresholds(config: Config) -> Iterator[Conflict]:
    for index, limit in enumerate(config.threshold):
        key = f"threshold.{index}"
        if (limit.above is None) == (limit.below is None):
            given = "neither above nor below" if limit.above is None else f"both above = {limit.above:g} and below = {limit.below:g}"
            yield Conflict(
                (f"{key}.above", f"{key}.below"),
                f'the threshold on "{limit.metric}" has {given}; give one of the two (for both sides write two tables)',
            )
        if config.run.deterministic and TIMES.search(limit.metric):
            yield Conflict(
                (f"{key}.metric", "run.deterministic"),
                f'the threshold on "{limit.metric}" with deterministic = true: the time that the machine takes would decide over the run; '
                "use a metric that measures no time",
            )
        if limit.action == "lower_max_staleness" and config.buffer.max_staleness == 0:
            yield Conflict(
                (f"{key}.action", "buffer.max_staleness"),
                f'the threshold on "{limit.metric}" lowers max_staleness, which is 0 already; use action = "stop" or max_staleness >= 1',
            )
        if limit.action == "lower_max_staleness" and config.weight_sync.lag is not None:
            yield Conflict(
                (f"{key}.action", "weight_sync.lag"),
                f'the threshold on "{limit.metric}" lowers max_staleness, but lag = {config.weight_sync.lag} holds the engine at exactly '
                'that distance; use action = "stop" or leave lag out',
            )


def _lengths(config: Config) -> Iterator[Conflict]:
    """A rollout must fit the context with at least one prompt token."""
    new, context = config.rollout.max_new_tokens, max_context_tokens(config)
    if new >= context:
        given = "max_context" if config.engine.max_context else "the default max_context"
        yield Conflict(
            ("rollout.max_new_tokens", "engine.max_context"),
            f"max_new_tokens = {new} leaves no room for a prompt in {given} = {context} ({context} - {new} = {context - new} tokens); "
            f"use max_new_tokens < {context} or a larger engine.max_context",
        )


def _rewards(config: Config, reward_given: bool) -> Iterator[Conflict]:
    if not config.reward and not reward_given and config.loss.teacher is not None:
        return
    if not config.reward and not reward_given:
        yield Conflict(
            ("reward",),
            "no reward: nothing says what a good answer is; set loss.teacher, or add [[reward]] with function = "
            + " | ".join(f'"{name}"' for name in BUILTIN_REWARDS)
            + ', "package.module:function", or "rewards.py:function" beside the run file; a Python function goes to '
            "slipstream.train(..., reward=function), also to resume a run that was trained with one",
        )
        return
    for index, reward in enumerate(config.reward):
        if ":" not in reward.function and reward.function not in BUILTIN_REWARDS:
            near = difflib.get_close_matches(reward.function, BUILTIN_REWARDS, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            yield Conflict(
                (f"reward.{index}.function",),
                f'"{reward.function}" is neither {", ".join(BUILTIN_REWARDS)} nor "module:function" or "file.py:function"{hint}',
            )
        if reward.function == "regex" and "pattern" not in reward.options:
            yield Conflict((f"reward.{index}.options",), "regex needs a pattern: options = {pattern = '...'}")
        elif reward.function == "regex" and (problem := _pattern_problem(reward.options["pattern"])):
            yield Conflict((f"reward.{index}.options",), f"pattern = {reward.options['pattern']!r}: {problem}")
        elif reward.function == "judge" and "url" not in reward.options:
            yield Conflict((f"reward.{index}.options",), 'a judge needs a server: options = {url = "http://host:port/v1"}')
        if reward.function == "judge" and importlib.util.find_spec("openai") is None:
            yield Conflict(
                (f"reward.{index}.function",), "judge needs the package openai, which is not installed; pip install 'slipstream[openai]'"
            )
    for name, count in Counter(reward.name for reward in config.reward if reward.name).items():
        if count > 1:
            yield Conflict(("reward",), f'{count} rewards are named "{name}"; metrics are kept by name, so give each its own')
    unweighted = config.reward and not reward_given and all(reward.weight == 0 for reward in config.reward)
    if unweighted and not only_teacher(config, reward_given=reward_given):
        yield Conflict(("reward.0.weight",), "the weight of every reward is 0, so each rollout would get reward 0 and nothing be learned")


def _pattern_problem(pattern: object) -> str | None:
    if not isinstance(pattern, str):
        return "a regular expression is a text"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"not a regular expression: {error}"
    return None


def _transport(config: Config) -> Iterator[Conflict]:
    sync = config.weight_sync
    if sync.directory is not None and sync.transport != "files":
        yield Conflict(
            ("weight_sync.directory", "weight_sync.transport"),
            f'directory = "{sync.directory}" with transport = "{sync.transport}", which writes no files; use transport = "files" or leave '
            "directory out",
        )
    if sync.bucket_mib != WeightSyncSettings().bucket_mib and sync.transport != "collective":
        yield Conflict(
            ("weight_sync.bucket_mib", "weight_sync.transport"),
            f'bucket_mib = {sync.bucket_mib} with transport = "{sync.transport}", which sends no messages; use transport = "collective" or '
            "leave bucket_mib out",
        )


def _files(config: Config, base_folder: Path) -> Iterator[Conflict]:
    """Files of Python code and chat templates that settings name must be there; data and models are judged by their loaders."""
    functions = [(f"reward.{i}.function", r.function) for i, r in enumerate(config.reward)]
    functions += [(f"rollout.tools.{i}", tool) for i, tool in enumerate(config.rollout.tools)]
    functions += [("loss.policy", config.loss.policy)] if config.loss.policy and is_own(config.loss.policy) else []
    for key, value in functions:
        file, colon, function = value.rpartition(":")
        if key.startswith("rollout") and not (file and function):
            yield Conflict((key,), f'"{value}" names no tool; write "module:function" or "file.py:function"')
        elif colon and not function:
            yield Conflict((key,), f'"{value}" names no function; write "{file}:function"')
        elif file.endswith(".py") and not resolve_path(file, base_folder).is_file():
            yield Conflict((key,), f"there is no file {resolve_path(file, base_folder)}")
    template = config.model.chat_template
    if template is not None and not is_inline_template(template) and not resolve_path(template, base_folder).is_file():
        path = resolve_path(template, base_folder)
        yield Conflict(("model.chat_template",), f'"{template}" is neither Jinja text (no braces) nor a file at {path}')


def advice(config: Config) -> list[str]:
    """What is allowed and probably not meant, one sentence each; `slipstream validate` prints it."""
    out = []
    if config.data.eval is None:
        out.append("data.eval is not set: nothing is evaluated; data.eval = N holds out N prompts")
    if config.evaluation.samples > 1 and config.evaluation.temperature == 0:
        out.append(f"evaluation.samples = {config.evaluation.samples} at temperature 0 gives that many equal answers")
    if config.trainer.warmup_steps >= config.trainer.steps:
        steps = config.trainer.steps
        out.append(f"trainer.warmup_steps = {config.trainer.warmup_steps} is not over within {steps} steps: the peak rate is never reached")
    samples = config.rollout.num_samples
    out += loss_advice(config)
    out += gate_advice(config)
    out += lora_advice(config)
    if config.engine.slots < samples:
        out.append(
            f"engine.slots = {config.engine.slots} is less than one group of {samples}: its rollouts take turns, and the prompt is "
            "prefilled again for some"
        )
    return out
