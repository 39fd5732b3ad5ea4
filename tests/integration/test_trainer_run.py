"""What the trainer says of real tokens in whole runs: exact over fresh keys and values, apart from kept ones; every term at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_harness import run, tables

from slipstream.observe.metrics import read_metrics


def step_lines(folder: Path, **changes):
    run(tables(folder, **changes))
    return read_metrics(folder).steps


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_over_fresh_keys_and_values_trainer_and_sampler_agree_in_an_asynchronous_run(tmp_path, kv):
    lines = step_lines(
        tmp_path / "run",
        rollout={"group_size": 4, "max_new_tokens": 24, "kv": kv},
        engine={"slots": 4, "max_context": 64},  # few slots: sequences and prompts straddle updates
        buffer={"max_staleness": 2},
        trainer={"steps": 6, "groups_per_step": 2, "learning_rate": 3e-4},
    )
    assert any(line["several_versions_fraction"] > 0 for line in lines)
    assert any("lag/1/tokens" in line for line in lines)
    assert all(line["logprob_gap_max"] < 1e-4 for line in lines)
    kept = [line["kept_kv_gap"] for line in lines if "kept_kv_gap" in line]
    assert all(gap > 1e-4 for gap in kept) and bool(kept) == (kv == "keep")


def test_several_updates_with_every_term(tmp_path):
    lines = step_lines(
        tmp_path / "run",
        trainer={"steps": 3, "groups_per_step": 3, "learning_rate": 1e-3, "updates_per_batch": 2, "minibatches": 3},
        loss={
            "kl_coefficient": 0.1,
            "entropy_coefficient": 0.01,
            "overlong_tokens": 2,
            "correction": ["tis", "m2po"],
            "aggregation": "sequence_mean_of_token_mean",
        },
        buffer={"max_staleness": 1},
    )
    assert [line["version"] for line in lines] == [1, 2, 3]
    assert all(line["updates"] == 6 and line["skipped"] is None for line in lines)
    assert lines[0]["reference_kl"] < 1e-6 < lines[2]["reference_kl"]  # the reference is the start
