"""Whole runs of a mixture of experts: what the engine routed is in the ledger, and the trainer replays it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from run_harness import Tables, run, step_lines, tables, told
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.models.tiny import make_tokenizer
from slipstream.types import NOT_ROUTED, ROUTED_EXPERTS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Qwen3-MoE over the byte tokenizer of builtin:tiny."""
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), make_tokenizer()
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def settings(folder: Path, mixture: str, **changes: Tables) -> Tables:
    return tables(folder, **{"model": {"name": mixture}, "trainer": {"steps": 3}, **changes})


def test_at_staleness_0_the_trainer_agrees_with_the_sampler(tmp_path: Path, mixture: str) -> None:
    run(settings(tmp_path / "r", mixture, buffer={"max_staleness": 0}))
    lines = step_lines(tmp_path / "r")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert (line["router_disagreement"], line["routing_recorded_fraction"]) == (0, 1)
        assert line["logprob_gap_max"] < 1e-4
    for rollout in (r for group in told(tmp_path / "r").groups.values() for r in group.rollouts):
        routing = rollout.arrays[ROUTED_EXPERTS]
        assert routing.shape == (len(rollout.token_ids), 4) and routing.dtype == np.int8
        assert (routing[:-1] >= 0).all() and (routing[-1] == NOT_ROUTED).all()


@pytest.mark.parametrize("rollout", [{"kv": "recompute", "top_p": 0.9}, {"interrupt": "abort_resume"}, {"interrupt": "abort_retry"}])
def test_asynchronous_runs_record_every_choice(tmp_path: Path, mixture: str, rollout: Tables) -> None:
    changes = {"rollout": {"max_new_tokens": 24, **rollout}, "buffer": {"max_staleness": 2, "window": 1}, "engine": {"slots": 6}}
    run(settings(tmp_path / "r", mixture, **changes))
    lines = step_lines(tmp_path / "r")
    assert all(line["routing_recorded_fraction"] == 1 for line in lines)
    interrupts = sum(r.interrupts for group in told(tmp_path / "r").groups.values() for r in group.rollouts)
    assert (interrupts > 0) == ("interrupt" in rollout)
    assert 0 < max(line["router_disagreement"] for line in lines) < 1, "older weights routed otherwise"


def test_switched_off_nothing_is_recorded(tmp_path: Path, mixture: str) -> None:
    run(settings(tmp_path / "r", mixture, rollout={"keep_routing": False}, trainer={"steps": 1}))
    (line,) = step_lines(tmp_path / "r")
    assert "router_disagreement" not in line and "routing_recorded_fraction" not in line
    assert not any(r.arrays for group in told(tmp_path / "r").groups.values() for r in group.rollouts)
