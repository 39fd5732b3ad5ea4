"""The weight-sync benchmark: shares, gaps, the order of its timings, and models that weigh what their names say."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.weight_sync.packing import WeightLayout

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
bench: Any = importlib.import_module("bench")
bounds: Any = importlib.import_module("weight_sync_bounds")
cases: Any = importlib.import_module("weight_sync_settings")
decoding: Any = importlib.import_module("weight_sync_decoding")
pair: Any = importlib.import_module("weight_sync_pair")
roles: Any = importlib.import_module("weight_sync_roles")
tables: Any = importlib.import_module("weight_sync_tables")
weight_sync: Any = importlib.import_module("weight_sync")
servers: Any = importlib.import_module("weight_sync_vllm")
EVERY = (*cases.SETTINGS[True], *cases.SETTINGS[False], *cases.VLLM)


def test_a_share_is_of_the_rounds_own_bound():
    assert tables.share([1.0, 2.0, 30.0], [2.0, 4.0, 60.0]) == 0.5


def test_sums_are_within_a_round():
    measured = tables.Measured(parts=[{"memcpy": 1.0, "hash": 2.0}, {"memcpy": 3.0, "hash": 4.0}])
    assert tables.part(measured, "memcpy") == [1.0, 3.0]
    assert tables.part(measured, "memcpy", "hash") == [3.0, 7.0]


@pytest.mark.parametrize("turn", range(-2, 5))
def test_every_way_is_timed_once_and_each_comes_first_in_turn(turn):
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in "abcd"}
    assert set(bounds.timed(ways, turn)) == set("abcd")
    assert sorted(order) == list("abcd") and order[0] == "abcd"[turn % 4]


def test_the_ways_move_all_bytes():
    source = np.random.default_rng(0).integers(1, 256, 1_000_003, dtype=np.uint8)
    for name, way in bounds.memory_ways(source, target := np.zeros_like(source)).items():
        target[:] = 0
        way()
        assert np.array_equal(target, source) == (name != "hash"), name


def test_the_ways_of_files_move_all_bytes(tmp_path):
    written = np.random.default_rng(0).integers(1, 256, 1_000_003, dtype=np.uint8)
    bounds.file_ways(tmp_path / "newest", tmp_path / "spare", written)["write"]()
    for _ in range(2):  # into a new file, and in the place of an old one
        read = np.zeros_like(written)
        bounds.file_ways(tmp_path / "spare", tmp_path / "other", read)["read"]()
        assert np.array_equal(read, written)
        bounds.write_file(tmp_path / "spare", written)


def test_the_ways_of_collective_move_all_bytes():
    source = np.random.default_rng(0).integers(1, 256, 9_000_003, dtype=np.uint8)
    for name, way in bounds.collective_ways(source, target := np.zeros_like(source)).items():
        target[:] = 0
        way()
        assert np.array_equal(target, source), name


def test_a_sync_is_both_sides():
    assert pair.Sync(trainer_s=1.0, engine_s=2.0, stall_s=1.5).total_s == 3.0


def test_settings_name_what_the_roles_know():
    for setting in EVERY:
        case = roles.msgspec.convert(setting.options(), roles.Case, strict=False)
        config = setting.config("python")
        assert case.layout in roles.LAYOUTS and setting.bound
        assert (config.payload, config.lora.on) == (setting.payload, setting.payload == "adapter")
        assert config.engine.slots == decoding.BATCH and config.rollout.group_size < decoding.BATCH
    assert len(set(map(str, EVERY[len(cases.SETTINGS[True]) :]))) == len(EVERY) - len(cases.SETTINGS[True]), "names of results"


def test_a_target_is_judged_by_three_rounds_or_more():
    for setting in EVERY:
        assert setting.syncs >= 3 and (setting.under_load == 0 or setting.under_load >= 3)


class Counting:
    """An engine that gives every sequence a token each time it is asked to."""

    def __init__(self):
        self.open: list[Any] = []
        self.num_cancelled = 0

    async def generate(self, request: Any, into: Any) -> None:
        self.open.append(into)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.open.remove(into)
            self.num_cancelled += 1
            raise

    async def ticks(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)
            for into in self.open:
                into.append(7, -0.5, 1, 0, "engine-0")


async def _with_ticks(engine: Counting, count: int, awaited: Any) -> Any:
    task = asyncio.create_task(awaited)
    await asyncio.sleep(0)
    await engine.ticks(count)
    return await asyncio.wait_for(task, 30)


def test_a_batch_is_replaced_by_a_new_one_between_two_syncs():
    async def scenario():
        engine = Counting()
        batch = decoding.Decoding(engine)
        assert batch.is_old
        await _with_ticks(engine, 2, batch.start(3))
        assert not batch.is_old and len(engine.open) == 3
        first = len(batch.sequences[0].times)
        await _with_ticks(engine, decoding.OLD_TOKENS, batch.more(decoding.OLD_TOKENS - 1))
        assert batch.is_old and len(batch.sequences[0].times) == len(batch.sequences[0].token_ids) == first + decoding.OLD_TOKENS
        await _with_ticks(engine, 10, batch.start(2))
        assert await _with_ticks(engine, 10, batch.rate(5)) > 0
        assert engine.num_cancelled == 3 and len(engine.open) == len(batch.sequences) == 2
        await batch.stop()
        assert not engine.open

    asyncio.run(scenario())


def test_gaps_are_those_of_each_sequence():
    batch = decoding.Decoding(Counting())
    for times in ([0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 1.6, 2.5, 9.0]):
        batch.sequences.append(decoding.Timed(asyncio.Event()))
        batch.sequences[-1].times = times
    assert batch.gaps_within(0.0, 2.0) == [1.0, 1.0, pytest.approx(1.1)]
    assert batch.longest_gap_across(2.2, 3.0) == 6.5, "it lasts longer than what is looked at"
    assert batch.longest_gap_across(1.7, 1.9) == 1.0 and batch.longest_gap_across(0.6, 0.9) == pytest.approx(1.1)


def _measured(setting: Any) -> Any:
    sync = pair.Sync(trainer_s=0.1, engine_s=0.2, stall_s=0.05)
    parts = [dict.fromkeys(("memcpy", "hash", "copy alone", "copy and hash", "write", "read", "loopback"), 0.04)] * 3
    loaded = [tables.Loaded(sync, gap_s=0.1, longest_gap_s=0.25)] * setting.under_load
    rates = {1: [20.0], 8: [100.0]} if setting.rates else {}
    return tables.Measured(2_000_000, 1_000_000, [sync] * 2, [sync] * 3, parts, loaded, rates)


@pytest.mark.parametrize("name", ["weight_sync", "weight_sync_vllm"])
def test_tables_have_a_row_for_each_setting_and_are_written_part_by_part(name, tmp_path, monkeypatch, capsys):
    chosen, fill = (cases.SETTINGS[False], tables.fill) if name == "weight_sync" else (cases.VLLM, partial(servers.fill, version="1.2"))
    path, report, written = tmp_path / "out.json", bench.Report(name, False), []

    async def measure(setting, python):
        written.append(json.loads(path.read_text()) if path.exists() else None)
        return _measured(setting)

    monkeypatch.setattr(weight_sync, "measure", measure)
    weight_sync.measure_all(report, chosen, path, fill, "python")
    assert [len(each["data"]) for each in written[1:]] == list(range(1, len(chosen)))
    assert written[2]["sources"] == f"It ended early, after 2 of {len(chosen)} settings." and not json.loads(path.read_text())["sources"]
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    if name == "weight_sync":
        syncs, shares, stalls = report.tables
        assert len(syncs.rows) == len(chosen) and len(shares.rows) == 3 and len(report.targets) == 5
        assert len(stalls.rows) == sum(setting.under_load > 0 for setting in chosen)
        assert stalls.rows[0][3:] == ("50 [50, 50]", "250 [250, 250]", "100 [100, 100]", "300 [300, 300]", "0.50")
    else:
        syncs, rates = report.tables
        assert len(syncs.rows) == len(chosen) and rates.rows == [("1", "20", "20"), ("8", "100", "100")]


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
    roles.change(model.parameters(), 0.01, version=3)
    changed = (model.weight.view(torch.int16) != before.view(torch.int16)).float().mean()
    assert 0.009 < changed < 0.0101
    roles.change(model.parameters(), 1.0, version=4)
    assert (model.weight != before).all()


def test_the_random_model_is_tied_and_random(monkeypatch):
    monkeypatch.setitem(roles.LAYOUTS, "135M", roles.LAYOUTS["135M"] | {"num_hidden_layers": 1, "vocab_size": 100})
    model = roles.random_model("135M", "bfloat16")
    assert WeightLayout.of(model).aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert all(p.dtype == torch.bfloat16 and 0.01 < p.float().std() < 0.03 for p in model.parameters())
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
