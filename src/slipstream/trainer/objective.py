"""What a step minimises, from what a forward pass says of the tokens of a micro-batch.

    loss = Σ_n weight[n] · ( correction[n] · policy[n]  +  β · KL[n]  -  η · entropy[n]  +  τ · divergence[n] )

    weight       aggregation over the whole batch (or minibatch) x what the token's age leaves of it
    correction   product of the corrections, 0 = rejected
    KL           to the frozen reference, by its estimator                        loss.kl_coefficient, kl_in = "loss"
    entropy      of the distribution each token comes from                        loss.entropy_coefficient
    divergence   KL(π ‖ teacher) over the vocabulary                              loss.teacher, teacher_kl = "full"

With teacher_kl = "sampled" the teacher enters through the advantage of each token instead: A + τ (log π_teacher - sg(log π)), so that the
policy loss's own clip and ratio hold for it as well. Corrections act on the policy loss alone: the other terms are about the model as it
is, not about how likely the sampler was to produce the token.

A correction is a property of the sampler's mismatch, so it uses the logprobs from before the first update of the step (opsm, which is
about the model as it is now, does not).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config.frozen_models import loss_arrays
from slipstream.config.loss_tables import CORRECTIONS
from slipstream.config.losses import resolve
from slipstream.config.settings import Config
from slipstream.trainer import corrections, kl, losses
from slipstream.trainer.logprobs import TokenOutputs
from slipstream.trainer.losses import Tokens
from slipstream.trainer.packing import MicroBatch
from slipstream.types import REFERENCE_LOGPROBS, TEACHER_LOGPROBS

# What looks at all tokens of a rollout together, beside a correction whose level is not "token".
_BY_ROLLOUT = {"gspo", "gmpo", "geometric", "opsm"}


class Value(NamedTuple):
    """What a micro-batch of N tokens adds to a step."""

    loss: Tensor  # float[], with a gradient
    cut: Tensor  # bool[N]: the policy loss's clip cuts the gradient off
    rejected: Tensor  # bool[N]: no weight is left

    def detach(self) -> Value:
        return self._replace(loss=self.loss.detach())

    @classmethod
    def joined(cls, parts: Sequence[Value]) -> Value:
        """Of tokens one part after another: losses add up."""
        loss, cut, rejected = zip(*parts, strict=True)
        return cls(torch.stack(loss).sum(), torch.cat(cut), torch.cat(rejected))


class Objective:
    """The loss of the settings, as functions of the tokens of a micro-batch. ConfigError where a person's own loss cannot be used."""

    def __init__(self, config: Config):
        self.loss = resolve(config.loss)
        self.arrays = loss_arrays(config)  # aligned arrays that every rollout must have
        self._settings = config.loss
        self._policy = losses.policy_loss(self.loss)
        self._by_micro_batch = [c for c in self.loss.corrections if not CORRECTIONS[c.type].whole_batch]

    @property
    def entropy_gradient(self) -> bool:
        return self._settings.entropy_coefficient != 0

    @property
    def by_token(self) -> bool:
        """A token's loss is a function of this token alone: any part of a micro-batch may be judged by itself, and parts add up."""
        if self.loss.own_policy or self.loss.policy in _BY_ROLLOUT:
            return False
        return all(c.type not in _BY_ROLLOUT and c.level in (None, "token") for c in self._by_micro_batch)

    def whole_batch_weight(self, start_logprob: Tensor, sampler_logprob: Tensor) -> Tensor:
        """[N of the whole batch]: the weights of those corrections that judge all its tokens together."""
        return corrections.whole_batch_weight(start_logprob, sampler_logprob, self.loss.corrections)

    def __call__(self, m: MicroBatch, outputs: TokenOutputs, start_logprob: Tensor | None, batch_weight: Tensor | None) -> Value:
        """`start_logprob` [N] from before the first update; None: this is the first. `batch_weight` [N]: see `whole_batch_weight`."""
        tokens = self._tokens(m, outputs.logprob, outputs.logprob.detach() if start_logprob is None else start_logprob)
        policy, cut = self._policy(tokens)
        weight = m.weight if batch_weight is None else m.weight * batch_weight
        for correction in self._by_micro_batch:
            weight = weight * corrections.correction_weight(tokens, correction)
        loss = (policy * weight).sum()
        if self._settings.kl_coefficient and self._settings.kl_in == "loss":
            estimate = kl.ESTIMATORS[self._settings.reference_estimator](outputs.logprob, m.arrays[REFERENCE_LOGPROBS])
            loss = loss + self._settings.kl_coefficient * (estimate * m.weight).sum()
        if self.entropy_gradient:
            loss = loss - self._settings.entropy_coefficient * (outputs.entropy * m.weight).sum()
        if outputs.divergence is not None:
            loss = loss + self._settings.teacher_coefficient * (outputs.divergence * m.weight).sum()
        return Value(loss, cut, weight == 0)

    def _tokens(self, m: MicroBatch, logprob: Tensor, start_logprob: Tensor) -> Tokens:
        advantage = m.advantage
        if TEACHER_LOGPROBS in m.arrays:
            distance = losses.log_ratio(m.arrays[TEACHER_LOGPROBS], logprob.detach())
            advantage = advantage + self._settings.teacher_coefficient * distance
        return Tokens(
            logprob=logprob,
            old_logprob=m.sampler_logprob if self.loss.old_logprobs == "sampler" else start_logprob,
            start_logprob=start_logprob,
            sampler_logprob=m.sampler_logprob,
            advantage=advantage,
            sequence=m.sequence,
            num_sequences=m.num_sequences,
            staleness=m.staleness,
        )

    @staticmethod
    @torch.no_grad()
    def distances(m: MicroBatch, start_logprob: Tensor, divergence: Tensor | None) -> dict[str, Tensor]:
        """[N] each, for the metrics: how far the model is from the frozen ones; estimates whose mean is the divergence."""
        out = {}
        if REFERENCE_LOGPROBS in m.arrays:
            out["reference_kl"] = kl.k3(start_logprob, m.arrays[REFERENCE_LOGPROBS])
        if TEACHER_LOGPROBS in m.arrays:
            out["teacher_kl"] = kl.k1(start_logprob, m.arrays[TEACHER_LOGPROBS])
        if divergence is not None:
            out["teacher_kl"] = divergence
        return out
