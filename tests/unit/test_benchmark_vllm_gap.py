"""The benchmark of the gap between server and trainer: what it compares, without a server."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_models import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("aiohttp")
vllm_gap: Any = importlib.import_module("vllm_gap")
bench: Any = importlib.import_module("bench")


def test_packed_logprobs_are_those_of_each_sequence_alone() -> None:
    model = tiny_model()
    sampled = [([1, 2, 3], [4, 5], [0.0] * 2), ([6], [7, 8, 9], [0.0] * 3)]
    together = vllm_gap.logprobs(model, sampled)
    alone = np.concatenate([vllm_gap.logprobs(model, [one]) for one in sampled])
    assert together.shape == (5,) and np.allclose(together, alone, atol=1e-5)


def test_a_version_moves_some_weights_by_one_step() -> None:
    model = tiny_model().bfloat16()
    before = [p.clone() for p in model.parameters()]
    vllm_gap.move(model, torch.Generator().manual_seed(0))
    moved = torch.cat([(p != q).flatten() for p, q in zip(model.parameters(), before, strict=True)]).float().mean()
    assert 0.01 < moved < 0.03
    assert all(torch.allclose(p, q, rtol=2**-6) for p, q in zip(model.parameters(), before, strict=True))


def test_a_gap_that_grows_is_missed() -> None:
    for late, reached in ((0.03, True), (0.3, False)):
        report = bench.Report("vllm_gap", True)
        looks = [{"version": v, **dict.fromkeys(vllm_gap.GAPS, 0.03 if v < 4 else late)} for v in range(8)]
        vllm_gap.render(report, looks, "server")
        assert report.targets[0].reached is reached
    server, trainer, exact = np.array([1.0]), np.array([3.0]), np.array([2.5])
    assert vllm_gap.gaps(server, trainer, exact) == {"server - trainer": 2.0, "server - exact": 1.5, "trainer - exact": 0.5}
