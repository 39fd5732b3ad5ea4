"""Two thousand simulated runs of the real controller core, over every pair of settings, each audited by its own count."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schedule_simulator import Simulation
from schedule_world import Setting
from staleness_harness import Broken, Stuck
from test_staleness_schedules import sliding

from slipstream.config import checks
from slipstream.controller import admission, delivery, state
from slipstream.controller import events as ev
from slipstream.controller.accounts import check_accounts
from slipstream.controller.intake import Intake
from slipstream.controller.stale import Treated
from slipstream.errors import LedgerError, StalenessError

BLOCKS, RUNS = 9, 200

INTERRUPTS = (  # interrupt, interrupt_after
    ("in_flight", None), ("abort_resume", None), ("abort_resume", 1), ("abort_retry", None), ("abort_retry", 1), ("drain", None),
    ("barrier", None),
)  # fmt: skip
RULES = (  # on_stale, stale_level
    ("mask_tokens", None), ("mask_tokens", "rollout"), ("mask_tokens", "group"), ("down_weight", None), ("down_weight", "rollout"),
    ("down_weight", "group"), ("drop", None), ("drop", "rollout"), ("cancel_early", None), ("keep", None),
)  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "S": (0, 1, 1, 2, 3),
    "P": (1, 2, 3),
    "G": (2, 3),
    "window": (1, 2, "middle", "largest", "unbounded", None),
    "interrupt": INTERRUPTS,
    "rule": RULES,
    "every": (1, 2, 3),
    "oversample": (None, "uniform", "roc"),
    "flat": (0.0, 0.3),  # with the filter on
    "failed": (0.0, 0.1),
    "sigma": (0.0, 0.5, 1.0, 1.5),
    "straggler": (0.0, 0.12),
    "slots": (2, 5, 12),
    "step": ((3.0, 0.0), (10.0, 1.0), (30.0, 0.0)),  # ticks, and the sigma of their logarithm
    "sync_ticks": (0, 3, 40),
    "skipped": (0.0, 0.15),
    "records": (True, False),
    "crashes": (0, 2),
    "lowered": (0, 1),
    "max_interrupts": (1, 3),
}


Point = dict[str, Any]


def draw(dice: random.Random) -> Point:
    return {name: dice.choice(values) for name, values in AXES.items()}


def accepted(point: Point) -> bool:
    """Whether these settings load."""
    return not checks.check(setting(point).config(0), reward_given=True, base_folder=Path())


def point_of(seed: int) -> Point:
    """A point of the product of all axes; of those that load, none is left out."""
    dice = random.Random(f"settings {seed}")
    return next(point for point in iter(lambda: draw(dice), None) if accepted(point))


def setting(point: Point) -> Setting:
    """The simulated run at this point."""
    largest = (point["S"] + 1) * point["P"]
    windows = {2: min(2, largest), "middle": (largest + 1) // 2, "largest": largest}
    same = {name: point[name] for name in AXES if name in Setting.__slots__}
    more = {
        "window": windows.get(point["window"], point["window"]),
        "interrupt": point["interrupt"][0],
        "interrupt_after": point["interrupt"][1],
        "on_stale": point["rule"][0],
        "stale_level": point["rule"][1],
        "oversample": point["G"] + 1 if point["oversample"] else None,
        "selection": point["oversample"] or "uniform",
        "filters": point["flat"] > 0,
        "step_ticks": point["step"][0],
        "step_sigma": point["step"][1],
    }
    return Setting(**(same | more), length=8.0, steps=6)


def test_every_pair_of_settings_is_simulated_or_refused_at_load():
    seen = {pair for seed in range(BLOCKS * RUNS) for pair in itertools.combinations(point_of(seed).items(), 2)}
    dice = random.Random(0)
    for one, other in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[one], AXES[other]):
            if ((one, a), (other, b)) not in seen:
                assert not any(accepted(draw(dice) | {one: a, other: b}) for _ in range(100)), (one, a, other, b)


def lived_through(simulation: Simulation) -> Counter[str]:
    """What this run went through; a fault that never happens tests nothing."""
    audit, totals = simulation.audit, simulation.core.state.totals
    made = audit.steps.values()
    return Counter(
        crashes=audit.crashes,
        lowered=simulation.setting.S - audit.S,
        swaps_amid_groups=audit.adoptions_amid_sequences,
        skipped=sum(step.skipped for step in made),
        masked=sum(step.masked for step in made),
        down_weighted=totals.down_weighted_tokens,
        stale_rollouts=sum(step.stale for step in made),
        beyond_max_staleness=sum(age > simulation.setting.S for step in made for age in step.ages),
        never_told=audit.lost,
        filtered=totals.filtered,
        **{f"wasted {cause}": tokens for cause, tokens in audit.wasted.items()},
        **{f"dropped {reason}": groups for reason, groups in totals.dropped.items()},
    )


EVENTS = (
    "crashes", "lowered", "swaps_amid_groups", "skipped", "masked", "down_weighted", "beyond_max_staleness", "never_told", "filtered",
    "wasted failed", "wasted interrupted", "wasted not selected", "wasted stale", "dropped stale",
)  # fmt: skip


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_run_ends_and_keeps_every_rule(block):
    seen: Counter[str] = Counter()
    for seed in range(block * RUNS, (block + 1) * RUNS):
        simulation = Simulation(setting(point_of(seed)), seed).run()
        assert simulation.cause is None, f"seed {seed}: {simulation.cause}"
        seen += lived_through(simulation)
        if seed % 8 == 0:
            check_accounts(simulation.ledger)
    assert not [event for event in EVENTS if not seen[event]], seen


RARE = {
    "dropped cancelled": {"on_stale": "cancel_early", "window": 4},
    "dropped interrupted": {"interrupt": "abort_retry", "max_interrupts": 1, "S": 3, "window": "unbounded", "step_ticks": 4.0},
    "stale_rollouts": {"on_stale": "drop", "stale_level": "rollout", "window": "unbounded", "G": 4, "slots": 3, "step_ticks": 4.0},
}


@pytest.mark.parametrize("event", RARE)
def test_what_hardly_ever_happens_keeps_every_rule(event):
    seen: Counter[str] = Counter()
    for seed in range(20):
        simulation = Simulation(Setting(**(HARD | RARE[event])), seed).run()
        assert simulation.cause is None, f"seed {seed}: {simulation.cause}"
        seen += lived_through(simulation)
        check_accounts(simulation.ledger)
    assert seen[event] > 1, seen


# ---- what single settings promise --------------------------------------------------------------------------------------------

HARD = {"sigma": 1.5, "straggler": 0.05, "failed": 0.1, "flat": 0.2, "filters": True, "length": 12.0, "step_ticks": 12.0, "steps": 9}


def ages_of(seed: int, **changes: Any) -> tuple[Simulation, dict[int, set[int]]]:
    """(the run, the ages of the tokens that each step trained)."""
    simulation = Simulation(Setting(**(HARD | changes)), seed).run()
    assert simulation.cause is None
    return simulation, {step: set(made.ages) for step, made in simulation.audit.steps.items()}


@pytest.mark.parametrize("interrupt", [name for name, after in INTERRUPTS if after is None])
def test_without_staleness_every_token_is_of_the_weights_that_it_trains(interrupt):
    for seed in range(8):
        _, ages = ages_of(seed, S=0, interrupt=interrupt, sync_ticks=30)
        assert set().union(*ages.values()) == {0}


def test_a_barrier_with_max_staleness_1_is_double_buffering():
    for seed in range(20):
        simulation, ages = ages_of(seed, S=1, interrupt="barrier", sync_ticks=20, slots=4)
        assert ages == {step: {min(step, 1)} for step in range(9)}
        assert simulation.audit.adoptions_amid_sequences == 0


def test_drain_wastes_nothing_and_abort_retry_only_what_it_starts_anew_or_gives_up():
    wasted = Counter()
    for seed in range(10):
        plain = {"S": 2, "failed": 0.0, "flat": 0.0, "filters": False}
        assert not ages_of(seed, interrupt="drain", **plain)[0].audit.wasted
        simulation, _ = ages_of(seed, interrupt="abort_retry", max_interrupts=2, **plain)
        wasted += simulation.audit.wasted
        assert set(simulation.audit.wasted) <= {"interrupted"}
    assert wasted["interrupted"] > 0


@pytest.mark.parametrize("interrupt", [name for name, after in INTERRUPTS if after is None])
def test_a_run_that_gets_nowhere_ends_with_its_cause(interrupt):
    world = Setting(P=2, interrupt=interrupt, on_stale="drop", window=4)
    nothing_learned = Simulation(replace(world, flat=1.0, filters=True, max_barren=9), 0).run()
    assert nothing_learned.cause is not None and "(buffer.max_barren_groups = 9)" in nothing_learned.cause
    broken = Simulation(replace(world, failed=1.0), 0).run()
    assert broken.cause is not None and broken.cause.startswith("every group of the first step failed (2 groups). The first: ")
    assert "it broke" in broken.cause


# ---- planted bugs ------------------------------------------------------------------------------------------------------------


def forgets_a_cancellation(old: Any) -> Any:
    """The group is not told to end, and stays where it was."""
    return lambda state, event: None if event.reason == "cancelled" else old(state, event)


BUGS: dict[str, tuple[list[tuple[Any, str, Any]], dict[str, Any]]] = {  # what is replaced, and the settings under which it shows
    "slot freed at the pull": ([(admission, "slots_taken", lambda unpulled, pulled, unconfirmed: unpulled)], {}),
    "slot freed at the step's end": (
        [(admission, "slots_taken", lambda unpulled, pulled, unconfirmed: unpulled + pulled)],
        {"sync_ticks": 40},
    ),
    "sliding window": ([(admission, "pull", sliding)], {"P": 3, "S": 2, "window": 4, "straggler": 0.1}),
    "barrier ignored": ([(Intake, "round_over", True)], {"interrupt": "barrier"}),
    "no permit": ([(admission, "permit", lambda *_: 0)], {"crashes": 3, "S": 0}),
    "cancelled group consumed": (
        [(Intake, "cancellations", lambda self: ()), (state, "_dropped", forgets_a_cancellation(state._dropped))],
        {"on_stale": "cancel_early", "window": 4},
    ),
    "stale group trained": ([(delivery.buffer, "treat", lambda group, step, rule: Treated(group))], {"window": 4, "straggler": 0.1}),
    "waste under another cause": ([(state, "INTERRUPTED", "failed")], {"interrupt": "abort_retry", "failed": 0.2}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    patches, changes = BUGS[bug]
    for where, name, replacement in patches:
        monkeypatch.setattr(where, name, replacement)
    monkeypatch.setitem(state._HANDLERS, ev.Dropped, state._dropped)
    caught = sum(catches(Setting(**(HARD | {"S": 1} | changes)), seed) for seed in range(20))
    assert caught >= 3, f"{bug}: only {caught} of 20 runs caught it"


def catches(world: Setting, seed: int) -> bool:
    try:
        Simulation(world, seed).run()
    except (Broken, StalenessError, LedgerError, AssertionError) as error:
        return not isinstance(error, Stuck)
    return False
