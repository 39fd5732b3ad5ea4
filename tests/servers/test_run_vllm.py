"""A whole run whose engine is a real vLLM server of its own: learning, evaluation, true versions, nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_harness import run_file, step_lines, tables, told
from test_run_delta import check_lines
from vllm_server import needs_vllm, tiny_model, vllm_python

from slipstream import train
from slipstream.config.load import load_config

pytestmark = needs_vllm
FINE = {"steps": 4, "learning_rate": 1e-10}  # so small that few of the float32 weights change


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"weight_sync": {"transport": "shared_memory"}}, id="shared memory", marks=pytest.mark.core),
        pytest.param({"rollout": {"top_k": 5, "top_p": 0.9}}, id="truncated sampling"),
        pytest.param({"weight_sync": {"transport": "files"}, "lora": {"rank": 4}}, id="files, an adapter merged"),
        pytest.param({"weight_sync": {"payload": "adapter"}, "lora": {"rank": 4}, "rollout": {"kv": "recompute"}}, id="an adapter"),
        pytest.param(
            {
                "weight_sync": {"payload": "adapter", "transport": "files"},
                "lora": {"rank": 1, "rslora": True},
                "rollout": {"kv": "recompute"},
            },
            id="files, an adapter",
        ),
        pytest.param({"weight_sync": {"transport": "collective"}}, id="messages"),
        pytest.param({"weight_sync": {"transport": "files", "payload": "delta"}, "trainer": FINE}, id="files, what changed"),
        pytest.param(
            {"weight_sync": {"payload": "adapter", "transport": "collective"}, "lora": {"rank": 4}, "rollout": {"kv": "recompute"}},
            id="messages, an adapter",
        ),
    ],
)
def test_a_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Sampled without staleness, the trainer's logprobs of the sampled tokens are the server's, up to rounding: the same weights."""
    settings = tables(
        tmp_path / "run",
        launch="local",
        model={"name": str(tiny_model(tmp_path / "model"))},
        data={"eval": "builtin:sort_digits:eval"},
        engine={"type": "vllm", "python": vllm_python()},
        evaluation={"limit": 4, "every": 2},
        buffer={"max_staleness": 0},
        **{"trainer": {"steps": 4, "learning_rate": 1e-2}} | changes,
    )
    train(load_config([run_file(tmp_path, settings)]))
    check_run(tmp_path / "run")
    assert (tmp_path / "run" / "log" / "engine-0-vllm.log").stat().st_size
    if changes.get("trainer") is FINE:
        check_lines(step_lines(tmp_path / "run"))


def check_run(folder: Path) -> None:
    story, lines = told(folder), step_lines(folder)
    assert story.account.counts == {"trained": 8} and len(set(story.versions.values())) == 5
    assert all(line["logprob_gap_max"] < 1e-3 for line in lines)
    assert [version for version, _, _ in story.evaluations.values()] == [0, 2, 4]
    assert "probe of version 4" in (folder / "log" / "engine-0.log").read_text(encoding="utf-8")
