"""From rows to messages, and the data of a run: hold-out, sizes, GSM8K as it comes."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import Config
from slipstream.config.settings import DataSettings
from slipstream.data import load_data, prompts, render_messages
from slipstream.data.dataset import hold_out
from slipstream.errors import DataError

GSM8K = [
    {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A pen costs {2} coins. What do 5 cost?", "answer": "5 * 2 = <<5*2=10>>10\n#### 10"},
    {"question": "Half of 1,200 is what?", "answer": "1200 / 2 = 600\n#### 600"},
]


def render(row: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    return render_messages(row, DataSettings(**settings), "set, row 3")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def config(folder: Path, rows: list[dict[str, Any]], steps: int = 1, **data: Any) -> Config:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Config.model_validate({"data": {"train": "train.jsonl", **data}, "trainer": {"groups_per_step": steps}})


def test_prompt_column_as_text_and_as_messages() -> None:
    assert render({"prompt": "hello"}) == [user("hello")]
    chat = [user("1 + 1 ="), assistant("2"), user("2 + 2 =")]
    assert render({"prompt": chat}) == chat
    assert render({"prompt": chat}, system_prompt="Add.") == [{"role": "system", "content": "Add."}, *chat]
    tool = [user("x"), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "7"}]
    assert render({"prompt": tool}) == tool


def test_templates_reach_inside_columns_and_format_values() -> None:
    row = {"metadata": {"expression": "3 + 4", "terms": [3, 4]}, "x": 0.12345}
    assert (
        render(row, prompt_template="{metadata[expression]} = {metadata[terms][1]} {x:.2f} {{{x!s}}}")[0]["content"]
        == "3 + 4 = 4 0.12 {0.12345}"
    )
    assert render(row, prompt_template="{metadata.expression} =") == [user("3 + 4 =")]
    turns = [user("3 + 4 ="), assistant("7"), user("{metadata[expression]} =")]
    assert render(row, prompt_template=turns) == [user("3 + 4 ="), assistant("7"), user("3 + 4 =")]


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"question": "q", "level": 1}, None, ("set, row 3", "no column 'prompt'", "question, level", "data.columns")),
        ({"question": "q"}, "{questoin}", ("set, row 3", "no column 'questoin'", "did you mean 'question'")),
        ({"meta": {"a": 1}}, "{meta[b]}", ("no 'b' inside column 'meta'", "it has a")),
        ({"meta": "text"}, "{meta[b]}", ("no 'b' inside column 'meta'", "'text'")),
        ({"hint": None}, "x {hint}", ("column 'hint' is empty (null)",)),
        ({"q": "x"}, r"{q} \boxed{}", ("{{ and }}",)),
        ({"q": "x"}, "{q", ("{{ and }}",)),
        ({"q": "x"}, "{0} {q}", ("name a column",)),
        ({"q": "x"}, "{q.__class__}", ("no '__class__' inside column 'q'",)),
        ({"q": "x"}, "{q:d}", ("cannot be filled",)),
        ({"prompt": "  \n"}, None, ("set, row 3", "prompt is empty")),
        ({"prompt": []}, None, ("prompt is empty",)),
        ({"prompt": None}, None, ("prompt is null",)),
        ({"prompt": 5}, None, ("prompt is int",)),
        ({"prompt": [user("x"), assistant("y")]}, None, ("end with the assistant", "drop the last message")),
        ({"prompt": [user("x"), {"role": "system", "content": "y"}]}, None, ("end with a system message",)),
        ({"prompt": [{"role": "human", "content": "x"}]}, None, ("role 'human'", "user")),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, None, ("only text",)),
        ({"prompt": [{"from": "human", "value": "x"}]}, None, ("role None",)),
    ],
)
def test_wrong_rows(row: dict[str, Any], template: str | None, words: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        render(row, prompt_template=template)
    for word in words:
        assert word in str(caught.value)


def test_two_system_messages_are_refused_and_a_system_prompt_alone_is_no_prompt() -> None:
    with pytest.raises(DataError, match="system message of its own"):
        render({"prompt": [{"role": "system", "content": "a"}, user("b")]}, system_prompt="c")
    with pytest.raises(DataError, match="prompt is empty"):
        render({"prompt": ""}, system_prompt="c")


def test_the_documented_example_runs() -> None:
    assert doctest.testmod(prompts).attempted > 0 and doctest.testmod(prompts).failed == 0


# ---- the data of a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_gsm8k_as_it_comes(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "gsm8k" / "main"
    folder.mkdir(parents=True)
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(GSM8K), folder / "train-00000-of-00001.parquet")
    else:
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    template = "{question}\nEnd with #### and the number."
    data = {"train": "gsm8k:main:train", "eval": 1, "prompt_template": template, "columns": {"solution": "answer"}}
    settings = Config.model_validate({"data": data, "trainer": {"groups_per_step": 2}})
    loaded = load_data(settings, tmp_path)
    assert len(loaded.train) == 2 and len(loaded.eval) == 1
    for row in loaded.train + loaded.eval:
        assert row in [r | {"solution": r["answer"]} for r in GSM8K]
        assert render_messages(row, settings.data) == [user(row["question"] + "\nEnd with #### and the number.")]


def test_hold_out_is_by_rendered_prompt_and_takes_every_duplicate(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 6}", "answer": str(i)} for i in range(30)]
    data = load_data(config(tmp_path, rows, eval=2), tmp_path)
    held, kept = {r["prompt"] for r in data.eval}, {r["prompt"] for r in data.train}
    assert len(data.eval) == 2 and len(held) == 2 and len(kept) == 4 and not held & kept
    assert len(data.train) == 20 and data.num_prompts == 4
    assert "distinct prompts" in data.notes()[0]


def test_a_template_decides_what_is_the_same_prompt(tmp_path: Path) -> None:
    rows = [{"a": str(i % 3), "b": str(i)} for i in range(9)]
    assert len(load_data(config(tmp_path, rows, eval=2, prompt_template="{a}"), tmp_path).train) == 3
    assert len(load_data(config(tmp_path, rows, eval=2, prompt_template="{a} {b}"), tmp_path).train) == 7


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 3), st.randoms(use_true_random=False))
def test_hold_out_properties(keys: list[int], count: int, seed: int, random: Any) -> None:
    rows = [{"n": i} for i in range(len(keys))]
    texts = [str(k) for k in keys]
    if count >= len(set(keys)):
        with pytest.raises(DataError, match=f"only {len(set(keys))} distinct"):
            hold_out(rows, texts, count, seed)
        return
    train, held = hold_out(rows, texts, count, seed)
    sides = {texts[r["n"]] for r in train}, {texts[r["n"]] for r in held}
    assert len(held) == count == len(sides[1]) and not sides[0] & sides[1] and sides[0] | sides[1] == set(texts)
    assert all(r["n"] == texts.index(texts[r["n"]]) for r in held)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = hold_out([rows[i] for i in order], [texts[i] for i in order], count, seed)
    assert {texts[r["n"]] for r in shuffled[1]} == sides[1]


def test_hold_out_depends_on_the_seed() -> None:
    rows = [{"n": i} for i in range(100)]
    texts = [str(i) for i in range(100)]
    assert hold_out(rows, texts, 10, 0) == hold_out(rows, texts, 10, 0)
    assert hold_out(rows, texts, 10, 0) != hold_out(rows, texts, 10, 1)


def test_a_separate_evaluation_source_and_shared_prompts_are_counted(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "q0"}\n{"prompt": "new"}\n{"prompt": "third"}\n')
    settings = config(tmp_path, [{"prompt": f"q{i}"} for i in range(4)], eval="eval.jsonl", limit=3)
    data = load_data(settings, tmp_path)
    assert len(data.train) == 3 and [r["prompt"] for r in data.eval] == ["q0", "new", "third"]
    assert data.num_shared_prompts == 1 and "1 evaluation prompts are also trained on" in data.notes()[0]
    limited = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"limit": 2})})
    assert len(load_data(limited, tmp_path).eval) == 2
    assert load_data(limited, tmp_path).fingerprint == data.fingerprint
    none = load_data(config(tmp_path, [{"prompt": f"q{i}"} for i in range(4)]), tmp_path)
    assert none.eval == [] and none.eval_fingerprint is None


def test_too_few_rows(tmp_path: Path) -> None:
    one = [{"prompt": "a"}]
    for rows, steps, data, words in (
        (one, 1, {}, "one row is not a data set"),
        (one * 3, 4, {}, r"3 training rows, fewer than trainer.groups_per_step = 4.*groups_per_step <= 3"),
        ([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}], 3, {"eval": 1}, "2 training rows after holding out 1 prompts"),
        ([{"prompt": "a"}, {"prompt": "b"}], 1, {"eval": 2}, "only 2 distinct prompts"),
    ):
        with pytest.raises(DataError, match=words):
            load_data(config(tmp_path, rows, steps, **data), tmp_path)


def test_wrong_rows_are_found_before_the_run_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "ok"}, *[{"prompt": ""}] * 5]
    with pytest.raises(DataError) as caught:
        load_data(config(tmp_path, rows), tmp_path)
    assert "train.jsonl, row 2: its prompt is empty" in str(caught.value) and "and 2 more rows" in str(caught.value)


def test_the_arithmetic_questions_are_held_out_by_question(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"size": 400, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = {"train": "reasoning_gym:chain_sum", "eval": 40, "options": options, "prompt_template": "{metadata[expression]} ="}
    loaded = load_data(Config.model_validate({"data": data}), tmp_path)
    train, held = ({r["metadata"]["expression"] for r in rows} for rows in (loaded.train, loaded.eval))
    assert len(held) == 40 and not train & held


def test_rows_from_python_are_treated_like_those_of_a_file(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": (i, i)} for i in range(5)]
    settings = Config.model_validate({"data": {"eval": 1, "columns": {"prompt": "question"}}, "trainer": {"groups_per_step": 4}})
    data = load_data(settings, tmp_path, rows)
    assert len(data.train) == 4 and data.train[0]["answer"] in [[i, i] for i in range(5)]
    with pytest.raises(DataError, match=r"^data: 1 training row after"):
        load_data(settings, tmp_path, rows[:2])
    with pytest.raises(DataError, match="no rows"):
        load_data(settings, tmp_path, [])
