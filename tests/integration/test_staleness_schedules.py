"""Promise 1 and the staleness bound, against thousands of adversarial schedules of the real controller core."""

from __future__ import annotations

import pytest
from staleness_harness import Adversary, Broken, Gate, Schedule, Stuck, census

from slipstream.controller import admission, buffer
from slipstream.controller.accounts import check_accounts
from slipstream.controller.intake import Intake
from slipstream.controller.ledger import Ledger
from slipstream.controller.stale import Treated
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
SEEDS = 20  # for each of the 56 choices; the planted bug that shows least is caught by every tenth schedule


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize(("S", "P", "W"), SHAPES)
def test_no_schedule_exceeds_the_bound_or_gets_stuck_or_loses_a_group(name, S, P, W):
    crashes = 0
    for seed in range(SEEDS):
        schedule = Schedule(seed, S, P, W, steps=8, adversary=Adversary(**ADVERSARIES[name], bias=BIASES[seed % 3]))
        assert schedule.run() <= schedule.claim
        crashes += schedule.crashes
        every_group_is_in_one_place(schedule)
    if name == "crashes":
        assert crashes > SEEDS / 4, "the fault was hardly ever injected"


def every_group_is_in_one_place(schedule: Schedule) -> None:
    check_accounts(schedule.ledger)
    places = census(schedule.ledger)
    assert sorted(places) == list(range(schedule.core.state.next_draw))
    assert all(len(where) == 1 for where in places.values()), places
    trained = sum(where == ["trained"] for where in places.values())
    assert trained == 8 * schedule.P == schedule.core.state.totals.trained_groups


GATES = {
    "masked": Gate("mask_tokens"),
    "masked whole": Gate("mask_tokens", "group"),
    "weighed": Gate("down_weight", "rollout"),
    "dropped": Gate("drop"),
    "cancelled": Gate("cancel_early"),
    "retried": Gate("mask_tokens", interrupt="abort_retry"),
    "retried or cancelled": Gate("cancel_early", interrupt="abort_retry"),
    "barrier": Gate("mask_tokens", interrupt="barrier"),
    "every second version, dropped": Gate("drop", every=2),
    "every second version, barrier, cancelled": Gate("cancel_early", interrupt="barrier", every=2),
}
WIDE = [(1, 2, 2), (2, 3, 7), (1, 3, None), (2, 1, None)]  # S, P, W; None: unbounded
WIDE_SEEDS = 12


@pytest.mark.parametrize("name", GATES)
def test_no_schedule_breaks_the_rules_of_a_gate(name):
    """With every trouble at once, and max_staleness lowered now and then. What is dropped, weighed and masked is checked by the harness."""
    dropped = retried = lowered = crashes = 0
    for S, P, W in WIDE:
        for seed in range(WIDE_SEEDS):
            adversary = Adversary(**EVERYTHING, lowered=0.002, bias=BIASES[seed % 3])
            schedule = Schedule(seed, S, P, W, steps=8, adversary=adversary, gate=GATES[name])
            schedule.run()
            every_group_is_in_one_place(schedule)
            totals = schedule.core.state.totals
            dropped += totals.dropped["stale"] + totals.dropped["cancelled"]
            retried += schedule.retried
            lowered += schedule.lowered
            crashes += schedule.crashes
    assert crashes > 5 and lowered > 5, "the faults were hardly ever injected"
    assert (dropped > 50) == (GATES[name].on_stale in ("drop", "cancel_early"))
    assert (retried > 50) == (GATES[name].interrupt == "abort_retry")


def test_a_synchronous_run_stays_at_zero_with_the_sync_withheld():
    for seed in range(60):
        schedule = Schedule(seed, 0, 2, 1, steps=10, adversary=Adversary(filtered=0.3, failed=0.2, engines=2, bias="lag"))
        assert schedule.run() == 0


def sliding(places, pulled, finished, window, groups_per_step):
    """The planted bug: a window over the oldest unpulled groups, which one slow group never stops."""
    unpulled = [g for g in places if not pulled(g)]
    batch: list[int] = []
    while len(batch) < groups_per_step:
        ready = [g for g in [g for g in unpulled if g not in batch][:window] if g in finished]
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


def eager(self: Intake, real=Intake.cancel_stale) -> None:
    """The planted bug: one version too early."""
    self._state.max_staleness -= 1
    real(self)
    self._state.max_staleness += 1


def all_prefixes(self: Ledger, group_id: int, attempt_of, real=Ledger.prefixes):
    """The planted bug: of a rollout that started anew the dead chunks too."""
    return real(self, group_id, lambda sample: 0)


GATE_BUGS = {
    "cancelled too early": (Intake, "cancel_stale", eager, Gate("cancel_early")),
    "nothing is too old": (buffer, "treat", lambda group, step, rule: Treated(group), Gate("mask_tokens")),
    "a barrier that is open": (Intake, "round_over", True, Gate(interrupt="barrier")),
    "dead prefixes": (Ledger, "prefixes", all_prefixes, Gate(interrupt="abort_retry", on_stale="mask_tokens")),
}


@pytest.mark.parametrize("bug", GATE_BUGS)
def test_planted_bugs_of_gates_are_caught(bug, monkeypatch):
    target, name, replacement, gate = GATE_BUGS[bug]
    monkeypatch.setattr(target, name, replacement)
    caught = 0
    for seed in range(30):
        adversary = Adversary(bias=BIASES[seed % 3], engines=2, crash=0.01)
        try:
            Schedule(seed, 1, 3, None if gate.on_stale != "keep" else 4, steps=12, adversary=adversary, gate=gate).run()
        except Broken:
            caught += 1
        except Stuck:
            pass
    assert caught >= 3, f"{bug}: only {caught} of 30 schedules caught it"
