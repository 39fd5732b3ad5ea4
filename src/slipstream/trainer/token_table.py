"""From records to what is trained: one `Sequence` per rollout, with everything that the loss wants to know of each of its tokens.

Shapes: L = tokens of one rollout, n = its trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from slipstream.errors import DataError, StalenessError
from slipstream.sampling_mask import split_kept
from slipstream.types import LOSS_WEIGHT, NOT_ROUTED, ROUTED_EXPERTS, Batch, Rollout


class PrefixKV(IntEnum):
    """By which weights the keys and values were made that a fresh token (staleness 0) was sampled over."""

    OTHER = 0  # the token is not fresh, or the record does not say
    FRESH = 1  # all of them by the token's own version: the trainer's forward is the sampler's
    KEPT = 2  # some by an older version, kept over a weight update


@dataclass(frozen=True, slots=True)
class Sequence:
    """One rollout as the trainer sees it; arrays are per trained token [n] unless noted."""

    group: int  # place of its group in the batch
    sample: int
    parent: tuple[int, int] | None  # (sample, token offset) it was forked from
    token_ids: np.ndarray  # int32[L]
    prompt_length: int
    targets: np.ndarray  # int64, indices into token_ids of the trained tokens; ascending, never 0
    sampler_logprob: np.ndarray  # float32
    staleness: np.ndarray  # int32
    temperature: np.ndarray  # float32
    advantage: float
    weight: np.ndarray  # float32: the token's share of the loss: the aggregation's, times what its age leaves of it
    prefix_kv: np.ndarray  # int8, PrefixKV
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # float32 each: logprobs under other models
    kept: tuple[bytes, ...] | None = None  # [n] what truncated sampling left of the vocabulary (`sampling_mask.py`); None: nothing was cut
    routing: np.ndarray | None = None  # int8 or int16 [L, routing width]; None: routing is not kept

    @property
    def needed(self) -> int:
        """How many leading tokens must pass through the model: those before the last trained one."""
        return int(self.targets[-1])


def token_table(
    batch: Batch,
    advantages: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    default_temperature: float = 1.0,
    arrays: Seq[str] = (),
    routing_width: int = 0,
) -> list[Sequence]:
    """The batch's rollouts that have trained tokens, those of their loss mask.

    `advantages` and `weights` (of each trained token, by the aggregation; 1 by default) have one number per rollout, in order. Tokens that
    are too old have left the loss mask already (`controller.buffer.make_batch`); those that count less have a loss weight. `arrays` names
    the logprobs under other models that the loss needs; `routing_width` is how many experts a token is routed to, all layers together,
    where recorded routing is to be replayed. Raises StalenessError for a token from the future, DataError for one that cannot be trained.
    """
    out, index = [], 0
    for place, group in enumerate(batch.groups):
        for rollout in group.rollouts:
            targets = np.flatnonzero(rollout.loss_mask)
            if len(targets):
                where = f"batch {batch.step}: group {group.group_id} sample {rollout.sample}"
                versions = rollout.model_versions()
                staleness = batch.step - versions[targets]
                _check_tokens(where, batch.step, rollout, targets, staleness)
                out.append(
                    Sequence(
                        group=place,
                        sample=rollout.sample,
                        parent=rollout.parent,
                        token_ids=rollout.token_ids,
                        prompt_length=rollout.prompt_length,
                        targets=targets,
                        sampler_logprob=rollout.logprobs[targets],
                        staleness=staleness,
                        temperature=_temperatures(rollout, default_temperature)[targets],
                        advantage=float(advantages[index]),
                        weight=_loss_weight(where, rollout, targets) * np.float32(1 if weights is None else weights[index]),
                        prefix_kv=_prefix_kv(rollout, versions, batch.step)[targets],
                        arrays={name: other_logprobs(rollout, name, targets) for name in arrays},
                        kept=_kept(where, rollout, targets),
                        routing=_routing(where, rollout, routing_width) if routing_width else None,
                    )
                )
            index += 1
    return out


def masked_tokens(batch: Batch) -> Counter[int]:
    """Staleness -> tokens that were sampled and are not trained: too old, or left out by the environment."""
    out: Counter[int] = Counter()
    for rollout in (r for group in batch.groups for r in group.rollouts):
        for span in rollout.spans:
            out[batch.step - span.version] += int((~rollout.loss_mask[span.start : span.end]).sum())
    return +out


def other_logprobs(rollout: Rollout, name: str, targets: np.ndarray) -> np.ndarray:
    """float32[n]: the rollout's aligned array `name` at its tokens `targets`: logprobs, so finite and at most 0 (DataError)."""
    values = rollout.arrays.get(name)
    where = f"group {rollout.group_id} sample {rollout.sample}"
    if values is None:
        raise DataError(f"{where} has no {name}; the logprob stage adds them before a group is trained")
    if values.shape != rollout.token_ids.shape:
        raise DataError(f"{where} has {name} of shape {values.shape} for {len(rollout.token_ids)} tokens")
    chosen = values[targets]
    _check_logprobs(where, name, chosen, targets)
    return chosen


# ---- one rollout


def _temperatures(rollout: Rollout, default: float) -> np.ndarray:
    """float32[L]: the temperature each token was sampled at."""
    out = np.full(len(rollout.token_ids), default, dtype=np.float32)
    for turn in rollout.turns:
        if turn.sampling is not None:
            out[turn.start : turn.end] = turn.sampling.temperature
    if (out <= 0).any():
        raise DataError(f"group {rollout.group_id} sample {rollout.sample} was sampled greedily (temperature 0); it cannot be trained")
    return out


def _loss_weight(where: str, rollout: Rollout, targets: np.ndarray) -> np.ndarray:
    weight = rollout.arrays.get(LOSS_WEIGHT)
    if weight is None:
        return np.ones(len(targets), dtype=np.float32)
    chosen = weight[targets]
    if not (np.isfinite(chosen).all() and (chosen >= 0).all()):
        raise DataError(f"{where} has a loss weight that is not a finite number of at least 0")
    return chosen.astype(np.float32, copy=False)


def _kept(where: str, rollout: Rollout, targets: np.ndarray) -> tuple[bytes, ...] | None:
    """The vocabulary that each trained token was drawn from; DataError where truncated sampling did not record it."""
    try:
        kept = split_kept(rollout.arrays, targets)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if kept is None and any(t.sampling is not None and t.sampling.truncates_vocabulary for t in rollout.turns):
        raise DataError(
            f"{where} was sampled with top-k, top-p or min-p, but not what they kept; without it no logprob of the trainer is comparable"
        )
    return None if kept is None else tuple(kept)


def _routing(where: str, rollout: Rollout, width: int) -> np.ndarray:
    """[L, width]: the experts that each token was routed to; NOT_ROUTED where that was not recorded."""
    recorded = rollout.arrays.get(ROUTED_EXPERTS)
    if recorded is None:
        return np.full((len(rollout.token_ids), width), NOT_ROUTED, dtype=np.int8)
    if recorded.shape != (len(rollout.token_ids), width):
        raise DataError(
            f"{where} has {ROUTED_EXPERTS} of shape {recorded.shape}; the model routes {len(rollout.token_ids)} tokens x {width}"
        )
    return recorded


def _prefix_kv(rollout: Rollout, versions: np.ndarray, newest: int) -> np.ndarray:
    """int8[L], PrefixKV of each token at version `newest`.

    A token's keys and values are made when the token after it is sampled, those of what was given (prompt, tool results) by the prefill
    before the next sampled token. `prefill_version` is the prompt's; where the record lacks it, the first sampled token's is taken. A
    later turn may have been prefilled as a whole, so an older token of an earlier turn proves nothing of it.
    """
    out = np.zeros(len(versions), dtype=np.int8)  # PrefixKV.OTHER
    if rollout.newest_version != newest:
        return out
    prefill = rollout.spans[0].version if rollout.prefill_version is None else rollout.prefill_version[1]
    at_newest = versions == newest
    if prefill == newest:  # and so every token since
        out[at_newest] = PrefixKV.FRESH
    elif rollout.kv == "kept":
        first = rollout.spans[0].start
        given = np.flatnonzero(versions[first:] < 0)
        end_of_turn = first + int(given[0]) if len(given) else len(versions)
        out[:end_of_turn][at_newest[:end_of_turn]] = PrefixKV.KEPT
    return out


def _check_tokens(where: str, step: int, rollout: Rollout, targets: np.ndarray, staleness: np.ndarray) -> None:
    """Every trained token has a version that exists and a finite logprob <= 0."""
    if targets[0] == 0:
        raise DataError(f"{where} trains its first token, which nothing predicts; a prompt has at least one token")
    if staleness.min() < 0:
        token = targets[staleness.argmin()]
        raise StalenessError(f"{where}: token {token} has version {step - staleness.min()}, newer than the trainer's {step}")
    if staleness.max() > step:  # version -1
        raise DataError(f"{where}: token {targets[staleness.argmax()]} is in the loss but no weights sampled it")
    _check_logprobs(where, "sampler logprob", rollout.logprobs[targets], targets)


def _check_logprobs(where: str, name: str, logprobs: np.ndarray, targets: np.ndarray) -> None:
    bad = ~(np.isfinite(logprobs) & (logprobs <= 0))
    if bad.any():
        at = int(bad.argmax())
        raise DataError(f"{where}: token {targets[at]} has {name} {logprobs[at]}; it must be finite and at most 0")
