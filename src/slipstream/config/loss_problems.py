"""What keeps `[loss]` settings from being one loss: unknown names (with the nearest), wrong parameters, double counting. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from math import inf

from slipstream.config.frozen_models import only_teacher
from slipstream.config.loss_tables import ADVANTAGES, ALIASES, CORRECTIONS, POLICY_LOSSES, PRESETS, alias, corrections_of, expand, is_own
from slipstream.config.problem import Problem
from slipstream.config.settings import Config, CorrectionSettings, LossSettings


def loss_problems(config: Config, *, reward_given: bool) -> Iterator[Problem]:
    """Everything about `[loss]` that does not go together, with other tables too; keys are whole, as `loss.policy`."""
    for keys, text in find_problems(config.loss):
        yield tuple(f"loss.{key}" for key in keys), text
    if only_teacher(config, reward_given=reward_given):
        yield from _only_teacher_problems(config.loss)
    else:
        yield from _advantage_problems(config)
    yield from _max_rl_problems(config.loss)
    yield from _reference_problems(config.loss)
    yield from _overlong_problems(config)


def _only_teacher_problems(loss: LossSettings) -> Iterator[Problem]:
    """The divergence over the vocabulary stands beside the policy loss, which then has nothing to learn from."""
    if loss.teacher_kl == "full" and corrections_of(loss) and not _penalty(loss):
        given = f'preset "{loss.preset}" with its correction' if loss.correction is None else "correction"
        reason = "corrections act on the policy loss, which is 0 without rewards, so they would do nothing"
        remedy = 'use loss.correction = [], or teacher_kl = "sampled", which goes through the policy loss'
        keys = ("loss.preset" if loss.correction is None else "loss.correction", "loss.teacher_kl", "reward")
        yield keys, f'{given} and teacher_kl = "full" with no reward that is learned from: {reason}; {remedy}'


def _advantage_problems(config: Config) -> Iterator[Problem]:
    loss, size = config.loss, config.rollout.group_size
    advantage = loss.advantage or PRESETS[loss.preset].advantage
    given = f'group_size = {size} with advantage "{advantage}" (preset "{loss.preset}")'
    if size == 1:
        if ADVANTAGES[advantage].needs_siblings:
            reason = "it is the distance to the rewards of the group, and a single rollout has no others to be compared with"
            remedy = 'use group_size >= 2, or loss.advantage = "group_mean_then_batch_whiten", which compares within the batch'
            yield ("rollout.group_size", "loss.advantage", "loss.preset"), f"{given}: {reason}; {remedy}"
        elif config.trainer.groups_per_step == 1:
            reason = "a batch of one rollout has nothing to be compared with, so its advantage is 0"
            yield ("rollout.group_size", "trainer.groups_per_step"), f"{given} and groups_per_step = 1: {reason}; use more of either"


def _max_rl_problems(loss: LossSettings) -> Iterator[Problem]:
    """Also where a teacher alone is learned from: the punishment is then the whole reward."""
    advantage = loss.advantage or PRESETS[loss.preset].advantage
    penalty = _penalty(loss)
    if advantage == "max_rl" and penalty:
        reason = "it divides by the mean reward of the group, which a punishment can bring near 0 or below"
        given = f"{penalty} = {getattr(loss, penalty)!r}".replace("'", '"')
        yield ("loss.advantage", f"loss.{penalty}"), f'advantage "max_rl" with {given}: {reason}; use another advantage'


def _penalty(loss: LossSettings) -> str | None:
    """The key that takes something from the rewards."""
    return "overlong_tokens" if loss.overlong_tokens else "kl_in" if loss.kl_in == "reward" and loss.kl_coefficient else None


def _reference_problems(loss: LossSettings) -> Iterator[Problem]:
    """Settings of a frozen model that is not there."""
    if loss.kl_coefficient == 0:
        for key, unset in (("reference", None), ("kl_in", "loss"), ("kl_estimator", None)):
            if (value := getattr(loss, key)) != unset:
                text = f'{key} = "{value}" with kl_coefficient = 0: no reference is loaded and no KL computed; set kl_coefficient > 0'
                yield (f"loss.{key}", "loss.kl_coefficient"), text
    if loss.teacher is None:
        if loss.teacher_coefficient != 1.0:
            text = f"teacher_coefficient = {loss.teacher_coefficient:g} without a teacher; name one in loss.teacher"
            yield ("loss.teacher_coefficient", "loss.teacher"), text
        if loss.teacher_kl != "sampled":
            yield ("loss.teacher_kl", "loss.teacher"), f'teacher_kl = "{loss.teacher_kl}" without a teacher; name one in loss.teacher'


def _overlong_problems(config: Config) -> Iterator[Problem]:
    overlong, longest = config.loss.overlong_tokens, config.rollout.max_new_tokens
    if overlong is not None and overlong >= longest:
        reason = "every completion would be punished, the shortest too"
        text = f"overlong_tokens = {overlong} with max_new_tokens = {longest}: {reason}; use overlong_tokens < {longest}"
        yield ("loss.overlong_tokens", "rollout.max_new_tokens"), text


def loss_advice(config: Config) -> Iterator[str]:
    """What is allowed in `[loss]` and probably not meant, one sentence each."""
    loss = config.loss
    policy = loss.policy or PRESETS[loss.preset].policy
    if loss.kl_coefficient and loss.kl_in == "loss" and loss.reference_estimator == "k1":
        yield 'loss.kl_estimator = "k1" in the loss has a gradient that is 0 on average; k2 and k3 pull towards the reference'
    if loss.kl_coefficient and loss.kl_in == "reward" and loss.reference_estimator != "k1":
        given = f'loss.kl_estimator = "{loss.reference_estimator}" in the reward'
        yield f"{given} does not pull a token towards its reference, near which its gradient is 0; k1 does"
    weighed = corrections_of(loss) or (policy in POLICY_LOSSES and POLICY_LOSSES[policy].weighs_by_sampler)
    if loss.old_logprobs == "recomputed" and not is_own(policy) and not weighed and config.buffer.max_staleness:
        given = 'loss.old_logprobs = "recomputed" without a correction'
        remedy = 'name one ("tis", "icepop"), or leave old_logprobs out'
        yield f"{given} trains stale tokens as if the weights at the start of the step had sampled them; {remedy}"


def find_problems(settings: LossSettings) -> Iterator[Problem]:
    """Everything that keeps these settings from being one loss; keys are those of `[loss]`."""
    policy = settings.policy or PRESETS[settings.preset].policy
    known = is_own(policy) or policy in POLICY_LOSSES
    if known:
        yield from _option_problems(settings, policy)
    else:
        own = ', or your own as "module:function" or "file.py:function"'
        yield ("policy",), _unknown(f'"{policy}" is no policy loss', policy, POLICY_LOSSES, own)
    wrong = [problem for correction in corrections_of(settings) for problem in _correction_problems(correction)]
    yield from wrong
    if known and not wrong:
        yield from _counted_twice(settings, policy, [expand(c) for c in corrections_of(settings)])


def _option_problems(settings: LossSettings, policy: str) -> Iterator[Problem]:
    given = {key: value for key in ("clip_low", "clip_high") if (value := getattr(settings, key)) is not None}
    if is_own(policy):
        for key in given:
            yield (key, "policy"), f"{policy} is your own loss; give it what it takes in loss.options"
        return
    parameters, named = POLICY_LOSSES[policy].parameters, _named(settings, policy)
    for key in given:
        if key not in parameters:
            yield (key, "policy"), f"{named} has no {key}; it takes {', '.join(parameters)}"
    for name, value in settings.options.items():
        if name not in parameters:
            yield ("options", "policy"), _unknown(f'{named} has no parameter "{name}"', name, parameters)
        elif name in ("clip_low", "clip_high"):
            yield ("options",), f"write loss.{name} = {value:g} instead of putting it into options"
        elif value <= parameters[name].above and not (value == 0 and parameters[name].zero_allowed):
            bound = "at least 0" if parameters[name].zero_allowed else f"above {parameters[name].above:g}"
            yield ("options",), f"{name} = {value:g} of {named} must be {bound}"


def _correction_problems(correction: str | CorrectionSettings) -> Iterator[Problem]:
    if isinstance(correction, str):
        if alias(correction) not in ALIASES:
            yield ("correction",), _no_such_correction(correction)
        return
    table, name = CORRECTIONS[correction.type], correction.type
    if correction.level is not None and correction.level not in table.levels:
        takes = "takes " + ", ".join(table.levels) if table.levels else "takes no level"
        yield ("correction",), f'{name} with level = "{correction.level}": it {takes}'
    if correction.statistic is not None and not table.statistics:
        yield ("correction",), f'{name} with statistic = "{correction.statistic}": only reject takes one'
    if correction.statistic is None and table.statistics:
        yield ("correction",), f"{name} needs a statistic: one of {', '.join(table.statistics)}"
    needed = ("high",) if name == "reject" and correction.statistic != "k1" else table.bounds
    for bound in ("low", "high"):
        value = getattr(correction, bound)
        if value is None and bound in needed:
            yield ("correction",), f"{name} needs {bound}; its weight is {table.formula}"
        elif value is not None and bound not in needed:
            yield ("correction",), f"{name} with {bound} = {value:g}: it takes {' and '.join(needed)} only; its weight is {table.formula}"
        elif value is not None and value < 0:
            yield ("correction",), f"{name} with {bound} = {value:g}: a bound is at least 0"
    if (correction.low if correction.low is not None else -inf) > (correction.high if correction.high is not None else inf):
        yield ("correction",), f"{name} with low = {correction.low:g} above high = {correction.high:g} would reject everything"
    if correction.statistic == "k1" and correction.low == 0:
        yield ("correction",), "reject k1 with low = 0: its bounds are ratios and their logarithms are taken; use low > 0"


def _no_such_correction(name: str) -> str:
    if alias(name) in CORRECTIONS:
        table = CORRECTIONS[alias(name)]
        return (
            f'"{name}" has no usual bounds; write a table, e.g. {{type = "{alias(name)}", {", ".join(f"{b} = ..." for b in table.bounds)}}}'
        )
    return _unknown(f'"{name}" is no correction', alias(name), ALIASES, ", or a table with type = ...")


def _counted_twice(settings: LossSettings, policy: str, corrections: list[CorrectionSettings]) -> Iterator[Problem]:
    """The sampler's probability may stand below one fraction only."""
    table, named = None if is_own(policy) else POLICY_LOSSES[policy], _named(settings, policy)
    if table and table.denominator == "none" and settings.old_logprobs is not None:
        given = f'old_logprobs = "{settings.old_logprobs}" with {named}'
        yield ("old_logprobs", "policy"), f"{given}, whose formula has no π_old; leave it out"
    if table and table.denominator == "recomputed" and settings.old_logprobs == "sampler":
        reason = "r = π/μ and ρ = π_start/μ would weigh by the sampler twice"
        remedy = 'use "recomputed" or leave it out'
        yield ("old_logprobs", "policy"), f'old_logprobs = "sampler" with {named}: {reason}; {remedy}'
    weighing = [c.type for c in corrections if CORRECTIONS[c.type].weighs]
    if len(weighing) > 1:
        yield ("correction",), f"{' and '.join(weighing)} each weigh by ρ = π_start/μ, together by its square; use one of them"
    if weighing and table and table.weighs_by_sampler:
        rejecting = ", ".join(name for name, correction in CORRECTIONS.items() if not correction.weighs)
        reason = "which weighs by the sampler already: each token would be weighed twice"
        remedy = f"use another policy loss, or a correction that only rejects ({rejecting})"
        yield ("correction", "policy"), f"{weighing[0]} with {named}, {reason}; {remedy}"
    elif weighing and settings.old_logprobs == "sampler":
        reason = "r = π/μ has the sampler in it already, so ρ would count it twice"
        remedy = 'use old_logprobs = "recomputed" or leave it out'
        yield ("correction", "old_logprobs"), f'{weighing[0]} with old_logprobs = "sampler": {reason}; {remedy}'


def _named(settings: LossSettings, policy: str) -> str:
    """`policy loss "reinforce" (preset "opo")`: the person may have written the preset alone."""
    return f'policy loss "{policy}"' + ("" if settings.policy or policy == settings.preset else f' (preset "{settings.preset}")')


def _unknown(what: str, name: str, names: Iterable[str], other: str = "") -> str:
    """`"ppo" is no policy loss: it is one of ..., did you mean "ppo_clip"?`"""
    names = list(names)
    near = [n for n in names if n.startswith(name)] or difflib.get_close_matches(name, names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"{what}; it is one of {', '.join(names)}{other}{hint}"
