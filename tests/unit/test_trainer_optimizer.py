"""AdamW: schedule, clipping, master weights, state."""

import copy

import pytest
import torch
from torch import nn

from slipstream.config.settings import TrainerSettings
from slipstream.trainer.optimizer import Optimizer, learning_rate


def net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def backward(model, seed=0, scale=1.0):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    (model(x).float().square().mean() * scale).backward()


def step(model, optimizer, number, seed=0, scale=1.0):
    optimizer.zero_grad()
    backward(model, seed, scale)
    norm = optimizer.gradient_norm()
    optimizer.update(number, norm)
    return norm


def test_equals_torch_adamw_with_clipping():
    settings = TrainerSettings(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.05)
    model, reference = net(), net()
    optimizer = Optimizer(model, settings)
    decayed = [p for p in reference.parameters() if p.ndim == 2]
    others = [p for p in reference.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    for number in range(5):
        norm = step(model, optimizer, number, seed=number)
        reference.zero_grad()
        backward(reference, seed=number)
        assert float(nn.utils.clip_grad_norm_(reference.parameters(), 0.05)) == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05
        adamw.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]), ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])],
)
def test_schedule(schedule, expected):
    settings = TrainerSettings(steps=8, warmup_steps=4, learning_rate=1.0, schedule=schedule)
    assert [learning_rate(settings, s) for s in range(8)] == expected


def test_cosine_goes_from_the_peak_to_zero():
    settings = TrainerSettings(steps=10, learning_rate=2.0, schedule="cosine")
    rates = [learning_rate(settings, s) for s in range(11)]
    assert rates[0] == 2.0 and rates[5] == pytest.approx(1.0) and rates[10] == pytest.approx(0.0)
    assert rates == sorted(rates, reverse=True)


def test_learning_rate_zero_moves_nothing():
    model = net()
    before = [p.clone() for p in model.parameters()]
    optimizer = Optimizer(model, TrainerSettings(learning_rate=0.0, weight_decay=0.1))
    assert step(model, optimizer, 0) > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_master_weights_accumulate_updates_smaller_than_a_bfloat16_ulp():
    """At 1.0 a bfloat16 ulp is 2^-7; updates of 1e-4 vanish in bfloat16 alone, and must add up here."""
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = Optimizer(model, TrainerSettings(learning_rate=1e-4, steps=1000))
    alone = torch.ones(4, 4, dtype=torch.bfloat16)
    for number in range(200):
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()  # the gradient is 1 everywhere: each update is the learning rate
        optimizer.update(number, optimizer.gradient_norm())
        alone -= 1e-4
        if number == 0:
            assert (model.weight == 1).all()
    assert (alone == 1).all()
    assert model.weight.dtype == torch.bfloat16
    assert torch.allclose(model.weight.float(), torch.tensor(0.98), atol=2**-7)
    assert (model.weight != 1).all()


def test_gradients_of_micro_batches_add_up_in_float32():
    """256 + 1 is 256 in bfloat16; 256 sums of 1/256 after a first of 256 would be lost."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    optimizer = Optimizer(model, TrainerSettings())
    for gradient in [256.0] + [0.5] * 64:
        (weight * gradient).sum().backward()
    assert weight.grad is None
    assert optimizer.gradient_norm() == 288.0


def test_tied_parameters_are_updated_once():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    assert len(Optimizer(model, TrainerSettings()).state_tensors()) == 0
    optimizer = Optimizer(model, TrainerSettings())
    model["b"](model["a"](torch.ones(1, 4))).sum().backward()
    optimizer.update(0, optimizer.gradient_norm())
    assert sorted(optimizer.state_tensors()) == ["a.weight.exp_avg", "a.weight.exp_avg_sq", "a.weight.step"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_with_the_same_bits(dtype):
    settings = TrainerSettings(learning_rate=0.01, weight_decay=0.1)
    model = net(dtype)
    optimizer = Optimizer(model, settings)
    for number in range(3):
        step(model, optimizer, number, seed=number)
    twin = copy.deepcopy(net(dtype, seed=9))
    twin.load_state_dict(model.state_dict())
    other = Optimizer(twin, settings)
    other.load_state_tensors({name: t.clone() for name, t in optimizer.state_tensors().items()})
    for number in range(3, 6):
        step(model, optimizer, number, seed=number)
        step(twin, other, number, seed=number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
