"""What the benchmarks of overhead and scale could get wrong by themselves: exponents, shares, and stand-ins that do not do all the work."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import numpy as np
import pytest

from slipstream.controller.accounts import check_accounts
from slipstream.controller.ledger import LedgerReader
from slipstream.types import GenerateRequest, Purpose, Sampling

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GROUP_SIZE, TOKENS = 4, 96


@pytest.fixture(autouse=True)
def benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name: str):
    return importlib.import_module(name)


def test_an_exponent_is_the_power_of_the_size() -> None:
    exponent = load("scale").exponent
    sizes = [10, 100, 1_000]
    assert exponent(sizes, [7 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [7, 7, 7]) == pytest.approx(0)


def test_a_long_run_is_judged_by_the_slopes_of_its_looks_without_what_a_resume_takes() -> None:
    scale, long_run, bench = load("scale"), load("long_run"), load("bench")
    looks = [long_run.Look(s, 0.01 * s + (5.0 if s > 500 else 0.0), 64_000_000 + 250 * s, 1_000) for s in range(100, 1_100, 100)]
    tables = {step: {name: (step, 100 * step) for name in ("events", "groups", "prefixes")} for step in (500, 1_000)}
    left = long_run.Left(looks, [long_run.Resume(500, 10_000, 5.0), long_run.Resume(1_000, 20_000, 10.0)], tables)
    report = bench.Report("scale", short=True)
    scale.long_run_tables(report, left)
    measured = {target.what.partition(",")[0]: target for target in report.targets}
    assert float(measured["CPU per step"].measured.split()[0]) == pytest.approx(0, abs=1e-6)
    assert measured["resident memory of the long run"].measured == "0.25 KB per step"
    assert measured["resume: exponent over events"].reached


def test_lengths_are_spread_evenly_around_their_mean() -> None:
    length_of = load("free_roles").length_of
    lengths = [length_of(group, sample, 512) for group in range(500) for sample in range(8)]
    assert 256 <= min(lengths) < 270 and 750 < max(lengths) < 768
    assert np.mean(lengths) == pytest.approx(512, rel=0.02)


def test_settings_put_as_many_rollouts_in_flight_as_asked_for_and_leave_the_rest_as_shipped() -> None:
    from slipstream.config import Config
    from slipstream.config.arithmetic import max_groups_in_flight

    config = load("free_roles").settings(1_008, 8, 512, 3)
    assert max_groups_in_flight(config) * 8 == 1_008 and config.engine.slots == 1_008
    for table in ("buffer", "checkpoint", "ledger", "metrics", "weight_sync"):
        assert getattr(config, table) == getattr(Config(), table)


@pytest.mark.parametrize("worker", ["groups", "worker"])
def test_every_rollout_of_a_run_is_recorded_token_by_token_and_trained_once(worker: str, tmp_path: Path) -> None:
    free, runs = load("free_roles"), load("measured_runs")
    spec = runs.Spec(16, 4, worker, group_size=GROUP_SIZE, tokens=TOKENS, tables={"ledger": {"keep": "all"}})
    steps, per_step = spec.config.trainer.steps, spec.config.trainer.groups_per_step
    meter = runs.Meter()
    controller = free.open_run(tmp_path / "run", spec.config, meter.mark)
    meter.watch_commits(controller)
    asyncio.run(runs._in_one_process(spec, controller, meter))
    controller.close()
    with LedgerReader.open(controller.folder.ledger) as ledger:
        assert check_accounts(ledger).counts == {"trained": steps * per_step}
        for group_id in range(steps * per_step):
            group = ledger.group(group_id, 0)
            assert [r.num_sampled_tokens for r in group.rollouts] == [free.length_of(group_id, s, TOKENS) for s in range(GROUP_SIZE)]
            if worker == "groups":  # the real worker's recorder may be overtaken by the end of a group
                assert [len(p.token_ids) for p in ledger.prefixes(group_id, lambda sample: 0)] == [
                    len(r.token_ids) - 64 for r in group.rollouts
                ]
    cost = runs._cost(spec, meter, 0.0)
    assert cost.num_rollouts == 4 * per_step * GROUP_SIZE and cost.num_commits >= 4 and cost.cost_us > 0


def test_the_free_engine_gives_every_request_its_own_number_of_tokens() -> None:
    free = load("free_roles")
    engine = free.FreeEngine(TOKENS)
    requests = [request(group, sample, min_version=group) for group in range(2) for sample in range(3)]
    handles = {engine.submit(r): r for r in requests}
    assert not engine.has_work(), "no weights yet"
    engine.set_version(1, 0, "x")
    counts = dict.fromkeys(handles, 0)
    while engine.has_work():
        for handle in engine.tick().handles.tolist():
            counts[handle] += 1
    assert [counts[h] for h, r in handles.items() if r.group_id == 1] == [0, 0, 0], "they wait for version 1"
    engine.set_version(1, 1, "y")
    while engine.has_work():
        for handle in engine.tick().handles.tolist():
            counts[handle] += 1
    assert list(counts.values()) == [free.length_of(r.group_id, r.sample, TOKENS) for r in requests]
    assert engine.handle(requests[0].key) is None


def test_a_commit_stands_for_a_second_of_the_virtual_clock() -> None:
    runs = load("measured_runs")
    assert runs.calls_per_second(runs.Spec(16, 1)) == pytest.approx(50 * 2 * (12 + 7) / 768)  # two groups: 12 chunks, 7 more ends
    assert runs.calls_per_second(runs.Spec(10_000, 1)) == 50, "calls of one turn are one"


def request(group_id: int, sample: int, min_version: int) -> GenerateRequest:
    return GenerateRequest(
        group_id=group_id,
        sample=sample,
        attempt=0,
        turn=0,
        purpose=Purpose.TRAIN,
        token_ids=np.arange(5, dtype=np.int32),
        prompt_length=5,
        num_sampled=0,
        sampling=Sampling(max_new_tokens=2 * TOKENS),
        stop_token_ids=(),
        min_version=min_version,
    )
