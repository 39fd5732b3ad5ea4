"""Settings that exclude each other, each refused with its reason; and what the settings amount to in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.config import Config, check_config
from slipstream.config.arithmetic import arithmetic
from slipstream.config.checks import BUILTIN_REWARDS, advice, check
from slipstream.errors import ConfigError

VLLM_ADAPTER: dict[str, Any] = {"engine": {"type": "vllm"}, "lora": {"rank": 4}, "weight_sync": {"payload": "adapter"}}
INLINE: dict[str, Any] = {"launch": "inline"}
ONLY_TEACHER: dict[str, Any] = {"reward": [], "loss": {"teacher": "big"}}
READY_FIRST: dict[str, Any] = {"window": "unbounded", "max_groups": 12}


def make(**tables: Any) -> Config:
    return Config.model_validate({"reward": [{"function": "exact"}], **tables})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"rollout": {"group_size": 1}}, ("group_size = 1", "single rollout", ">= 2")),
        ({"buffer": {"window": 2, "max_staleness": 0}}, ("window = 2", "max_staleness = 0")),
        ({"buffer": {"window": 9, "max_staleness": 1}, "trainer": {"groups_per_step": 4}}, ("window = 9", "8 groups", "2 x 4")),
        ({"buffer": {"max_groups": 20}}, ("max_groups = 20", "(max_staleness + 1) x groups_per_step = 8")),
        ({"buffer": READY_FIRST | {"max_staleness": 0}}, ('"unbounded"', "max_staleness = 0", "max_staleness >= 1")),
        ({"buffer": {"window": "unbounded"}}, ("without max_groups", "e.g. 16")),
        ({"buffer": READY_FIRST | {"max_groups": 3}}, ("max_groups = 3", "groups_per_step = 4", "max_groups >= 4")),
        (
            {"buffer": READY_FIRST | {"max_groups": 7}, "weight_sync": {"every": 2}},
            ("max_groups = 7", "those of 2 batches hold their slots", "max_groups >= 8"),
        ),
        ({"buffer": READY_FIRST | {"on_stale": "keep"}}, ('"keep"', "nothing bounds the age")),
        ({"buffer": {"on_stale": "keep", "stale_level": "group"}}, ('"keep"', "judges nothing")),
        ({"buffer": {"on_stale": "drop", "stale_level": "token"}}, ('"drop"', '"mask_tokens"')),
        ({"buffer": {"on_stale": "cancel_early", "stale_level": "rollout"}}, ('"cancel_early"', "whole group")),
        ({"buffer": {"stale_decay": 0.9}}, ("stale_decay = 0.9", '"mask_tokens"', '"down_weight"')),
        (
            {"buffer": {"filter_zero_variance": True}, "rollout": {"group_size": 1}, "loss": {"preset": "reinforce_pp"}},
            ("filter_zero_variance", "group_size = 1", "every group would be filtered", "group_size >= 2"),
        ),
        ({"rollout": {"kv": "recompute", "interrupt": "drain"}}, ('"recompute"', '"drain"', "end on the weights")),
        ({"rollout": {"kv": "recompute", "interrupt": "barrier"}}, ('"recompute"', '"barrier"', "no sequence runs")),
        ({"rollout": {"kv": "recompute", "interrupt": "abort_retry"}}, ('"recompute"', '"abort_retry"', "starts anew")),
        ({"rollout": {"interrupt_after": 0}}, ("interrupt_after = 0", '"in_flight"', "aborts nothing")),
        ({"rollout": {"interrupt_after": 2, "interrupt": "abort_resume"}}, ("interrupt_after = 2", "never more than 2 versions")),
        ({"rollout": {"max_interrupts": 3}}, ("max_interrupts = 3", '"in_flight"')),
        ({"weight_sync": {"every": 2}, "buffer": {"max_staleness": 0}}, ("every = 2", "after 1 batch all", "2 batches make")),
        ({"weight_sync": {"every": 3}}, ("every = 3", "after 2 batches all", "8 slots", "every <= 2 or max_staleness >= 2")),
        (
            {"threshold": [{"metric": "kl_k3", "above": 2, "action": "lower_max_staleness"}], "weight_sync": {"every": 2}},
            ("max_staleness = 1", "every 2 steps"),
        ),
        ({"trainer": {"minibatches": 5, "groups_per_step": 4}}, ("minibatches = 5 of 4 groups",)),
        ({"engine": {"urls": ["http://a"]}}, ("urls", '"embedded"', '"vllm"')),
        (INLINE | {"engine": {"type": "vllm"}}, ('"inline"', "logical clock", '"local"')),
        (INLINE | {"engine": {"type": "vllm"}, "run": {"deterministic": True}}, ("deterministic = true", "per-request seed")),
        ({"engine": {"type": "vllm", "device": "cpu"}}, ('device = "cpu"', "leave it out")),
        ({"engine": {"type": "vllm", "urls": ["http://a"], "python": "p"}}, ("python with urls", "run already")),
        ({"engine": {"type": "vllm", "urls": ["http://a", "unix:/b"]}}, ("2 servers", "replicas = 1", "use replicas = 2")),
        ({"engine": {"type": "vllm", "urls": ["a:80"]}}, ('"a:80"', "unix:/path")),
        ({"engine": {"type": "vllm", "urls": ["http://a", "http://a/"], "replicas": 2}}, ('"http://a"', "2 times", "one engine")),
        ({"engine": {"type": "vllm"}, "rollout": {"temperature": 8.0}}, ("rollout.temperature = 8", "takes 0.01 to 2")),
        ({"engine": {"type": "vllm"}, "evaluation": {"temperature": 0.001}}, ("evaluation.temperature = 0.001", "takes 0.01 to 2")),
        ({"engine": {"type": "vllm"}, "rollout": {"top_p": 0.9}}, ("top_p = 0.9", "no top_k", "set top_k besides")),
        ({"engine": {"type": "vllm"}, "rollout": {"min_p": 0.1}}, ("min_p = 0.1", "no top_k")),
        (VLLM_ADAPTER, ('kv = "keep"', 'payload = "adapter"', 'rollout.kv = "recompute"', '"drain"')),
        (
            VLLM_ADAPTER | {"lora": {"rank": 4, "modules_to_save": ["norm"]}, "rollout": {"interrupt": "drain"}},
            ("modules_to_save", "no whole modules", 'payload = "full"'),
        ),
        (VLLM_ADAPTER | {"lora": {"rank": 600}, "rollout": {"interrupt": "drain"}}, ("rank = 600", "up to 512", 'payload = "full"')),
        (
            {"engine": {"type": "vllm"}, "rollout": {"interrupt": "abort_resume"}},
            ('"abort_resume"', 'kv = "keep"', 'kv = "recompute"'),
        ),
        (INLINE | {"weight_sync": {"lag": 1, "every": 2}}, ("lag = 1", "every = 2")),
        (INLINE | {"weight_sync": {"lag": 1}, "buffer": READY_FIRST}, ("lag = 1", '"unbounded"')),
        (INLINE | {"weight_sync": {"lag": 1}, "rollout": {"interrupt": "drain"}}, ("lag = 1", '"drain"', "only when nothing runs")),
        (INLINE | {"weight_sync": {"lag": 1}, "rollout": {"kv": "recompute"}}, ("lag = 1", 'kv = "recompute"')),
        ({"weight_sync": {"directory": "w"}}, ('directory = "w"', '"shared_memory", which writes no files', 'transport = "files"')),
        ({"weight_sync": {"bucket_mib": 8}}, ("bucket_mib = 8", '"shared_memory", which sends no messages', 'transport = "collective"')),
        ({"run": {"deterministic": True}}, ("deterministic", 'launch = "inline"')),
        ({"weight_sync": {"lag": 1}}, ("lag = 1", 'launch = "inline"')),
        (INLINE | {"engine": {"replicas": 2}}, ("replicas = 2", 'launch = "inline"', 'launch = "local"')),
        (INLINE | {"weight_sync": {"lag": 2}}, ("lag = 2", "max_staleness = 1", "use max_staleness = 2")),
        (INLINE | {"weight_sync": {"lag": 0}}, ("lag = 0", "max_staleness = 1", "use max_staleness = 0")),
        (INLINE | {"weight_sync": {"lag": 1}, "run": {"deterministic": True}}, ("lag = 1", "deterministic")),
        (
            INLINE | {"weight_sync": {"lag": 1}, "loss": {"correction": [{"type": "version_gate", "high": 0}]}},
            ("lag = 1", "version_gate high = 0", "none is trained", "at least 1"),
        ),
        (INLINE | {"weight_sync": {"lag": 1}, "buffer": {"filter_zero_variance": True}}, ("lag = 1", "filter_zero_variance")),
        ({"rollout": {"environment": "tools", "max_turns": 2}}, ("without tools",)),
        ({"rollout": {"environment": "tools", "tools": ["math:sqrt"]}}, ("max_turns = 1", ">= 2")),
        ({"rollout": {"environment": "tools", "tools": ["sqrt"], "max_turns": 2}}, ('"sqrt" names no tool',)),
        ({"rollout": {"tools": ["math:sqrt"]}}, ("single_turn",)),
        ({"rollout": {"max_turns": 3}}, ("max_turns = 3", "single_turn")),
        ({"rollout": {"max_new_tokens": 64}, "engine": {"max_context": 64}}, ("max_new_tokens = 64", "64 - 64 = 0")),
        ({"rollout": {"max_new_tokens": 5000}}, ("default max_context = 4096",)),
        ({"rollout": {"oversample": 7}}, ("oversample = 7", "group_size = 8", "oversample >= 8")),
        ({"rollout": {"selection": "roc"}}, ('"roc"', "8 rollouts sampled and 8 kept", "oversample = 16")),
        ({"rollout": {"selection": "roc", "oversample": 8}}, ('"roc"', "8 rollouts sampled and 8 kept")),
        (
            {"rollout": {"selection": "roc", "oversample": 4, "group_size": 1}, "loss": {"preset": "reinforce_pp"}},
            ('"roc"', "group_size = 1", "group_size >= 2"),
        ),
        ({"threshold": [{"metric": "kl_k3"}]}, ('"kl_k3"', "neither above nor below")),
        ({"threshold": [{"metric": "kl_k3", "above": 2, "below": 1}]}, ('"kl_k3"', "both above = 2 and below = 1")),
        (
            {"threshold": [{"metric": "kl_k3", "above": 2, "action": "lower_max_staleness"}], "buffer": {"max_staleness": 0}},
            ('"kl_k3"', "which is 0 already"),
        ),
        (
            INLINE | {"threshold": [{"metric": "kl_k3", "above": 2, "action": "lower_max_staleness"}], "weight_sync": {"lag": 1}},
            ('"kl_k3"', "lag = 1"),
        ),
        (
            INLINE | {"threshold": [{"metric": "trained_tokens_per_s", "below": 10}], "run": {"deterministic": True}},
            ('"trained_tokens_per_s"', "deterministic", "measures no time"),
        ),
        ({"reward": []}, ("no reward", "loss.teacher", "exact", "number", "regex", "rewards.py:function")),
        (ONLY_TEACHER | {"buffer": {"filter_zero_variance": True}}, ("filter_zero_variance", "reward 0", "every group would be filtered")),
        (ONLY_TEACHER | {"rollout": {"selection": "roc", "oversample": 16}}, ('"roc"', "reward 0", "no positives")),
        (ONLY_TEACHER | {"data": {"eval": 4}}, ("data.eval", "no reward", "weight = 0 it is measured")),
        (
            ONLY_TEACHER | {"reward": [{"function": "exact", "weight": 0}], "buffer": {"filter_zero_variance": True}},
            ("filter_zero_variance", "a [[reward]] with a weight"),
        ),
        ({"reward": [{"function": "regex", "options": {"pattern": "(a"}}]}, ("'(a'", "not a regular expression", "unterminated")),
        ({"reward": [{"function": "regex", "options": {"pattern": 7}}]}, ("pattern = 7", "is a text")),
        ({"reward": [{"function": "exakt"}]}, ('did you mean "exact"?',)),
        ({"reward": [{"function": "absent.py:score"}]}, ("there is no file", "absent.py")),
        ({"reward": [{"function": "regex"}]}, ("pattern",)),
        ({"reward": [{"function": "exact", "weight": 0}]}, ("weight of every reward is 0",)),
        ({"reward": [{"function": "exact", "name": "a"}, {"function": "number", "name": "a"}]}, ('2 rewards are named "a"',)),
        ({"model": {"chat_template": "absent.jinja"}}, ("absent.jinja", "Jinja")),
    ],
)
def test_refused_with_the_reason(tables: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    conflicts = check(make(**tables), reward_given=False, base_folder=tmp_path)
    assert len(conflicts) == 1, conflicts
    for word in words:
        assert word in conflicts[0].text


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"buffer": {"window": 8, "max_staleness": 1}},
        {"buffer": READY_FIRST},
        {"buffer": READY_FIRST | {"on_stale": "cancel_early"}, "weight_sync": {"every": 2}},
        {"buffer": {"on_stale": "drop", "stale_level": "rollout"}},
        {"buffer": {"on_stale": "down_weight", "stale_level": "group", "stale_decay": 0.9}},
        {"rollout": {"interrupt": "abort_resume", "kv": "recompute", "interrupt_after": 1}},
        {"rollout": {"interrupt": "abort_retry", "max_interrupts": 2}},
        {"rollout": {"interrupt": "barrier"}, "weight_sync": {"every": 2}},
        {"trainer": {"minibatches": 4, "updates_per_batch": 3}},
        {"buffer": {"window": 1, "max_staleness": 0}},
        ONLY_TEACHER,
        ONLY_TEACHER | {"rollout": {"group_size": 1}},
        ONLY_TEACHER | {"reward": [{"function": "exact", "weight": 0}], "data": {"eval": 4}},
        {"loss": {"teacher": "big"}, "buffer": {"filter_zero_variance": True}},
        INLINE | {"weight_sync": {"lag": 1}},
        INLINE | {"run": {"deterministic": True}},
        INLINE | {"weight_sync": {"lag": 0}, "buffer": {"max_staleness": 0}},
        {"engine": {"slots": 1}},
        {"rollout": {"oversample": 8}},
        {"rollout": {"oversample": 16, "selection": "roc"}},
        {"threshold": [{"metric": "kl_k3", "above": 2}, {"metric": "kl_k3", "below": -2, "action": "lower_max_staleness"}]},
        {"rollout": {"environment": "tools", "tools": ["math:sqrt"], "max_turns": 2}},
        {"rollout": {"max_new_tokens": 63}, "engine": {"max_context": 64}},
        {"reward": [{"function": "exact", "weight": 0}, {"function": "number"}]},
        {"model": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}},
    ],
)
def test_allowed(tables: dict[str, Any], tmp_path: Path) -> None:
    assert check(make(**tables), reward_given=False, base_folder=tmp_path) == []


def test_all_conflicts_are_raised_together_and_a_callable_needs_no_reward_table() -> None:
    config = make(reward=[], rollout={"group_size": 1, "interrupt_after": 0})
    with pytest.raises(ConfigError) as caught:
        check_config(config, reward_given=True)
    assert len(caught.value.problems) == 2
    check_config(make(reward=[]), reward_given=True)


def test_the_builtin_rewards_are_those_of_scoring() -> None:
    from slipstream.scoring.builtin import BUILTIN_REWARDS as functions
    from slipstream.scoring.scorers import JUDGE

    assert set(BUILTIN_REWARDS) == {*functions, JUDGE}


def test_arithmetic_of_the_settings() -> None:
    config = make(
        rollout={"group_size": 8, "max_new_tokens": 10},
        trainer={"groups_per_step": 4, "steps": 100},
        engine={"slots": 16, "max_context": 64},
        data={"eval": 40},
        evaluation={"every": 30},
        checkpoint={"every": 50},
    )
    numbers = arithmetic(config, num_rows=200)
    assert numbers.samples_per_step == 32 and numbers.samples == 3200
    assert numbers.max_groups_in_flight == 8 and numbers.max_rollouts_in_flight == 64
    assert (numbers.window, numbers.worst_staleness) == (2, 2)
    assert numbers.max_new_tokens_per_step == 320 and numbers.kv_pool_tokens == 1024
    assert numbers.evaluations == 5  # 0, 30, 60, 90, 100
    assert numbers.checkpoints == 2
    assert numbers.epochs == 2.0
    first = numbers.lines()[0]
    assert "4 groups x 8 rollouts = 32 samples per optimizer step, at most 8 groups in flight, worst staleness 2" in first
    assert first.endswith(", tokens older than 1 are masked")


def test_oversampling_costs_rollouts_and_tokens_and_trains_no_more_samples() -> None:
    settings = {"rollout": {"group_size": 4, "oversample": 6, "max_new_tokens": 10}, "trainer": {"groups_per_step": 2}}
    numbers = arithmetic(make(**settings, engine={"max_context": 64}))
    assert (numbers.samples_per_step, numbers.max_rollouts_in_flight, numbers.max_new_tokens_per_step) == (8, 24, 120)
    assert "of each 6 rollouts sampled 4 are kept" in numbers.lines()


def test_the_worst_case_is_said_in_versions_and_in_updates() -> None:
    numbers = arithmetic(make(buffer={"window": 1}, trainer={"updates_per_batch": 2, "minibatches": 2}))
    assert (numbers.worst_staleness, numbers.worst_updates) == (1, 7)  # 4 updates of the batch between, 3 of its own before the last
    assert numbers.lines()[0].endswith("worst staleness 1 (7 optimizer updates)")


def test_without_a_window_there_is_no_worst_case() -> None:
    numbers = arithmetic(make(buffer=READY_FIRST | {"on_stale": "drop"}))
    assert (numbers.window, numbers.worst_staleness, numbers.staleness_limit, numbers.max_groups_in_flight) == (None, None, 1, 12)
    first, _, slots, *_ = numbers.lines()
    assert "at most 12 groups in flight, no worst case of staleness (unbounded window)" in first
    assert first.endswith("groups with trained tokens older than 1 are dropped") and slots.endswith("window unbounded")
    weighed = arithmetic(make(buffer=READY_FIRST | {"on_stale": "down_weight"}))
    assert weighed.staleness_limit is None and weighed.lines()[0].endswith("older data is weighed less")


def test_what_is_published_seldom_is_said() -> None:
    lines = arithmetic(make(buffer={"max_staleness": 2}, weight_sync={"every": 3})).lines()
    assert "weights are published every 3 steps: a group may start 2 versions behind the trainer" in lines
    assert not any("published" in line for line in arithmetic(make()).lines())


def test_a_synchronous_run_has_no_staleness() -> None:
    numbers = arithmetic(make(buffer={"max_staleness": 0}))
    assert (numbers.window, numbers.worst_staleness, numbers.max_groups_in_flight) == (1, 0, 4)


def test_advice_names_what_is_probably_not_meant() -> None:
    assert advice(make(data={"eval": 4})) == []
    config = make(evaluation={"samples": 4}, trainer={"steps": 5, "warmup_steps": 5}, engine={"slots": 2})
    text = "\n".join(advice(config))
    for word in ("data.eval", "evaluation.samples = 4", "warmup_steps = 5", "engine.slots = 2"):
        assert word in text


def test_advice_names_gates_that_have_nothing_to_do_and_the_bias_of_starting_anew() -> None:
    def said(**tables) -> str:
        return "\n".join(advice(make(data={"eval": 4}, **tables)))

    assert 'on_stale = "drop" has nothing to do' in said(buffer={"window": 1, "on_stale": "drop"})
    assert said(buffer={"window": 2, "on_stale": "drop"}) == ""
    lower = [{"metric": "kl_k3", "above": 1.0, "action": "lower_max_staleness"}]
    assert said(buffer={"window": 1, "on_stale": "drop"}, threshold=lower) == "", "a lowered limit leaves stale data"
    assert 'interrupt = "drain" has nothing to do' in said(buffer={"max_staleness": 0}, rollout={"interrupt": "drain"})
    assert "what is trained is shorter" in said(rollout={"interrupt": "abort_retry"})
