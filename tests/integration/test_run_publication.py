"""Whole runs whose weights are published every few steps, and whose generation takes turns with them under a barrier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_harness import Tables, run, sampled_with, tables, told

STEPS = 7


class Stopped(Exception):
    pass


def settings(folder: Path, interrupt: str, **more: Any) -> Tables:
    base: Tables = {
        "rollout": {"group_size": 3, "max_new_tokens": 24, "interrupt": interrupt},
        "engine": {"slots": 8, "max_context": 64},
        "trainer": {"steps": STEPS},
        "buffer": {"max_staleness": 2},
        "weight_sync": {"every": 3},
        "checkpoint": {"every": 4},
        "data": {"eval": "builtin:sort_digits:eval"},
        "evaluation": {"limit": 4, "every": 2},
    }
    for name, change in more.items():
        base[name] = {**base.get(name, {}), **change}
    return tables(folder, **base)


def test_engines_get_every_third_version_and_the_last(tmp_path: Path) -> None:
    run(settings(tmp_path / "run", "in_flight"))
    story = told(tmp_path / "run")
    assert sorted(story.versions) == [0, 3, 6, 7]
    assert set.union(*sampled_with(story).values()) == {0, 3, 6}
    assert {due: version for due, (version, _, _) in story.evaluations.items()} == {0: 0, 2: 3, 6: 6, 7: 7}


@pytest.mark.parametrize(("interrupt", "every"), [("in_flight", 3), ("barrier", 3), ("barrier", 1)])
def test_a_deterministic_run_is_the_same_after_a_resume_whatever_is_published(tmp_path: Path, interrupt: str, every: int) -> None:
    """With every = 3, version 4 is published for its checkpoint alone; under a barrier the pause there lets groups be amid their tokens."""
    exact = {"run": {"deterministic": True}, "weight_sync": {"every": every}, "evaluation": {"every": 6}}  # none holds up a checkpoint
    run(settings(tmp_path / "reference", interrupt, **exact))

    def fails(line: dict) -> None:
        if line["step"] == 5:
            raise Stopped

    with pytest.raises(Stopped):
        run(settings(tmp_path / "run", interrupt, **exact), on_step=fails)
    run(settings(tmp_path / "run", interrupt, **exact), resume=tmp_path / "run")
    first, resumed = told(tmp_path / "reference"), told(tmp_path / "run")
    assert sorted(first.versions) == ([0, 3, 4, 6, 7] if every == 3 else list(range(STEPS + 1)))
    assert (resumed.versions, resumed.batches, resumed.evaluations) == (first.versions, first.batches, first.evaluations)


@pytest.mark.parametrize(("max_staleness", "behind"), [(0, 0), (1, 1)])
def test_under_a_barrier_every_batch_is_sampled_by_one_version(tmp_path: Path, max_staleness: int, behind: int) -> None:
    """max_staleness = 1 is double buffering: the next batch is generated on the weights before those that this one makes."""
    turns = {"buffer": {"max_staleness": max_staleness, "window": 1}, "weight_sync": {"every": 1}}
    run(settings(tmp_path / "run", "barrier", **turns))
    assert sampled_with(told(tmp_path / "run")) == {step: {max(0, step - behind)} for step in range(STEPS)}
