"""`[lora]` settings: what excludes what, which payload is sent, who computes the reference, how much memory an adapter saves."""

from __future__ import annotations

import dataclasses
from importlib import util
from typing import Any

import pytest

from slipstream.config import Config, check_config
from slipstream.config.checks import advice
from slipstream.config.frozen_models import base_is_reference, frozen_models, loss_arrays, stage_models
from slipstream.errors import ConfigError
from slipstream.models.memory import ModelSize, memory_need

SIZE = ModelSize(1_000_000, hidden_size=100, intermediate_size=400, num_layers=2, kv_width=50, vocab_size=1000, context_tokens=64)


def make(**tables: Any) -> Config:
    return Config.model_validate({"reward": [{"function": "exact"}], **tables})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"lora": {"targets": ["q_proj"]}}, ('targets = ["q_proj"] without an adapter', "set lora.rank")),
        ({"lora": {"dora": True}}, ("dora = true without an adapter", "leave dora out")),
        ({"lora": {"rank": 4, "dropout": 0.05}}, ("dropout = 0.05", "share their packed prompt", "leave it out")),
        ({"lora": {"rank": 4, "targets": []}}, ("targets = [] adapts nothing", '"all-linear"')),
        ({"weight_sync": {"payload": "adapter"}}, ('payload = "adapter" without an adapter', "set lora.rank")),
        (
            {"lora": {"rank": 4}, "weight_sync": {"payload": "delta"}},
            ('"delta" with lora.rank', "adapter alone is smaller", "leave payload out"),
        ),
        ({"model": {"quantize": "nf4"}}, ('quantize = "nf4" without an adapter', "cannot be trained", "set lora.rank")),
        ({"lora": {"rank": 4, "dora": True}, "weight_sync": {"payload": "adapter"}}, ('"adapter" with dora', "norms", '"full"')),
    ],
)
def test_what_does_not_go_together_is_refused(tables: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(make(**tables))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_an_adapter_without_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.config.lora_problems.find_spec", lambda name: None if name == "peft" else util.find_spec(name))
    check_config(make())
    with pytest.raises(ConfigError, match=r"rank = 4 needs peft, .*pip install 'slipstream\[lora\]'"):
        check_config(make(lora={"rank": 4}))


def test_a_quantised_base_without_bitsandbytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.config.lora_problems.find_spec", lambda name: None if name == "bitsandbytes" else util.find_spec(name))
    check_config(make(lora={"rank": 4}))
    with pytest.raises(ConfigError, match=r"quantize = .nf4. needs bitsandbytes, .*pip install 'slipstream\[qlora\]'"):
        check_config(make(lora={"rank": 4}, model={"quantize": "nf4"}))


def test_other_models_than_the_base_are_read_as_they_are_stored() -> None:
    kl = {"model": {"name": "own", "quantize": "nf4"}, "lora": {"rank": 4}, "loss": {"kl_coefficient": 0.1, "reference": "other"}}
    (reference,) = frozen_models(make(**kl))
    assert (reference.settings.name, reference.settings.quantize) == ("other", None)
    (teacher,) = frozen_models(make(**{**kl, "loss": {"teacher": "own"}}))
    assert teacher.settings.quantize == "nf4"


def test_a_learning_rate_of_whole_weights_is_advised_against() -> None:
    said = [line for line in advice(make(lora={"rank": 4}, trainer={"learning_rate": 1e-5})) if "ten times" in line]
    assert len(said) == 1
    assert not any("ten times" in line for c in (make(), make(lora={"rank": 4}, trainer={"learning_rate": 1e-4})) for line in advice(c))


@pytest.mark.parametrize(
    ("tables", "payload"),
    [
        ({}, "full"),
        ({"lora": {"rank": 1}}, "adapter"),
        ({"lora": {"rank": 1, "dora": True}}, "full"),
        ({"lora": {"rank": 1}, "weight_sync": {"payload": "full"}}, "full"),
    ],
)
def test_the_adapter_travels_alone_where_an_engine_can_add_it(tables: dict[str, Any], payload: str) -> None:
    assert make(**tables).payload == payload


def test_the_base_is_the_reference_of_an_adapter() -> None:
    kl = {"loss": {"kl_coefficient": 0.1}}
    adapter, whole = make(lora={"rank": 1}, **kl), make(**kl)
    assert base_is_reference(adapter) and not frozen_models(adapter) and loss_arrays(adapter) == ("reference_logprobs",)
    assert not base_is_reference(whole) and set(stage_models(whole)) == {"reference_logprobs"} == set(loss_arrays(whole))
    other = make(lora={"rank": 1}, loss={"kl_coefficient": 0.1, "reference": "other/model"})
    assert not base_is_reference(other) and set(stage_models(other)) == {"reference_logprobs"}
    assert not base_is_reference(make(lora={"rank": 1}))


def test_an_adapter_needs_little_beside_its_base() -> None:
    tables: dict[str, Any] = {"data": {"eval": 4}, "engine": {"slots": 1, "max_context": 64}, "rollout": {"max_new_tokens": 8}}
    whole = memory_need(make(**tables), SIZE).parts
    adapter = memory_need(make(lora={"rank": 2}, **tables), SIZE).parts
    merged = memory_need(make(lora={"rank": 2}, weight_sync={"payload": "full"}, **tables), SIZE).parts
    trained = 2 * 2 * (4 * 100 + 2 * 150 + 3 * 500)
    assert whole["trainer"] - adapter["trainer"] == 12_000_000 - 16 * trained  # gradients and moments; the adapter with its own
    assert adapter["weight sync"] == 3 * 4 * trained and merged["weight sync"] == whole["weight sync"] == 3 * 4_000_000
    pinned = 4_000_000 + 4 * 1000 * 100  # plain, and the head packed: an adapter shares its base
    assert whole["engine"] - adapter["engine"] == pinned and merged["engine"] == whole["engine"]
    assert merged["trainer"] == adapter["trainer"]  # merged weights are made one after the other
    size = dataclasses.replace(SIZE, num_linear=800_000)
    adapter = memory_need(make(lora={"rank": 2}, **tables), size).parts
    rounded = memory_need(make(lora={"rank": 2}, model={"quantize": "nf4"}, **tables), size).parts
    assert adapter["trainer"] - rounded["trainer"] == 800_000 * 4 - int(800_000 * (0.5 + 1 / 64 + 1 / 4096))
    assert {name: n for name, n in rounded.items() if name != "trainer"} == {n: b for n, b in adapter.items() if n != "trainer"}


def test_what_changed_takes_a_quarter_of_each_block_and_over_files_one_block_of_the_trainers() -> None:
    def parts(**weight_sync: str) -> dict[str, int]:
        return memory_need(make(weight_sync=weight_sync), SIZE).parts

    full, delta = parts(), parts(payload="delta")
    assert full["weight sync"] == 3 * 4_000_000 and delta["weight sync"] == (3 * 5 + 1) * 1_000_000
    assert parts(transport="files")["weight sync"] == 0 and parts(transport="files", payload="delta")["weight sync"] == 6_000_000
    assert full["engine"] == delta["engine"]
