"""The reference of a run that trains an adapter: the trainer's own base, with the adapter off. No second copy of the model, no other role.

    batch ──► adapter off: one forward pass over each group, no gradient ──► the batch with `reference_logprobs` ──► the step

It is what the logprob stage does with a reference of its own (`logprobs/stage.py`), by the same code over the same bytes, so the values are
equal bit for bit. They are functions of the recorded tokens alone and are made anew when a batch is trained again, so none are recorded.
"""

from __future__ import annotations

import msgspec

from slipstream.config.settings import Config
from slipstream.errors import DataError
from slipstream.logprobs.stage import LogprobStage
from slipstream.models.lora import Adapter
from slipstream.types import REFERENCE_LOGPROBS, Batch, Group


class BaseReference:
    """What the base of this adapter says of sampled tokens."""

    def __init__(self, adapter: Adapter, config: Config):
        self._adapter = adapter
        self._stage = LogprobStage(
            {REFERENCE_LOGPROBS: adapter.model},
            max_tokens=config.trainer.max_tokens_per_micro_batch,
            chunk_rows=config.trainer.logprob_chunk_tokens,
            default_temperature=config.rollout.temperature,
        )

    def annotated(self, batch: Batch) -> Batch:
        """The batch, each rollout with the array. DataError for a value that is no logprob."""
        with self._adapter.off():
            groups = tuple(self._stage.annotated(group) for group in batch.groups)
        for before, after in zip(batch.groups, groups, strict=True):
            _check(batch.step, before, after)
        return msgspec.structs.replace(batch, groups=groups)


def _check(step: int, before: Group, after: Group) -> None:
    for rollout, read in zip(before.rollouts, after.rollouts, strict=True):
        if rollout.status.ok and not read.status.ok:
            raise DataError(f"batch {step}: group {before.group_id} sample {rollout.sample}: {read.error}")
