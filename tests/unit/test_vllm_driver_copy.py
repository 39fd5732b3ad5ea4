"""Messages, and what changed, into a server that reads neither: through the driver's copy. The fake server hashes as the plugin does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from aiohttp import web
from fake_vllm import LOGPROB, FakeVllm
from msgspec import structs
from test_weight_sync_packing import Toy
from vllm_bench import DEADLINE_S, LABELS, VOCABULARY, Bench, request, run

from slipstream.config.engine_problems import engine_problems
from slipstream.config.settings import Config
from slipstream.engines.vllm.driver_copy import CopiedWeights, DriverCopy
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.environment import PLUGIN
from slipstream.engines.vllm.loop import Weights
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.errors import WeightSyncError
from slipstream.launch.assemble_vllm import weight_engine
from slipstream.launch.assemble_weights import build_publisher, build_reader
from slipstream.launch.context import RunContext
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import Sampling, Span, decode, encode
from slipstream.weight_sync.ends import Reader
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, checksum
from slipstream.weight_sync.probe import NUM_TOKENS

NUM_SLOTS = 3
BYTES = 40  # of the model's first tensor: a damaged one in it is seen by every payload
WAYS = [("collective", "full"), ("shared_memory", "delta"), ("files", "delta"), ("collective", "delta")]


@pytest.fixture(autouse=True)
def plugin_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))


class Trainer:
    """A model, what sends it, and a driver's copy of it, chosen as a run chooses them."""

    def __init__(self, transport: str, payload: str, folder: Path):
        self.model, self.version = Toy(), -1
        settings = {"engine": {"type": "vllm"}, "weight_sync": {"transport": transport, "payload": payload}}
        self.context = RunContext(Config.model_validate(settings), folder, folder, 1, 0, run_id="run-a", sockets=str(folder))
        if self.context.weights is not None:
            self.context.weights.prepare()
        self.slots = [MemoryFile.create(f"slot-{i}") for i in range(NUM_SLOTS if transport == "shared_memory" else 0)]
        self.publisher = build_publisher(self.context, self.model, None, self.slots)  # type: ignore[arg-type]
        self.readers: list[Reader] = []
        self.copy = DriverCopy(self.reader)

    def reader(self, own: Source) -> Reader:
        self.readers.append(build_reader(self.context, own, "engine-0", self.slots))
        return self.readers[-1]

    def pack(self) -> WeightsOffer:
        """The next version."""
        self.version += 1
        slot = self.version % NUM_SLOTS
        manifest = structs.replace(self.publisher.pack(slot, 1, self.version), probe=(LOGPROB,) * (NUM_TOKENS - 1))
        return WeightsOffer(slot=slot, manifest=decode(encode(manifest), Manifest))

    def change(self) -> None:
        with torch.no_grad():
            self.model.embed[0, 0] += 1

    def block(self, offer: WeightsOffer) -> Any:
        """uint8: what the trainer wrote into the slot."""
        return (self.slots or self.publisher._slots)[offer.slot].map(writable=True)  # type: ignore[attr-defined]

    def copied(self) -> Any:
        """uint8: what lies in the copy."""
        return self.copy._memory.map(writable=True)

    def held(self) -> str:
        """The checksum of that."""
        return xxhash.xxh3_128_hexdigest(self.copied())

    def close(self) -> None:
        for each in (*self.readers, self.publisher):
            each.close()


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Any]:
    made: list[Trainer] = []

    def make(transport: str, payload: str) -> Trainer:
        made.append(Trainer(transport, payload, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


class ReadingVllm(FakeVllm):
    """Reads what it is named, as the plugin does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}

    async def _update_weights(self, body: Any) -> web.Response:
        from slipstream_vllm.block import Block, from_memory

        assert self.paused
        try:
            tensors, _ = from_memory(Block(**body["update_info"]))
        except ValueError as error:
            self.refusal = str(error)
        else:
            self.weights = {name: tensor.clone() for name, tensor in tensors.items()}
        return await super()._update_weights(body)


class CopyBench(Bench):
    """Over such a server, and a driver's copy."""

    trainer: Trainer
    fake: ReadingVllm

    def make(self, options: dict[str, Any]) -> tuple[VllmEngine, Weights]:
        engine = VllmEngine(self.client, **options)
        return engine, CopiedWeights(engine, ServerWeights(self.client, "policy", VOCABULARY, LABELS), self.trainer.copy)

    async def sync(self, offer: WeightsOffer | None = None) -> None:
        offer = offer or self.trainer.pack()
        self.controller.offers.put_nowait(offer)
        await self.until(self.controller.until_confirmed(offer.manifest.version))

    def check(self) -> None:
        """The server holds the trainer's bytes."""
        state = self.trainer.model.state_dict()
        assert self.fake.weights.keys() == state.keys() and self.fake.label == LABELS.of((1, self.trainer.version))
        assert all(torch.equal(tensor, state[name]) for name, tensor in self.fake.weights.items())
        assert self.controller.reports[-1].checksum == checksum(self.trainer.model)


def serve(tmp_path: Path, trainer: Trainer, body: Any) -> None:
    def make(*args: Any) -> CopyBench:
        return type("Made", (CopyBench,), {"trainer": trainer})(*args)

    run(tmp_path, body, make=make, fake=ReadingVllm)


# ---- what arrives


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_the_server_holds_the_trainers_bytes_and_stands_still_for_its_load_alone(trainer_of, tmp_path: Path, way: tuple[str, str]) -> None:
    trainer = trainer_of(*way)

    async def body(bench: CopyBench) -> None:
        for version in range(4):
            bench.fake.calls.clear()
            await bench.sync()
            bench.check()
            assert bench.fake.calls == [
                f"pause?mode=keep,clear_cache={str(version == 0).lower()}", "start_weight_update", "update_weights", "collective_rpc",
                "finish_weight_update", "resume",
            ]  # fmt: skip
            trainer.change()
        assert len(trainer.readers) == 1 and not any(report.repaired for report in bench.controller.reports)

    serve(tmp_path, trainer, body)


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_a_damaged_part_is_repaired_by_whole_weights_and_told(trainer_of, tmp_path: Path, transport: str) -> None:
    trainer = trainer_of(transport, "delta")

    async def body(bench: CopyBench) -> None:
        await bench.sync()
        trainer.change()
        offer = trainer.pack()
        trainer.block(offer)[offer.manifest.total_bytes + 1] ^= 1
        await bench.sync(offer)
        bench.check()
        assert "what changed up to version 1" in bench.controller.reports[1].repaired
        trainer.change()
        await bench.sync()
        bench.check()
        assert bench.controller.reports[2].repaired == ""

    serve(tmp_path, trainer, body)


def test_what_runs_goes_on_while_the_copy_is_written_and_while_an_evaluation_holds_it_back(trainer_of, tmp_path: Path, monkeypatch) -> None:
    trainer = trainer_of("collective", "delta")
    reached, let_go, written = (threading.Event() for _ in range(3))
    update = trainer.copy.update

    def slowly(offer: WeightsOffer) -> str:
        if offer.manifest.version == 0:
            return update(offer)
        reached.set()
        assert let_go.wait(DEADLINE_S)
        said = update(offer)
        written.set()
        return said

    monkeypatch.setattr(trainer.copy, "update", slowly)

    async def body(bench: CopyBench) -> None:
        await bench.sync()
        await bench.fake.allow(2)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=6)))
        await bench.until_sampled(into, 2)
        bench.fake.calls.clear()
        trainer.change()
        syncing = asyncio.ensure_future(bench.sync())
        await asyncio.to_thread(reached.wait, DEADLINE_S)
        await bench.fake.allow(2)
        await bench.until_sampled(into, 4)
        bench.engine.pin()
        let_go.set()
        await asyncio.to_thread(written.wait, DEADLINE_S)
        assert trainer.held() == checksum(trainer.model) != bench.engine.checksum
        assert bench.fake.calls == [] and bench.fake.label == LABELS.of((1, 0)), "written, and held back"
        bench.engine.unpin()
        await syncing
        bench.check()
        await bench.fake.allow(float("inf"))
        await bench.until(ended)
        assert into.spans == [Span(2, 6, 1, 0, "engine-0"), Span(6, 8, 1, 1, "engine-0")]

    serve(tmp_path, trainer, body)


# ---- what does not


async def refused(bench: CopyBench, offer: WeightsOffer, words: str, *, paused: bool) -> None:
    """The loop ends; the server goes on with what it held."""
    held, label = bench.fake.weights, bench.fake.label
    bench.fake.calls.clear()
    with pytest.raises(WeightSyncError, match=words):
        await bench.sync(offer)
    assert bench.fake.weights is held and bench.fake.label == label and not bench.fake.paused
    assert bool(bench.fake.calls) == paused


@pytest.mark.parametrize("payload", ["full", "delta"])
def test_bytes_that_are_damaged_on_their_way_never_reach_the_server_and_the_next_version_is_taken_whole(
    trainer_of, tmp_path: Path, payload: str
) -> None:
    trainer = trainer_of("collective", payload)

    async def body(bench: CopyBench) -> None:
        await bench.sync()
        trainer.change()
        offer = trainer.pack()
        trainer.block(offer)[BYTES] ^= 1
        trainer.block(offer)[-1] ^= payload == "delta"  # a part: neither it nor the whole block is sound
        await refused(bench, offer, "hashes to", paused=False)
        trainer.change()
        assert trainer.copy.update(next_one := trainer.pack()) == ""
        assert trainer.held() == next_one.manifest.checksum

    serve(tmp_path, trainer, body)


def test_a_delta_that_fails_half_way_leaves_nothing_that_the_next_one_is_put_upon(trainer_of, monkeypatch) -> None:
    trainer = trainer_of("shared_memory", "delta")
    trainer.copy.update(trainer.pack())
    (reader,) = trainer.readers

    def half(*args: Any, **options: Any) -> str:
        trainer.copied()[:BYTES] = 0
        raise WeightSyncError("half way")

    trainer.change()
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_lead_on", half)
        patch.setattr(reader, "_whole", half)
        with pytest.raises(WeightSyncError, match="half way"):
            trainer.copy.update(trainer.pack())
    trainer.change()
    offer = trainer.pack()
    assert offer.manifest.deltas and trainer.copy.update(offer) == "", "whole weights, as a matter of course"
    assert trainer.held() == offer.manifest.checksum


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"shape": (7, 6)}, "does not add up: .*shape"), ({"dtype": "no"}, "does not add up: 'no' is not a dtype"), ({"offset": 64}, "embed")],
)
def test_a_first_manifest_that_does_not_add_up(trainer_of, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    trainer = trainer_of("collective", "full")

    async def body(bench: CopyBench) -> None:
        offer = trainer.pack()
        first, *others = offer.manifest.entries
        manifest = structs.replace(offer.manifest, entries=(structs.replace(first, **changes), *others))
        await refused(bench, structs.replace(offer, manifest=manifest), words, paused=False)

    serve(tmp_path, trainer, body)


def test_a_later_manifest_of_another_model(trainer_of, tmp_path: Path) -> None:
    trainer = trainer_of("shared_memory", "delta")

    async def body(bench: CopyBench) -> None:
        await bench.sync()
        offer = trainer.pack()
        manifest = structs.replace(offer.manifest, entries=offer.manifest.entries[:-1])
        await refused(bench, structs.replace(offer, manifest=manifest), "count: this model has it, the trainer does not", paused=False)

    serve(tmp_path, trainer, body)


def test_a_copy_that_is_damaged_after_it_was_hashed_is_refused_by_the_server(trainer_of, tmp_path: Path) -> None:
    trainer = trainer_of("collective", "full")

    async def body(bench: CopyBench) -> None:
        await bench.sync()
        update = trainer.copy.update

        def damaging(offer: WeightsOffer) -> str:
            said = update(offer)
            trainer.copied()[3] ^= 1
            return said

        trainer.copy.update = damaging
        trainer.change()
        await refused(bench, trainer.pack(), "the server refuses weights 1.1: worker 0: .*the bytes received hash to", paused=True)

    serve(tmp_path, trainer, body)


@pytest.mark.parametrize(
    ("sync", "engine"),
    [
        ({}, "slipstream_shared_memory"),
        ({"transport": "files"}, "slipstream_files"),
        ({"transport": "files", "payload": "adapter"}, "slipstream_files"),
        ({"transport": "files", "payload": "delta"}, "slipstream_shared_memory"),
        ({"transport": "collective"}, "slipstream_shared_memory"),
        ({"transport": "collective", "payload": "adapter"}, "slipstream_shared_memory"),
        ({"transport": "collective", "payload": "delta"}, "slipstream_shared_memory"),
    ],
)
def test_what_a_server_is_started_with_and_nothing_is_refused(sync: dict[str, str], engine: str) -> None:
    settings = {"engine": {"type": "vllm"}, "rollout": {"kv": "recompute"}, "weight_sync": sync}
    config = Config.model_validate(settings | ({"lora": {"rank": 4}} if sync.get("payload") == "adapter" else {}))
    assert weight_engine(config) == engine and not list(engine_problems(config, trains=True))
