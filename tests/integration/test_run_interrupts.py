"""Every interrupt in whole runs: exact and resumable in one process, and over sockets with a process per role.

That in_flight with kept keys and values is exact: `test_run_exact.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from run_harness import Tables, Told, run, run_file, step_lines, tables, told

from slipstream.config.load import load_config
from slipstream.run import train
from slipstream.types import Rollout

STEPS = 5


class Stopped(Exception):
    pass


def deterministic(folder: Path, rollout: Tables) -> Tables:
    """Fewer slots than rollouts, so that those of a group run at different times; checkpoint 2 falls amid rollouts."""
    return tables(
        folder,
        run={"deterministic": True},
        rollout={"max_new_tokens": 12, **rollout},
        engine={"slots": 6},
        trainer={"steps": STEPS},
        checkpoint={"every": 2},
    )


def rollouts(story: Told) -> list[Rollout]:
    return [r for g in story.groups.values() for r in g.rollouts]


def num_versions(rollout: Rollout) -> int:
    return len({span.version for span in rollout.spans})


def remade(story: Told) -> None:
    assert any(num_versions(r) > 1 for r in rollouts(story)) and not any(r.interrupts for r in rollouts(story))
    for rollout in rollouts(story):
        newest = rollout.newest_version
        assert num_versions(rollout) == 1 or (rollout.kv, rollout.prefill_version[1]) == ("recomputed", newest)  # type: ignore[index]


def resumed(story: Told) -> None:
    interrupted = [r for r in rollouts(story) if r.interrupts]
    assert interrupted and all(r.attempt == 0 and num_versions(r) == 1 + r.interrupts for r in interrupted)


def resumed_and_remade(story: Told) -> None:
    resumed(story)
    assert all(r.kv == "recomputed" for r in rollouts(story) if r.interrupts)


def retried(story: Told) -> None:
    interrupted = [r for r in rollouts(story) if r.interrupts]
    assert interrupted and all(r.attempt == r.interrupts for r in interrupted)
    assert any(r.attempt == 0 for g in story.groups.values() for r in g.rollouts if any(o.attempt for o in g.rollouts))


def never_straddle_but_at_checkpoints(story: Told) -> None:
    """A canonical point takes what runs out of the engine, and it goes on from there: under the checkpoint's version or a later one."""
    assert not any(r.interrupts for r in rollouts(story))
    for rollout in rollouts(story):
        assert all(later.version >= 2 for later in rollout.spans[1:])
    assert sum(num_versions(r) == 1 for r in rollouts(story)) >= len(rollouts(story)) * 3 / 4


def never_straddle(story: Told) -> None:
    assert all(num_versions(r) == 1 and not r.interrupts for r in rollouts(story))


@pytest.mark.parametrize(
    ("rollout", "shows"),
    [
        ({"interrupt": "in_flight", "kv": "recompute"}, remade),
        ({"interrupt": "abort_resume", "kv": "keep"}, resumed),
        ({"interrupt": "abort_resume", "kv": "recompute"}, resumed_and_remade),
        ({"interrupt": "abort_retry"}, retried),
        ({"interrupt": "drain"}, never_straddle_but_at_checkpoints),
        ({"interrupt": "barrier"}, never_straddle),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_deterministic_run_ended_by_an_error_and_resumed_is_the_same_run(
    rollout: Tables, shows: Callable[[Told], None], tmp_path: Path
) -> None:
    def fails(line: dict) -> None:
        if line["step"] == 3:
            raise Stopped

    run(deterministic(tmp_path / "whole", rollout))
    whole = told(tmp_path / "whole")
    shows(whole)
    with pytest.raises(Stopped):
        run(deterministic(tmp_path / "run", rollout), on_step=fails)
    run(deterministic(tmp_path / "run", rollout), resume=tmp_path / "run")
    again = told(tmp_path / "run")
    assert (again.versions, again.batches) == (whole.versions, whole.batches)
    assert len(set(whole.versions.values())) == STEPS + 1


@pytest.mark.parametrize("rollout", [{"interrupt": "abort_resume"}, {"interrupt": "abort_retry"}], ids=lambda value: value["interrupt"])
def test_a_run_of_processes_with_interrupts_is_accounted_for(rollout: Tables, tmp_path: Path) -> None:
    """Two slots, so that the engine is never done when new weights come."""
    settings = tables(
        tmp_path / "run", launch="local", rollout={"max_new_tokens": 32, **rollout}, engine={"slots": 2}, trainer={"steps": STEPS}
    )
    result = train(load_config([run_file(tmp_path, settings)]))
    story = told(tmp_path / "run")
    assert story.account.counts == {"trained": STEPS * 2}
    assert sum(line["interrupts"] for line in step_lines(tmp_path / "run")) == sum(r.interrupts for r in rollouts(story)) > 0
    assert result.metrics["staleness_max"] <= result.metrics["staleness_bound"]
    if rollout["interrupt"] == "abort_resume":
        assert any(num_versions(r) > 1 for r in rollouts(story)) and {r.kv for r in rollouts(story)} == {"kept"}
    else:
        assert all(num_versions(r) == 1 and r.attempt == r.interrupts for r in rollouts(story))
