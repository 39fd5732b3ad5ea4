"""Reward functions: conventions by parameter name, what they may return, built-ins, loading."""

import asyncio
import sys
from decimal import Decimal

import numpy as np
import pytest
from rollout_fakes import finished_group

from slipstream.config.settings import RewardSettings
from slipstream.errors import ConfigError, ScoringError
from slipstream.scoring.builtin import exact, last_number, number, regex
from slipstream.scoring.functions import Convention, RewardFunction, convention_of
from slipstream.scoring.loading import load_function
from slipstream.scoring.process import ProcessScorer
from slipstream.scoring.scorers import CallableScorer, InlineScorer, make_scorers
from slipstream.types import Group

TEXTS = ["ok", "no", "ok"]


def scores(function, texts=TEXTS, row=None, options=None, weight=1.0):
    reward = RewardFunction(function, "r", weight, options)
    return asyncio.run(reward.call(finished_group(texts, row)))


def values(function, **more):
    return [s.value for s in scores(function, **more)]


# ---- conventions


def test_a_function_of_a_completion_is_called_per_rollout_with_what_it_names():
    assert values(lambda completion, answer: completion == answer) == [1.0, 0.0, 1.0]
    assert values(lambda completion, **columns: len(columns)) == [2.0] * 3  # prompt, answer
    assert values(lambda prompt, completion: prompt == "say it") == [1.0] * 3
    assert values(lambda completion, row: row["answer"] == "ok") == [1.0] * 3
    assert values(lambda completion, completion_ids: sum(completion_ids)) == [5.0, 5.0, 5.0]  # ids 2, 3 behind the prompt's 0, 1


def test_a_trl_function_of_ids_alone_is_called_per_group():
    assert values(lambda completion_ids, **columns: [len(ids) for ids in completion_ids]) == [2.0] * 3


def test_a_trl_function_gets_keywords_as_trl_gives_them():
    seen = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, state=trainer_state, more=kwargs)
        log_extra("length", [len(c) for c in completions])
        log_extra("text", completions)
        log_metric("best", 1)
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    result = scores(reward, row={"prompt": "say it", "answer": "ok", "level": 3})
    assert [s.value for s in result] == [1.0, 0.0, 1.0]
    assert seen == {
        "prompts": ["say it"] * 3,
        "completions": TEXTS,
        "ids": [[2, 3]] * 3,
        "answer": ["ok"] * 3,
        "state": None,
        "more": {"level": [3, 3, 3]},
    }
    assert result[1].parts == {"length": 2.0, "best": 1.0}


def test_conversational_prompts_get_conversational_completions():
    prompt = [{"role": "user", "content": "say it"}]

    def reward(completions, prompts, **kwargs):
        assert prompts == [prompt] * 3
        return [float(c[0]["content"] == "ok" and c[0]["role"] == "assistant") for c in completions]

    assert values(reward, row={"prompt": prompt, "answer": "ok"}) == [1.0, 0.0, 1.0]


def test_without_a_prompt_column_the_messages_as_shown_are_the_prompt():
    group = finished_group(TEXTS, {"question": "?"})
    shown = [{"role": "user", "content": "?"}]
    group = Group(group_id=3, draw=group.draw, row=group.row, prompt=shown, rollouts=group.rollouts)
    reward = RewardFunction(lambda completions, prompts: [float(p == shown) for p in prompts], "r")
    assert [s.value for s in asyncio.run(reward.call(group))] == [1.0] * 3


def test_trl_functions_that_log_nothing_get_no_loggers():
    assert values(lambda completions, **kwargs: [len(kwargs)] * 3) == [4.0] * 3  # prompts, completion_ids, answer, trainer_state


def test_a_function_of_a_group_gets_the_record():
    assert values(lambda group: [r.sample for r in group.rollouts]) == [0.0, 1.0, 2.0]


def test_async_functions_are_awaited():
    async def per_rollout(completion):
        await asyncio.sleep(0)
        return len(completion)

    async def per_group(completions):
        return [1] * len(completions)

    assert values(per_rollout) == [2.0] * 3
    assert values(per_group) == [1.0] * 3


def test_options_are_further_keywords():
    assert values(lambda completion, bonus: bonus, options={"bonus": 2}) == [2.0] * 3
    assert values(lambda completions, bonus, **kw: [bonus] * 3, options={"bonus": 2}) == [2.0] * 3
    with pytest.raises(ConfigError, match="does not take the option 'bonsu'; it takes: bonus, completion"):
        RewardFunction(lambda completion, bonus=1: bonus, "r", options={"bonsu": 2})


def test_an_absent_column_lists_those_present():
    with pytest.raises(ScoringError, match="reward 'r' needs 'solution', which is no column of the row; its columns: answer, prompt"):
        scores(lambda completion, solution: 1.0)


def test_a_function_of_nothing_known_is_refused():
    with pytest.raises(ConfigError, match=r"its parameters \(text\) name none of 'completions'"):
        convention_of(lambda text: 1.0, "r")
    assert convention_of(lambda completions, completion: 1.0, "r") is Convention.COMPLETIONS


def test_what_a_function_raises_is_told_with_its_traceback():
    def broken(completion):
        return {}["key"]

    with pytest.raises(ScoringError, match=r"reward 'r' raised KeyError: 'key'\nTraceback[\s\S]*in broken"):
        scores(broken)


# ---- what may be returned


class Tensor:
    """What a torch scalar looks like."""

    def __init__(self, *items):
        self.items = items

    def item(self):
        if len(self.items) != 1:
            raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")
        return self.items[0]

    def __repr__(self):
        return f"tensor({list(self.items)})"


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(3.0), 3.0),
        (Tensor(0.25), 0.25),
    ],
)
def test_numbers_of_all_kinds_are_rewards(returned, value):
    assert values(lambda completion: returned) == [value] * 3
    assert values(lambda completions: [returned] * 3) == [value] * 3


def test_dicts_give_a_score_and_parts():
    result = scores(lambda completion: {"score": np.float32(0.5), "format": True, "skipped": None}, weight=2.0)
    assert (result[0].value, result[0].parts, result[0].weight) == (0.5, {"format": 1.0}, 2.0)
    assert values(lambda completions: [{"score": None}] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (float("nan"), "returned nan for sample 0; rewards must be finite"),
        (np.float32("inf"), "returned inf"),
        (Tensor(float("nan")), "returned nan"),
        ("1.0", r"returned '1.0' \(str\) for sample 0; a number or None is expected"),
        ([1.0], r"returned \[1.0\] \(list\)"),
        (Tensor(1, 2), r"returned tensor\(\[1, 2\]\) for sample 0: not a single number"),
        (np.array([1.0, 2.0]), "not a single number"),
        ({"reward": 1.0}, "needs the key 'score'"),
        ({"score": "high"}, "returned 'high'"),
        ({"score": 1.0, "part": float("inf")}, "reward 'r/part' returned inf"),
        (1j, "complex"),
        ("x" * 1000, r"returned 'x{199}\.\.\."),
    ],
)
def test_what_is_no_reward_is_shown(returned, message):
    with pytest.raises(ScoringError, match=message):
        scores(lambda completion: returned)
    with pytest.raises(ScoringError, match=message):
        scores(lambda completions: [returned] * 3)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 2.0], r"returned 2 rewards for 3 samples: \[1.0, 2.0\]"),
        (1.0, r"returned 1.0 \(float\); a list of 3 rewards is expected"),
        (None, "returned None"),
        ("abc", r"returned 'abc' \(str\); a list of 3"),
        ({"a": 1, "b": 2, "c": 3}, "a list of 3 rewards is expected"),
    ],
)
def test_a_group_level_function_returns_one_reward_per_sample(returned, message):
    with pytest.raises(ScoringError, match=message):
        scores(lambda completions: returned)


def test_arrays_and_tuples_are_lists():
    assert values(lambda completions: np.array([1.0, 0.0, 0.5])) == [1.0, 0.0, 0.5]
    assert values(lambda completions: (1, None, 0)) == [1.0, None, 0.0]


# ---- built-ins


def test_exact_compares_stripped_text():
    row = {"answer": 42, "other": "Yes"}
    assert exact(" 42\n", row) == 1.0 and exact("42.", row) == 0.0 and exact("4 2", row) == 0.0
    assert exact("42.", row, strip=".") == 1.0
    assert exact("yes", row, column="other") == 0.0 and exact("yes", row, column="other", ignore_case=True) == 1.0


def test_number_compares_last_numbers():
    assert number("3 + 4 = 7", {"answer": "7"}) == 1.0
    assert number("I think 1,234.50.", {"answer": 1234.5}) == 1.0
    assert number("so -4", {"answer": "-4"}) == 1.0 and number("so 4", {"answer": "-4"}) == 0.0
    assert number("The total is 18", {"answer": "9 * 2 = <<9*2=18>>18\n#### 18"}) == 1.0  # GSM8K as it comes
    assert number("no idea", {"answer": "7"}) == 0.0
    with pytest.raises(ValueError, match="column 'answer' holds no number: 'seven'"):
        number("7", {"answer": "seven"})
    with pytest.raises(ValueError, match="needs the column 'answer'; the row has question"):
        number("7", {"question": "?"})


def test_last_number_reads_what_people_write():
    assert last_number("$1,000") == Decimal(1000) and last_number(".5") == Decimal("0.5") and last_number("none") is None
    assert last_number("7.") == Decimal(7) and last_number("1.0") == Decimal(1)


def test_regex_finds_or_compares():
    row = {"answer": "7"}
    assert regex("the answer is 7", row, pattern=r"answer is \d") == 1.0 and regex("no", row, pattern=r"\d") == 0.0
    assert regex("<a>6</a> <a>7</a>", row, pattern=r"<a>(.*?)</a>", column="answer") == 1.0
    assert regex("<a>7</a> <a>6</a>", row, pattern=r"<a>(.*?)</a>", column="answer") == 0.0
    assert regex("ANSWER 7", row, pattern="answer", ignore_case=True) == 1.0


def test_built_ins_take_their_options_from_the_settings():
    (scorer,) = make_scorers([RewardSettings(function="exact", options={"column": "prompt"}, weight=2.0)])
    assert isinstance(scorer, InlineScorer)
    (first, *_) = asyncio.run(scorer.score(finished_group(["say it"])))
    assert (first.name, first.value, first.weight) == ("exact", 1.0, 2.0)


# ---- from settings to scorers


def test_each_reward_becomes_the_scorer_that_can_bear_it():
    rewards = [
        RewardSettings(function="number", name="right"),
        RewardSettings(function="regex", options={"pattern": "x"}),
        RewardSettings(function="rewards.py:score", timeout_s=3),
        RewardSettings(function="my.rewards:score"),
    ]
    scorers = make_scorers(rewards, [lambda completion: 1.0])
    assert [type(s) for s in scorers] == [InlineScorer, ProcessScorer, ProcessScorer, ProcessScorer, CallableScorer]
    assert [s.name for s in scorers] == ["right", "regex", "score", "score_2", "<lambda>"]  # names are kept apart


@pytest.mark.parametrize("spec", ["exactly", "rewards.py", "rewards.py:", "module:not-a-name"])
def test_a_function_that_cannot_be_meant_is_refused_at_once(spec):
    with pytest.raises(ConfigError, match=r"expected 'package\.module:function' or 'file\.py:function'"):
        make_scorers([RewardSettings(function=spec)])


def test_functions_load_from_modules_and_files(tmp_path):
    (tmp_path / "helper_of_rewards.py").write_text("FULL = 3\n")
    text = "from helper_of_rewards import FULL\ndef score(completion): return FULL\ndef other(completion): pass\n"
    (tmp_path / "my_rewards.py").write_text(text)
    path_before = list(sys.path)
    try:
        assert load_function(f"{tmp_path}/my_rewards.py:score")("x") == 3
        assert load_function("json:dumps")({}) == "{}"
        with pytest.raises(ConfigError, match=r"has no function 'scor'; it has: other, score"):
            load_function(f"{tmp_path}/my_rewards.py:scor")
    finally:
        sys.path[:] = path_before


def test_what_does_not_import_says_why(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match=r"importing .*broken\.py failed: ModuleNotFoundError: No module named 'nothing_of_that_name'"):
        load_function(f"{tmp_path}/broken.py:score")
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.py"):
        load_function(f"{tmp_path}/absent.py:score")
    with pytest.raises(ConfigError, match=r"importing no\.such\.module failed"):
        load_function("no.such.module:score")
