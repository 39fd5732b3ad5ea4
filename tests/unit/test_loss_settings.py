"""`[loss]` resolved to one loss: presets, overrides, aliases; and every refusal with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream.config import Config, load_config
from slipstream.config.checks import advice, check
from slipstream.config.loss_tables import ADVANTAGES, AGGREGATIONS, ALIASES, CORRECTIONS, POLICY_LOSSES, PRESETS
from slipstream.config.losses import ResolvedLoss, resolve
from slipstream.config.settings import AdvantageName, AggregationName, CorrectionSettings, LossPreset, LossSettings
from slipstream.errors import ConfigError

CONSTANT = "sequence_mean_of_token_sum_over_max_length"
PER_ROLLOUT = "sequence_mean_of_token_mean"


def test_the_settings_name_the_rows_of_the_tables():
    assert get_args(LossPreset) == tuple(PRESETS)
    assert get_args(AdvantageName) == tuple(ADVANTAGES)
    assert get_args(AggregationName) == tuple(AGGREGATIONS)
    assert get_args(CorrectionSettings.model_fields["type"].annotation) == tuple(CORRECTIONS)


@pytest.mark.parametrize(
    ("preset", "policy", "options", "advantage", "aggregation", "old", "corrections"),
    [
        ("grpo", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "group_mean_std", "token_mean", "sampler", ""),
        ("dr_grpo", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "group_mean", CONSTANT, "sampler", ""),
        ("dapo", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}, "group_mean_std", "token_mean", "sampler", ""),
        ("gspo", "gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, "group_mean_std", PER_ROLLOUT, "sampler", ""),
        ("gmpo", "gmpo", {"clip_low": 0.4, "clip_high": 0.4}, "group_mean_std", PER_ROLLOUT, "sampler", ""),
        ("cispo", "cispo", {"clip_low": 0.2, "clip_high": 0.28}, "group_mean_std", "token_mean", "sampler", ""),
        ("sapo", "sapo", {"tau_positive": 1.0, "tau_negative": 1.05}, "group_mean_std", PER_ROLLOUT, "sampler", ""),
        ("rloo", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "leave_one_out", "token_mean", "sampler", ""),
        ("reinforce", "reinforce", {"clip_high": 0.02}, "group_mean", "token_mean", "sampler", ""),
        ("reinforce_pp", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "group_mean_then_batch_whiten", "token_mean", "sampler", ""),
        ("opo", "reinforce", {"clip_high": 0.02}, "length_weighted_baseline", "token_mean", "sampler", ""),
        ("maxrl", "ppo_clip", {"clip_low": 0.2, "clip_high": 0.2}, "max_rl", "token_mean", "sampler", ""),
        (
            "decoupled_ppo", "decoupled_ppo", {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 5.0}, "group_mean_std", "token_mean",
            "recomputed", "",
        ),
        ("dppo", "dppo_tv", {"mask_low": 0.2, "mask_high": 0.2, "ratio_cap": 20.0}, "group_mean", "token_mean", "sampler", ""),
        (
            "prime_rl", "dppo_behaviour", {"mask_low": 0.2, "mask_high": 0.2, "square_weight": 1e-3}, "group_mean", "token_mean",
            "sampler", "",
        ),
        ("topr", "topr", {"ratio_cap": 1.0}, "group_mean", CONSTANT, "sampler", ""),
        ("kimi", "kimi", {"tau": 0.1}, "group_mean", "token_mean", "sampler", ""),
        ("dro", "dro", {"beta": 0.05}, "group_mean", "token_mean", "sampler", ""),
        ("m2po", "reinforce", {"clip_high": 4.0}, "group_mean_std", "token_mean", "sampler", "m2po"),
    ],
)  # fmt: skip
def test_presets(preset, policy, options, advantage, aggregation, old, corrections):
    found = resolve(LossSettings(preset=preset))
    assert (found.policy, found.options, found.advantage, found.aggregation) == (policy, options, advantage, aggregation)
    assert found.old_logprobs == old and found.corrections == ((ALIASES[corrections],) if corrections else ())


def test_every_preset_is_tested():
    mark = next(mark for mark in test_presets.pytestmark if mark.name == "parametrize")
    assert [row[0] for row in mark.args[1]] == list(PRESETS)


def test_keys_override_the_preset():
    found = resolve(LossSettings(preset="dapo", clip_low=0.1, options={"dual_clip": 3.0}, advantage="group_mean", aggregation=PER_ROLLOUT))
    assert found.options == {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}
    assert (found.advantage, found.aggregation) == ("group_mean", PER_ROLLOUT)


def test_another_policy_loss_has_its_own_defaults():
    assert resolve(LossSettings(preset="dapo", policy="gmpo")).options == {"clip_low": 0.4, "clip_high": 0.4}
    assert resolve(LossSettings(preset="dapo", policy="ppo_clip")).options["clip_high"] == 0.28
    assert resolve(LossSettings(preset="m2po", policy="ppo_clip", correction=[])).corrections == ()


def test_the_denominator_follows_what_needs_it():
    assert resolve(LossSettings(correction=["tis"])).old_logprobs == "recomputed"
    assert resolve(LossSettings(correction=["geo", "opsm"])).old_logprobs == "sampler"
    assert resolve(LossSettings(policy="decoupled_ppo")).old_logprobs == "recomputed"
    assert resolve(LossSettings(preset="decoupled_ppo", policy="ppo_clip")).old_logprobs == "sampler"
    assert resolve(LossSettings(policy="a:b", correction=["icepop"])).old_logprobs == "recomputed"
    assert resolve(LossSettings(old_logprobs="recomputed")).old_logprobs == "recomputed"


@pytest.mark.parametrize(
    ("settings", "start", "whole_batch"),
    [
        ({}, False, False),
        ({"correction": ["opsm", {"type": "version_gate", "high": 2}]}, False, False),
        ({"correction": ["geo"]}, True, False),
        ({"correction": ["m2po"]}, True, True),
        ({"preset": "m2po"}, True, True),
        ({"old_logprobs": "recomputed"}, True, False),
        ({"preset": "topr"}, False, False),
        ({"policy": "a:b"}, True, False),
    ],
)
def test_what_is_needed_before_the_first_update(settings, start, whole_batch):
    found = resolve(LossSettings(**settings))
    assert (found.uses_start, found.needs_whole_batch) == (start, whole_batch)


def test_corrections_by_name_and_as_tables():
    table = {"type": "reject", "statistic": "k1", "low": 0.5, "high": 2.0}
    found = resolve(LossSettings(correction=["Seq-TIS", CorrectionSettings(**table)])).corrections
    assert found[0] == CorrectionSettings(type="truncate", level="sequence", high=2.0)
    assert found[1] == CorrectionSettings(**table, level="token")
    for name, alias in ALIASES.items():
        expected = resolve(LossSettings(correction=[alias], policy="ppo_clip"))
        assert resolve(LossSettings(correction=[name], policy="ppo_clip")) == expected, name


def test_from_a_file_and_the_command_line(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('[loss]\ncorrection = ["icepop", {type = "version_gate", high = 3}]\n[[reward]]\nfunction = "exact"\n', encoding="utf-8")
    found = resolve(load_config([run]).config.loss)
    assert [c.type for c in found.corrections] == ["mask", "version_gate"]
    found = resolve(load_config([run], ["--loss.correction", '["tis"]', "--loss.options.dual_clip", "3"]).config.loss)
    assert [c.type for c in found.corrections] == ["truncate"] and found.options["dual_clip"] == 3
    own = load_config([run], ["--loss.policy", "mine.py:loss"], checked=False).config.loss.policy
    assert own == f"{Path.cwd() / 'mine.py'}:loss"


def test_the_expansion_in_words_and_as_json():
    found = resolve(LossSettings(preset="dapo", correction=["tis", {"type": "version_gate", "high": 2}]))  # type: ignore[list-item]
    assert found.lines() == [
        f"loss dapo: ppo_clip(clip_low = 0.2, clip_high = 0.28): {POLICY_LOSSES['ppo_clip'].formula}",
        "  advantage group_mean_std: (R - mean) / (std + 1e-6)",
        "  aggregation token_mean: every token of the batch weighs the same",
        "  π_old recomputed: the logprobs of the weights at the start of the step",
        "  correction truncate(level = token, high = 2): weight min(ρ, high)",
        "  correction version_gate(high = 2): weight 1 for tokens at most high versions old, else 0",
    ]
    assert json.loads(json.dumps(found.to_json()))["corrections"][1] == {"type": "version_gate", "high": 2.0}
    assert resolve(LossSettings(preset="topr")).lines()[3:] == ["  no π_old: c = π / the sampler's logprobs", "  no correction"]
    assert resolve(LossSettings(policy="mine.py:loss", options={"x": 2.0})).lines()[0] == "loss grpo: mine.py:loss(x = 2)"


# ---- refusals --------------------------------------------------------------------------------------------------------------------------


REJECT = {"type": "reject", "statistic": "k3", "high": 0.1}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"policy": "ppo"}, ('"ppo" is no policy loss', 'did you mean "ppo_clip"?', "module:function")),
        ({"policy": "cipso"}, ('did you mean "cispo"?',)),
        ({"options": {"dualclip": 3.0}}, ('no parameter "dualclip"', 'did you mean "dual_clip"?')),
        ({"options": {"clip_low": 0.1}}, ("write loss.clip_low = 0.1",)),
        ({"options": {"dual_clip": 1.0}}, ("dual_clip = 1", "above 1")),
        ({"policy": "topr", "options": {"ratio_cap": 0.0}}, ("ratio_cap = 0", "above 0")),
        ({"policy": "dppo_behaviour", "options": {"square_weight": -0.1}}, ("square_weight = -0.1", "at least 0")),
        ({"preset": "topr", "clip_low": 0.1}, ('"topr" has no clip_low', "ratio_cap")),
        ({"preset": "reinforce", "clip_low": 0.1}, ('"reinforce" has no clip_low', "clip_high")),
        ({"policy": "math:sqrt", "clip_high": 0.1}, ("your own loss", "loss.options")),
        ({"correction": ["tsi"]}, ('"tsi" is no correction', 'did you mean "tis"?')),
        ({"correction": ["truncate"]}, ("no usual bounds", '{type = "truncate", high = ...}')),
        ({"correction": [{"type": "truncate"}]}, ("truncate needs high",)),
        ({"correction": [{"type": "mask", "high": 2.0}]}, ("mask needs low",)),
        ({"correction": [{"type": "truncate", "low": 0.1, "high": 2.0}]}, ("low = 0.1", "takes high only")),
        ({"correction": [{"type": "truncate", "high": 2.0, "level": "sequence_max"}]}, ('level = "sequence_max"', "takes token, sequence")),
        ({"correction": [{"type": "m2po", "high": 0.1, "level": "token"}]}, ("m2po", "takes no level")),
        ({"correction": [{"type": "m2po", "high": 0.1, "statistic": "k1"}]}, ("only reject takes one",)),
        ({"correction": [{"type": "reject", "high": 0.1}]}, ("needs a statistic", "k1, k2, k3")),
        ({"correction": [{**REJECT, "low": 0.1}]}, ("low = 0.1", "takes high only")),
        ({"correction": [{**REJECT, "statistic": "k1"}]}, ("reject needs low",)),
        ({"correction": [{**REJECT, "statistic": "k1", "low": 0.0}]}, ("low = 0", "use low > 0")),
        ({"correction": [{"type": "mask", "low": 3.0, "high": 2.0}]}, ("low = 3 above high = 2", "reject everything")),
        ({"correction": [{"type": "opsm", "high": -1.0}]}, ("high = -1", "at least 0")),
        ({"correction": ["tis", "icepop"]}, ("truncate and mask each weigh by ρ", "use one of them")),
        ({"correction": ["tis"], "old_logprobs": "sampler"}, ('truncate with old_logprobs = "sampler"', "count it twice", '"recomputed"')),
        ({"old_logprobs": "sampler", "preset": "opo"}, ('policy loss "reinforce" (preset "opo")', "no π_old")),
        ({"correction": ["mis"], "preset": "topr"}, ('mask with policy loss "topr"', "weighs by the sampler already", "only rejects")),
        ({"correction": ["tis"], "preset": "reinforce"}, ('truncate with policy loss "reinforce"', "weighed twice")),
        ({"correction": ["tis"], "preset": "prime_rl"}, ('"dppo_behaviour"', "weighed twice")),
        ({"correction": ["tis"], "preset": "decoupled_ppo"}, ('"decoupled_ppo"', "weighed twice")),
        ({"preset": "decoupled_ppo", "old_logprobs": "sampler"}, ('old_logprobs = "sampler"', "twice", "leave it out")),
        ({"preset": "reinforce", "old_logprobs": "recomputed"}, ("no π_old", "leave it out")),
        ({"reference": "other"}, ('reference = "other" with kl_coefficient = 0', "set kl_coefficient > 0")),
        ({"kl_in": "reward"}, ('kl_in = "reward" with kl_coefficient = 0',)),
        ({"kl_estimator": "k1"}, ('kl_estimator = "k1" with kl_coefficient = 0',)),
        ({"teacher_coefficient": 0.5}, ("teacher_coefficient = 0.5 without a teacher",)),
        ({"teacher_kl": "full"}, ('teacher_kl = "full" without a teacher',)),
        ({"overlong_tokens": 128}, ("overlong_tokens = 128 with max_new_tokens = 128", "use overlong_tokens < 128")),
        ({"advantage": "max_rl", "overlong_tokens": 12}, ('"max_rl" with overlong_tokens', "near 0")),
        ({"preset": "maxrl", "kl_in": "reward", "kl_coefficient": 0.1}, ('"max_rl" with kl_in = "reward"',)),
        ({"policy": "absent.py:loss"}, ("there is no file", "absent.py")),
        ({"policy": "mine.py:"}, ("names no function",)),
    ],
)
def test_refused_with_the_reason(loss: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    config = Config.model_validate({"reward": [{"function": "exact"}], "loss": loss})
    conflicts = check(config, reward_given=False, base_folder=tmp_path)
    assert len(conflicts) == 1, conflicts
    for word in words:
        assert word in conflicts[0].text
    assert all(key.startswith(("loss.", "rollout.max_new_tokens")) for key in conflicts[0].keys)


@pytest.mark.parametrize("advantage", [name for name, row in ADVANTAGES.items() if row.needs_siblings])
def test_a_group_of_one_has_no_baseline(advantage, tmp_path):
    def conflicts(loss: dict[str, Any], steps: int = 4, **more: Any) -> list[str]:
        tables = {"reward": [{"function": "exact"}], "rollout": {"group_size": 1}, "loss": loss, "trainer": {"groups_per_step": steps}}
        return [c.text for c in check(Config.model_validate(tables | more), reward_given=False, base_folder=tmp_path)]

    [text] = conflicts({"advantage": advantage})
    assert f'group_size = 1 with advantage "{advantage}"' in text and "use group_size >= 2" in text
    assert conflicts({"preset": "reinforce_pp"}) == []
    [text] = conflicts({"preset": "reinforce_pp"}, steps=1)
    assert "a batch of one rollout" in text
    assert conflicts({"advantage": advantage, "teacher": "other"}, reward=[]) == []


def test_a_punishment_is_refused_for_max_rl_also_beside_a_teacher_alone(tmp_path):
    config = Config.model_validate({"loss": {"preset": "maxrl", "teacher": "other", "overlong_tokens": 12}})
    [conflict] = check(config, reward_given=False, base_folder=tmp_path)
    assert '"max_rl" with overlong_tokens = 12' in conflict.text


@pytest.mark.parametrize("loss", [{"correction": ["icepop"]}, {"preset": "m2po"}])
def test_corrections_of_a_policy_loss_that_learns_nothing_are_refused(loss, tmp_path):
    def conflicts(loss: dict[str, Any], reward_given: bool = False) -> list[str]:
        return [c.text for c in check(Config.model_validate({"loss": loss}), reward_given=reward_given, base_folder=tmp_path)]

    full = {"teacher": "other", "teacher_kl": "full"}
    [text] = conflicts(loss | full)
    assert "correction" in text and "would do nothing" in text and 'teacher_kl = "sampled"' in text
    assert conflicts(loss | full | {"correction": []}) == conflicts(loss | full, reward_given=True) == []
    assert conflicts(loss | {"teacher": "other"}) == conflicts(loss | full | {"overlong_tokens": 8}) == []


@pytest.mark.parametrize("loss", [{"preset": preset} for preset in PRESETS] + [{"correction": [name]} for name in ALIASES])
def test_allowed(loss, tmp_path):
    config = Config.model_validate({"reward": [{"function": "exact"}], "loss": loss})
    assert check(config, reward_given=False, base_folder=tmp_path) == []


def test_every_combination_works_or_says_why():
    """All policy losses x corrections x denominators: resolved, or refused where the sampler would count twice."""
    refused = 0
    for policy, row in POLICY_LOSSES.items():
        for correction in ([], *([name] for name in ALIASES)):
            weighs = any(CORRECTIONS[ALIASES[name].type].weighs for name in correction)
            for old in (None, "sampler", "recomputed"):
                settings = LossSettings(policy=policy, correction=correction, old_logprobs=old)  # type: ignore[arg-type]
                wrong = (
                    (weighs and (row.weighs_by_sampler or old == "sampler"))
                    or (row.denominator == "none" and old is not None)
                    or (row.denominator == "recomputed" and old == "sampler")
                )
                if wrong:
                    refused += 1
                    with pytest.raises(ConfigError):
                        resolve(settings)
                else:
                    assert isinstance(resolve(settings), ResolvedLoss)
    assert refused > 50


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    for override, word in (
        ("--loss.preset=dapoo", 'did you mean "dapo"?'),
        ("--loss.advantage=group_means", 'did you mean "group_mean"?'),
        ("--loss.aggregation=token_means", 'did you mean "token_mean"?'),
        ("--loss.correction=[{type = 'trunkate', high = 2}]", 'type = "truncate" | "mask"'),
        ("--loss.correction=[{type = 'truncate', hi = 2}]", "low = a number, high = a number"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config([], ["--reward", "[{function = 'exact'}]", override])
        assert len(caught.value.problems) == 1 and word in caught.value.problems[0]


def test_resolving_says_all_that_is_wrong():
    with pytest.raises(ConfigError) as caught:
        resolve(LossSettings(policy="ppo", correction=["tsi"], options={"x": 1.0}))
    assert len(caught.value.problems) == 2  # the options of a policy loss that is not known cannot be judged


def test_the_kl_estimator_follows_its_place():
    assert LossSettings(kl_in="loss").reference_estimator == "k3" and LossSettings(kl_in="reward").reference_estimator == "k1"
    assert LossSettings(kl_in="loss", kl_estimator="k1").reference_estimator == "k1"
    assert LossSettings(kl_in="reward", kl_estimator="k3").reference_estimator == "k3"


def notes(max_staleness: int = 1, **loss: Any) -> str:
    config = Config.model_validate({"loss": loss, "data": {"eval": 4}, "buffer": {"max_staleness": max_staleness}})
    return "\n".join(advice(config))


def test_estimators_in_the_wrong_place_are_advised_against():
    assert "0 on average" in notes(kl_coefficient=0.1, kl_estimator="k1")
    assert notes(kl_coefficient=0.1, kl_estimator="k1", kl_in="reward") == notes(kl_coefficient=0.1) == ""
    assert '"k3" in the reward' in notes(kl_coefficient=0.1, kl_estimator="k3", kl_in="reward")
    assert notes(kl_coefficient=0.1, kl_in="reward") == ""


def test_a_denominator_that_hides_staleness_is_advised_against():
    assert "as if the weights at the start of the step had sampled them" in notes(old_logprobs="recomputed")
    assert notes(old_logprobs="recomputed", max_staleness=0) == notes(old_logprobs="recomputed", correction=["geo"]) == ""
    assert notes(correction=["tis"]) == notes(preset="decoupled_ppo", old_logprobs="recomputed") == ""
