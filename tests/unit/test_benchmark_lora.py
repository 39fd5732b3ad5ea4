"""The benchmark of ways to send an adapter: every way brings the same model to the engine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from trainer_models import tiny_model

from slipstream.config.settings import LoraSettings, ModelSettings
from slipstream.models.lora import Adapter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
lora: Any = importlib.import_module("lora")


def test_every_way_brings_the_same_weights() -> None:
    whole, base = tiny_model(), tiny_model()
    adapter = Adapter.of(base, LoraSettings(rank=2), ModelSettings())
    adapter.perturb()
    made = lora.ways(whole, adapter)
    assert made["adapter"].manifest.total_bytes < made["full"].manifest.total_bytes == made["merged"].manifest.total_bytes
    expected = adapter.merged()
    for name in ("merged", "at engine"):
        whole.load_state_dict(adapter.base)
        made[name].pack()
        made[name].adopt()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in whole.state_dict().items()), name
