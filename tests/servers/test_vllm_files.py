"""A real vLLM server reads its weights from files: whole ones, and the base of adapters, as it is stored or rounded to 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_vllm_lora import ROOM, Adapters, check_versions
from vllm_server import LiveServer, live_server, needs_vllm, small_model
from ways import check_perturb_and_revert, way_to

from slipstream.engines.interrupts import InterruptPolicy
from slipstream.weight_sync.packing import checksum

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server(small_model("qwen3", tie_word_embeddings=True), room=ROOM, transfer="slipstream_files") as live:
        yield live


def test_perturb_and_revert_of_whole_weights(live: LiveServer, tmp_path: Path) -> None:
    with way_to(live, "files", "full", tmp_path) as through:
        check_perturb_and_revert(through)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_every_adapter_is_what_peft_computes_over_the_trainers_base(live: LiveServer, tmp_path: Path, quantize: str | None) -> None:
    """Rounded, that is another one than the model's files hold."""
    adapters = Adapters(live, tmp_path / "adapters", InterruptPolicy("drain"), "files", quantize)
    assert (adapters.trainer.base_checksum == checksum(live.model)) == (quantize is None)
    check_versions(live, adapters)
