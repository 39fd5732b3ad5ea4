"""A person's own policy loss: called with tokens and options, tried when it is loaded, checked."""

from __future__ import annotations

import pytest
import torch
from loss_tokens import random_tokens

from slipstream.config.losses import resolve
from slipstream.config.settings import LossSettings
from slipstream.errors import ConfigError
from slipstream.trainer import losses
from slipstream.trainer.user_loss import load_policy_loss

CODE = """
import torch
from slipstream.trainer.losses import LossValue, log_ratio

def plain(t, scale=1.0):
    return -scale * log_ratio(t.logprob, t.old_logprob).exp() * t.advantage

def with_cut(t, *, above):
    ratio = log_ratio(t.logprob, t.old_logprob).exp()
    return LossValue((-ratio * t.advantage).masked_fill(ratio > above, 0.0), ratio > above)

def per_rollout(t):
    return t.sequence_mean(t.logprob)

def total(t):
    return t.logprob.sum()

def constant(t):
    return t.advantage

def number(t):
    return 1.0

def broken(t):
    return t.logprobs
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own_losses.py"
    path.write_text(CODE, encoding="utf-8")
    return path


def test_it_is_a_loss_like_the_others(file):
    t = random_tokens(1)
    plain = losses.policy_loss(resolve(LossSettings(policy=f"{file}:plain", options={"scale": 2.0})))
    value, cut = plain(t)
    assert torch.allclose(value, -2 * (t.logprob - t.old_logprob).exp() * t.advantage) and not cut.any()
    value, cut = load_policy_loss(f"{file}:with_cut", {"above": 1.2})(t)
    assert 0 < cut.sum() < len(cut) and (value[cut] == 0).all()
    assert load_policy_loss(f"{file}:per_rollout", {})(t).per_token.shape == t.logprob.shape


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("total", {}, r"per_token must be a tensor of one value per token \(5,\), not shape \(\)"),
        ("number", {}, "not float"),
        ("constant", {}, "has no gradient"),
        ("broken", {}, "failed on five example tokens: AttributeError"),
        ("plain", {"scal": 1.0}, "failed on five example tokens: TypeError: .*scal"),
        ("with_cut", {}, "missing 1 required keyword-only argument: 'above'"),
        ("absent", {}, "has no function 'absent'; it has: broken, constant"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_loaded(file, name, options, words):
    with pytest.raises(ConfigError, match=words):
        load_policy_loss(f"{file}:{name}", options)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        load_policy_loss(f"{tmp_path / 'none.py'}:loss", {})
