"""The trainer: a batch in, an updated model out. It knows nothing of where it runs; `loop.py` feeds it.

The weights after n batches are a function of the start weights, the recorded batches, the settings and the numerics fingerprint:
nothing here draws a random number, and a batch is packed and summed in an order that only it decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from slipstream.config.frozen_models import base_is_reference, trainer_teacher
from slipstream.config.settings import Config
from slipstream.errors import DataError, RunFailed
from slipstream.models.head import base_model
from slipstream.models.lora import Adapter
from slipstream.models.routing import Replay, kept_routers, replay
from slipstream.models.support import num_embeddings
from slipstream.tensors import dtype_name
from slipstream.trainer import advantages
from slipstream.trainer.aggregation import token_weights
from slipstream.trainer.diagnostics import Diagnostics
from slipstream.trainer.logprobs import Teacher, TokenOutputs, token_logprobs
from slipstream.trainer.lora import BaseReference
from slipstream.trainer.objective import Objective, Value
from slipstream.trainer.optimizer import Optimizer, learning_rate
from slipstream.trainer.packing import MicroBatch, pack
from slipstream.trainer.rewards import shaped_rewards
from slipstream.trainer.token_table import Sequence, masked_tokens, token_table
from slipstream.types import Batch

NO_TOKEN = "no token to train"  # why the update of a batch is skipped whose tokens are all masked


@dataclass(frozen=True, slots=True)
class TrainStep:
    """What came of one batch."""

    skipped: str | None  # why the weights were left as they were; None: updated
    metrics: dict[str, float] = field(default_factory=dict)  # finite ones; `skipped` says which was not


class Trainer:
    """Owns the model that learns and its optimizer. `step` counts finished batches, skipped updates included: it is the version.

    The model's attention must be slipstream's (`models.attention.attach`). All dropout is switched off: with it, the ratio to the
    sampler would not be 1 for fresh weights, and siblings would share one prompt's mask. So must the teacher's be: a frozen model that
    full-vocabulary distillation compares with (`loss.teacher_kl = "full"`). With an `adapter` in the model, that alone is trained.
    """

    def __init__(self, config: Config, model: nn.Module, teacher: nn.Module | None = None, adapter: Adapter | None = None):
        if (teacher is None) != (trainer_teacher(config) is None):
            raise ValueError('the trainer holds a teacher with loss.teacher_kl = "full", and only then')
        self.config = config
        self.model = model
        self.adapter = adapter
        self.objective = Objective(config)
        self.reference = BaseReference(adapter, config) if adapter is not None and base_is_reference(config) else None
        self.teacher = None if teacher is None else teacher.to(device=next(model.parameters()).device).requires_grad_(False).eval()
        self.step = 0
        self.skipped_in_a_row = 0
        self.device = next(model.parameters()).device
        _no_dropout(model)
        _sparse_lookup(model)
        if adapter is None:
            model.requires_grad_(True)
        model.eval()
        if config.trainer.gradient_checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # the older name
            enable({"use_reentrant": False})  # type: ignore[operator]
            model.train()  # transformers recomputes only in training mode
        self.routers = kept_routers(model, config.rollout.keep_routing)
        self.optimizer = Optimizer(model, config.trainer)

    @property
    def version(self) -> int:
        return self.step

    def train_step(self, batch: Batch) -> TrainStep:
        """Train batch number `step`. RunFailed after `trainer.max_skipped_steps` skipped updates in a row."""
        if batch.step != self.step:
            raise DataError(f"the trainer is at step {self.step} but was given batch {batch.step}")
        with _threads(self.config.trainer.threads):
            result = self._train(batch)
        self.step += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if self.skipped_in_a_row >= self.config.trainer.max_skipped_steps:
            remedy = "lower trainer.learning_rate, or train in float32"
            if result.skipped == NO_TOKEN:
                remedy = "where buffer.on_stale masks all of it, raise buffer.max_staleness or use a smaller buffer.window"
            raise RunFailed(
                f"{self.skipped_in_a_row} updates in a row were skipped, the last at step {batch.step}: {result.skipped}. What can help: "
                f"{remedy}; the weights are still those of the last good update"
            )
        return result

    def _train(self, batch: Batch) -> TrainStep:
        if self.reference is not None:
            batch = self.reference.annotated(batch)
        minibatches = [pack(part, self.config.trainer.max_tokens_per_micro_batch) for part in self._read(batch)]
        micro_batches = [m for part in minibatches for m in part]
        metrics = {
            "num_loss_tokens": float(batch.num_loss_tokens),
            "packed_tokens": float(sum(m.layout.num_tokens for m in micro_batches)),
            "micro_batches": float(len(micro_batches)),
            "learning_rate": learning_rate(self.config.trainer, batch.step),
        }
        if not micro_batches:
            return TrainStep(NO_TOKEN, metrics)
        diagnostics = Diagnostics(masked_tokens(batch))
        parts = [[_Work(m) for m in part] for part in minibatches if part]
        if self._needs_first_pass(len(parts)):
            self._first_pass([work for part in parts for work in part], diagnostics)
        causes: list[str | None] = []
        for _ in range(self.config.trainer.updates_per_batch):
            causes += [self._update(part, batch.step, diagnostics) for part in parts]
        # An update that is not finite is left out, and the others are made; the step is skipped where none was.
        skipped = causes[0] if all(causes) else None
        metrics |= diagnostics.metrics()
        return TrainStep(skipped, {name: value for name, value in metrics.items() if math.isfinite(value)})

    def _read(self, batch: Batch) -> list[list[Sequence]]:
        """The sequences of each minibatch, with advantages over the whole batch and weights over the minibatch.

        Each minibatch is normalised by its own tokens, as if it were a batch: its gradient has a batch's scale, so the learning rate means
        the same however many updates a batch is made of.
        """
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        places = np.repeat(np.arange(len(batch.groups)), [len(group.rollouts) for group in batch.groups])
        lengths = np.array([np.count_nonzero(rollout.loss_mask) for rollout in rollouts])
        if lengths.sum() != batch.num_loss_tokens:
            raise DataError(f"batch {batch.step} says {batch.num_loss_tokens} loss tokens, its groups have {lengths.sum()}")
        keys = [(place, rollout.agent) for place, rollout in zip(places.tolist(), rollouts, strict=True)]
        estimate = advantages.ESTIMATORS[self.objective.loss.advantage]
        longest = self.config.rollout.max_new_tokens * self.config.rollout.max_turns
        parts = np.array_split(np.arange(len(batch.groups)), self.config.trainer.minibatches)
        weights = np.zeros(len(rollouts))
        for part in parts:
            members = np.isin(places, part)
            weights[members] = token_weights(self.objective.loss.aggregation, lengths[members], longest)
        sequences = token_table(
            batch,
            estimate(shaped_rewards(batch, self.config), keys, lengths),
            weights,
            default_temperature=self.config.rollout.temperature,
            arrays=self.objective.arrays,
            routing_width=0 if self.routers is None else self.routers.width,
        )
        if self.teacher is not None:
            _check_known(batch, sequences, num_embeddings(self.teacher))
        return [[s for s in sequences if s.group in members] for members in (set(part.tolist()) for part in parts)]

    def _needs_first_pass(self, num_parts: int) -> bool:
        """Whether logprobs must be known before the first update: with a single one, they are those of its own forward pass."""
        loss, several = self.objective.loss, self.config.trainer.updates_per_batch * num_parts > 1
        return loss.needs_whole_batch or (several and loss.uses_start)

    @torch.no_grad()
    def _first_pass(self, works: list[_Work], diagnostics: Diagnostics) -> None:
        for work in works:
            m = work.micro_batch.to(self.device)
            with self._routed(m) as replayed:
                outputs = self.forward(m)
            work.start_logprob = outputs.logprob
            self._tell_before(m, outputs, replayed, diagnostics)
            work.told = True
        if self.objective.loss.needs_whole_batch:
            sampler_logprob = torch.cat([work.micro_batch.sampler_logprob for work in works]).to(self.device)
            start_logprob = torch.cat([work.start_logprob for work in works if work.start_logprob is not None])
            weight = self.objective.whole_batch_weight(start_logprob, sampler_logprob)
            for work, part in zip(works, weight.split([len(w.micro_batch.weight) for w in works]), strict=True):
                work.batch_weight = part

    def _update(self, works: list[_Work], step: int, diagnostics: Diagnostics) -> str | None:
        """One optimizer update from these micro-batches, or why it was left out: weights and optimizer are then as they were."""
        self.optimizer.zero_grad()
        loss = float(sum(self._accumulate(work, diagnostics) for work in works))
        norm = self.optimizer.gradient_norm()
        cause = None
        if not math.isfinite(loss):
            cause = f"non-finite loss ({loss})"
        elif not math.isfinite(norm):
            cause = f"non-finite gradient (norm {norm})"
        else:
            self.optimizer.update(step, norm)
        diagnostics.update(loss, norm, applied=cause is None)
        self.optimizer.zero_grad()
        return cause

    def _accumulate(self, work: _Work, diagnostics: Diagnostics) -> torch.Tensor:
        """Forward and backward of one micro-batch: its gradient is added to the optimizer's, its share of the loss is returned."""
        m = work.micro_batch.to(self.device)
        with self._routed(m) as replayed:
            outputs, value = self._backward_in_chunks(m, work) if self.objective.by_token else self._backward(m, work)
        if not work.told:
            self._tell_before(m, outputs, replayed, diagnostics)
            work.told = True
        diagnostics.pass_over(m, value.cut, value.rejected)
        return value.loss.detach()

    def _backward(self, m: MicroBatch, work: _Work) -> tuple[TokenOutputs, Value]:
        """All logprobs before any gradient, for losses that judge whole rollouts: several chunks are each computed again for theirs."""
        outputs = self.forward(m)
        value = self.objective(m, outputs, work.start_logprob, work.batch_weight)
        value.loss.backward()
        return outputs, value

    def _backward_in_chunks(self, m: MicroBatch, work: _Work) -> tuple[TokenOutputs, Value]:
        """The gradient of each chunk as soon as its logprobs are there, so no logits are computed twice: a third of the head's work.

        The body runs backward once, from the sum of what the chunks say of its hidden states.
        """
        hidden, teacher = _hidden(self.model, m), self._teacher(m)
        leaf = hidden.detach().requires_grad_()
        parts = []
        for at, chunk in m.chunks(self.config.trainer.logprob_chunk_tokens):
            outputs = self._head(leaf, chunk, teacher)
            start, weight = (None if x is None else x[at] for x in (work.start_logprob, work.batch_weight))
            value = self.objective(chunk, outputs, start, weight)
            value.loss.backward()
            parts.append((outputs.detach(), value.detach()))
        if hidden.requires_grad:  # it has none where the head alone has an adapter
            hidden.backward(leaf.grad)
        return TokenOutputs.joined([outputs for outputs, _ in parts]), Value.joined([value for _, value in parts])

    @contextmanager
    def _routed(self, m: MicroBatch) -> Iterator[Replay | None]:
        """Within, the model routes the tokens as the sampler did, in the forward and in the backward pass; None: it routes by itself."""
        if self.routers is None:
            yield None
            return
        assert m.routing is not None, "the token table was made for these routers"
        with replay(self.routers, m.routing) as replayed:
            yield replayed

    def _tell_before(self, m: MicroBatch, outputs: TokenOutputs, replayed: Replay | None, diagnostics: Diagnostics) -> None:
        logprob, entropy, divergence = outputs.detach()
        diagnostics.before(m, logprob, entropy, self.objective.distances(m, logprob, divergence))
        if replayed is not None:
            diagnostics.routing(replayed.num_choices, replayed.num_recorded, replayed.num_different)

    def forward(self, m: MicroBatch) -> TokenOutputs:
        """Of the micro-batch's tokens [N], under the model as it is; the logprobs have a gradient."""
        return self._head(_hidden(self.model, m), m, self._teacher(m))

    def _head(self, hidden: torch.Tensor, m: MicroBatch, teacher: Teacher | None) -> TokenOutputs:
        size, wanted = self.config.trainer.logprob_chunk_tokens, self.objective.entropy_gradient
        return token_logprobs(self.model, hidden, m.rows, size, entropy_gradient=wanted, teacher=teacher)

    @torch.no_grad()
    def _teacher(self, m: MicroBatch) -> Teacher | None:
        return None if self.teacher is None else Teacher(self.teacher, _hidden(self.teacher, m))

    def numerics(self) -> dict[str, str]:
        """What, besides the recorded facts, decides the bits of an update."""
        return {
            "torch": str(torch.__version__),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(self.config.trainer.threads),
            "device": self.device.type,
            "dtype": dtype_name(next(self.model.parameters()).dtype),
            "attention": str(getattr(self.model.config, "_attn_implementation", "")),
        }


@dataclass(slots=True)
class _Work:
    """A micro-batch, and what is known of it before the first update of the step."""

    micro_batch: MicroBatch
    start_logprob: torch.Tensor | None = None  # float32[N]; None: those of its own first forward pass
    batch_weight: torch.Tensor | None = None  # float32[N], of corrections that judge the whole batch; None: there are none
    told: bool = False  # the diagnostics have its first forward pass


def _check_known(batch: Batch, sequences: list[Sequence], known: int) -> None:
    """DataError for a token that the teacher has no embedding for: an embedding may have more rows than the vocabulary has tokens."""
    for sequence in sequences:
        if (largest := int(sequence.token_ids.max())) >= known:
            raise DataError(
                f"batch {batch.step}: group {batch.groups[sequence.group].group_id} sample {sequence.sample} has token id {largest}, but "
                f'loss.teacher has only {known} embeddings; with teacher_kl = "sampled" such a rollout is left out'
            )


def _hidden(model: nn.Module, m: MicroBatch) -> torch.Tensor:
    """The body's last hidden states [T, d] of the packed tokens."""
    body = base_model(model)
    return body(input_ids=m.input_ids, position_ids=m.position_ids, layout=m.layout, use_cache=False).last_hidden_state.squeeze(0)


def _no_dropout(model: nn.Module) -> None:
    """Every dropout probability becomes 0: of modules, and of layers that keep it as a number; so does router noise."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout", "layerdrop", "router_jitter_noise", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _sparse_lookup(model: nn.Module) -> None:
    """Where one matrix is both embedding and head, its lookup's gradient goes row by row onto the head's, which is there first and dense.

    The dense form fills and adds two more matrices of vocabulary x width: 1 to 2 % of a step of a 135M model at 1000 tokens. In float32
    on a CPU only: in bfloat16 rows that are added one by one lose what their sum would keep.
    """
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if isinstance(lookup, nn.Embedding) and head is not None and head.weight is lookup.weight:
        lookup.sparse = lookup.weight.device.type == "cpu" and lookup.weight.dtype == torch.float32


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """The trainer's thread count, given back after: in one process the engine has its own."""
    before = torch.get_num_threads()
    if before != num:
        torch.set_num_threads(num)
    try:
        yield
    finally:
        if before != num:
            torch.set_num_threads(before)
