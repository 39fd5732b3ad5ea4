"""The resolved settings: written, hashed, compared at resume; the settings page and the option set."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import Config, check_resume, compare_for_resume, load_config, save_config, settings_hash, to_toml
from slipstream.config import resume as resume_table
from slipstream.config.document import document, key_list
from slipstream.config.keys import all_keys
from slipstream.errors import ConfigError, ResumeError

ROOT = Path(__file__).parents[2]


def make(**tables: Any) -> Config:
    return Config.model_validate({"reward": [{"function": "exact"}], **tables})


def test_written_settings_load_back_equal(tmp_path: Path) -> None:
    config = make(
        launch="inline",
        data={"eval": 40, "columns": {"prompt": "q"}, "options": {"a": [1, 2], "b": {"c": "ü\n"}}, "prompt_template": 'x "{q}"\n'},
        trainer={"betas": (0.8, 0.9), "learning_rate": 1.2345e-7},
        reward=[{"function": "exact", "name": "a"}, {"function": "regex", "options": {"pattern": r"\d+"}}],
        weight_sync={"lag": 1},
    )
    save_config(config, tmp_path / "config.toml")
    assert load_config([tmp_path]).config == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.toml"]
    data = tomllib.loads(to_toml(Config()))
    assert "limit" not in data["data"]  # None is left out, and is the default


@settings(max_examples=50, deadline=None)
@given(
    st.text(max_size=20),
    st.floats(min_value=1e-300, max_value=1e300),
    st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5), max_size=3),
)
def test_any_text_and_number_survives(text: str, number: float, options: dict[str, Any]) -> None:
    config = make(data={"system_prompt": text, "options": options}, trainer={"learning_rate": number})
    assert Config.model_validate(tomllib.loads(to_toml(config))) == config


def test_what_toml_cannot_hold_is_said() -> None:
    with pytest.raises(ConfigError, match="TOML"):
        to_toml(make(data={"options": {"values": [1, None]}}))


def test_the_hash_depends_on_values_alone() -> None:
    assert settings_hash(make()) == settings_hash(make(trainer={"steps": 100}))
    assert settings_hash(make()) != settings_hash(make(trainer={"steps": 101}))


# ---- resume ------------------------------------------------------------------------------------------------------------------


def test_every_key_is_in_exactly_one_list_of_the_resume_table() -> None:
    listed = [*resume_table.FREE, *resume_table.FREE_UNLESS_DETERMINISTIC, *resume_table.FIXED]
    assert sorted(listed) == sorted(key.path for key in all_keys())


def test_steps_learning_rate_evaluation_checkpoint_and_metrics_may_change() -> None:
    new = make(
        trainer={"steps": 500, "learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 3, "threads": 2},
        evaluation={"every": 1, "samples": 3},
        checkpoint={"every": 1, "keep": 9},
        metrics={"samples_per_step": 0},
        run={"stop_grace_s": 1, "name": "other"},
        reward=[{"function": "exact", "timeout_s": 1}],
    )
    assert compare_for_resume(make(), new) == []
    check_resume(make(), new, "runs/x")


@pytest.mark.parametrize(
    ("tables", "key", "old", "new"),
    [
        ({"model": {"name": "other"}}, "model.name", "'builtin:tiny'", "'other'"),
        ({"data": {"train": "b.jsonl"}}, "data.train", "'builtin:sort_digits'", "'b.jsonl'"),
        ({"data": {"options": {"size": 3}}}, "data.options", "{}", "{'size': 3}"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size", "8", "4"),
        ({"trainer": {"groups_per_step": 2}}, "trainer.groups_per_step", "4", "2"),
        ({"buffer": {"max_staleness": 3}}, "buffer.max_staleness", "1", "3"),
        ({"loss": {"preset": "dapo"}}, "loss.preset", "'grpo'", "'dapo'"),
        ({"run": {"seed": 1}}, "run.seed", "0", "1"),
        ({"reward": [{"function": "number"}]}, "reward.0.function", "'exact'", "'number'"),
    ],
)
def test_what_makes_it_another_run_is_refused_with_both_values(tables: dict[str, Any], key: str, old: str, new: str) -> None:
    (refusal,) = compare_for_resume(make(), make(**tables))
    assert refusal == f"{key} was {old} and is now {new}"


def test_an_added_reward_is_refused_and_all_refusals_come_together() -> None:
    new = make(reward=[{"function": "exact"}, {"function": "number"}], model={"name": "other"})
    with pytest.raises(ResumeError) as caught:
        check_resume(make(), new, "runs/x")
    text = str(caught.value)
    assert "runs/x" in text and "model.name was" in text and "reward.1.function was absent and is now 'number'" in text


def test_a_deterministic_run_keeps_what_changes_its_rounding() -> None:
    tables: dict[str, Any] = {"launch": "inline", "run": {"deterministic": True}}
    (refusal,) = compare_for_resume(make(**tables), make(**tables, engine={"threads": 2}))
    assert "engine.threads was 1 and is now 2" in refusal and "deterministic" in refusal
    assert compare_for_resume(make(), make(engine={"threads": 2})) == []


# ---- documentation -----------------------------------------------------------------------------------------------------------


def test_the_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == document(), "run: python -m slipstream.config.document > docs/settings.md"


def test_the_option_set_is_frozen() -> None:
    committed = (Path(__file__).parent / "option_set.txt").read_text(encoding="utf-8")
    command = "python -m slipstream.config.document --keys > tests/unit/option_set.txt"
    assert committed == key_list(), f"an option was added, removed or has another default; if that is meant: {command}"


def test_every_key_is_described() -> None:
    for key in all_keys():
        assert key.field.description and key.field.description.endswith("."), key.path
