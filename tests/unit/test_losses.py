"""Policy losses against the oracle (another implementation, float64), closed forms, and what all of them must keep."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from loss_tokens import CASES, oracle_tokens, random_tokens, split, take, tokens_of, weights

from slipstream.config.loss_tables import AGGREGATIONS, ALIASES, POLICY_LOSSES
from slipstream.config.losses import resolve
from slipstream.config.settings import CorrectionSettings, LossSettings
from slipstream.trainer import losses
from slipstream.trainer.corrections import correction_weight, whole_batch_weight
from slipstream.trainer.losses import Tokens

LOSS_CASES = [name for name, case in CASES.items() if "loss" in case["params"]]
OUR_NAMES = {"tau_pos": "tau_positive", "tau_neg": "tau_negative"}
DEFAULTS = {name: {key: p.default for key, p in loss.parameters.items() if p.default is not None} for name, loss in POLICY_LOSSES.items()}
CORRECTIONS = {
    "none": None,
    **ALIASES,
    "version_gate": CorrectionSettings(type="version_gate", high=1),
    "reject": CorrectionSettings(type="reject", level="sequence_max", statistic="k1", low=0.4, high=2.5),
}


def oracle_loss(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    params = dict(CASES[name]["params"])
    t, table, mask = oracle_tokens()
    function, aggregation = losses.POLICY_LOSSES[params.pop("loss")], params.pop("aggregation", "sequence_mean_of_token_mean")
    weight = weights(t, aggregation)
    if kind := params.pop("correction", None):
        correction = CorrectionSettings(type=kind, level=params.pop("level"), high=params.pop("cap"))
        weight = weight * correction_weight(t, correction)
    value = function(t, **{OUR_NAMES.get(key, key): number for key, number in params.items()})
    return (value.per_token * weight).sum(), table, mask


@pytest.mark.parametrize("name", LOSS_CASES)
def test_oracle(name):
    loss, table, mask = oracle_loss(name)
    loss.backward()
    expected = torch.tensor(CASES[name]["grad_logprob"], dtype=torch.float64).flatten()
    assert loss.item() == pytest.approx(CASES[name]["loss"], abs=1e-6)
    assert (table.grad - expected).abs().max() < 1e-6
    assert expected.abs().max() > 1e-3
    assert (table.grad[~mask] == 0).all() and (~mask).sum() > 5


def test_the_oracle_has_the_cases_that_it_had():
    assert len(LOSS_CASES) == 15
    assert {CASES[name]["params"]["loss"] for name in LOSS_CASES} == {"ppo_clip", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl"}


# ---- closed forms, for one token: value and derivative -------------------------------------------------------------------------------
# r, rho and c as in the module's docstring; A is the advantage, lp = log π.

PI_OLD = math.log(0.4)


def one_token(name: str, *, log_r: float, log_rho: float, advantage: float, **parameters: float) -> tuple[float, float, bool]:
    """(value, d value / d log π, cut) of a token with these ratios; log π = log 0.4 + log_r."""
    logprob = torch.tensor([PI_OLD + log_r], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([PI_OLD], dtype=torch.float64)
    adv = torch.tensor([advantage], dtype=torch.float64)
    t = tokens_of(logprob, old_logprob=old, start_logprob=old, sampler_logprob=old - log_rho, advantage=adv)
    value, cut = losses.POLICY_LOSSES[name](t, **{**DEFAULTS[name], **parameters})
    value.sum().backward()
    return value.item(), logprob.grad.item(), bool(cut)


def test_dual_clip_bounds_a_token_with_a_negative_advantage_alone():
    assert one_token("ppo_clip", log_r=math.log(5), log_rho=0, advantage=-2.0) == pytest.approx((10.0, 10.0, False))
    assert one_token("ppo_clip", log_r=math.log(5), log_rho=0, advantage=-2.0, dual_clip=3.0) == pytest.approx((6.0, 0.0, True))
    assert one_token("ppo_clip", log_r=math.log(2.9), log_rho=0, advantage=-2.0, dual_clip=3.0) == pytest.approx((5.8, 5.8, False))
    assert one_token("ppo_clip", log_r=math.log(0.1), log_rho=0, advantage=2.0, dual_clip=3.0) == pytest.approx((-0.2, -0.2, False))


@pytest.mark.parametrize(
    ("log_r", "advantage", "used", "cut"),
    [(0.5, 1.0, 0.4, True), (-0.5, 1.0, -0.5, False), (0.5, -1.0, 0.5, False), (-0.5, -1.0, -0.4, True), (0.3, 0.0, 0.0, False)],
)
def test_gmpo_limits_the_side_that_the_advantage_makes_harmful(log_r, advantage, used, cut):
    expected = -advantage * math.exp(used)
    found = one_token("gmpo", log_r=log_r, log_rho=0, advantage=advantage)
    assert found == pytest.approx((expected, 0.0 if cut else expected, cut))


def test_gmpo_of_a_rollout_is_its_geometric_mean():
    t = random_tokens(3)
    value, _ = losses.gmpo(t, clip_low=0.4, clip_high=0.4)
    for number in range(t.num_sequences):
        mine = t.sequence == number
        a = t.advantage[mine][0]
        log_r = (t.logprob - t.old_logprob)[mine]
        limited = log_r.clamp(max=0.4) if a > 0 else log_r.clamp(min=-0.4)
        assert torch.allclose(value[mine], -a * limited.mean().exp())


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_losses_have_the_gradient_of_their_formula(name):
    """Each token carries its own share; under equal weights that is the gradient of the rollout's value through all its tokens."""
    t = random_tokens(4, spread=0.2)
    losses.POLICY_LOSSES[name](t, clip_low=0.1, clip_high=0.15).per_token.sum().backward()
    logprob = t.logprob.detach().clone().requires_grad_()
    log_r, a = logprob - t.old_logprob, t.advantage
    if name == "gspo":
        s = t.sequence_mean(log_r).exp()
        value = -torch.minimum(s * a, s.clamp(0.9, 1.15) * a)
    else:
        value = -a * t.sequence_mean(torch.where(a > 0, log_r.clamp(max=0.15), log_r.clamp(min=-0.1))).exp()
    value.sum().backward()
    assert torch.allclose(t.logprob.grad, logprob.grad, atol=1e-12)
    assert (logprob.grad != 0).any()


def test_decoupled_ppo_weighs_the_clip_by_a_capped_rho():
    for log_rho, weight in ((math.log(0.5), 0.5), (math.log(4.9), 4.9), (math.log(50), 5.0)):
        found = one_token("decoupled_ppo", log_r=0.1, log_rho=log_rho, advantage=1.5)
        assert found == pytest.approx((-weight * 1.5 * math.exp(0.1), -weight * 1.5 * math.exp(0.1), False))
    assert one_token("decoupled_ppo", log_r=0.5, log_rho=math.log(2), advantage=1.5) == pytest.approx((-2 * 1.5 * 1.2, 0.0, True))


@pytest.mark.parametrize(
    ("c", "advantage", "weight", "cut"),
    [(0.5, 1.0, 1.0, False), (3.0, 1.0, 1.0, False), (0.5, -1.0, 0.5, False), (3.0, -1.0, 1.0, True)],
)
def test_topr(c, advantage, weight, cut):
    lp = PI_OLD + 0.2
    found = one_token("topr", log_r=0.2, log_rho=math.log(c) - 0.2, advantage=advantage)
    assert found == pytest.approx((-weight * advantage * lp, -weight * advantage, cut))


@pytest.mark.parametrize(("c", "weight", "cut"), [(0.01, 0.01, False), (1.01, 1.01, False), (1.5, 1.02, True)])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_reinforce(c, weight, cut, advantage):
    lp = PI_OLD + 0.2
    found = one_token("reinforce", log_r=0.2, log_rho=math.log(c) - 0.2, advantage=advantage)
    assert found == pytest.approx((-weight * advantage * lp, -weight * advantage, cut))


@pytest.mark.parametrize(("name", "parameter"), [("kimi", "tau"), ("dro", "beta")])
@pytest.mark.parametrize("log_r", [-0.7, 0.0, 0.3])
def test_kimi_and_dro(name, parameter, log_r):
    found = one_token(name, log_r=log_r, log_rho=0.4, advantage=-1.2, **{parameter: 0.3})
    assert found == pytest.approx((1.2 * (PI_OLD + log_r) + 0.15 * log_r**2, 1.2 + 0.3 * log_r, False))


@pytest.mark.parametrize(
    ("log_r", "log_rho", "advantage", "keep"),
    [(0.2, 0.6, 1.0, 0), (0.2, 0.6, -1.0, 1), (-0.6, -0.2, -1.0, 0), (-0.6, -0.2, 1.0, 1), (0.1, 0.0, 1.0, 1), (0.1, 0.0, -1.0, 1)],
)
def test_dppo_behaviour(log_r, log_rho, advantage, keep):
    """The mask is on π - μ, 0.2 either way; the square pulls every token."""
    log_c, change = log_r + log_rho, math.exp(PI_OLD + log_r) - math.exp(PI_OLD - log_rho)
    assert keep == (not (change > 0.2 if advantage > 0 else change < -0.2))
    expected = -keep * advantage * math.exp(log_c)
    found = one_token("dppo_behaviour", log_r=log_r, log_rho=log_rho, advantage=advantage, square_weight=0.01)
    assert found == pytest.approx((expected + 0.01 * log_c**2, expected + 0.02 * log_c, not keep))


def test_dppo_kl_masks_by_the_binary_divergence():
    p, q = 0.4, 0.4 * math.exp(0.5)
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    near = {"mask_low": divergence * 1.001, "mask_high": divergence * 1.001}
    far = {"mask_low": divergence * 0.999, "mask_high": divergence * 0.999}
    weight = math.exp(0.5)
    value = -weight * (PI_OLD + 0.5)
    assert one_token("dppo_kl", log_r=0.5, log_rho=0, advantage=1.0, **near) == pytest.approx((value, -weight, False))
    assert one_token("dppo_kl", log_r=0.5, log_rho=0, advantage=1.0, **far) == pytest.approx((0.0, 0.0, True))
    assert one_token("dppo_kl", log_r=0.5, log_rho=0, advantage=-1.0, **far) == pytest.approx((-value, weight, False))
    certain = tokens_of(torch.zeros(1, requires_grad=True), advantage=torch.ones(1))  # probability 1 on both sides
    assert losses.dppo_kl(certain, **DEFAULTS["dppo_kl"]).cut.tolist() == [False]


def test_gradient_of_fresh_tokens_is_the_policy_gradient():
    """Where π = π_old = μ every loss has the gradient -A per token; nothing is cut."""
    for name in POLICY_LOSSES:
        t = random_tokens(1)
        here = t.logprob.detach()
        t = tokens_of(t.logprob, advantage=t.advantage, sequence=t.sequence, num_sequences=t.num_sequences)
        value, cut = losses.POLICY_LOSSES[name](t, **DEFAULTS[name])
        value.sum().backward()
        assert torch.allclose(t.logprob.grad, -t.advantage), name
        assert not cut.any() and value.shape == here.shape


# ---- what `cut` means ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo", "dppo_tv", "dppo_kl", "dppo_behaviour", "decoupled_ppo"])
def test_cut_is_where_the_gradient_is_cut_off(name):
    t = random_tokens(2)
    parameters = DEFAULTS[name] | ({"square_weight": 0.0} if name == "dppo_behaviour" else {})
    value, cut = losses.POLICY_LOSSES[name](t, **parameters)
    value.sum().backward()
    judged = t.advantage != 0
    assert torch.equal(cut[judged], t.logprob.grad[judged] == 0)
    assert 0 < cut.sum() < judged.sum()


@pytest.mark.parametrize(
    ("name", "wide"), [("cispo", {"clip_low": 0.99, "clip_high": 1e6}), ("reinforce", {"clip_high": 1e6}), ("topr", {"ratio_cap": 1e6})]
)
def test_cut_is_where_a_cap_bounds_the_weight(name, wide):
    gradients = []
    for parameters in (DEFAULTS[name], wide):
        t = random_tokens(2)
        value, cut = losses.POLICY_LOSSES[name](t, **parameters)
        value.sum().backward()
        gradients.append((t.logprob.grad, cut))
    (capped, cut), (free, uncut) = gradients
    judged = t.advantage != 0
    assert torch.equal(cut[judged], (capped != free)[judged])
    assert 0 < cut.sum() < len(cut) and not uncut.any()


# ---- what every loss keeps -------------------------------------------------------------------------------------------------------------


def weighted_loss(t: Tokens, name: str, weight: torch.Tensor, correction: CorrectionSettings | None) -> torch.Tensor:
    if correction is not None and correction.type != "m2po":
        weight = weight * correction_weight(t, correction)
    return (losses.POLICY_LOSSES[name](t, **DEFAULTS[name]).per_token * weight).sum()


def batch_weight(t: Tokens, aggregation: str, correction: CorrectionSettings | None) -> torch.Tensor:
    of_batch = [correction] if correction is not None else []
    return weights(t, aggregation) * whole_batch_weight(t.start_logprob, t.sampler_logprob, of_batch)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_parts_of_a_batch_add_up_to_the_whole_in_any_order(name, aggregation, correction):
    whole = random_tokens(5)
    weight = batch_weight(whole, aggregation, CORRECTIONS[correction])
    loss = weighted_loss(whole, name, weight, CORRECTIONS[correction])
    loss.backward()
    gradient = whole.logprob.grad

    t = random_tokens(5)
    total = 0.0
    for part in split(t):
        shuffled = part.flip(0)
        share = weighted_loss(take(t, shuffled), name, weight[shuffled], CORRECTIONS[correction])
        share.backward()
        total += share.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert (t.logprob.grad - gradient).abs().max() < 1e-12
    assert gradient.abs().max() > 0 or correction == "geo"


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_token_without_weight_has_no_gradient(name):
    t = random_tokens(6)
    weight = torch.ones(len(t.logprob), dtype=torch.float64)
    weight[::3] = 0.0
    weighted_loss(t, name, weight, None).backward()
    assert (t.logprob.grad[::3] == 0).all()


@pytest.mark.parametrize("sampler", [-3000.0, 0.0, 3000.0])
@pytest.mark.parametrize("old", [-3000.0, 0.0, 3000.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_absurd_ratios_give_finite_gradients(name, old, sampler):
    base = torch.tensor([-1.0, -1.0, 0.0, -3000.0])
    logprob = base.clone().requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    t = tokens_of(logprob, old_logprob=base + old, start_logprob=base + old, sampler_logprob=base + sampler, advantage=advantage)
    value = losses.POLICY_LOSSES[name](t, **DEFAULTS[name]).per_token.sum()
    value.backward()
    assert value.isfinite() and logprob.grad.isfinite().all()


def test_the_functions_take_what_the_table_says():
    assert losses.POLICY_LOSSES.keys() == POLICY_LOSSES.keys()
    for name, function in losses.POLICY_LOSSES.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keywords == list(POLICY_LOSSES[name].parameters), name


def test_the_named_function_gets_its_parameters():
    t = random_tokens(7)
    named = losses.policy_loss(resolve(LossSettings(preset="dapo", clip_high=0.05)))
    assert torch.equal(named(t).per_token, losses.ppo_clip(t, clip_low=0.2, clip_high=0.05).per_token)
    assert not torch.equal(named(t).per_token, losses.ppo_clip(t, clip_low=0.2, clip_high=0.28).per_token)
