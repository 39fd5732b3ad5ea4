"""Payload `delta`: whatever comes in between, an engine holds the trainer's bytes; bad parts are repaired by whole weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from test_weight_sync_packing import Toy, engine

from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import decode, encode
from slipstream.weight_sync.collective import CollectivePublisher, CollectiveWeights
from slipstream.weight_sync.delta import PAGE, DeltaPublisher, DeltaWeights, first_delta, memory_delta_weights, place_of
from slipstream.weight_sync.delta_collective import CollectiveDeltaWeights
from slipstream.weight_sync.delta_files import FileDeltaPublisher, file_delta_weights
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import checksum
from slipstream.weight_sync.shared_memory import MemoryPublisher
from slipstream.weight_sync.slots import SlotBroker, slots_for
from slipstream.weight_sync.weight_directory import WeightDirectory

Tensors = dict[str, torch.Tensor]
TRANSPORTS = ("shared_memory", "files", "collective")
BUCKET_BYTES = 4096
NUM_SLOTS = slots_for(3)


class World:
    """A trainer over one transport, a broker, and engines that come and go."""

    def __init__(self, trainer, transport: str, folder: Path, dtype: torch.dtype | None = None):
        self.trainer, self.dtype, self.version, self.broker = trainer, dtype, -1, SlotBroker(NUM_SLOTS)
        self.slots: list[MemoryFile] = []
        self.directory = WeightDirectory(folder / "weights", "run-a") if transport == "files" else None
        self.sockets = str(folder) if transport == "collective" else None
        if self.directory is not None:
            self.directory.prepare()
            self.publisher = FileDeltaPublisher(trainer, self.directory, NUM_SLOTS, dtype)
        elif self.sockets is not None:
            self.publisher = CollectivePublisher(
                trainer, self.sockets, NUM_SLOTS, dtype, packer=DeltaPublisher, bucket_bytes=BUCKET_BYTES, deadline_s=60.0
            )
            self.slots = self.publisher._slots
        else:
            self.slots = [MemoryFile.create(f"slot-{i}") for i in range(NUM_SLOTS)]
            self.publisher = DeltaPublisher(trainer, self.slots, dtype)
        self.engines: dict[str, tuple[object, DeltaWeights]] = {}
        self.held: dict[str, int] = {}

    def publish(self) -> Manifest:
        self.version += 1
        slot = self.broker.begin_write()
        manifest = decode(encode(self.publisher.pack(slot, 1, self.version)), Manifest)
        self.broker.publish(slot, manifest)
        return manifest

    def pack_only(self) -> None:
        """As for a checkpoint of a version that is not published."""
        self.version += 1
        self.publisher.pack(self.broker.begin_write(), 1, self.version)

    def join(self, name: str, model) -> None:
        """A new engine, or an old one that starts anew."""
        self.leave(name)
        self.engines[name], self.held[name] = (model, self._weights(name, model)), -1

    def _weights(self, name: str, model) -> DeltaWeights:
        if self.directory is not None:
            return file_delta_weights(model, self.directory)
        if self.sockets is not None:
            whole = CollectiveWeights(model, self.sockets, name, bucket_bytes=BUCKET_BYTES, deadline_s=60.0)
            return CollectiveDeltaWeights(model, whole)
        return memory_delta_weights(model, self.slots)

    def leave(self, name: str) -> None:
        self.broker.drop_engine(name)
        if name in self.engines:
            self.engines.pop(name)[1].close()

    def lease(self, name: str) -> WeightsOffer | None:
        return self.broker.lease(name, 1, self.held[name])

    def adopt(self, name: str, offer: WeightsOffer) -> None:
        model, weights = self.engines[name]
        assert weights(offer) == offer.manifest.checksum == checksum(model)
        self.broker.give_back(name, offer.slot)
        self.held[name] = offer.manifest.version

    def sync(self, name: str) -> DeltaWeights:
        offer = self.lease(name)
        if offer is not None:
            self.adopt(name, offer)
        return self.engines[name][1]

    def close(self) -> None:
        for name in list(self.engines):
            self.leave(name)
        self.publisher.close()
        for slot in self.slots:
            slot.close()


@pytest.fixture(params=TRANSPORTS)
def world_of(request, tmp_path):
    worlds: list[World] = []

    def make(trainer, dtype: torch.dtype | None = None) -> World:
        worlds.append(World(trainer, request.param, tmp_path, dtype))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def counted(world: World, monkeypatch) -> list[int]:
    """Versions whose whole weights engines have read."""
    seen: list[int] = []
    for _, weights in world.engines.values():
        whole = weights._whole
        monkeypatch.setattr(weights, "_whole", lambda offer, whole=whole: (seen.append(offer.manifest.version), whole(offer))[1])
    return seen


def large(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A tensor of several pages, the last one short, between small ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3,), "b": (PAGE + 77,), "c": (1,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


# ---- what travels


def test_an_engine_that_holds_the_version_before_reads_only_what_changed(world_of, monkeypatch):
    trainer = large()
    world = world_of(trainer)
    world.join("e", large(1))
    whole = counted(world, monkeypatch)
    first = world.publish()
    assert first.deltas == () and first.changed_fraction is None
    world.sync("e")
    trainer["b"][[0, PAGE - 1, PAGE, PAGE + 76]] += 1
    trainer["c"] += 1
    second = world.publish()
    world.sync("e")
    assert whole == [0] and torch.equal(world.engines["e"][0]["b"], trainer["b"])
    assert len(second.deltas) == 1 and second.deltas[0].num_bytes == 4 * 4 + 5 * (2 + 2), "4 pages, 5 elements"
    assert second.changed_fraction == pytest.approx(5 / (PAGE + 81))


def test_what_the_whole_manifest_says_is_that_of_a_full_payload(world_of):
    world, memory = world_of(Toy(), torch.bfloat16), MemoryFile.create("slot")
    world.publish()
    manifest = world.publish()
    full = MemoryPublisher(Toy(), [memory], torch.bfloat16).pack(0, 1, 1)
    memory.close()
    assert encode(structs.replace(manifest, deltas=(), changed_fraction=None, whole=None)) == encode(full)


def test_an_engine_that_skipped_versions_reads_the_parts_of_all(world_of, monkeypatch):
    trainer = large()
    world = world_of(trainer)
    world.join("e", large(1))
    whole = counted(world, monkeypatch)
    world.publish()
    world.sync("e")
    for i in range(5):
        trainer["b"][i : i + 3] += 1  # an element changes more than once
        world.pack_only() if i % 2 else world.publish()
    assert world.held["e"] == 0
    world.sync("e")
    assert world.held["e"] == 5 and whole == [0]


def test_where_most_changes_whole_weights_are_taken(world_of, monkeypatch):
    trainer = large(dtype=torch.float32)
    world = world_of(trainer)
    world.join("e", large(1, torch.float32))
    whole = counted(world, monkeypatch)
    for _ in range(3):
        manifest = world.publish()
        world.sync("e")
        for tensor in trainer.values():
            tensor += 1e-3
    assert manifest.deltas == () and manifest.changed_fraction > 0.99 and whole == [0, 1, 2]


def test_parts_that_lie_too_far_back_are_dropped(world_of, monkeypatch):
    trainer = large()
    world = world_of(trainer)
    world.join("e", large(1))
    whole = counted(world, monkeypatch)
    world.publish()
    world.sync("e")
    for i in range(8):
        trainer["b"][i::25] += 1  # 4 % of the elements: about 8 % of the bytes
        manifest = world.publish()
    assert 2 <= len(manifest.deltas) <= 3 and first_delta(manifest, world.engines["e"][1]._held) is None
    before = len(whole)
    world.sync("e")
    assert len(whole) == before + 1 and world.engines["e"][1].refused == ""


@pytest.mark.parametrize("value", [math.nan, -0.0])
def test_elements_are_compared_as_bits(world_of, value):
    trainer = {"w": torch.zeros(64)}
    world = world_of(trainer)
    world.join("e", {"w": torch.ones(64)})
    world.publish()
    world.sync("e")
    trainer["w"][3] = value
    assert world.publish().changed_fraction == 1 / 64
    world.sync("e")
    assert world.publish().changed_fraction == 0, "it is equal to itself"
    world.sync("e")
    assert world.engines["e"][0]["w"].numpy().tobytes() == trainer["w"].numpy().tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_happens_engines_hold_the_trainers_bytes(transport, tmp_path_factory, data):
    """Perturbations, reverts, supersession, packs that are not published, engines that come, go, start anew and lag amid a lease."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    trainer = Toy()
    world = World(trainer, transport, tmp_path_factory.mktemp("world"), dtype)
    states = [{name: tensor.clone() for name, tensor in trainer.state_dict().items()}]
    leases: dict[str, WeightsOffer] = {}
    world.publish()
    for _ in range(data.draw(st.integers(1, 20))):
        name = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["perturb", "perturb", "revert", "pack", "join", "leave", "lease", "adopt", "adopt"])):
            case "perturb":
                with torch.no_grad():
                    tensor = trainer.state_dict()[data.draw(st.sampled_from(["embed", "scale", "proj", "router_bias", "count"]))]
                    tensor += data.draw(st.integers(1, 3)) * torch.randint(0, 2, tensor.shape)
                states.append({name: tensor.clone() for name, tensor in trainer.state_dict().items()})
                world.publish()
            case "revert":
                trainer.load_state_dict(data.draw(st.sampled_from(states)))
                world.publish()
            case "pack":
                trainer.scale.data += 1
                world.pack_only()
            case "join":
                leases.pop(name, None)
                world.join(name, engine(seed=2, dtype=dtype))
            case "leave":
                leases.pop(name, None)
                world.leave(name)
            case "lease" if name in world.engines and name not in leases:
                if (offer := world.lease(name)) is not None:
                    leases[name] = offer
            case "adopt" if name in world.engines:
                if (offer := leases.pop(name, None) or world.lease(name)) is not None:
                    world.adopt(name, offer)  # asserts the checksum of the engine's own copy
                    assert world.engines[name][1].refused == ""
    world.close()


def test_bfloat16_weights_are_exact_over_200_small_updates(world_of, monkeypatch):
    """Float32 masters, AdamW-like steps of 1e-6, sent in bfloat16: few elements change per version, and each version arrives."""
    masters = {name: 0.05 * tensor for name, tensor in large(dtype=torch.float32).items()}
    world = world_of(masters, torch.bfloat16)
    world.join("e", large(1))
    generator, fractions, sent = torch.Generator().manual_seed(0), [], []
    directions = {name: torch.randn(t.shape, generator=generator).sign() for name, t in masters.items()}
    whole = counted(world, monkeypatch)
    for _ in range(200):
        manifest = world.publish()
        world.sync("e")
        assert all(torch.equal(world.engines["e"][0][name], tensor.bfloat16()) for name, tensor in masters.items())
        fractions.append(manifest.changed_fraction)
        sent.append(manifest.deltas[-1].num_bytes if manifest.deltas else manifest.total_bytes)
        for name, tensor in masters.items():
            tensor.add_(directions[name], alpha=1e-6)
    assert max(fractions[1:]) < 0.05 and sum(sent[1:]) / 199 < 0.1 * sent[0] and whole == [0]


# ---- what is refused


def flip(data: np.ndarray, at: int) -> None:
    data[at] ^= 1


def sync_damaged(world: World, damage: Callable[[np.ndarray], None]) -> DeltaWeights:
    """The engine takes an offer whose newest part was damaged in its slot."""
    offer = world.lease("e")
    assert offer is not None
    damage(world.slots[offer.slot].map(writable=True)[place_of(offer.manifest, len(offer.manifest.deltas) - 1)])
    world.adopt("e", offer)
    return world.engines["e"][1]


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_a_flipped_byte_is_refused_before_anything_is_touched_and_whole_weights_repair_it(transport, tmp_path, monkeypatch):
    trainer = large()
    world = World(trainer, transport, tmp_path)
    world.join("e", model := large(1))
    world.publish()
    weights = world.sync("e")
    for at in (0, 30, -1):
        trainer["b"][:10] += 1
        world.publish()
        before, seen = checksum(model), []
        whole = weights._whole
        monkeypatch.setattr(weights, "_whole", lambda offer, whole=whole, seen=seen: (seen.append(checksum(model)), whole(offer))[1])
        assert "it was damaged on its way" in sync_damaged(world, lambda data, at=at: flip(data, at)).refused
        assert seen == [before], "the old weights were touched before"
        monkeypatch.setattr(weights, "_whole", whole)
        assert weights.refused
        trainer["b"][:10] += 1
        world.publish()
        assert world.sync("e").refused == "", "the part after it is used"
    world.close()


def test_weights_that_are_not_what_was_confirmed_are_repaired(world_of, monkeypatch):
    trainer = large()
    world = world_of(trainer)
    world.join("e", model := large(1))
    world.publish()
    world.sync("e")
    whole = counted(world, monkeypatch)
    model["b"][PAGE] += 1  # memory that failed
    trainer["a"] += 1
    world.publish()
    assert "this engine's copy hashes to" in world.sync("e").refused
    assert len(whole) == 1 and torch.equal(model["b"], trainer["b"])


def test_a_damaged_file_of_changes_leaves_the_old_weights(tmp_path):
    """Files hold whole weights only now and then, so nothing can repair this one: the engine ends with its cause, its weights as before."""
    trainer = large()
    world = World(trainer, "files", tmp_path)
    world.join("e", model := large(1))
    world.publish()
    world.sync("e")
    trainer["b"][:10] += 1
    world.publish()
    assert world.directory is not None
    path = world.directory.part(1, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = checksum(model)
    offer = world.lease("e")
    assert offer is not None
    with pytest.raises(WeightSyncError, match="damaged on its way"):
        world.engines["e"][1](offer)
    assert checksum(model) == before
    path.unlink()
    with pytest.raises(WeightSyncError, match=r"what changed is not to be had from .*1\.1\.delta\.safetensors"):
        world.engines["e"][1](offer)
    assert checksum(model) == before
    world.close()


def test_a_model_that_the_manifest_does_not_fit_is_not_touched(world_of):
    world = world_of(Toy())
    world.join("e", model := engine(width=6))
    world.publish()
    before = checksum(model)
    with pytest.raises(WeightSyncError, match="embed: shape is"):
        world.sync("e")
    assert checksum(model) == before


# ---- files


def test_whole_files_are_written_now_and_then_and_files_go_when_no_slot_needs_them(tmp_path):
    trainer = large()
    world = World(trainer, "files", tmp_path)
    world.join("e", large(1))
    assert world.directory is not None
    wholes = set()
    for i in range(30):
        trainer["b"][i::25] += 1
        world.publish()
        world.sync("e")
        names = {path.name for path in world.directory.path.iterdir()}
        wholes |= {name for name in names if "delta" not in name}
        world.join("new", large(2))
        world.sync("new")
        world.leave("new")
        assert len(names) <= 12, names
    assert 5 <= len(wholes) <= 15, "one for every few versions"
    world.directory.clear()
    assert list(world.directory.path.iterdir()) == []


# ---- messages


def test_only_what_changed_is_asked_for_and_it_is_here_before_it_is_applied(tmp_path, monkeypatch):
    trainer = large()
    world = World(trainer, "collective", tmp_path)
    world.join("e", model := large(1))
    weights = world.engines["e"][1]
    assert isinstance(weights, CollectiveDeltaWeights)
    asked, receive = [], weights._collective.receive
    monkeypatch.setattr(weights._collective, "receive", lambda offer, *place: (asked.append(place), receive(offer, *place))[1])
    first = world.publish()
    world.sync("e")
    for i in range(2):
        trainer["b"][i] += 1
        newest = world.publish()
    trainer["b"][:9] += 1  # not published
    offer, before = world.lease("e"), checksum(model)
    assert offer is not None
    weights.fetch(offer)
    assert asked == [(0, first.total_bytes), (first.total_bytes, sum(delta.num_bytes for delta in newest.deltas))]
    assert checksum(model) == before
    world.adopt("e", offer)
    assert len(asked) == 2
    world.close()
