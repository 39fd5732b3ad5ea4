"""Adapters on a vLLM server, against a fake one: every token is of the adapter that its version names, whatever the interrupt; places."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vllm import LOGPROB
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_bench import LABELS, VOCABULARY, Bench, manifest, request, run

from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.adapter_engine import AdapterEngine
from slipstream.engines.vllm.adapters import ServerAdapters
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.labels import StartedAnew, Version, adapter_name
from slipstream.engines.vllm.loop import Weights
from slipstream.engines.vllm.shelf import Shelf
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.errors import WeightSyncError
from slipstream.protocols import WeightsOffer
from slipstream.types import Purpose, Sampling, Span, StopReason
from slipstream.weight_sync.probe import NUM_TOKENS

PLACES = 3
SWAP = InterruptPolicy("in_flight", "recompute")
DRAIN = InterruptPolicy("drain")


def logprob_of(version: int) -> float:
    """What the fake server gives every token of that adapter: a token tells what sampled it."""
    return round(LOGPROB - 0.01 * version, 4)


class Folders:
    """In place of `adapter_files.AdapterFiles`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, offer: WeightsOffer) -> tuple[str, Path]:
        target = self.folder / adapter_name((offer.manifest.incarnation, offer.manifest.version))
        target.mkdir(parents=True)
        (target / "adapter_config.json").touch()
        return offer.manifest.checksum, target

    def remove(self, version: Version) -> None:
        (self.folder / adapter_name(version) / "adapter_config.json").unlink()
        (self.folder / adapter_name(version)).rmdir()

    @property
    def there(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


class AdapterBench(Bench):
    """The same over a server that has its base."""

    engine: AdapterEngine

    def make(self, options: dict[str, Any]) -> tuple[VllmEngine, Weights]:
        self.fake.label = LABELS.base
        engine = AdapterEngine(self.client, places=PLACES, **options)
        self.folders = Folders(Path(self.client.address.removeprefix("unix:")).parent / "adapters")
        self.adapters = ServerAdapters(engine, self.client, ServerWeights(self.client, "policy", VOCABULARY, LABELS), self.folders)
        return engine, self.adapters

    def offer(self, version: int) -> None:
        self.fake.logprobs[adapter_name((1, version))] = logprob_of(version)
        self.controller.publish(manifest(version, probe=(logprob_of(version),) * (NUM_TOKENS - 1)))

    async def publish(self, version: int, **changes: Any) -> None:
        self.offer(version)
        await self.until(self.controller.until_confirmed(version))

    def check_true(self) -> None:
        """Each token's version is that of the adapter that gave it its logprob."""
        for frame in self.frames:
            assert np.allclose(frame.logprobs, logprob_of(frame.version))


def adapters(tmp_path: Path, body: Any, policy: InterruptPolicy = SWAP, slots: int = 4) -> None:
    async def checked(bench: AdapterBench) -> None:
        await body(bench)
        bench.check_true()
        assert bench.fake.most_adapters <= PLACES

    run(tmp_path, checked, policy, slots, AdapterBench)


def long(group: int = 0, **changes: Any) -> Any:
    return request(group, sampling=Sampling(max_new_tokens=8), **changes)


# ---- a version comes


def test_a_version_is_loaded_under_its_own_name_and_nothing_is_paused(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        into, ended, _ = bench.open(request())
        await bench.publish(0)
        await bench.until(ended)
        assert bench.fake.calls == ["load_lora_adapter", "collective_rpc"]
        assert bench.fake.requests[0]["model"] == "policy-1-v0" and bench.fake.requests[0]["cache_salt"] == LABELS.of((1, 0))
        assert into.token_ids == [102, 103, 104, 105] and into.spans == [Span(2, 6, 1, 0, "engine-0")]
        assert into.prefill_version == (1, 0) and not into.recomputed
        assert [(r.version, r.checksum) for r in bench.controller.reports] == [(0, "hash-0")]

    adapters(tmp_path, body)


def test_what_an_earlier_driver_left_on_the_server_is_forgotten(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        bench.fake.adapters |= {"policy-1-v0": tmp_path, "somebody-elses": tmp_path}
        await bench.adapters.clear()
        assert list(bench.fake.adapters) == ["somebody-elses"]
        await bench.publish(0)

    adapters(tmp_path, body)


def test_a_version_that_the_server_refuses_leaves_it_what_it_has(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.publish(0)
        bench.fake.refusal = "No adapter found for /nowhere"
        with pytest.raises(WeightSyncError, match=r"the server refuses adapter 1\.1: .*No adapter found"):
            await bench.publish(1)
        assert list(bench.fake.adapters) == ["policy-1-v0"] and bench.engine.version == (1, 0)

    adapters(tmp_path, body)


def test_layers_that_the_server_would_silently_leave_out(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        bench.fake.unused = ["model.layers.0.mlp.down_proj"]
        with pytest.raises(WeightSyncError, match=r"without its part for model\.layers\.0\.mlp\.down_proj"):
            await bench.publish(0)

    adapters(tmp_path, body)


def test_a_version_that_fails_the_probe_is_sampled_by_nobody(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.publish(0)
        bench.fake.logprobs["policy-1-v1"] = -5.0
        bench.controller.publish(manifest(1))
        with pytest.raises(WeightSyncError, match=r"probe of weights 1\.1"):
            await bench.until(bench.controller.until_confirmed(1))
        assert bench.engine.version == (1, 0) and [r.version for r in bench.controller.reports] == [0]

    adapters(tmp_path, body)


# ---- what runs


def test_in_flight_goes_on_from_its_last_token_on_the_new_adapter(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.fake.allow(3)
        await bench.publish(0)
        into, ended, _ = bench.open(long())
        await bench.until_sampled(into, 3)
        await bench.publish(1)
        await bench.fake.allow(float("inf"))
        await bench.until(ended)
        assert into.token_ids == list(range(102, 110))
        assert into.spans == [Span(2, 5, 1, 0, "engine-0"), Span(5, 10, 1, 1, "engine-0")]
        assert into.recomputed and into.prefill_version == (1, 1)
        assert [r["model"] for r in bench.fake.requests] == ["policy-1-v0", "policy-1-v1"]
        assert bench.fake.requests[1]["sampling_params"]["max_tokens"] == 5

    adapters(tmp_path, body)


def test_drain_ends_on_its_adapter_and_keeps_nobody_from_the_new_one(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.fake.allow(2)
        await bench.publish(0)
        old, old_ended, _ = bench.open(long(0))
        await bench.until_sampled(old, 2)
        await bench.publish(1)
        new, new_ended, _ = bench.open(request(1))
        await bench.until_sampled(new, 2)  # beside the old one
        bench.fake.cut()  # and where the stream breaks off
        await bench.fake.allow(float("inf"))
        await bench.until(old_ended)
        await bench.until(new_ended)
        assert [s.version for s in old.spans] == [0] and [s.version for s in new.spans] == [1]
        assert old.token_ids == list(range(102, 110)) and not old.recomputed

    adapters(tmp_path, body, DRAIN)


@pytest.mark.parametrize("interrupt", ["abort_resume", "abort_retry"])
def test_aborted_sequences_come_back_on_the_new_adapter(tmp_path: Path, interrupt: str) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.fake.allow(3)
        await bench.publish(0)
        into, ended, _ = bench.open(long())
        await bench.until_sampled(into, 3)
        bench.offer(1)
        await bench.until(ended)
        assert into.stop_reason is StopReason.INTERRUPT and into.token_ids == [102, 103, 104]
        await bench.fake.allow(float("inf"))
        again = request(
            token_ids=np.array([1, 2, *into.token_ids], np.int32), num_sampled=3, oldest_version=0, sampling=Sampling(max_new_tokens=5)
        )
        into.stop_reason = None
        await bench.until(bench.router.open(bench.engine.submit(again), into))
        assert into.spans == [Span(2, 5, 1, 0, "engine-0"), Span(5, 10, 1, 1, "engine-0")]
        assert into.recomputed and into.prefill_version == (1, 1)

    adapters(tmp_path, body, InterruptPolicy(interrupt, "recompute"))


def test_interrupt_after_lets_the_young_end_on_their_adapter(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.fake.allow(2)
        await bench.publish(5)
        old, old_ended, _ = bench.open(long(0, oldest_version=3, num_sampled=1))
        young, young_ended, _ = bench.open(long(1))
        await bench.until_sampled(old, 2)
        await bench.until_sampled(young, 2)
        bench.offer(6)
        await bench.until(old_ended)
        assert old.stop_reason is StopReason.INTERRUPT
        await bench.fake.allow(float("inf"))
        await bench.until(young_ended)
        assert young.stop_reason is StopReason.LENGTH and [s.version for s in young.spans] == [5]

    adapters(tmp_path, body, InterruptPolicy("abort_resume", "recompute", 1))


def test_an_evaluation_runs_on_what_is_pinned_while_newer_ones_come(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.fake.allow(1)
        await bench.publish(0)
        assert bench.engine.pin() == (1, 0, "hash-0")
        evaluated, evaluated_ended, _ = bench.open(long(0, purpose=Purpose.EVAL))
        await bench.until_sampled(evaluated, 1)
        for version in (1, 2, 3, 4):
            await bench.publish(version)
        assert "policy-1-v0" in bench.fake.adapters
        late, late_ended, _ = bench.open(long(1, purpose=Purpose.EVAL))
        trained, trained_ended, _ = bench.open(long(2))
        await bench.fake.allow(float("inf"))
        for ended in (evaluated_ended, late_ended, trained_ended):
            await bench.until(ended)
        assert [[s.version for s in into.spans] for into in (evaluated, late, trained)] == [[0], [0], [4]]
        bench.engine.unpin()
        for version in (5, 6, 7):
            await bench.publish(version)
        assert "policy-1-v0" not in bench.fake.adapters

    adapters(tmp_path, body)


# ---- places


def test_a_version_waits_for_a_place_and_for_no_more(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.fake.allow(1)
        running = []
        for version in range(PLACES):
            await bench.publish(version)
            into, ended, handle = bench.open(long(version))
            await bench.until_sampled(into, 1)
            running.append((into, ended, handle))
        bench.offer(PLACES)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await bench.until(bench.controller.until_confirmed(PLACES))
        assert bench.fake.adapters.keys() == {"policy-1-v0", "policy-1-v1", "policy-1-v2"}
        bench.engine.cancel(running[1][2])
        await bench.until(bench.controller.until_confirmed(PLACES))
        assert bench.fake.adapters.keys() == {"policy-1-v0", "policy-1-v2", "policy-1-v3"}
        await bench.fake.allow(float("inf"))
        for _, ended, _ in (running[0], running[2]):
            await bench.until(ended)
        assert [running[0][0].spans[0].version, running[2][0].spans[0].version] == [0, 2]

    adapters(tmp_path, body, DRAIN)


def test_folders_go_one_version_after_their_adapter(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        for version in range(6):
            await bench.publish(version)
        assert list(bench.fake.adapters) == ["policy-1-v3", "policy-1-v4", "policy-1-v5"]
        assert bench.folders.there == ["policy-1-v2", "policy-1-v3", "policy-1-v4", "policy-1-v5"]

    adapters(tmp_path, body)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(("put", "need", "release")), st.integers(0, 5)), max_size=40), places=st.integers(2, 5))
def test_no_more_than_its_places_and_never_without_what_is_needed(steps: list[tuple[str, int]], places: int) -> None:
    shelf, needed, newest = Shelf(places), [], 0
    shelf.put((1, 0))
    for what, which in steps:
        if what == "put":
            while shelf.full and (version := shelf.unneeded()) is not None:
                shelf.evict(version)
            if not shelf.full:
                newest += 1
                shelf.put((1, newest))
            else:
                assert {version for version, _ in needed} >= set(shelf.held[:-1]), "it waits only where all are needed"
        elif what == "need":
            version = shelf.held[which % len(shelf.held)]
            hold = shelf.needing(version)
            hold.__enter__()
            needed.append((version, hold))
        elif needed:
            needed.pop(which % len(needed))[1].__exit__(None, None, None)
        assert len(shelf.held) <= places and shelf.held[-1] == (1, newest)
        assert {version for version, _ in needed} <= set(shelf.held)


@pytest.mark.parametrize("policy", [SWAP, DRAIN, InterruptPolicy("abort_resume", "recompute", 1)], ids=lambda p: p.interrupt)
@pytest.mark.parametrize("seed", range(3))
def test_versions_are_true_under_any_order_of_events(tmp_path: Path, policy: InterruptPolicy, seed: int) -> None:
    async def body(bench: AdapterBench) -> None:
        chance, opened, version = random.Random(seed), [], 0
        await bench.publish(0)
        for number in range(30):
            event = chance.choice(("open", "open", "publish", "allow", "cut", "cancel", "pin"))
            if event == "open":
                pinned = bench.engine._pinned is not None and chance.random() < 0.5
                opened.append(bench.open(long(number, purpose=Purpose.EVAL if pinned else Purpose.TRAIN)))
            elif event == "publish":
                await bench.fake.allow(float("inf"))  # so that a place comes free
                version += 1
                await bench.publish(version)
            elif event == "allow":
                await bench.fake.allow(chance.randrange(4))
            elif event == "cut":
                bench.fake.cut()
            elif event == "cancel" and opened:
                bench.engine.cancel(opened.pop(chance.randrange(len(opened)))[2])
            elif event == "pin":
                if bench.engine._pinned is None:
                    bench.engine.pin()
                else:
                    bench.engine.unpin()
            await asyncio.sleep(0)
        await bench.fake.allow(float("inf"))
        for into, ended, _ in opened:
            await bench.until(ended)
            assert into.token_ids == list(range(102, 102 + len(into.token_ids)))

    adapters(tmp_path, body, policy, slots=3)


# ---- a server that is not what it was


def test_a_server_that_was_started_anew_behind_our_back(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.publish(0)
        bench.fake.adapters.clear()
        _, ended, _ = bench.open(request())
        with pytest.raises(StartedAnew, match=r"holds nothing of that name: it has been started anew.*policy-1-v0"):
            await bench.until(ended)

    adapters(tmp_path, body)


def test_a_base_that_this_run_did_not_give_it(tmp_path: Path) -> None:
    async def body(bench: AdapterBench) -> None:
        await bench.publish(0)
        bench.fake.label = "another-run:engine-0:base"
        into, ended, _ = bench.open(request())
        with pytest.raises(WeightSyncError, match="taken by engine-0 of run another-run"):
            await bench.until(ended)
        assert into.token_ids == []

    adapters(tmp_path, body)


@pytest.mark.parametrize(("label", "error"), [("default", StartedAnew), ("another-run:engine-0:base", WeightSyncError)])
def test_an_adapter_is_loaded_over_this_runs_base_alone(tmp_path: Path, label: str, error: type[Exception]) -> None:
    """A server that was started anew while nothing ran would take it, and compute with noise below it."""

    async def body(bench: AdapterBench) -> None:
        await bench.publish(0)
        bench.fake.label = label
        bench.fake.calls.clear()
        with pytest.raises(error):
            await bench.publish(1)
        assert bench.fake.calls == [] and [r.version for r in bench.controller.reports] == [0]

    adapters(tmp_path, body)
