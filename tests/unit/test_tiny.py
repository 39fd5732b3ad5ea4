"""builtin:sort_digits and builtin:tiny."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.data.builtin import PARTS, builtin_names, builtin_rows, sort_digits
from slipstream.errors import DataError, ModelError
from slipstream.models import tiny
from slipstream.models.tiny import TinyRecipe, make_model, make_tokenizer, tiny_folder, warm_start

QUICK = TinyRecipe(hidden_size=16, num_layers=1, num_heads=2, enough=0.0)  # stops at the first probe


def test_prompts_of_warm_start_training_and_evaluation_are_disjoint():
    parts = {part: [row["prompt"] for row in sort_digits(part)] for part in ("warm", "train", "eval")}
    everything = [prompt for prompts in parts.values() for prompt in prompts]
    assert len(everything) == len(set(everything)) == 5_040
    assert min(map(len, parts.values())) >= 200


def test_every_answer_is_the_sorted_prompt():
    for row in builtin_rows("sort_digits"):
        digits = row["prompt"].removeprefix("sort ")
        assert len(set(digits)) == 4
        assert row["answer"] == "".join(sorted(digits))


@pytest.mark.parametrize("name", builtin_names())
def test_a_policy_that_ignores_the_prompt_scores_below_five_percent(name):
    answers = collections.Counter(row["answer"] for row in builtin_rows(name))
    assert max(answers.values()) / answers.total() < 0.05


def test_three_of_the_digits_do_not_decide_the_answer():
    rows = [row for part in PARTS for row in sort_digits(part)]
    for hidden in range(4):
        seen = collections.defaultdict(collections.Counter)
        for row in rows:
            digits = row["prompt"][-4:]
            seen[digits[:hidden] + digits[hidden + 1 :]][row["answer"]] += 1
        assert {max(answers.values()) / answers.total() for answers in seen.values()} == {1 / 7}


def test_an_unknown_name_gets_a_hint():
    with pytest.raises(DataError, match="did you mean 'builtin:sort_digits'"):
        builtin_rows("sort_digit")


def test_tokenizer_is_bytes_and_roles():
    tokenizer = make_tokenizer()
    text = "sort 7391 é€\n\x00 <|end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "sort 7391"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|system|>s<|end|><|user|>sort 7391<|end|><|assistant|>"
    assert len(ids) == 1 + 1 + 1 + 1 + len("sort 7391") + 1 + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ssort 7391"


def test_a_role_name_or_end_token_inside_a_message_costs_no_more_than_its_own_token():
    tokenizer = make_tokenizer()
    assert tokenizer.encode("<|assistant|>") == [tokenizer.convert_tokens_to_ids("<|assistant|>")]


def test_the_seed_alone_makes_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "a"))
    torch.manual_seed(1)
    first = tiny_folder(QUICK)
    torch.manual_seed(2)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "b"))
    second = tiny_folder(QUICK)
    assert first != second
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    other = tiny_folder(TinyRecipe(**(QUICK.__dict__ | {"seed": 1})))
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_it_is_made_once_and_leaves_the_random_state_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    folder = tiny_folder(QUICK)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(tiny, "warm_start", lambda *_: pytest.fail("made again"))
    assert tiny_folder(QUICK) == folder
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")) == [folder.name]


def test_a_warm_start_that_cannot_succeed_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    recipe = TinyRecipe(**(QUICK.__dict__ | {"enough": 1.1, "max_steps": 5}))
    with pytest.raises(ModelError, match=r"did not reach 1\.1 within 5 steps"):
        tiny_folder(recipe)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_the_warm_start_never_sees_training_or_held_out_prompts(monkeypatch):
    asked = []
    monkeypatch.setattr(tiny.builtin, "sort_digits", lambda part: asked.append(part) or sort_digits(part))
    tokenizer = make_tokenizer()
    warm_start(QUICK, make_model(QUICK, tokenizer), tokenizer)
    assert asked == ["warm"]


def test_the_tiny_model_starts_between_a_tenth_and_three_tenths():
    folder = tiny_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = builtin_rows("sort_digits:eval")
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    share = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)
    assert 0.1 <= share <= 0.3
    assert Path(folder, "model.safetensors").stat().st_size < 5_000_000
