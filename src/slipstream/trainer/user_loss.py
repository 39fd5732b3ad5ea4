"""A person's own policy loss, named in `loss.policy`: loaded once, tried on a few tokens, checked at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.scoring.loading import load_function
from slipstream.trainer.losses import LossValue, PolicyLoss, Tokens


def load_policy_loss(spec: str, options: dict[str, float]) -> PolicyLoss:
    """The function behind 'module:function' or 'file.py:function' as a policy loss.

    It is called as `function(tokens, **options)` and gives the loss per token, float[N] with a gradient, or a `LossValue`. Raises
    ConfigError if it cannot be loaded, or fails on five made-up tokens of two rollouts.
    """
    function = load_function(spec)

    def loss(t: Tokens) -> LossValue:
        value = function(t, **options)
        if not isinstance(value, LossValue):
            value = LossValue(value, torch.zeros_like(t.logprob, dtype=torch.bool))
        _check(spec, value, t)
        return value

    try:
        loss(_example())
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"loss.policy = {spec!r} failed on five example tokens: {type(error).__name__}: {error}") from error
    return loss


def _check(spec: str, value: LossValue, t: Tokens) -> None:
    for name, tensor in zip(LossValue._fields, value, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != t.logprob.shape:
            given = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(
                f"loss.policy = {spec!r}: {name} must be a tensor of one value per token {tuple(t.logprob.shape)}, not {given}"
            )
    if not value.per_token.requires_grad:
        raise ConfigError(f"loss.policy = {spec!r}: its value has no gradient; it must be computed from tokens.logprob")


def _example() -> Tokens:
    """Two rollouts, interleaved, of three and two tokens."""
    logprob = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.7], requires_grad=True)
    old = torch.tensor([-0.6, -0.9, -2.1, -0.2, -0.5])
    return Tokens(
        logprob=logprob,
        old_logprob=old,
        start_logprob=old,
        sampler_logprob=old - 0.1,
        advantage=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
        sequence=torch.tensor([0, 1, 0, 1, 0]),
        num_sequences=2,
        staleness=torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32),
    )
