"""The tokens of one rollout as they grow: exact ids, never re-tokenised; only sampled ones are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from slipstream.protocols import Generation
from slipstream.sampling_mask import join_kept
from slipstream.types import (
    NOT_ROUTED,
    ROUTED_EXPERTS,
    PrefixChunk,
    Purpose,
    Rollout,
    RolloutStatus,
    Sampling,
    Span,
    StopReason,
    Turn,
    join_spans,
)

LOGPROB_SLACK = 1e-6  # rounding of log_softmax: a logprob this far above 0 is 0


class Trajectory:
    """Collects prompt, sampled turns and environment messages of one rollout."""

    def __init__(self, group_id: int, sample: int, attempt: int, purpose: Purpose, num_interrupts: int = 0):
        self.group_id, self.sample, self.attempt, self.purpose = group_id, sample, attempt, purpose
        self.token_ids: list[int] = []
        self.messages: list[dict[str, Any]] = []  # the same in words, for an engine that takes no tokens
        self.texts: list[str] = []  # decoded, one per sampled turn
        self.prompt_length = 0
        self.num_sampled = 0
        self.num_interrupts = num_interrupts  # those of earlier attempts at the rollout included
        self.stop_reason: StopReason | None = None
        self.error: str | None = None
        self._logprobs: list[float] = []
        self._kept: list[bytes] = []
        self._sampled: list[tuple[int, int]] = []  # stretches [start, end) of sampled tokens
        self._spans: list[Span] = []
        self._turns: list[Turn] = []
        self._routing: np.ndarray | None = None  # [n, experts per token] of the first n tokens
        self._prefill_version: tuple[int, int] | None = None
        self._kv = "kept"

    def __len__(self) -> int:
        return len(self.token_ids)

    def oldest_version(self, generation: Generation) -> int | None:
        """Of the tokens sampled so far, those of a generation in progress included; None without any."""
        return min((span.version for span in (*self._spans, *generation.spans)), default=None)

    def add_prompt(self, ids: np.ndarray) -> None:
        """The prompt, int32[n]: first, once."""
        self.prompt_length = len(ids)
        self.add_given(ids, "prompt")

    def add_given(self, ids: np.ndarray, role: str, *, error: bool = False) -> None:
        """Tokens the model did not sample, int32[n]: no logprob, not trained. `error`: they answer a call with an error."""
        start = len(self)
        self._extend(ids.tolist(), [0.0] * len(ids), sampled=False)
        self._add_kept((), len(ids))
        self._turns.append(Turn(start=start, end=len(self), role=role, error=error))

    def add_recorded(self, prefix: PrefixChunk) -> None:
        """Sampled tokens of an earlier incarnation of the run: ids, logprobs and spans as they were recorded. The turn stays open."""
        self._extend(prefix.token_ids.tolist(), prefix.logprobs.tolist(), sampled=True)
        self._add_kept(prefix.kept, len(prefix.token_ids))
        self._spans.extend(prefix.spans)
        self._routing = prefix.routing
        self._prefill_version = prefix.prefill_version
        self.stop_reason = prefix.stop_reason
        self._kv = "kept" if prefix.stop_reason and not prefix.recomputed else "recomputed"

    def add_generation(self, generation: Generation) -> None:
        """What the model sampled, whole or cut off. The turn stays open."""
        self._extend(generation.token_ids, generation.logprobs, sampled=True)
        self._add_kept(generation.kept, len(generation.token_ids))
        self._spans.extend(generation.spans)
        if generation.recomputed:
            self._kv, self._prefill_version = "recomputed", generation.prefill_version
        else:
            self._prefill_version = self._prefill_version or generation.prefill_version
        self._routing = generation.routing
        self.stop_reason = generation.stop_reason

    def end_turn(self, start: int, sampling: Sampling, duration_s: float, text: str) -> None:
        """The sampled turn that began at `start` is over."""
        truncated = self.stop_reason is StopReason.LENGTH
        self._turns.append(
            Turn(start=start, end=len(self), role="assistant", sampling=sampling, duration_s=duration_s, truncated=truncated)
        )
        self.texts.append(text)

    def mark_turn(self, **changes: Any) -> None:
        """What the environment said of the model's last turn: reward, terminated, truncated."""
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], **changes)

    def fail(self, cause: str, detail: str) -> None:
        """The rollout failed; it keeps its tokens as data. `cause` is counted, `detail` is for people. The first failure stays."""
        self.error = self.error or f"{cause}: {detail}"

    def rollout(self, duration_s: float) -> Rollout:
        """The record. Logprobs that no distribution gives make it failed ("bad logprob")."""
        logprobs = np.asarray(self._logprobs, dtype=np.float32)
        mask = np.zeros(len(self), dtype=bool)
        for start, end in self._sampled:
            mask[start:end] = True
        logprobs[(logprobs > 0) & (logprobs <= LOGPROB_SLACK)] = 0.0
        bad = mask & ~(np.isfinite(logprobs) & (logprobs <= 0))
        if bad.any():
            at = int(np.argmax(bad))
            self.fail("bad logprob", f"token {at} (id {self.token_ids[at]}) has logprob {logprobs[at]}; {int(bad.sum())} such tokens")
        return Rollout(
            group_id=self.group_id,
            sample=self.sample,
            attempt=self.attempt,
            episode=self.sample,
            purpose=self.purpose,
            status=RolloutStatus.FINISHED if self.error is None else RolloutStatus.FAILED,
            error=self.error,
            stop_reason=self.stop_reason,
            prompt_length=self.prompt_length,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=logprobs,
            loss_mask=mask,
            spans=join_spans(self._spans),
            prefill_version=self._prefill_version,
            kv=self._kv,
            turns=tuple(self._turns),
            arrays=self._arrays(),
            completion="\n".join(self.texts),
            duration_s=duration_s,
            interrupts=self.num_interrupts,
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        """Named aligned arrays. An engine that keeps routing tells that of all tokens before the last at the end of every generation."""
        arrays = join_kept(self._kept)
        if self._routing is None:
            return arrays
        num_unrouted = len(self) - len(self._routing)
        return arrays | {ROUTED_EXPERTS: np.pad(self._routing, ((0, num_unrouted), (0, 0)), constant_values=NOT_ROUTED)}

    def _add_kept(self, kept: Sequence[bytes], num_tokens: int) -> None:
        """What truncated sampling kept for the tokens just added; nothing given: nothing was cut off."""
        self._kept.extend(kept or (b"",) * num_tokens)

    def _extend(self, ids: list[int], logprobs: list[float], sampled: bool) -> None:
        if sampled:
            self._sampled.append((len(self), len(self) + len(ids)))
            self.num_sampled += len(ids)
        self.token_ids.extend(ids)
        self._logprobs.extend(logprobs)
