"""The weight-sync benchmark: shares, the order of its timings, and models that weigh what their names say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.weight_sync.packing import WeightLayout

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
weight_sync: Any = importlib.import_module("weight_sync")
pair: Any = importlib.import_module("weight_sync_pair")
roles: Any = importlib.import_module("weight_sync_roles")


def test_a_share_is_of_the_rounds_own_bound():
    assert weight_sync.share([1.0, 2.0, 30.0], [2.0, 4.0, 60.0]) == 0.5


def test_sums_are_within_a_round():
    measured = weight_sync.Measured(parts=[{"memcpy": 1.0, "hash": 2.0}, {"memcpy": 3.0, "hash": 4.0}])
    assert weight_sync.part(measured, "memcpy") == [1.0, 3.0]
    assert weight_sync.part(measured, "memcpy", "hash") == [3.0, 7.0]


@pytest.mark.parametrize("turn", range(-2, 5))
def test_every_way_is_timed_once_and_each_comes_first_in_turn(turn):
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in "abcd"}
    assert set(weight_sync.timed(ways, turn)) == set("abcd")
    assert sorted(order) == list("abcd") and order[0] == "abcd"[turn % 4]


def test_the_ways_move_all_bytes():
    source = np.random.default_rng(0).integers(1, 256, 1_000_003, dtype=np.uint8)
    for name, way in weight_sync.memory_ways(source, target := np.zeros_like(source)).items():
        target[:] = 0
        way()
        assert np.array_equal(target, source) == (name != "hash"), name


def test_the_ways_of_files_move_all_bytes(tmp_path):
    written = np.random.default_rng(0).integers(1, 256, 1_000_003, dtype=np.uint8)
    weight_sync.file_ways(tmp_path / "newest", tmp_path / "spare", written)["write"]()
    for _ in range(2):  # into a new file, and in the place of an old one
        read = np.zeros_like(written)
        weight_sync.file_ways(tmp_path / "spare", tmp_path / "other", read)["read"]()
        assert np.array_equal(read, written)
        weight_sync.write_file(tmp_path / "spare", written)


def test_the_ways_of_collective_move_all_bytes():
    source = np.random.default_rng(0).integers(1, 256, 9_000_003, dtype=np.uint8)
    for name, way in weight_sync.collective_ways(source, target := np.zeros_like(source)).items():
        target[:] = 0
        way()
        assert np.array_equal(target, source), name


def test_a_sync_is_both_sides():
    assert pair.Sync(trainer_s=1.0, engine_s=2.0, stall_s=1.5).total_s == 3.0


def test_settings_name_what_the_roles_know():
    for setting in (*weight_sync.SETTINGS[True], *weight_sync.SETTINGS[False]):
        case = roles.msgspec.convert(setting.options(), roles.Case, strict=False)
        assert case.layout in roles.LAYOUTS and (case.transport, case.payload) in roles.WAYS and setting.bound
        assert case.decode_from == 2 * weight_sync.FIRST_USES + setting.syncs - 1, "the last version before those under load"


def test_layouts_weigh_what_they_are_called():
    with torch.device("meta"):
        models = {
            name: roles.LlamaForCausalLM(roles.LlamaConfig(**sizes, tie_word_embeddings=True)) for name, sizes in roles.LAYOUTS.items()
        }
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert 2 * sizes["135M"] == pytest.approx(270e6, rel=0.01) and sizes["1B"] == pytest.approx(1e9, rel=0.03)


def test_a_share_of_the_weights_changes():
    model = torch.nn.Linear(1000, 100, bias=False, dtype=torch.bfloat16)
    before = model.weight.detach().clone()
    roles.change(model, 0.01, version=3)
    changed = (model.weight.view(torch.int16) != before.view(torch.int16)).float().mean()
    assert 0.009 < changed < 0.0101
    roles.change(model, 1.0, version=4)
    assert (model.weight != before).all()


def test_the_random_model_is_tied_and_random(monkeypatch):
    monkeypatch.setitem(roles.LAYOUTS, "135M", roles.LAYOUTS["135M"] | {"num_hidden_layers": 1, "vocab_size": 100})
    model = roles.random_model("135M", "bfloat16")
    assert WeightLayout.of(model).aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert all(p.dtype == torch.bfloat16 and 0.01 < p.float().std() < 0.03 for p in model.parameters())
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
