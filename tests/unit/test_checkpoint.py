"""Checkpoints: exact, verified, never half visible."""

import base64
import os
import shutil
import subprocess
import sys

import pytest
import torch
from trainer_models import config, make_batch, tiny_model

from slipstream import checkpoint_files
from slipstream.checkpoint_files import read_manifest, verify_checkpoint
from slipstream.errors import CheckpointError
from slipstream.trainer import checkpoint
from slipstream.trainer.checkpoint import load_checkpoint, read_tensors, write_checkpoint, write_tensors
from slipstream.trainer.trainer import Trainer
from slipstream.types import encode
from slipstream.weight_sync.packing import checksum


def trainer_of(dtype=torch.float32, kind="llama", seed=0):
    settings = {"learning_rate": 1e-3, "steps": 20, "schedule": "linear", "warmup_steps": 2}
    return Trainer(config(trainer=settings), tiny_model(kind, seed=seed, dtype=dtype))


def write(folder, trainer):
    name, manifest = write_checkpoint(folder, trainer, run_id="r", incarnation=2, ledger_seq=17, weights_checksum=checksum(trainer.model))
    return folder / name, manifest


@pytest.fixture(scope="module")
def trained():
    trainer = trainer_of()
    for step in range(2):
        trainer.train_step(make_batch(step))
    return trainer


@pytest.fixture(scope="module")
def pristine(trained, tmp_path_factory):
    return write(tmp_path_factory.mktemp("checkpoints"), trained)[0]


@pytest.fixture
def folder(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "step-2")


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "llama"), (torch.bfloat16, "llama"), (torch.float32, "qwen3")])
def test_going_on_from_a_checkpoint_gives_the_same_bits(tmp_path, dtype, kind):
    trainer = trainer_of(dtype, kind)
    for step in range(3):
        trainer.train_step(make_batch(step))
    trainer.skipped_in_a_row = 1
    path, manifest = write(tmp_path, trainer)
    other = trainer_of(dtype, kind, seed=9)
    assert checksum(other.model) != checksum(trainer.model)
    torch.manual_seed(5)
    assert encode(load_checkpoint(path, other)) == encode(manifest)
    assert checksum(other.model) == checksum(trainer.model) == manifest.weights_checksum
    assert other.step == 3 and other.skipped_in_a_row == 1
    theirs, ours = trainer.optimizer.state_tensors(), other.optimizer.state_tensors()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[k], ours[k]) for k in theirs)
    for step in range(3, 6):
        assert trainer.train_step(make_batch(step)).metrics["loss"] == other.train_step(make_batch(step)).metrics["loss"]
    assert checksum(other.model) == checksum(trainer.model) != manifest.weights_checksum


def test_random_state_comes_back(trained, tmp_path):
    torch.manual_seed(123)
    path, _ = write(tmp_path, trained)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_checkpoint(path, trainer_of())
    assert torch.equal(torch.rand(3), expected)


def test_before_the_first_update(tmp_path):
    path, _ = write(tmp_path, trainer_of())
    other = trainer_of(seed=3)
    other.train_step(make_batch(0))
    load_checkpoint(path, other)
    assert other.step == 0 and not other.optimizer.state_tensors()


def test_manifest_says_what_is_inside(pristine, trained):
    manifest = verify_checkpoint(pristine)
    assert pristine.name == ".tmp-2-2"
    assert (manifest.run_id, manifest.incarnation, manifest.step, manifest.ledger_seq) == ("r", 2, 2, 17)
    assert sorted(manifest.files) == [
        "model/index.json",
        "model/rank-00000.safetensors",
        "optimizer/index.json",
        "optimizer/rank-00000.safetensors",
        "trainer.json",
    ]
    assert manifest.numerics["torch"] == torch.__version__ and manifest.numerics["dtype"] == "float32"


def test_nothing_is_pickled(pristine):
    for path in pristine.rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors")


# ---- damage

FILES = ["model/index.json", "model/rank-00000.safetensors", "optimizer/rank-00000.safetensors", "trainer.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.1, 0.5, 0.97])
def test_a_flipped_byte_is_found_and_named(folder, name, where):
    path = folder / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)
    before = trainer_of(seed=4)
    start = checksum(before.model)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder, before)
    assert checksum(before.model) == start and before.step == 0


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_found_and_named(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify_checkpoint(folder)


def test_another_model_is_refused(pristine):
    with pytest.raises(CheckpointError, match="other tensors than this model"):
        load_checkpoint(pristine, trainer_of(kind="qwen2"))
    with pytest.raises(CheckpointError, match=r"is float32\[.*\], this model has bfloat16"):
        load_checkpoint(pristine, trainer_of(dtype=torch.bfloat16))


# ---- killed while writing


class Killed(BaseException):
    """Stands for kill -9: no handler of ours may catch it."""


def kill_at(monkeypatch, count):
    """Raise at the `count`-th durable operation of a write (0 based); before it does anything, or after half of it."""
    calls = []

    def wrap(module, name):
        real = getattr(module, name)

        def wrapped(*args, **kwargs):
            calls.append(name)
            if len(calls) - 1 == count:
                raise Killed(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    wrap(checkpoint, "save_file")
    wrap(checkpoint, "write_bytes")
    wrap(checkpoint, "fsync")
    wrap(checkpoint, "write_manifest")
    wrap(checkpoint_files, "write_bytes")
    wrap(checkpoint_files, "fsync")
    return calls


def test_killed_at_any_write_nothing_is_visible(trained, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        operations = kill_at(patch, -1)
        write(tmp_path / "whole", trained)
    assert len(operations) > 12 and "write_manifest" in operations
    complete = 0
    for count in range(len(operations)):
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch:
            kill_at(patch, count)
            with pytest.raises(Killed):
                write(folder, trained)
        names = os.listdir(folder)
        assert names == [".tmp-2-2"]  # which no reader takes for a checkpoint
        try:
            verify_checkpoint(folder / names[0])
            complete += 1  # the manifest was written; only syncing it was left
        except CheckpointError as error:
            assert "manifest.json is missing" in str(error)
        path, manifest = write(folder, trained)  # the next incarnation or a second try is not disturbed
        assert verify_checkpoint(path).files == manifest.files
    assert 0 < complete < 5


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="finds a descriptor's path in /proc")
def test_files_are_synced_before_the_manifest_and_the_folders_after(trained, tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)), real(fd)))
    path, manifest = write(tmp_path, trained)
    at = {name: len(synced) - 1 - synced[::-1].index(name) for name in synced}
    for name in manifest.files:
        assert at[f"{path.name}/{name}"] < at[f"{path.name}/manifest.json"]
    assert at[f"{path.name}/model"] < at[f"{path.name}/manifest.json"] < at[path.name] < at["."]


# ---- the format


def test_shards_of_several_ranks_are_read_as_one(tmp_path):
    whole = {"w": torch.arange(24.0).reshape(6, 4), "b": torch.arange(3)}
    write_tensors(tmp_path / "t", whole)
    index = checkpoint._decode(tmp_path / "t" / "index.json", checkpoint.TensorIndex)
    checkpoint.save_file({"w": whole["w"][2:].contiguous()}, tmp_path / "t" / "rank-00001.safetensors")
    checkpoint.save_file({"w": whole["w"][:2].contiguous(), "b": whole["b"]}, tmp_path / "t" / "rank-00000.safetensors")
    shards = (
        checkpoint.Shard("rank-00000.safetensors", "w", (0, 0), (2, 4)),
        checkpoint.Shard("rank-00001.safetensors", "w", (2, 0), (4, 4)),
    )

    def rewrite(shards):
        tensors = {**index.tensors, "w": checkpoint.TensorEntry("float32", (6, 4), shards)}
        (tmp_path / "t" / "index.json").write_bytes(checkpoint.msgspec.json.encode(checkpoint.TensorIndex(tensors)))

    rewrite(shards)
    assert all(torch.equal(t, whole[name]) for name, t in read_tensors(tmp_path / "t").items())
    rewrite(shards[:1])
    with pytest.raises(CheckpointError, match="the shards of w hold 8 of its 24 elements"):
        read_tensors(tmp_path / "t")


def test_tied_names_are_stored_once(tmp_path):
    path, _ = write(tmp_path, trainer_of(kind="qwen3"))
    index = checkpoint._decode(path / "model" / "index.json", checkpoint.TensorIndex)
    assert index.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in index.tensors


def test_verification_needs_no_torch(pristine):
    code = (
        "import sys; from slipstream.checkpoint_files import verify_checkpoint; "
        "print(verify_checkpoint(sys.argv[1]).step, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pristine)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_random_state_is_json(pristine):
    state = checkpoint._decode(pristine / "trainer.json", checkpoint.TrainerState)
    assert len(base64.b64decode(state.torch_rng)) == len(torch.get_rng_state())
    assert read_manifest(pristine).step == state.step
