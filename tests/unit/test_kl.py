"""KL estimators against the exact divergence of two categorical distributions: their means, and where their gradients point."""

from __future__ import annotations

import pytest
import torch

from slipstream.trainer import kl

torch.manual_seed(0)
LOGITS = torch.randn(7, dtype=torch.float64)
REFERENCE = torch.randn(7, dtype=torch.float64).log_softmax(-1)


def exact(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def mean_and_gradient(estimator, logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Over every token, weighed by the probability that it is sampled: what infinitely many samples of π would give."""
    logits = logits.clone().requires_grad_()
    logprob = logits.log_softmax(-1)
    mean = (logprob.exp().detach() * estimator(logprob, reference)).sum()
    mean.backward()
    return mean.item(), logits.grad


def gradient_of(divergence, logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone().requires_grad_()
    divergence(logits.log_softmax(-1)).backward()
    return logits.grad


def test_means():
    expected = exact(LOGITS.log_softmax(-1), REFERENCE).item()
    assert mean_and_gradient(kl.k1, LOGITS, REFERENCE)[0] == pytest.approx(expected, abs=1e-12)
    assert mean_and_gradient(kl.k3, LOGITS, REFERENCE)[0] == pytest.approx(expected, abs=1e-12)
    assert mean_and_gradient(kl.k2, LOGITS, REFERENCE)[0] != pytest.approx(expected, rel=0.01)
    near = (LOGITS + 0.01 * REFERENCE).log_softmax(-1)
    assert mean_and_gradient(kl.k2, LOGITS, near)[0] == pytest.approx(exact(LOGITS.log_softmax(-1), near).item(), rel=0.01)


def test_gradients():
    assert mean_and_gradient(kl.k1, LOGITS, REFERENCE)[1].abs().max() < 1e-12
    reverse = gradient_of(lambda log_p: exact(log_p, REFERENCE), LOGITS)
    assert torch.allclose(mean_and_gradient(kl.k2, LOGITS, REFERENCE)[1], reverse)
    forward = gradient_of(lambda log_p: exact(REFERENCE, log_p), LOGITS)
    assert torch.allclose(mean_and_gradient(kl.k3, LOGITS, REFERENCE)[1], forward)
    assert (reverse - forward).abs().max() > 0.05


def gradient_as_reward(estimator, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """What infinitely many samples of π would give where the estimate is a punishment."""
    logits = logits.clone().requires_grad_()
    logprob = logits.log_softmax(-1)
    (logprob.exp().detach() * estimator(logprob, reference).detach() * logprob).sum().backward()
    return logits.grad


def test_gradients_where_the_estimate_is_taken_from_the_reward():
    near = (LOGITS + 0.2 * REFERENCE).log_softmax(-1)
    reverse = gradient_of(lambda log_p: exact(log_p, near), LOGITS)
    forward = gradient_of(lambda log_p: exact(near, log_p), LOGITS)
    assert torch.allclose(gradient_as_reward(kl.k1, LOGITS, near), reverse)
    assert torch.allclose(gradient_as_reward(kl.k3, LOGITS, near), reverse - forward)
    for estimator in (kl.k2, kl.k3):
        assert gradient_as_reward(estimator, LOGITS, near).norm() < 0.2 * reverse.norm()


def test_k2_and_k3_are_never_negative_and_0_for_equals():
    other = torch.randn(1000, dtype=torch.float64)
    for estimator in (kl.k2, kl.k3):
        values = estimator(torch.zeros(1000, dtype=torch.float64), other)
        assert (values >= 0).all() and estimator(other, other).abs().max() == 0


@pytest.mark.parametrize("name", kl.ESTIMATORS)
@pytest.mark.parametrize("gap", [-3000.0, 3000.0])
def test_absurd_distances_give_finite_gradients(name, gap):
    logprob = torch.tensor([-1.0], requires_grad=True)
    value = kl.ESTIMATORS[name](logprob, torch.tensor([-1.0 + gap]))
    value.sum().backward()
    assert value.isfinite().all() and logprob.grad.isfinite().all()


def test_full_kl_equals_its_definition_in_value_and_gradient():
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    other = torch.randn(5, 11, dtype=torch.float64)
    found = kl.full_kl(logits, other)
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    assert torch.allclose(found, torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
    gradient = torch.autograd.grad(found.sum(), logits)[0]
    by_hand = log_p.exp() * (log_p - log_q - found[:, None])
    assert torch.allclose(gradient, by_hand)
    assert torch.autograd.gradcheck(lambda x: kl.full_kl(x, other), logits)


def test_full_kl_of_vocabularies_padded_to_different_sizes():
    logits, other = torch.randn(3, 8), torch.randn(3, 10)
    assert torch.allclose(kl.full_kl(logits, other), kl.full_kl(logits, other[:, :8]))
    assert torch.allclose(kl.full_kl(other, logits), kl.full_kl(other[:, :8], logits))


def test_an_excluded_entry_counts_0_and_gives_no_nan():
    logits = torch.tensor([[0.3, -torch.inf, 1.0]], requires_grad=True)
    other = torch.tensor([[0.1, 0.7, 0.2]])
    found = kl.full_kl(logits, other)
    found.sum().backward()
    log_p, log_q = torch.tensor([0.3, 1.0]).log_softmax(-1), other.log_softmax(-1)[0, [0, 2]]
    assert found.item() == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item())
    assert logits.grad.isfinite().all() and logits.grad[0, 1] == 0
