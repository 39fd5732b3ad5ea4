"""Packing: the engine's own copy is byte for byte what the trainer packed, or an error names the first difference."""

from __future__ import annotations

import weakref

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest
from slipstream.tensors import LazyTensors, Made, outline
from slipstream.types import decode, encode
from slipstream.weight_sync.hashed_copy import CHUNK_BYTES, hashed_copy
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import ALIGNMENT, WeightLayout, WeightSet, checksum
from slipstream.weight_sync.shared_memory import MemoryPublisher


class Toy(nn.Module):
    """Odd sizes, a tie, a persistent and a non-persistent buffer, a scalar, an integer."""

    def __init__(self, seed: int = 0, width: int = 5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(7, width, generator=generator))
        self.scale = nn.Parameter(torch.randn((), generator=generator))
        self.proj = nn.Parameter(torch.randn(width, 3, generator=generator).t())  # not contiguous
        self.head = self.embed
        self.register_buffer("router_bias", torch.randn(3, generator=generator))
        self.register_buffer("count", torch.tensor([seed], dtype=torch.int64))
        self.register_buffer("inv_freq", torch.full((4,), float(seed)), persistent=False)


@pytest.fixture
def slots():
    files = [MemoryFile.create(f"slot-{i}") for i in range(3)]
    yield files
    for file in files:
        file.close()


def engine(seed: int = 1, dtype: torch.dtype = torch.float32, width: int = 5) -> Toy:
    model = Toy(seed, width)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def test_layout_holds_each_storage_once():
    layout = WeightLayout.of(Toy())
    assert [e.name for e in layout.entries] == ["embed", "scale", "proj", "router_bias", "count"]
    assert layout.aliases == {"head": "embed"}
    assert all(e.offset % ALIGNMENT == 0 for e in layout.entries) and layout.total_bytes % ALIGNMENT == 0
    ends = [e.offset + e.nbytes for e in layout.entries]
    assert all(end <= e.offset for end, e in zip(ends, layout.entries[1:], strict=False)) and ends[-1] <= layout.total_bytes


def test_tensors_that_are_made_when_asked_for_are_made_one_at_a_time(slots) -> None:
    """The same bytes and ties as those that are held."""
    held = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.arange(3.0), "d": torch.full((4,), 2.0)}
    held["tied"] = held["b"]
    alive: list[weakref.ref[torch.Tensor]] = []

    def made(name: str, like: torch.Tensor) -> Made:
        def make() -> torch.Tensor:
            assert all(made() is None for made in alive), "another one is held"
            tensor = held[name].clone()
            alive.append(weakref.ref(tensor))
            return tensor

        return Made(like, make)

    outlines = {name: outline(held[name].shape, held[name].dtype) for name in "bd"}
    outlines["tied"] = outlines["b"]
    lazy = LazyTensors({name: made(name, outlines[name]) if name in outlines else tensor for name, tensor in held.items()})
    found, expected = WeightLayout.of(lazy), WeightLayout.of(held)
    assert encode(found.manifest(1, 0, "")) == encode(expected.manifest(1, 0, "")) and found.aliases == {"tied": "b"} and not alive
    assert checksum(lazy) == checksum(held) == MemoryPublisher(lambda: lazy, slots).pack(0, 1, 0).checksum
    assert len(alive) == 4


def test_only_floating_parameters_are_cast():
    dtypes = {e.name: e.dtype for e in WeightLayout.of(Toy(), torch.bfloat16).entries}
    assert dtypes == {"embed": "bfloat16", "scale": "bfloat16", "proj": "bfloat16", "router_bias": "float32", "count": "int64"}


def test_empty_tensors_are_not_taken_for_tied_ones():
    layout = WeightLayout.of({"a": torch.empty(0), "b": torch.empty(0)})
    assert [e.name for e in layout.entries] == ["a", "b"] and layout.aliases == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(slots, dtype):
    trainer, model = Toy(seed=0), engine(seed=1, dtype=dtype)
    kept = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    publisher, weights = MemoryPublisher(trainer, slots, dtype), WeightSet(model)
    manifest = decode(encode(publisher.pack(2, incarnation=1, version=4)), Manifest)

    assert weights.apply(slots[2].map(), manifest) == manifest.checksum

    for name, tensor in trainer.state_dict().items():
        expected = tensor if name in ("router_bias", "count") else tensor.to(dtype)
        assert torch.equal(model.state_dict()[name], expected), name
    assert model.head is model.embed, "the tie was broken"
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == kept, "a tensor was replaced"
    assert torch.equal(model.inv_freq, torch.full((4,), 1.0)), "a non-persistent buffer was sent"


def test_checksum_is_of_the_packed_bytes(slots):
    trainer = Toy()
    manifest = MemoryPublisher(trainer, slots, torch.bfloat16).pack(0, 1, 0)
    block = slots[0].map()[: manifest.total_bytes]
    assert manifest.checksum == xxhash.xxh3_128_hexdigest(block.data) == checksum(trainer, torch.bfloat16)
    assert manifest.checksum != checksum(trainer), "the cast changes the bytes"


def test_gaps_are_zero_whatever_the_slot_held(slots):
    publisher = MemoryPublisher(Toy(), slots)
    first = publisher.pack(0, 1, 0)
    slots[1].resize(first.total_bytes + 4096)
    slots[1].map(writable=True)[:] = 255
    assert publisher.pack(1, 1, 1).checksum == first.checksum


def test_same_weights_same_checksum_other_weights_another(slots):
    trainer = Toy()
    publisher = MemoryPublisher(trainer, slots)
    first = publisher.pack(0, 1, 0)
    assert publisher.pack(1, 1, 1).checksum == first.checksum
    with torch.no_grad():
        trainer.scale += 1
    assert publisher.pack(2, 1, 2).checksum != first.checksum


def test_slot_memory_is_made_once(slots):
    publisher = MemoryPublisher(Toy(), slots)
    publisher.pack(0, 1, 0)
    block = slots[0].map(writable=True)
    publisher.pack(0, 1, 1)
    assert slots[0].map(writable=True) is block


def test_publisher_follows_replaced_parameters(slots):
    trainer = Toy()
    publisher = MemoryPublisher(trainer, slots)
    before = publisher.pack(0, 1, 0)
    trainer.scale.data = trainer.scale.data + 1
    assert publisher.pack(1, 1, 1).checksum == checksum(trainer) != before.checksum


MISFITS = {
    "another shape": (lambda: engine(width=6), r"embed: shape is \(7, 6\) here and \(7, 5\) at the trainer"),
    "another dtype": (lambda: engine(dtype=torch.bfloat16), "embed: dtype is bfloat16 here and float32 at the trainer"),
    "a missing tensor": (lambda: {k: v for k, v in engine().state_dict().items() if k != "count"}, "count: the trainer sends it"),
    "one too many": (lambda: {**engine().state_dict(), "extra": torch.ones(1)}, "extra: this model has it"),
    "untied": (lambda: _untied(), "head: this model has it"),
}


def _untied() -> Toy:
    model = engine()
    model.head = nn.Parameter(model.embed.detach().clone())
    return model


@pytest.mark.parametrize("case", MISFITS)
def test_a_misfit_is_named_before_anything_is_touched(slots, case):
    make, message = MISFITS[case]
    model = make()
    weights = WeightSet(model)
    before = weights.checksum()
    manifest = MemoryPublisher(Toy(), slots).pack(0, 1, 3)
    with pytest.raises(WeightSyncError, match=message) as caught:
        weights.apply(slots[0].map(), manifest)
    assert "1.3" in str(caught.value)
    assert weights.checksum() == before


def test_other_aliases_are_a_misfit(slots):
    manifest = MemoryPublisher(Toy(), slots).pack(0, 1, 0)
    with pytest.raises(WeightSyncError, match="head is tied to embed only here"):
        WeightSet(engine()).apply(slots[0].map(), msgspec.structs.replace(manifest, aliases={}))


def test_short_block_is_refused(slots):
    manifest = MemoryPublisher(Toy(), slots).pack(0, 1, 0)
    with pytest.raises(WeightSyncError, match="the slot holds 64 bytes"):
        WeightSet(engine()).apply(slots[0].map()[:64], manifest)


def test_one_flipped_bit_is_caught(slots):
    manifest = MemoryPublisher(Toy(), slots).pack(0, 1, 0)
    slots[0].map(writable=True)[4] ^= 1
    with pytest.raises(WeightSyncError, match="this engine's copy hashes to"):
        WeightSet(engine()).apply(slots[0].map(), manifest)


def test_the_engine_hashes_its_own_copy(slots):
    """The block is intact, the copy is not: hashing the block would miss it."""
    manifest = MemoryPublisher(Toy(), slots).pack(0, 1, 0)

    model = engine()
    weights = WeightSet(model)
    assert weights.apply(slots[0].map(), manifest) == manifest.checksum
    with torch.no_grad():
        model.proj[0, 0] += 1
    assert weights.checksum() != manifest.checksum
    assert xxhash.xxh3_128_hexdigest(slots[0].map()[: manifest.total_bytes].data) == manifest.checksum


def test_state_that_is_not_a_tensor_is_refused():
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(WeightSyncError, match="_extra_state of the model's state is a dict"):
        WeightLayout.of(Extra())


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_hashed_copy_equals_a_copy_and_a_hash(num_bytes):
    source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    target, hasher = np.zeros(num_bytes, np.uint8), xxhash.xxh3_128()
    hashed_copy(target, source, hasher)
    assert np.array_equal(target, source) and hasher.hexdigest() == xxhash.xxh3_128_hexdigest(source.data)


def test_tensors_that_overlap_in_the_engine_are_caught(slots):
    """Each is what was sent when it is copied; the second one overwrites part of the first."""
    memory = torch.zeros(96)
    trainer = {"a": torch.zeros(64), "b": torch.ones(64)}
    manifest = MemoryPublisher(trainer, slots).pack(0, 1, 0)
    assert WeightSet({"a": memory[:32].repeat(2), "b": memory[32:]}).apply(slots[0].map(), manifest) == manifest.checksum
    with pytest.raises(WeightSyncError, match="this engine's copy hashes to"):
        WeightSet({"a": memory[:64], "b": memory[32:]}).apply(slots[0].map(), manifest)
