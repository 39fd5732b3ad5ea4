"""Gates in whole runs: every way to select, to treat stale data and to limit diagnostics really trains, and its accounts close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_harness import Tables, run, spread, step_lines, tables, told

from slipstream.controller import events as ev
from slipstream.controller.ledger import LedgerReader
from slipstream.controller.run_state import RunState, Totals
from slipstream.controller.state import fold
from slipstream.errors import RunFailed

STEPS = 5


def settings(folder: Path, **changes: Any) -> Tables:
    """Answers of very different lengths, so that groups end out of order and live through several updates."""
    base: Tables = {
        "rollout": {"group_size": 3, "max_new_tokens": 40, "temperature": 1.6},
        "engine": {"slots": 12, "max_context": 64},
        "trainer": {"steps": STEPS},
    }
    for name, change in changes.items():
        base[name] = {**base.get(name, {}), **change} if isinstance(change, dict) else change
    return tables(folder, **base)


def events_of(folder: Path) -> list[ev.Event]:
    with LedgerReader.open(folder / "ledger.sqlite") as reader:
        return [event for *_, event in reader.live_events()]


def checked(folder: Path, steps: int = STEPS) -> RunState:
    """The state of a run that has trained so many steps: each made other weights, every group and every token is accounted for."""
    story, state = told(folder), fold(events_of(folder))
    assert sorted(story.batches) == list(range(steps)) and state.step == steps
    assert len(set(story.versions.values())) == steps + 1, "a step changed nothing"
    totals = state.totals
    assert +story.account.wasted_tokens == +totals.wasted_tokens
    waiting = sum(g.num_tokens for g in state.live.values())
    assert totals.generated_tokens == totals.trained_tokens + totals.masked_tokens + sum(totals.wasted_tokens.values()) + waiting
    return state


@pytest.mark.parametrize("selection", ["uniform", "roc"])
def test_oversampled_groups(tmp_path: Path, selection: str) -> None:
    scored: list[str] = []

    def graded(completion: str) -> dict[str, float]:
        scored.append(completion)
        return {"score": float(spread(completion) > 0.5), "penalty": len(completion) / 100}

    gates = {"rollout": {"oversample": 6, "selection": selection}, "buffer": {"filter_zero_variance": True}}
    run(settings(tmp_path / "run", **gates), reward=graded)
    state = checked(tmp_path / "run")
    kept = [g.rollouts for g in told(tmp_path / "run").groups.values()]
    samples = [[r.sample for r in rollouts] for rollouts in kept]
    assert all(len(s) == 3 and s == sorted(set(s)) and s[-1] < 6 for s in samples) and len({tuple(s) for s in samples}) > 1
    assert len(scored) >= 2 * sum(map(len, kept))
    told_of = sum(line.get("wasted_tokens/not selected", 0) for line in step_lines(tmp_path / "run"))
    assert 0 < told_of <= state.totals.wasted_tokens["not selected"]
    if selection == "roc":
        penalties = [r.scores[0].parts["penalty"] for rollouts in kept for r in rollouts if r.reward == 1.0]
        everywhere = [len(text) / 100 for text in scored if spread(text) > 0.5]
        assert sum(penalties) / len(penalties) < sum(everywhere) / len(everywhere), "the cleaner correct answers are kept"


WINDOW = {"max_staleness": 1, "window": 4}
READY_FIRST = {"max_staleness": 1, "window": "unbounded", "max_groups": 8}


@pytest.mark.parametrize(
    ("buffer", "treated"),
    [
        (WINDOW | {"on_stale": "mask_tokens", "stale_level": "rollout"}, lambda t: t.masked_tokens),
        (WINDOW | {"on_stale": "down_weight"}, lambda t: t.down_weighted_tokens),
        (WINDOW | {"on_stale": "drop"}, lambda t: t.dropped["stale"]),
        (READY_FIRST | {"on_stale": "drop", "stale_level": "rollout"}, lambda t: t.stale.rollouts),
        (READY_FIRST | {"on_stale": "cancel_early"}, lambda t: t.dropped["stale"] + t.dropped["cancelled"]),
    ],
    ids=["masked", "down-weighted", "dropped", "rollouts dropped, ready first", "cancelled, ready first"],
)
def test_stale_data(tmp_path: Path, buffer: Tables, treated: Callable[[Totals], int]) -> None:
    run(settings(tmp_path / "run", buffer=buffer))
    state = checked(tmp_path / "run")
    assert treated(state.totals) > 0, "nothing was stale: the test shows nothing"
    trained_ages = {age for age, tokens in state.totals.staleness.items() if tokens}
    assert (max(trained_ages) > 1) == (buffer["on_stale"] == "down_weight"), "older than max_staleness"


def test_a_limit_on_a_metric_of_the_trainer_stops_the_run(tmp_path: Path) -> None:
    limit = {"metric": "num_loss_tokens", "above": 0.0, "steps": 9}, {"metric": "entropy", "above": 0.0, "steps": 2}
    with pytest.raises(RunFailed, match=r"entropy is \d.* at step 1; the threshold is above 0 for 2 steps in a row"):
        run(settings(tmp_path / "run", threshold=list(limit)))
    state = checked(tmp_path / "run", steps=2)
    assert state.threshold_counts == {"num_loss_tokens above 0.0: stop": 2}


def lowering(folder: Path, **more: Any) -> Tables:
    """Everything at once: selection, filter, treatment of stale data, and a limit that lowers max_staleness in the course of the run."""
    return settings(
        folder,
        rollout={"oversample": 5, "selection": "roc"},
        buffer={"max_staleness": 2, "window": 6, "on_stale": "down_weight", "filter_zero_variance": True},
        trainer={"steps": 7},
        threshold=[{"metric": "reward_std", "above": 0.0, "steps": 2, "action": "lower_max_staleness"}],
        **more,
    )


def test_a_limit_that_lowers_max_staleness_lowers_it_for_what_is_admitted_then(tmp_path: Path) -> None:
    run(lowering(tmp_path / "run"))
    checked(tmp_path / "run", steps=7)
    lines = step_lines(tmp_path / "run")
    assert lines[0]["max_staleness"] == 2 and lines[-1]["max_staleness"] < 2
    events = events_of(tmp_path / "run")
    lowered = [i for i, e in enumerate(events) if isinstance(e, ev.SettingsChanged)]
    assert lowered and [events[i].changes["buffer.max_staleness"] for i in lowered] == [1, 0][: len(lowered)]
    bounds = [e.bound for e in events[lowered[-1] :] if isinstance(e, ev.Admitted)]
    assert all(bound is not None and bound < 5 for bound in bounds)


class Stopped(Exception):
    pass


def test_a_deterministic_run_with_gates_is_the_same_after_a_resume(tmp_path: Path) -> None:
    exact = {"run": {"deterministic": True}, "checkpoint": {"every": 3}}
    run(lowering(tmp_path / "reference", **exact))

    def fails(line: dict) -> None:
        if line["step"] == 4:
            raise Stopped

    with pytest.raises(Stopped):
        run(lowering(tmp_path / "run", **exact), on_step=fails)
    run(lowering(tmp_path / "run", **exact), resume=tmp_path / "run")
    first, resumed = told(tmp_path / "reference"), told(tmp_path / "run")
    assert (resumed.versions, resumed.batches) == (first.versions, first.batches)
    assert resumed.account.wasted_tokens == first.account.wasted_tokens
    assert [e for e in events_of(tmp_path / "run") if isinstance(e, ev.SettingsChanged)] == [
        e for e in events_of(tmp_path / "reference") if isinstance(e, ev.SettingsChanged)
    ]
