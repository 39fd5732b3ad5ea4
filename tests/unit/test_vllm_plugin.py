"""The parts of the vLLM plugin that need no vLLM: blocks that are proved before they are read, experts by name, the key for every route."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.engines.vllm.environment import PLUGIN
from slipstream.engines.vllm.weights import update_info
from slipstream.protocols import Manifest
from slipstream.weight_sync.files import FilePublisher
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher
from slipstream.weight_sync.weight_directory import WeightDirectory


@pytest.fixture(autouse=True)
def plugin_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.Parameter(torch.randn(3))
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.embed.weight


def packed() -> tuple[nn.Module, MemoryFile, Manifest]:
    model, slot = Tied(), MemoryFile.create("test")
    return model, slot, MemoryPublisher(model, [slot], torch.bfloat16).pack(0, 2, 7)


def info_of(slot: MemoryFile, manifest: Manifest) -> dict[str, Any]:
    return update_info(f"/proc/{os.getpid()}/fd/{slot.fileno()}", manifest, "a-run:engine-0:2.7")


def test_a_block_is_read_from_another_process_memory_file_and_hashed_there() -> None:
    from slipstream_vllm.block import Block, from_memory

    model, slot, manifest = packed()
    tensors, checksum = from_memory(Block(**info_of(slot, manifest)))
    assert checksum == manifest.checksum
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert {name: value.tolist() for name, value in tensors.items()} == {name: value.tolist() for name, value in expected.items()}
    assert "lm_head.weight" in tensors and "lm_head.weight" in manifest.aliases, "the tied head is sent as well"


def packed_file(tmp_path: Path) -> tuple[nn.Module, Path, Manifest]:
    model, directory = Tied(), WeightDirectory(tmp_path / "weights", "run")
    directory.prepare()
    manifest = FilePublisher(model, directory, 1, torch.bfloat16).pack(0, 2, 7)
    return model, directory.file(2, 7), manifest


def test_a_file_is_read_and_hashed_as_if_packed(tmp_path: Path) -> None:
    from slipstream_vllm.block import Block, from_file

    model, path, manifest = packed_file(tmp_path)
    tensors, checksum = from_file(Block(**update_info(str(path), manifest, "a-run:engine-0:2.7")))
    assert checksum == manifest.checksum
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert {name: value.tolist() for name, value in tensors.items()} == {name: value.tolist() for name, value in expected.items()}


@pytest.mark.parametrize(("damage", "words"), [("cut", "ended within"), ("flip", "hash to"), ("gone", "cannot be opened")])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str, words: str) -> None:
    from slipstream_vllm.block import Block, from_file

    _, path, manifest = packed_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "gone":
        path.unlink()
    with pytest.raises(ValueError, match=words):
        from_file(Block(**update_info(str(path), manifest, "a-run:engine-0:2.7")))


def test_damaged_bytes_are_refused() -> None:
    from slipstream_vllm.block import Block, from_memory

    _, slot, manifest = packed()
    slot.map(writable=True)[5] ^= 1
    with pytest.raises(ValueError, match=r"weights 2\.7: the bytes received hash to"):
        from_memory(Block(**info_of(slot, manifest)))


@pytest.mark.parametrize(("change", "words"), [({"total_bytes": 1 << 20}, "holds"), ({"path": "/proc/0/fd/9"}, "same user")])
def test_a_block_that_is_not_there(change: dict[str, Any], words: str) -> None:
    from slipstream_vllm.block import Block, from_memory

    _, slot, manifest = packed()
    with pytest.raises(ValueError, match=words):
        from_memory(Block(**{**info_of(slot, manifest), **change}))


@pytest.mark.parametrize(("field", "value"), [(1, "float32"), (2, (11, 4)), (3, 65), (4, 1), (3, 1 << 30)])
def test_entries_that_do_not_add_up_are_refused(field: int, value: Any) -> None:
    from slipstream_vllm.block import Block

    _, slot, manifest = packed()
    info = info_of(slot, manifest)
    entry = list(info["entries"][0])
    entry[field] = value
    info["entries"] = [entry, *info["entries"][1:]]
    with pytest.raises(ValueError, match="does not add up"):
        Block(**info)


def test_experts_are_named_as_checkpoints_name_them() -> None:
    from slipstream_vllm.experts import split_experts

    both, down, other = torch.randn(2, 6, 4), torch.randn(2, 4, 3), torch.randn(5)
    names = {"m.experts.gate_up_proj": both, "m.experts.down_proj": down, "m.gate.weight": other}
    split = dict(split_experts(names))
    assert sorted(split) == sorted(
        ["m.gate.weight", *(f"m.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up", "down"))]
    )
    assert torch.equal(split["m.experts.1.gate_proj.weight"], both[1, :3]) and torch.equal(split["m.experts.1.up_proj.weight"], both[1, 3:])
    assert torch.equal(split["m.experts.0.down_proj.weight"], down[0]) and split["m.gate.weight"] is other


def answers(headers: list[tuple[bytes, bytes]], kind: str = "http") -> list[dict[str, Any]]:
    from slipstream_vllm.middleware import RequireKey

    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"type": "the app"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": kind, "headers": headers, "path": "/pause"}, None, send))
    return sent


def test_every_route_wants_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_VLLM_KEY", "secret")
    assert answers([(b"authorization", b"Bearer secret")]) == [{"type": "the app"}]
    assert answers([], "lifespan") == [{"type": "the app"}]
    for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"secret")]):
        assert answers(headers)[0]["status"] == 401
    assert answers([], "websocket") == [{"type": "websocket.close", "code": 1008}]


def test_without_a_key_the_middleware_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_VLLM_KEY", raising=False)
    with pytest.raises(ValueError, match="SLIPSTREAM_VLLM_KEY"):
        answers([])


def test_the_folder_alone_on_the_path_makes_the_plugin_known() -> None:
    code = "from importlib.metadata import entry_points; print([e.value for e in entry_points(group='vllm.general_plugins')])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PLUGIN)}, capture_output=True, text=True, check=True, timeout=60
    )
    assert "slipstream_vllm:register" in done.stdout


def test_the_plugin_imports_nothing_of_slipstreams() -> None:
    for file in (PLUGIN / "slipstream_vllm").glob("*.py"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip().startswith(("import", "from"))]
        assert not [line for line in lines if "slipstream." in line or "import slipstream" in line.replace("slipstream_vllm", "")], file


def test_the_metadata_names_what_the_folder_is_called() -> None:
    found = [d for d in metadata.distributions(path=[str(PLUGIN)]) if d.metadata["Name"] == "slipstream-vllm"]
    assert len(found) == 1 and Path(str(found[0].locate_file("slipstream_vllm"))).is_dir()
