"""Thousands of simulated runs of the real controller core, over every pair of settings, each audited by its own count."""

from __future__ import annotations

import random
from typing import Any

import pytest
from schedule_simulator import Setting, Simulation

RULES = (  # on_stale, stale_level
    ("mask_tokens", None), ("mask_tokens", "rollout"), ("mask_tokens", "group"), ("down_weight", None), ("down_weight", "group"),
    ("drop", None), ("drop", "rollout"), ("cancel_early", None), ("keep", None),
)  # fmt: skip
INTERRUPTS = (  # interrupt, interrupt_after
    ("in_flight", None), ("abort_resume", None), ("abort_resume", 1), ("abort_retry", None), ("abort_retry", 1), ("drain", None),
    ("barrier", None),
)  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "S": (0, 1, 2, 3),
    "P": (1, 2, 3),
    "window": (1, 2, "middle", "largest", "unbounded"),
    "interrupt": INTERRUPTS,
    "rule": RULES,
    "every": (1, 2, 3),
    "oversample": (None, "uniform", "roc"),
    "filters": (0.0, 0.3),
    "failed": (0.0, 0.1),
    "sigma": (0.0, 0.5, 1.0, 1.5),
    "straggler": (0.0, 0.05),
    "slots": (2, 5, 12),
    "speed": ((4.0, 0.0), (12.0, 1.0), (40.0, 0.0)),  # ticks of a step, and the sigma of their logarithm
    "sync_ticks": (0, 3, 40),
    "skipped": (0.0, 0.15),
    "crashes": (0, 0, 2),
    "lowered": (0, 0, 1),
}


def draw(seed: int) -> dict[str, Any]:
    """A point of the product of all axes, moved to the nearest one that is not refused at load."""
    dice = random.Random(f"settings {seed}")
    point = {name: dice.choice(values) for name, values in AXES.items()}
    if point["S"] == 0:
        point |= {"window": 1, "every": 1}
    point["every"] = min(point["every"], point["S"] + 1)
    return point


def setting(point: dict[str, Any]) -> Setting:
    S, P, oversample, rule, flat = point["S"], point["P"], point["oversample"], point["rule"], point["filters"]
    largest = (S + 1) * P
    windows = {2: min(2, largest), "middle": (largest + 1) // 2, "largest": largest}
    return Setting(
        S=S,
        P=P,
        G=2,
        window=windows.get(point["window"], point["window"]),
        interrupt=point["interrupt"][0],
        interrupt_after=point["interrupt"][1],
        on_stale=rule[0],
        stale_level=rule[1],
        every=point["every"],
        oversample=None if oversample is None else 3,
        selection=oversample or "uniform",
        filters=flat > 0,
        flat=flat,
        failed=point["failed"],
        length=12.0,
        sigma=point["sigma"],
        straggler=point["straggler"],
        slots=point["slots"],
        step_ticks=point["speed"][0],
        step_sigma=point["speed"][1],
        sync_ticks=point["sync_ticks"],
        skipped=point["skipped"],
        crashes=point["crashes"],
        lowered=point["lowered"],
        steps=8,
    )


@pytest.mark.parametrize("block", range(4))
def test_runs_end_and_keep_every_rule(block):
    for seed in range(100 * block, 100 * block + 100):
        simulation = Simulation(setting(draw(seed)), seed).run()
        assert simulation.cause is None, f"seed {seed}: {simulation.cause}"
