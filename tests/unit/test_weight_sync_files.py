"""Weights as files: the same bytes and checksums as through shared memory; what is not whole or not meant is refused."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from test_weight_sync_packing import Toy, engine

from slipstream.errors import RunFolderError, WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import decode, encode
from slipstream.weight_sync.files import FilePublisher, FileWeights
from slipstream.weight_sync.hashed_copy import CHUNK_BYTES
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import WeightLayout, WeightSet, checksum
from slipstream.weight_sync.safetensors_header import places
from slipstream.weight_sync.shared_memory import MemoryPublisher
from slipstream.weight_sync.slots import SlotBroker, slots_for
from slipstream.weight_sync.weight_directory import WeightDirectory, check_room

SLOTS = slots_for(1)


@pytest.fixture
def directory(tmp_path: Path) -> WeightDirectory:
    out = WeightDirectory(tmp_path / "a" / "weights", "run-a")
    out.prepare()
    return out


def pack(directory: WeightDirectory, source, version: int = 4, dtype: torch.dtype | None = None) -> Manifest:
    manifest = FilePublisher(source, directory, SLOTS, dtype).pack(0, incarnation=1, version=version)
    return decode(encode(manifest), Manifest)


def offer(manifest: Manifest, slot: int = 0) -> WeightsOffer:
    return WeightsOffer(slot=slot, manifest=manifest)


def names(directory: WeightDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir())


# ---- what travels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(directory, dtype):
    trainer, model = Toy(seed=0), engine(seed=1, dtype=dtype)
    kept = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    manifest = pack(directory, trainer, dtype=dtype)
    assert FileWeights(model, directory)(offer(manifest)) == manifest.checksum
    for name, tensor in trainer.state_dict().items():
        expected = tensor if name in ("router_bias", "count") else tensor.to(dtype)
        assert torch.equal(model.state_dict()[name], expected), name
    assert model.head is model.embed, "the tie was broken"
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == kept, "a tensor was replaced"
    assert torch.equal(model.inv_freq, torch.full((4,), 1.0)), "a non-persistent buffer was sent"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_manifest_is_that_of_shared_memory(directory, dtype):
    memory = MemoryFile.create("slot")
    expected = MemoryPublisher(Toy(), [memory], dtype).pack(0, incarnation=1, version=4)
    memory.close()
    assert encode(pack(directory, Toy(), dtype=dtype)) == encode(expected)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_tensors_of_any_length_between_others(directory, num_bytes):
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    trainer = {"a": torch.ones(3), "data": data, "z": torch.arange(5)}
    model = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    assert FileWeights(model, directory)(offer(pack(directory, trainer))) == checksum(trainer)
    assert all(torch.equal(model[name], tensor) for name, tensor in trainer.items())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_tensors_arrive_and_any_reader_reads_them(tmp_path_factory, described):
    directory = WeightDirectory(tmp_path_factory.mktemp("weights"), "run-a")
    trainer = {f"t{i}": torch.randint(0, 100, shape).to(dtype) for i, (shape, dtype) in enumerate(described)}
    model = {name: torch.zeros_like(tensor) for name, tensor in trainer.items()}
    manifest = pack(directory, trainer)
    assert FileWeights(model, directory)(offer(manifest)) == manifest.checksum
    with safe_open(directory.file(1, 4), framework="pt") as file:
        assert set(file.keys()) == set(trainer)
        assert all(torch.equal(file.get_tensor(name), tensor) and torch.equal(model[name], tensor) for name, tensor in trainer.items())
    shutil.rmtree(directory.path)


def test_the_file_says_what_it_is_and_holds_ties_once(directory):
    manifest = pack(directory, Toy(), dtype=torch.bfloat16)
    with safe_open(directory.file(1, 4), framework="pt") as file:
        assert file.metadata() == {
            "format": "pt", "run": "run-a", "incarnation": "1", "version": "4", "checksum": manifest.checksum, "head": "embed",
        }  # fmt: skip
        assert set(file.keys()) == {"embed", "scale", "proj", "router_bias", "count"}
    model = engine(seed=1, dtype=torch.bfloat16)
    load_model(model, str(directory.file(1, 4)))
    assert checksum(model) == manifest.checksum


def test_perturb_and_revert_give_the_same_bytes(directory):
    trainer, model = Toy(), engine()
    weights, publisher = FileWeights(model, directory), FilePublisher(trainer, directory, SLOTS)
    seen, files, start = [], [], trainer.router_bias[0].item()
    for version, value in enumerate((start, start + 1, start)):
        trainer.router_bias[0] = value
        seen.append(weights(offer(publisher.pack(version, 1, version))))
        files.append(directory.file(1, version).read_bytes())
        assert {name: t.tolist() for name, t in model.state_dict().items()} == {
            name: t.tolist() for name, t in trainer.state_dict().items()
        }
    assert seen[0] == seen[2] != seen[1]
    assert files[0].replace(b'"version":"0"', b'"version":"2"') == files[2] != files[1]


def test_a_dtype_that_the_format_does_not_know_is_refused_at_the_start(directory):
    with pytest.raises(WeightSyncError, match=r'w is complex128.*use weight_sync.transport = "shared_memory"'):
        FilePublisher({"w": torch.zeros(2, dtype=torch.complex128)}, directory, SLOTS)


# ---- what is refused


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_in_the_header(path: Path) -> None:
    os.truncate(path, 20)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def foreign(path: Path) -> None:
    path.write_bytes(b"#!/bin/sh\necho this is no file of weights\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def another_run(path: Path) -> None:
    other = WeightDirectory(path.parent / "other", "run-b")
    other.prepare()
    pack(other, Toy(seed=5))
    shutil.copy(other.file(1, 4), path)


def another_version(path: Path) -> None:
    os.rename(path, path.with_name("kept"))
    pack(WeightDirectory(path.parent, "run-a"), Toy(), version=5)
    os.rename(path.with_name("1.5.safetensors"), path)


def rewritten(change) -> object:
    """The same metadata over other tensors."""

    def damage(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}
        change(tensors)
        save_file(tensors, path, metadata)

    return damage


REFUSALS = {
    "missing": (Path.unlink, "it is missing; is .* the same directory for trainer and engine"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "it cannot be read"),
    "empty": (empty, "not a safetensors file: it has 0 bytes"),
    "cut short": (cut, r"it has \d+ bytes, its header tells of \d+: it was cut short"),
    "cut in the header": (cut_in_the_header, "not a safetensors file: it ends within its header"),
    "longer": (longer, "was cut short or written to"),
    "another kind of file": (foreign, "not a safetensors file"),
    "another run's": (another_run, "of other weights: checksum is"),
    "another version": (another_version, "of other weights: version is 5, published was 4"),
    "a tensor less": (rewritten(lambda tensors: tensors.pop("count")), "count is not in it"),
    "a tensor more": (rewritten(lambda tensors: tensors.update(extra=torch.ones(1))), "extra is in it and not in the manifest"),
    "another shape": (rewritten(lambda tensors: tensors.update(embed=torch.ones(5, 7))), r"embed is F32\[5, 7\].*F32\[7, 5\]"),
    "another dtype": (rewritten(lambda tensors: tensors.update(embed=torch.ones(7, 5).half())), r"embed is F16\[7, 5\]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_file_that_is_not_these_weights_is_named_before_anything_is_touched(directory, case):
    damage, message = REFUSALS[case]
    manifest, model = pack(directory, Toy()), engine()
    damage(directory.file(1, 4))
    before = checksum(model)
    with pytest.raises(WeightSyncError, match=message) as caught:
        FileWeights(model, directory)(offer(manifest))
    assert str(caught.value).startswith(f"weights 1.4 in {directory.file(1, 4)} are refused") and "--resume" in str(caught.value)
    assert checksum(model) == before


def test_a_model_that_the_manifest_does_not_fit_is_not_touched(directory):
    model = engine(width=6)
    before = checksum(model)
    with pytest.raises(WeightSyncError, match=r"embed: shape is \(7, 6\) here and \(7, 5\) at the trainer"):
        FileWeights(model, directory)(offer(pack(directory, Toy())))
    assert checksum(model) == before


def test_any_flipped_bit_is_caught(directory):
    manifest = pack(directory, Toy())
    path, choose = directory.file(1, 4), random.Random(0)
    whole = path.read_bytes()
    header = len(whole) - sum(entry.nbytes for entry in manifest.entries)
    for at in (header, len(whole) - 1, *(choose.randrange(header, len(whole)) for _ in range(20))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << choose.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(WeightSyncError, match="this engine's copy hashes to"):
            FileWeights(engine(), directory)(offer(manifest))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(directory, monkeypatch):
    manifest = pack(directory, trainer := {"a": torch.zeros(CHUNK_BYTES), "b": torch.ones(CHUNK_BYTES)})
    overwrite = WeightSet.overwrite

    def shrink_then_overwrite(self, *args):
        os.truncate(directory.file(1, 4), 3 * CHUNK_BYTES)
        return overwrite(self, *args)

    monkeypatch.setattr(WeightSet, "overwrite", shrink_then_overwrite)
    with pytest.raises(WeightSyncError, match="it ended within a while it was read"):
        FileWeights({name: tensor.clone() for name, tensor in trainer.items()}, directory)(offer(manifest))


def test_tensors_lie_without_holes():
    entries = WeightLayout.of({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(()), "c": torch.zeros(0, 2)}).entries
    assert [(place.start, place.end) for place in places(entries).values()] == [(0, 6), (6, 10), (10, 10)]
    assert [entry.offset for entry in entries] == [0, 64, 128], "the block has some, which its checksum covers"


# ---- what lies in the directory, and for how long


def test_a_version_stays_until_the_broker_gives_its_slot_away(directory):
    trainer, model, broker, choose = Toy(), engine(), SlotBroker(), random.Random(3)
    publisher, weights = FilePublisher(trainer, directory, SLOTS), FileWeights(model, directory)
    leased: WeightsOffer | None = None
    for version in range(60):
        trainer.count.fill_(version)
        slot = broker.begin_write()
        broker.publish(slot, publisher.pack(slot, 1, version))
        present = {int(path.name.split(".")[1]) for path in directory.path.iterdir()}
        assert {version} | ({leased.manifest.version} if leased else set()) <= present and len(present) <= SLOTS
        if leased is not None and choose.random() < 0.4:
            held = leased.manifest
            assert weights(leased) == held.checksum and model.count.item() == held.version
            broker.give_back("e", leased.slot)
            leased = None
        if leased is None and choose.random() < 0.7:
            leased = broker.lease("e", 1, int(model.count.item()) if version else -1)


def test_what_was_packed_and_never_published_goes_with_the_next(directory):
    publisher = FilePublisher(Toy(), directory, SLOTS)
    publisher.pack(1, 1, 7)
    publisher.pack(1, 1, 8)
    assert names(directory) == ["1.8.safetensors"]
    publisher.pack(1, 1, 8)
    assert names(directory) == ["1.8.safetensors"]


def test_what_a_crash_left_is_removed_and_nothing_else(directory):
    pack(directory, Toy())
    directory.temporary.write_bytes(b"half")
    (directory.path / "mine.txt").touch()
    (directory.path / ".run-b.tmp").touch()
    WeightDirectory(directory.path, "run-a").prepare()
    assert names(directory) == [".run-b.tmp", "mine.txt"]


@pytest.mark.parametrize("leave", [lambda path: foreign(path), lambda path: None])
def test_the_weights_of_another_run_are_refused_and_kept(directory, leave):
    pack(directory, Toy())
    leave(directory.file(1, 4))
    with pytest.raises(RunFolderError, match=r"1\.4\.safetensors is not of this run.*Name another weight_sync.directory, or remove it"):
        WeightDirectory(directory.path, "run-b").prepare()
    assert names(directory) == ["1.4.safetensors"]


def test_a_directory_that_cannot_be_made_or_is_too_small_is_refused(directory, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot be used: .*Name another weight_sync.directory"):
        WeightDirectory(tmp_path / "file" / "weights", "run-a").prepare()
    usage = shutil.disk_usage(tmp_path)
    need = SLOTS * WeightLayout.of(Toy()).total_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need))
    FilePublisher(Toy(), directory, SLOTS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    with pytest.raises(RunFolderError, match=r"weights in flight take 0 MiB in .*, where 0 MiB are free"):
        FilePublisher(Toy(), directory, SLOTS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))
    check_room(tmp_path, 1 << 60)  # a mount that does not know its size


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_ends_the_run_with_its_cause_and_leaves_no_half_file(directory, monkeypatch, call):
    publisher = FilePublisher(Toy(), directory, SLOTS)
    publisher.pack(0, 1, 3)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(RunFolderError, match=r"weights 1\.4 cannot be written to .*1\.4\.safetensors: No space left on device.*--resume"):
        publisher.pack(1, 1, 4)
    assert names(directory) == ["1.3.safetensors"]


WRITER = """
import sys, torch
from pathlib import Path
from slipstream.weight_sync.files import FilePublisher
from slipstream.weight_sync.weight_directory import WeightDirectory
tensors = {"a": torch.zeros(200_000), "b": torch.zeros(200_000, 3)}
publisher = FilePublisher(tensors, WeightDirectory(Path(sys.argv[1]), "run-a"), 3)
version = 0
while True:
    version += 1
    for tensor in tensors.values():
        tensor.fill_(version)
    manifest = publisher.pack(version % 3, 1, version)
    print(version, manifest.checksum, flush=True)
"""


def test_a_trainer_killed_amid_a_write_leaves_no_file_that_is_not_whole(directory):
    """Killed at any moment; every file that has the name of weights is whole, and the next incarnation finds its way."""
    model = {"a": torch.zeros(200_000), "b": torch.zeros(200_000, 3)}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(directory.path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline()
        while not directory.temporary.exists():
            pass
        child.kill()
        told = dict(line.split() for line in child.stdout.read().splitlines())
    assert directory.temporary.exists(), "it was not killed amid a write"
    weights, whole = FileWeights(model, directory), sorted(directory.path.glob("*.safetensors"))
    assert whole
    for path in whole:
        version = int(path.name.split(".")[1])
        with safe_open(path, framework="pt") as file:
            proof = file.metadata()["checksum"]
        assert told.get(str(version), proof) == proof
        manifest = WeightLayout.of(model).manifest(1, version, proof)
        assert weights(offer(manifest)) == proof and bool((model["b"] == version).all())
    directory.prepare()
    assert names(directory) == []
    assert weights(offer(pack(directory, {name: t + 1 for name, t in model.items()})))


def test_the_manifest_is_what_counts(directory):
    """Whole weights of the right name are refused where the published checksum is another."""
    manifest = pack(directory, Toy())
    with pytest.raises(WeightSyncError, match=r"checksum is .*, published was 0"):
        FileWeights(engine(), directory)(offer(msgspec.structs.replace(manifest, checksum="0" * 32)))


def test_a_run_that_moves_its_directory_goes_on_in_the_new_one(directory, tmp_path):
    moved = dataclasses.replace(directory, path=tmp_path / "elsewhere")
    moved.prepare()
    pack(moved, Toy())
    assert names(moved) == ["1.4.safetensors"] and names(directory) == []
