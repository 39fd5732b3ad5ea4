"""Corrections against the oracle and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from loss_tokens import CASES, oracle_tokens, random_tokens, split, take, tokens_of

from slipstream.config.loss_tables import ALIASES
from slipstream.config.loss_tables import CORRECTIONS as TABLE
from slipstream.config.settings import CorrectionSettings
from slipstream.trainer import corrections
from slipstream.trainer.corrections import correction_weight, m2po_kept, whole_batch_weight
from slipstream.trainer.losses import Tokens

OUR_LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
WEIGHTS = [name for name, case in CASES.items() if "weights" in case]
MASKS = [name for name, case in CASES.items() if "mask" in case]


def weight_of(t: Tokens, **keys) -> torch.Tensor:
    return correction_weight(t, CorrectionSettings(**keys))


@pytest.mark.parametrize("name", WEIGHTS)
def test_oracle_weights(name):
    params = CASES[name]["params"]
    t, _, mask = oracle_tokens()
    found = weight_of(t, type=params["correction"], level=params["level"], high=params["cap"])
    expected = torch.tensor(CASES[name]["weights"], dtype=torch.float64).flatten()
    assert (found - expected[mask]).abs().max() < 1e-6
    assert (expected[mask] < params["cap"]).any() and (expected[mask] == params["cap"]).any()


@pytest.mark.parametrize("name", MASKS)
def test_oracle_rejections(name):
    params = CASES[name]["params"]
    level, _, statistic = params["rejection"].rpartition("_")
    bounds = [float(part) for part in params["threshold"].split("_")]
    t, _, mask = oracle_tokens()
    keys = {"low": bounds[0], "high": bounds[1]} if len(bounds) == 2 else {"high": bounds[0]}
    found = weight_of(t, type="reject", level=OUR_LEVELS[level], statistic=statistic, **keys)
    expected = torch.tensor(CASES[name]["mask"], dtype=torch.float64).flatten()[mask]
    assert torch.equal(found, expected)
    assert 0 < expected.sum() < len(expected)


def test_the_oracle_has_the_cases_that_it_had():
    assert len(WEIGHTS) == 4 and len(MASKS) == 6


def naive_rho(t: Tokens) -> list[tuple[list[int], list[float]]]:
    """(indices, ρ) of each rollout, in plain numbers."""
    log_rho = (t.start_logprob - t.sampler_logprob).tolist()
    members = [[i for i, s in enumerate(t.sequence.tolist()) if s == number] for number in range(t.num_sequences)]
    return [(indices, [math.exp(log_rho[i]) for i in indices]) for indices in members]


def test_mask_per_token_and_per_rollout():
    t = random_tokens(1)
    token, whole = (weight_of(t, type="mask", level=level, low=0.6, high=1.6) for level in ("token", "sequence"))
    for indices, rho in naive_rho(t):
        product = math.prod(rho)
        assert token[indices].tolist() == pytest.approx([r if 0.6 <= r <= 1.6 else 0.0 for r in rho])
        assert whole[indices].tolist() == pytest.approx([product if 0.6 <= product <= 1.6 else 0.0] * len(rho))
    assert 0 < (token == 0).sum() < len(token) and 0 < (whole == 0).sum() < len(whole)


def test_geometric_keeps_rollouts_by_the_mean_of_log_rho():
    t = random_tokens(2)
    found = weight_of(t, type="geometric", low=0.9, high=1.2)
    for indices, rho in naive_rho(t):
        mean = math.prod(rho) ** (1 / len(rho))
        assert found[indices].tolist() == [float(0.9 <= mean <= 1.2)] * len(rho)
    assert 0 < found.sum() < len(found)


def test_opsm_drops_drifted_rollouts_with_a_negative_advantage_alone():
    t = random_tokens(3)
    found = weight_of(t, type="opsm", high=0.05)
    drift = (t.sampler_logprob - t.logprob).detach()
    dropped = set()
    for number in range(t.num_sequences):
        mine = t.sequence == number
        drop = bool(drift[mine].mean() > 0.05) and bool(t.advantage[mine][0] < 0)
        assert found[mine].tolist() == [float(not drop)] * int(mine.sum())
        dropped.add(drop)
    assert dropped == {True, False}
    kept = weight_of(take(t, t.advantage > 0), type="opsm", high=-0.0)
    assert kept.all()


def test_opsm_follows_the_model_as_it_is_now():
    """After an update that made the mistake less likely, it is dropped; π_start has no part in it."""
    sampler = torch.tensor([-1.0, -1.0])
    for now, kept in ((-1.0, 1.0), (-2.0, 0.0)):
        logprob = torch.full((2,), now, requires_grad=True)
        t = tokens_of(logprob, sampler_logprob=sampler, start_logprob=sampler - 4, advantage=-torch.ones(2))
        assert weight_of(t, type="opsm", high=0.1).tolist() == [kept, kept]


def test_version_gate():
    t = random_tokens(4)
    assert torch.equal(weight_of(t, type="version_gate", high=2) == 1, t.staleness <= 2)


@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean", "sequence_max"])
def test_reject_by_every_statistic_and_level(level, statistic):
    t = random_tokens(5, spread=0.4)
    low, high = (0.7, 1.4) if statistic == "k1" else (None, 0.06)
    found = weight_of(t, type="reject", level=level, statistic=statistic, low=low, high=high)
    formula = {"k1": lambda r: -math.log(r), "k2": lambda r: math.log(r) ** 2 / 2, "k3": lambda r: r - 1 - math.log(r)}[statistic]
    upper, lower = (math.log(1.4), math.log(0.7)) if statistic == "k1" else (0.06, -math.inf)
    for indices, rho in naive_rho(t):
        values = [formula(r) for r in rho]
        inside = [lower <= v <= upper for v in values]
        keep = {
            "token": inside,
            "sequence": [lower <= sum(values) <= upper] * len(rho),
            "sequence_mean": [lower <= sum(values) / len(rho) <= upper] * len(rho),
            "sequence_max": [all(inside)] * len(rho),
        }[level]
        assert found[indices].tolist() == [float(k) for k in keep]
    assert found.any() and not found.all()


def test_m2po_drops_the_largest_until_the_mean_is_small_enough():
    start = torch.tensor([0.1, -0.5, 0.0, 0.3, -0.2]) - 1.0
    sampler = torch.full((5,), -1.0)
    squares = [0.01, 0.25, 0.0, 0.09, 0.04]
    assert m2po_kept(start, sampler, high=1.0).all()
    assert m2po_kept(start, sampler, high=0.05).tolist() == [True, False, True, True, True]  # mean of the others is 0.035
    assert m2po_kept(start, sampler, high=0.02).tolist() == [True, False, True, False, True]
    assert sum(s for s, kept in zip(squares, m2po_kept(start, sampler, high=0.02).tolist(), strict=True) if kept) / 3 <= 0.02
    assert m2po_kept(start, sampler, high=0.0).tolist() == [False, False, True, False, False]
    equal = m2po_kept(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3), high=0.5)
    assert equal.tolist() == [True, True, False]  # of equal ones the later leaves


def test_m2po_is_of_the_whole_batch_and_others_are_not():
    t = random_tokens(7)
    settings = [CorrectionSettings(type="m2po", high=0.04), CorrectionSettings(type="geometric", low=0.1, high=0.11)]
    weight = whole_batch_weight(t.start_logprob, t.sampler_logprob, settings)
    assert torch.equal(weight == 1, m2po_kept(t.start_logprob, t.sampler_logprob, high=0.04))
    parts = torch.zeros_like(weight)
    for indices in split(t):
        parts[indices] = m2po_kept(t.start_logprob[indices], t.sampler_logprob[indices], high=0.04).double()
    assert not torch.equal(parts, weight)  # judging parts would be another thing


@pytest.mark.parametrize("name", [name for name in ALIASES if ALIASES[name].type != "m2po"])
@pytest.mark.parametrize("gap", [-3000.0, 3000.0])
def test_weights_have_no_gradient_and_are_finite(name, gap):
    logprob = torch.full((4,), -1.0, requires_grad=True)
    t = tokens_of(logprob, start_logprob=logprob.detach() + gap, sequence=torch.tensor([0, 0, 1, 1]), num_sequences=2)
    weight = correction_weight(t, ALIASES[name])
    assert weight.isfinite().all() and (weight >= 0).all() and not weight.requires_grad
    assert weight.dtype == logprob.dtype


def test_every_type_has_a_function():
    one_batch = {name for name, row in TABLE.items() if row.whole_batch}
    assert set(corrections._FUNCTIONS) | one_batch == set(TABLE) and one_batch == {"m2po"}
