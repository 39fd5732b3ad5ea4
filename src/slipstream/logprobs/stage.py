"""The logprob stage: frozen models read the rollouts of a group and say how likely each sampled token was to them.

    group, all rollouts ended ──► packed as the trainer packs it, the shared prompt once ──► one forward pass per model, no gradient
                                                                                                    │
    group with an array per model on each rollout ◄── bad values fail their rollout ◄───────────────┘

The values depend on the recorded tokens and temperatures alone, so they are as good when the trainer gets them, steps later, as now.

Shapes: L = tokens of one rollout, N = sampled tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import nn

from slipstream.models.head import base_model
from slipstream.models.support import num_embeddings
from slipstream.protocols import LogprobClient
from slipstream.rollout.trajectory import LOGPROB_SLACK
from slipstream.trainer.logprobs import token_logprobs
from slipstream.trainer.packing import MicroBatch, pack
from slipstream.trainer.token_table import Sequence, token_table
from slipstream.types import Batch, Group, Rollout, RolloutStatus

BAD_LOGPROB = "bad logprob"  # the cause that such rollouts are counted under, as where the sampler's own are bad


@dataclass(frozen=True, slots=True)
class LogprobStage(LogprobClient):
    """Frozen models by the array that each makes; one model may stand under several names and is then computed once.

    All are in eval mode, attached to the shared attention function. `max_tokens`: packed tokens of a forward pass; `chunk_rows`: rows of
    logits held at once. `default_temperature` is that of sampled tokens whose record names none.
    """

    models: Mapping[str, nn.Module]
    max_tokens: int
    chunk_rows: int
    default_temperature: float = 1.0

    async def annotate(self, group: Group) -> Group:
        """See `LogprobClient`. Computes at once and never waits: called in an event loop, it leaves the order of events as it is."""
        return self.annotated(group)

    def annotated(self, group: Group) -> Group:
        """What `annotate` gives; rollouts that have failed stay as they are."""
        read = {r.sample: r for r in group.rollouts if r.status.ok}
        for name, model in self.models.items():
            read = {sample: _if_tokens_known(r, name, num_embeddings(model)) for sample, r in read.items()}
        for name, logprobs in self._logprobs(group, [r for r in read.values() if r.status.ok]).items():
            read |= {sample: _with_array(read[sample], name, values) for sample, values in logprobs.items()}
        return msgspec.structs.replace(group, rollouts=tuple(read.get(r.sample, r) for r in group.rollouts))

    def _logprobs(self, group: Group, rollouts: list[Rollout]) -> dict[str, dict[int, np.ndarray]]:
        """Array -> sample -> float32[L]."""
        batch = _as_batch(group, rollouts)
        sequences = token_table(batch, np.zeros(len(rollouts)), default_temperature=self.default_temperature)
        micro_batches = pack(sequences, self.max_tokens)
        out: dict[str, dict[int, np.ndarray]] = {}
        done: dict[int, dict[int, np.ndarray]] = {}  # by the model's identity
        for name, model in self.models.items():
            if id(model) not in done:
                done[id(model)] = {r.sample: np.zeros(len(r.token_ids), dtype=np.float32) for r in rollouts}
                self._read(model, sequences, micro_batches, done[id(model)])
            out[name] = {sample: values.copy() for sample, values in done[id(model)].items()}
        return out

    def _read(self, model: nn.Module, sequences: list[Sequence], micro_batches: list[MicroBatch], into: dict[int, np.ndarray]) -> None:
        """Fill in the sampled tokens' logprobs, by sample. The micro-batches hold the sequences in order, each with its tokens in order."""
        remaining = iter(sequences)
        for micro_batch in micro_batches:
            logprobs, owner = _forward(model, micro_batch, self.chunk_rows), micro_batch.sequence.numpy()
            for index in range(micro_batch.num_sequences):
                sequence = next(remaining)
                into[sequence.sample][sequence.targets] = logprobs[owner == index]


@torch.no_grad()
def _forward(model: nn.Module, micro_batch: MicroBatch, chunk_rows: int) -> np.ndarray:
    """float32[N]: logprobs of the micro-batch's tokens."""
    m = micro_batch.to(next(model.parameters()).device)
    output = base_model(model)(input_ids=m.input_ids, position_ids=m.position_ids, layout=m.layout, use_cache=False)
    return token_logprobs(model, output.last_hidden_state[0], m.rows, chunk_rows).logprob.float().cpu().numpy()


def _as_batch(group: Group, rollouts: list[Rollout]) -> Batch:
    """A batch as the token table reads it: every sampled token in the loss, none from the future."""
    whole = tuple(msgspec.structs.replace(r, loss_mask=r.model_versions() >= 0) for r in rollouts)
    newest = max((r.newest_version or 0 for r in whole), default=0)
    num_tokens = sum(int(r.loss_mask.sum()) for r in whole)
    return Batch(step=newest, groups=(msgspec.structs.replace(group, rollouts=whole),), num_loss_tokens=num_tokens)


# ---- quarantine


def _if_tokens_known(rollout: Rollout, name: str, known: int) -> Rollout:
    """The rollout, failed where the model has no embedding for a token: an embedding may have more rows than the vocabulary has tokens, and
    rarely such a row is sampled."""
    largest = int(rollout.token_ids.max(initial=0))
    return rollout if largest < known else _failed(rollout, f"{name}: token id {largest}, but its model has only {known} embeddings")


def _with_array(rollout: Rollout, name: str, logprobs: np.ndarray) -> Rollout:
    """The rollout with this array, or failed where a value is none that a distribution gives; rounding above 0 becomes 0."""
    if not rollout.status.ok:
        return rollout
    logprobs[(logprobs > 0) & (logprobs <= LOGPROB_SLACK)] = 0.0
    bad = ~(np.isfinite(logprobs) & (logprobs <= 0))
    if bad.any():
        at = int(bad.argmax())
        return _failed(rollout, f"{name}: token {at} (id {rollout.token_ids[at]}) has {logprobs[at]}; {int(bad.sum())} such tokens")
    return msgspec.structs.replace(rollout, arrays={**rollout.arrays, name: logprobs})


def _failed(rollout: Rollout, detail: str) -> Rollout:
    return msgspec.structs.replace(rollout, status=RolloutStatus.FAILED, error=f"{BAD_LOGPROB}: {detail}")
