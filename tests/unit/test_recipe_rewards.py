"""The SmolLM2 recipes: their rewards, and that no held-out question is trained on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slipstream.config.load import load_config
from slipstream.data import load_data, render_messages

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def rewards():
    spec = importlib.util.spec_from_file_location("smollm2_rewards", RECIPES / "smollm2_rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("-4", 1), (" -4\n", 1), ("-4.", 1), ("-4 .", 1), ("-4..", 0), ("4", 0), ("2 - 6 = -4", 0), ("-40", 0), ("", 0)],
)
def test_answer_only(rewards, completion, reward):
    assert rewards.answer_only(completion=completion, answer="-4") == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The final answer is 7.", "7", 1),
        ("3 + 4 = 7", "7", 1),
        ("2 - 6 = -4", "-4", 1),
        ("The answer is -4.", "-4", 1),
        ("It is 6 - 2", "2", 1),
        ("It is 6-2", "2", 1),
        ("It is 6 - 2", "-2", 0),
        ("7, because 3 + 4", "7", 0),
        ("7.0", "7", 1),
        ("7.5", "7", 0),
        ("7.5", "5", 0),
        ("3 -4", "4", 1),
        ("The answer is 1,000", "1000", 1),
        ("seven", "7", 0),
        ("", "0", 0),
    ],
)
def test_last_number(rewards, completion, answer, reward):
    assert rewards.last_number(completion=completion, answer=answer) == reward


@pytest.mark.parametrize("recipe", ["smollm2_arithmetic", "smollm2_words"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_200_questions_are_there_and_the_held_out_ones_are_not_trained_on(recipe, seed):
    pytest.importorskip("reasoning_gym")
    loaded = load_config([RECIPES / f"{recipe}.toml"], ["--run.seed", str(seed)])
    data = load_data(loaded.config, loaded.base_folder)
    train, held_out = ({row["metadata"]["expression"] for row in rows} for rows in (data.train, data.eval))
    assert (len(train), len(held_out), len(data.eval)) == (160, 40, 40)
    assert not train & held_out


def test_the_two_prompts():
    row = {"prompt": "State 1 + 2 =", "metadata": {"expression": "1 + 2"}}
    arithmetic, words = (load_config([RECIPES / f"smollm2_{name}.toml"]).config for name in ("arithmetic", "words"))
    assert [m["content"] for m in render_messages(row, arithmetic.data)] == ["3 + 4 =", "7", "2 - 6 =", "-4", "1 + 2 ="]
    assert render_messages(row, words.data) == [{"role": "user", "content": "State 1 + 2 ="}]
