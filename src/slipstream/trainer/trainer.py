"""The trainer: a batch in, an updated model out. It knows nothing of where it runs; `loop.py` feeds it.

The weights after n batches are a function of the start weights, the recorded batches, the settings and the numerics fingerprint:
nothing here draws a random number, and a batch is packed and summed in an order that only it decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from slipstream.config.settings import Config
from slipstream.errors import DataError, RunFailed
from slipstream.models.head import base_model
from slipstream.tensors import dtype_name
from slipstream.trainer import advantages, losses
from slipstream.trainer.diagnostics import Diagnostics
from slipstream.trainer.logprobs import TokenOutputs, token_logprobs
from slipstream.trainer.optimizer import Optimizer, learning_rate
from slipstream.trainer.packing import MicroBatch, pack
from slipstream.trainer.token_table import Sequence, token_table
from slipstream.types import Batch


@dataclass(frozen=True, slots=True)
class TrainStep:
    """What came of one batch."""

    skipped: str | None  # why the weights were left as they were; None: updated
    metrics: dict[str, float] = field(default_factory=dict)  # finite ones; `skipped` says which was not


class Trainer:
    """Owns the model that learns and its optimizer. `step` counts finished batches, skipped updates included: it is the version.

    The model's attention must be slipstream's (`models.attention.attach`). All dropout is switched off: with it, the ratio to the
    sampler would not be 1 for fresh weights, and siblings would share one prompt's mask.
    """

    def __init__(self, config: Config, model: nn.Module):
        self.config = config
        self.model = model
        self.step = 0
        self.skipped_in_a_row = 0
        self.device = next(model.parameters()).device
        self._preset = losses.resolve(config.loss)
        _no_dropout(model)
        model.requires_grad_(True)
        model.eval()
        if config.trainer.gradient_checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # the older name
            enable({"use_reentrant": False})  # type: ignore[operator]
            model.train()  # transformers recomputes only in training mode
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
            raise RunFailed(
                f"{self.skipped_in_a_row} updates in a row were skipped, the last at step {batch.step}: {result.skipped}. "
                "Lower trainer.learning_rate, or train in float32; the weights are still those of the last good update"
            )
        return result

    def _train(self, batch: Batch) -> TrainStep:
        sequences = self._read(batch)
        num_tokens = sum(len(s.targets) for s in sequences)
        if num_tokens != batch.num_loss_tokens:
            raise DataError(f"batch {batch.step} says {batch.num_loss_tokens} loss tokens, its groups have {num_tokens}")
        micro_batches = pack(sequences, self.config.trainer.max_tokens_per_micro_batch)
        metrics = {
            "num_loss_tokens": float(num_tokens),
            "packed_tokens": float(sum(m.layout.num_tokens for m in micro_batches)),
            "micro_batches": float(len(micro_batches)),
            "learning_rate": learning_rate(self.config.trainer, batch.step),
        }
        if num_tokens == 0:
            return TrainStep("no token to train", metrics)
        diagnostics = Diagnostics(self._preset)
        normalizer = self._normalizer(batch, num_tokens)
        self.optimizer.zero_grad()
        for micro_batch in micro_batches:
            self._accumulate(micro_batch.to(self.device), normalizer, diagnostics)
        norm = self.optimizer.gradient_norm()
        metrics |= {**diagnostics.metrics(), "grad_norm": norm}
        skipped = None
        if not math.isfinite(diagnostics.loss):
            skipped = f"non-finite loss ({diagnostics.loss})"
        elif not math.isfinite(norm):
            skipped = f"non-finite gradient (norm {norm})"
        else:
            self.optimizer.update(batch.step, norm)
        self.optimizer.zero_grad()
        return TrainStep(skipped, {name: value for name, value in metrics.items() if math.isfinite(value)})

    def _read(self, batch: Batch) -> list[Sequence]:
        rollouts = [(group, rollout) for group in batch.groups for rollout in group.rollouts]
        estimate = advantages.ESTIMATORS[self._preset.advantage]
        return token_table(
            batch,
            estimate([r.reward for _, r in rollouts], [(g.group_id, r.agent) for g, r in rollouts]),
            default_temperature=self.config.rollout.temperature,
        )

    def _normalizer(self, batch: Batch, num_tokens: int) -> float:
        num_rollouts = sum(len(group.rollouts) for group in batch.groups)
        longest = self.config.rollout.max_new_tokens * self.config.rollout.max_turns
        return losses.normalizer(self._preset.aggregation, num_tokens, num_rollouts, longest)

    def _accumulate(self, micro_batch: MicroBatch, normalizer: float, diagnostics: Diagnostics) -> None:
        """Forward and backward of one micro-batch; its gradient is added to the optimizer's."""
        m = micro_batch
        logprob, entropy, _ = self.logprobs(m)
        per_token = losses.ppo_clip(logprob, m.sampler_logprob, m.advantage, self._preset.clip_low, self._preset.clip_high)
        loss = losses.aggregate(per_token, normalizer)
        loss.backward()
        diagnostics.add(loss, logprob, m.sampler_logprob, entropy, m.advantage, m.staleness)

    def logprobs(self, m: MicroBatch) -> TokenOutputs:
        """Of the micro-batch's tokens [N], under the model as it is; the logprobs have a gradient."""
        body = base_model(self.model)
        output = body(input_ids=m.input_ids, position_ids=m.position_ids, layout=m.layout, use_cache=False)
        return token_logprobs(self.model, output.last_hidden_state[0], m.rows, self.config.trainer.logprob_chunk_tokens)

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


def _no_dropout(model: nn.Module) -> None:
    """Every dropout probability becomes 0: of modules, and of layers that keep it as a number; so does router noise."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout", "layerdrop", "router_jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


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
