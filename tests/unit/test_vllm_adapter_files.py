"""The driver's copy of an adapter: proved as an engine's own, written as peft has it, on the base that the server was given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from test_lora import BASE, adapted
from torch import nn
from trainer_models import eager_twin, make_batch, tiny_model

from slipstream.config.arithmetic import staleness_bound
from slipstream.config.settings import Config, DataSettings, LoraSettings, WeightSyncSettings
from slipstream.engines.vllm.adapter_files import AdapterFiles
from slipstream.errors import WeightSyncError
from slipstream.launch.assemble_adapters import adapter_room
from slipstream.models.loading import ModelInfo
from slipstream.models.lora import Adapter
from slipstream.protocols import WeightsOffer
from slipstream.weight_sync.files import FilePublisher, FileWeights
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher, MemoryWeights
from slipstream.weight_sync.weight_directory import WeightDirectory


class Sides:
    """A trainer's adapter, its publisher over shared memory, and the driver's side of it."""

    def __init__(self, folder: Path, other_base: bool = False):
        self.trainer = adapted(alpha=8.0)
        slots = [MemoryFile.create("test")]
        self.publisher = MemoryPublisher(self.trainer.sent, slots)
        own = adapted(seed=int(other_base), moved=False, alpha=8.0)
        folder.mkdir()
        self.files = AdapterFiles(own, folder, lambda tensors: MemoryWeights(tensors, slots))

    def offer(self, version: int) -> WeightsOffer:
        return WeightsOffer(slot=0, manifest=self.publisher.pack(0, 1, version))


def test_a_folder_is_what_peft_reads_and_the_checksum_that_of_the_own_copy(tmp_path: Path) -> None:
    sides = Sides(tmp_path / "adapters")
    for version in range(2):
        sides.trainer.perturb(version)
        offer = sides.offer(version)
        checksum, folder = sides.files.write(offer)
        assert checksum == offer.manifest.checksum and folder == tmp_path / "adapters" / f"policy-1-v{version}"
        read = PeftModel.from_pretrained(eager_twin(tiny_model("llama", 0)), folder)
        merged = eager_twin(tiny_model("llama", 0))
        merged.load_state_dict(sides.trainer.merged())
        tokens = make_batch().groups[0].rollouts[0].token_ids
        assert _logits(read, tokens).allclose(_logits(merged, tokens), atol=1e-5)
    sides.files.remove((1, 0))
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["policy-1-v1"]


def _logits(model: nn.Module, tokens: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens.astype("int64"))[None]).logits


def test_bytes_that_were_not_published_are_never_shown_to_the_server(tmp_path: Path) -> None:
    sides = Sides(tmp_path / "adapters")
    offer = sides.offer(0)
    damaged = WeightsOffer(slot=0, manifest=msgspec.structs.replace(offer.manifest, checksum="0" * 32))
    with pytest.raises(WeightSyncError, match="the trainer packed 000"):
        sides.files.write(damaged)
    assert not list((tmp_path / "adapters").iterdir())


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    sides = Sides(tmp_path / "adapters", other_base=True)
    with pytest.raises(WeightSyncError, match="lie on a base that hashes to"):
        sides.files.write(sides.offer(0))


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    sides = Sides(tmp_path / "adapters")
    (tmp_path / "adapters").rmdir()
    with pytest.raises(WeightSyncError, match=r"policy-1-v0 cannot be written for the server: .*free space in"):
        sides.files.write(sides.offer(0))


def test_files_bring_the_same(tmp_path: Path) -> None:
    trainer, own = adapted(), adapted(moved=False)
    directory = WeightDirectory(tmp_path / "weights", "run1")
    directory.prepare()
    manifest = FilePublisher(trainer.sent, directory, 1).pack(0, 1, 0)
    folder = directory.of_engine("engine-0")
    folder.mkdir()
    files = AdapterFiles(own, folder, lambda tensors: FileWeights(tensors, directory))
    assert files.write(WeightsOffer(slot=0, manifest=manifest))[0] == manifest.checksum
    (tmp_path / "weights" / ".another-run.engine-0").mkdir()
    directory.clear()
    assert [path.name for path in directory.path.iterdir()] == [".another-run.engine-0"]


def test_the_base_is_sent_whole_with_its_tied_names_and_its_checksum_is_the_one_that_adapters_name() -> None:
    adapter = adapted("qwen3")
    manifest = MemoryPublisher(adapter.base, [MemoryFile.create("base")]).pack(0, 1, 0)
    assert manifest.checksum == adapter.base_checksum == adapter.sent.base_checksum
    assert not any("lora" in entry.name for entry in manifest.entries)


def test_room_is_for_the_layers_of_the_adapter(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    info = ModelInfo(name="m", source=tmp_path, stop_token_ids=(), vocab_size=1, context_tokens=1)
    config = Config(lora=LoraSettings(rank=4), weight_sync=WeightSyncSettings(payload="adapter"), data=DataSettings(eval=None))
    room = adapter_room(config, info)
    assert room is not None and room.rank == 4 and room.places == (staleness_bound(config) or 0) + 2
    assert room.targets == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    evaluated = adapter_room(config.model_copy(update={"data": DataSettings()}), info)
    assert evaluated is not None and evaluated.places == room.places + (DataSettings().eval is not None)
    assert adapter_room(config.model_copy(update={"weight_sync": WeightSyncSettings(payload="full")}), info) is None
    assert Adapter.of(tiny_model("llama"), config.lora, BASE).config.target_modules == set(room.targets)
