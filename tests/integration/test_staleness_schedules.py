"""Promise 1 and the staleness bound, against thousands of adversarial schedules of the real controller core."""

from __future__ import annotations

import pytest
from staleness_harness import Adversary, Broken, Schedule, Stuck, census

from slipstream.controller import admission
from slipstream.controller.accounts import check_accounts
from slipstream.errors import StalenessError

BIASES = (None, "lag", "slow")
EVERYTHING = dict(filtered=0.2, failed=0.2, skipped=0.1, engines=3, restart=0.01, crash=0.004, prefetch=2)
SHAPES = [(0, 1, 1), (0, 3, 1), (1, 4, 1), (1, 2, 2), (2, 3, 4), (1, 3, 6), (3, 1, 4)]
ADVERSARIES = {
    "plain": {},
    "filter and fail": dict(filtered=0.4, failed=0.3),
    "skipped updates": dict(skipped=0.4),
    "three engines": dict(engines=3),
    "engines restart": dict(engines=2, restart=0.03),
    "prefetch": dict(prefetch=3),
    "crashes": dict(crash=0.01),
    "everything": EVERYTHING,
}
SEEDS = 40


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize(("S", "P", "W"), SHAPES)
def test_no_schedule_exceeds_the_bound_or_gets_stuck_or_loses_a_group(name, S, P, W):
    crashes = 0
    for seed in range(SEEDS):
        schedule = Schedule(seed, S, P, W, steps=8, adversary=Adversary(**ADVERSARIES[name], bias=BIASES[seed % 3]))
        assert schedule.run() <= schedule.claim
        crashes += schedule.crashes
        check_accounts(schedule.ledger)
        places = census(schedule.ledger)
        assert sorted(places) == list(range(schedule.core.state.next_draw))
        assert all(len(where) == 1 for where in places.values()), places
        assert sum(where == ["trained"] for where in places.values()) == 8 * P == schedule.core.state.totals.trained_groups
    if name == "crashes":
        assert crashes > SEEDS / 4, "the fault was hardly ever injected"


def test_a_synchronous_run_stays_at_zero_with_the_sync_withheld():
    for seed in range(60):
        schedule = Schedule(seed, 0, 2, 1, steps=10, adversary=Adversary(filtered=0.3, failed=0.2, engines=2, bias="lag"))
        assert schedule.run() == 0


def sliding(places, pulled, finished, window, groups_per_step):
    """The planted bug: a window over the oldest unpulled groups, which one slow group never stops."""
    unpulled = [g for g in places if not pulled(g)]
    batch: list[int] = []
    while len(batch) < groups_per_step:
        ready = [g for g in [g for g in unpulled if g not in batch][:window] if finished(g)]
        if not ready:
            return None
        batch.append(ready[0])
    return batch


BUGS = {
    "slot freed at the pull": ("slots_taken", lambda unpulled, pulled, unconfirmed: unpulled),
    "slot freed at the step's end": ("slots_taken", lambda unpulled, pulled, unconfirmed: unpulled + pulled),
    "sliding window": ("pull", sliding),
    "no permit": ("permit", lambda *_: 0),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    name, replacement = BUGS[bug]
    monkeypatch.setattr(admission, name, replacement)
    caught = 0
    for seed in range(90):
        adversary = Adversary(bias=BIASES[seed % 3], engines=2, restart=0.03 if bug == "no permit" else 0.0)
        try:
            Schedule(seed, 2, 3, 4, steps=12, adversary=adversary).run()
        except (Broken, StalenessError):
            caught += 1
        except Stuck:
            pass
    assert caught >= 3, f"{bug}: only {caught} of 90 schedules caught it"
