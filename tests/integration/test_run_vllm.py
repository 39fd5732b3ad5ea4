"""A whole run whose engine is a real vLLM server of its own: learning, evaluation, true versions, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_harness import run_file, step_lines, tables, told
from vllm_server import needs_vllm, vllm_python

from slipstream import train
from slipstream.config.load import load_config
from slipstream.models.tiny import TinyRecipe, make_model, make_tokenizer

pytestmark = needs_vllm


@pytest.mark.parametrize("transport", ["shared_memory", "files"])
def test_a_run(tmp_path: Path, transport: str) -> None:
    """Sampled without staleness, the trainer's logprobs of the sampled tokens are the server's, up to rounding: the same weights."""
    tokenizer, folder = make_tokenizer(), tmp_path / "model"
    make_model(TinyRecipe(hidden_size=64, num_layers=2, num_heads=2), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = tables(
        tmp_path / "run",
        launch="local",
        model={"name": str(folder)},
        data={"eval": "builtin:sort_digits:eval"},
        engine={"type": "vllm", "python": vllm_python()},
        evaluation={"limit": 4, "every": 2},
        trainer={"steps": 4, "learning_rate": 1e-2},
        buffer={"max_staleness": 0},
        weight_sync={"transport": transport},
    )
    train(load_config([run_file(tmp_path, settings)]))
    story, lines = told(tmp_path / "run"), step_lines(tmp_path / "run")
    assert story.account.counts == {"trained": 8} and len(set(story.versions.values())) == 5
    assert all(line["logprob_gap_max"] < 1e-3 for line in lines)
    assert [version for version, _, _ in story.evaluations.values()] == [0, 2, 4]
    assert "probe of version 4" in (tmp_path / "run" / "log" / "engine-0.log").read_text(encoding="utf-8")
    assert (tmp_path / "run" / "log" / "engine-0-vllm.log").stat().st_size
