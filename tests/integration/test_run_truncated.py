"""Training on truncated sampling: whole runs in which every ratio of a fresh token is 1."""

from __future__ import annotations

import pytest
from run_harness import run, tables, told

from slipstream.observe.jsonl import read_jsonl
from slipstream.sampling_mask import decode_kept, split_kept


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_with_top_p_trains_and_its_logprobs_agree(tmp_path, deterministic: bool) -> None:
    folder = tmp_path / "run"
    cut = {"top_p": 0.8, "top_k": 20, "temperature": 0.9}
    run(tables(folder, rollout={"group_size": 4, "max_new_tokens": 8, **cut}, run={"deterministic": deterministic}))
    steps = [line for line in read_jsonl(folder / "metrics.jsonl") if line.get("kind") == "step"]
    assert len(steps) == 4
    gaps = [line["logprob_gap"] for line in steps if line.get("logprob_gap") is not None]
    assert gaps and max(gaps) < 1e-4
    rollouts = [r for group in told(folder).groups.values() for r in group.rollouts]
    sets = [part for r in rollouts for part in split_kept(r.arrays, r.loss_mask.nonzero()[0]) or ()]
    assert len(sets) == sum(int(r.loss_mask.sum()) for r in rollouts) and {len(decode_kept(part)) for part in sets} > {1}
