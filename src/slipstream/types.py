"""The records: what a draw, a rollout, a group and a batch are. No torch here, and no behaviour beyond derivation.

Shapes: L = tokens of one rollout, k = entries per token of an aligned array, G = rollouts of a group, P = groups of a batch.
Every record is a frozen msgspec struct; `encode` and `decode` give the bytes that travel on every wire and lie in the ledger
(msgpack header, raw array buffers). Recorded tokens, the most of what travels, are encoded once, where they are sampled (`SealedChunk`).
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

# Names of `Rollout.arrays`, and what they hold.
ROUTED_EXPERTS = "routed_experts"  # int8 or int16 [L, routers x experts per token]: where each token was routed, layer after layer
NOT_ROUTED = -1  # in all of a token's: not recorded, as of the last sampled token, which no forward pass has seen
SAMPLING_MASK = "sampling_mask"  # uint8: what top-k, top-p and min-p kept for each token, joined; see `sampling_mask.py`
SAMPLING_MASK_SIZES = "sampling_mask_sizes"  # int32 [L]: how many of those bytes are a token's; 0: nothing was cut off
REFERENCE_LOGPROBS = "reference_logprobs"  # float32 [L]: of each sampled token under the frozen reference
TEACHER_LOGPROBS = "teacher_logprobs"  # the same under the teacher
LOSS_WEIGHT = "loss_weight"  # float32 [L]: what is left of a token's weight because of its age; absent: 1 everywhere


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token (which is part of the tokens and is trained) or a stop string
    LENGTH = "length"  # max_new_tokens or the context was reached: scored as it is, and counted
    ABORT = "abort"  # the engine was asked to stop it
    INTERRUPT = "interrupt"  # new weights stopped it; it goes on from its tokens or starts anew

    @property
    def truncated(self) -> bool:
        return self is StopReason.LENGTH


class RolloutStatus(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"  # recorded as data: `error` says why; never turned into a reward

    @property
    def ok(self) -> bool:
        return self is RolloutStatus.FINISHED


class GroupStatus(StrEnum):
    """Where a group is. The last three are final: every group ends in exactly one of them (promise 1)."""

    RUNNING = "running"
    FINISHED = "finished"  # scored, waiting in the buffer
    BATCHED = "batched"  # pulled into a recorded batch
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"

    @property
    def final(self) -> bool:
        return self in (GroupStatus.TRAINED, GroupStatus.FILTERED, GroupStatus.DROPPED)


class Record(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True, gc=False):
    """Base of all records: immutable, slotted, keyword-only.

    No record is part of a reference cycle, so the garbage collector need not walk them: with 10,000 rollouts in flight it did little else.
    """


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a rollout were sampled by these weights."""

    start: int
    end: int
    incarnation: int
    version: int
    engine_id: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The settings that turn logits into tokens. They belong to the policy, so they travel with the tokens."""

    temperature: float = 1.0  # 0.0 is greedy (evaluation only)
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1.0 = off
    min_p: float = 0.0  # 0.0 = off
    max_new_tokens: int = 128  # per turn
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates_vocabulary(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Turn(Record, kw_only=True, frozen=True):
    """A stretch [start, end) of a rollout's tokens with one author."""

    start: int
    end: int
    role: str  # "prompt", "assistant", "tool", "user"
    reward: float | None = None  # given by the environment for this turn
    terminated: bool = False  # the environment ended here
    truncated: bool = False  # a limit ended it here
    error: bool = False  # of tool turns: a call was answered with an error
    sampling: Sampling | None = None  # of sampled turns
    duration_s: float = 0.0


class Score(Record, kw_only=True, frozen=True):
    """What one scorer says of one rollout. `value` None means not applicable; an error is not a value."""

    name: str
    value: float | None
    weight: float = 1.0
    parts: dict[str, float] = {}


class Rollout(Record, kw_only=True, frozen=True):
    """One sampled trajectory. The arrays have equal length L; a token the model did not sample has logprob 0 and mask False."""

    group_id: int
    sample: int  # 0 .. G-1 within the group
    attempt: int = 0
    episode: int = 0
    agent: str = "main"
    policy: str = "main"
    purpose: Purpose = Purpose.TRAIN
    status: RolloutStatus = RolloutStatus.FINISHED
    error: str | None = None  # of a failed rollout: cause first
    stop_reason: StopReason | None = None
    prompt_length: int = 0  # leading tokens shared by the group
    token_ids: np.ndarray  # int32[L]
    logprobs: np.ndarray  # float32[L], natural log, under the distribution sampled from
    loss_mask: np.ndarray  # bool[L]
    spans: tuple[Span, ...] = ()  # which weights sampled which tokens; sorted, disjoint
    prefill_version: tuple[int, int] | None = None  # (incarnation, version) whose weights made the prompt's KV
    kv: str = "kept"  # at a swap: kept | recomputed
    parent: tuple[int, int] | None = None  # (sample, token offset) this one was forked from
    turns: tuple[Turn, ...] = ()
    arrays: dict[str, np.ndarray] = {}  # named aligned arrays, [L] or [L, k]
    scores: tuple[Score, ...] = ()
    reward: float | None = None  # weighted sum of the applicable scores
    completion: str = ""  # decoded sampled text, for people and scorers
    duration_s: float = 0.0
    interrupts: int = 0  # how often new weights stopped it: it went on from its tokens, or started anew

    @property
    def num_sampled_tokens(self) -> int:
        return sum(s.end - s.start for s in self.spans)

    def model_versions(self) -> np.ndarray:
        """int32[L]: the version that sampled each token, -1 where none did."""
        out = np.full(len(self.token_ids), -1, dtype=np.int32)
        for span in self.spans:
            out[span.start : span.end] = span.version
        return out

    @property
    def oldest_version(self) -> int | None:
        return min((s.version for s in self.spans), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((s.version for s in self.spans), default=None)


class Draw(Record, kw_only=True, frozen=True):
    """One draw of one dataset row: a recorded fact, never re-derived."""

    number: int  # = group_id
    row: int  # index in the dataset
    epoch: int
    dataset: str  # fingerprint of the rows


class Group(Record, kw_only=True, frozen=True):
    """The G rollouts of one draw: the unit of accounting, scoring, admission and advantage."""

    group_id: int
    attempt: int = 0
    draw: Draw
    row: dict[str, Any]  # the raw dataset row, whole
    prompt: list[dict[str, Any]] = []  # messages as shown to the model
    purpose: Purpose = Purpose.TRAIN
    origin: str = "pulled"  # pulled | pushed
    rollouts: tuple[Rollout, ...] = ()
    min_version: int = 0  # the permit it was admitted under

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts if r.status.ok and r.reward is not None]

    @property
    def oldest_version(self) -> int | None:
        return min((v for r in self.rollouts if (v := r.oldest_version) is not None), default=None)


class PrefixChunk(Record, kw_only=True, frozen=True):
    """Sampled tokens [start, start+n) of a running rollout, recorded so that a crash does not lose them.

    A chunk that ends a rollout without ever having had tokens is of one whose tokens are not recorded (several turns): its engine slot is
    free, and there is nothing to go on from.

    `start` counts tokens after the prompt. Chunks of one (group_id, sample, attempt) are contiguous; `merge_chunks` joins them.
    Spans are in rollout coordinates (prompt included), like `Rollout.spans`.
    """

    group_id: int
    sample: int
    attempt: int
    prompt_length: int
    start: int
    token_ids: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    kept: tuple[bytes, ...] = ()  # per token, or none: the vocabulary that truncated sampling left (`sampling_mask.py`)
    spans: tuple[Span, ...]
    prefill_version: tuple[int, int] | None = None
    recomputed: bool = False  # newer weights made keys and values of tokens that older ones had sampled: see `Rollout.kv`
    stop_reason: StopReason | None = None  # set once the rollout's generation has ended
    routing: np.ndarray | None = None  # set with it, of the whole rollout: see `Frame.routing`


class SealedChunk(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A chunk as it travels and is stored: the worker encodes it once, and the controller reads these few facts and never the tokens."""

    group_id: int
    sample: int
    attempt: int
    start: int
    num_tokens: int
    oldest_version: int  # among its tokens; -1: there are none
    ended: bool  # the rollout's generation has ended with it
    data: bytes  # the encoded PrefixChunk


def seal(chunk: PrefixChunk) -> SealedChunk:
    """Encode the chunk, its facts beside it."""
    spans = chunk.spans
    oldest = spans[0].version if len(spans) == 1 else min([span.version for span in spans], default=-1)
    ended = chunk.stop_reason is not None
    data = encode(chunk)
    return SealedChunk(chunk.group_id, chunk.sample, chunk.attempt, chunk.start, len(chunk.token_ids), oldest, ended, data)


def merge_chunks(chunks: list[PrefixChunk]) -> PrefixChunk:
    """Join contiguous chunks of one rollout into one that starts at 0; adjacent spans of the same weights are joined."""
    chunks = sorted(chunks, key=lambda c: c.start)
    at, spans = 0, []
    for chunk in chunks:
        if chunk.start != at:
            raise ValueError(f"prefix of group {chunk.group_id} sample {chunk.sample}: chunk at {chunk.start}, expected {at}")
        at += len(chunk.token_ids)
        spans.extend(chunk.spans)
    return msgspec.structs.replace(
        chunks[-1],
        start=0,
        token_ids=np.concatenate([c.token_ids for c in chunks]).astype(np.int32),
        logprobs=np.concatenate([c.logprobs for c in chunks]).astype(np.float32),
        kept=tuple(kept for c in chunks for kept in c.kept or (b"",) * len(c.token_ids)) if any(c.kept for c in chunks) else (),
        spans=join_spans(spans),
        prefill_version=next((c for c in reversed(chunks) if c.recomputed), chunks[0]).prefill_version,
        recomputed=any(c.recomputed for c in chunks),
    )


def join_spans(spans: list[Span]) -> tuple[Span, ...]:
    """Adjacent spans of the same weights become one."""
    out: list[Span] = []
    for span in spans:
        last = out[-1] if out else None
        same = last is not None and (last.incarnation, last.version, last.engine_id) == (span.incarnation, span.version, span.engine_id)
        if last is not None and same and last.end == span.start:
            out[-1] = Span(last.start, span.end, last.incarnation, last.version, last.engine_id)
        else:
            out.append(span)
    return tuple(out)


class Assignment(Record, kw_only=True, frozen=True):
    """The controller's order to a rollout worker: run this group."""

    group_id: int
    attempt: int
    draw: Draw
    row: dict[str, Any]
    min_version: int  # generate only on an engine at this version or later
    prefixes: tuple[PrefixChunk, ...] = ()  # merged, one per recorded sample, after a resume
    retries: dict[int, int] = {}  # sample -> times it was started anew (interrupt = abort_retry); its attempt is attempt + retries


class EvalTask(Record, kw_only=True, frozen=True):
    """The controller's order to evaluate the version the engine holds now (pinned)."""

    number: int  # of evaluations ordered in this run
    rows: tuple[dict[str, Any], ...]
    samples: int
    temperature: float


class EvalItem(Record, kw_only=True, frozen=True):
    row: int  # index in the evaluation rows
    rewards: tuple[float | None, ...]  # per sample; None = failed or not applicable
    completions: tuple[str, ...]
    num_tokens: tuple[int, ...]


class EvalResult(Record, kw_only=True, frozen=True):
    number: int
    incarnation: int
    version: int
    checksum: str
    items: tuple[EvalItem, ...]
    duration_s: float  # wall time from pin to last score
    engine_s: float = 0.0  # time the engine spent on evaluation passes


class Work(Record, kw_only=True, frozen=True):
    """Answer to a rollout worker that asked for something to do."""

    assignments: tuple[Assignment, ...] = ()
    evaluation: EvalTask | None = None
    cancel: tuple[tuple[int, int], ...] = ()  # (group_id, attempt) of running groups that can no longer be consumed: end them at once
    stop: bool = False  # finish or save what runs, then leave


class Batch(Record, kw_only=True, frozen=True):
    """The P groups of one optimizer step, asked for by step number; the same answer every time it is asked."""

    step: int  # = the trainer's version when it trains this batch
    groups: tuple[Group, ...]
    replayed: tuple[int, ...] = ()  # group ids that come from a replay policy
    num_loss_tokens: int  # unmasked tokens of the whole batch: micro-batches and ranks normalise by it
    world: tuple[int, ...] = (1,)  # layout it is trained on
    assignment: tuple[tuple[int, ...], ...] = ()  # group ids per rank; empty = all on rank 0


class StepReport(Record, kw_only=True, frozen=True):
    """What the trainer says after a step. `version` = step + 1, also when the update was skipped."""

    step: int
    version: int
    skipped: str | None = None  # why the update was not applied ("non-finite gradient"); the version then has the same bytes
    checksum: str  # xxh3-128 of the packed weights of `version`
    metrics: dict[str, float] = {}
    wait_s: float = 0.0  # waited for this batch
    step_s: float = 0.0  # computed it
    publish_s: float = 0.0  # packed and published the weights


class EngineReport(Record, kw_only=True, frozen=True):
    """An engine holds these bytes: hashed from its own copy."""

    engine_id: str
    incarnation: int
    version: int
    checksum: str
    sync_s: float = 0.0  # copy + hash, the engine's stall
    repaired: str = ""  # why what changed was refused and whole weights were taken instead (payload "delta")


RequestKey = tuple[str, int, int, int, int]  # (purpose, group_id, sample, attempt, turn)


class GenerateRequest(Record, kw_only=True, frozen=True):
    """Continue `token_ids`. Keyed (group_id, sample, attempt, turn, purpose), idempotent under that key."""

    group_id: int
    sample: int
    attempt: int
    turn: int
    purpose: Purpose
    token_ids: np.ndarray  # int32[n]: prompt and everything since
    prompt_length: int  # leading tokens that the group's samples share
    num_sampled: int  # tokens sampled so far in this rollout: where its random counter stands
    num_sampled_in_turn: int = 0  # those of this turn, the last of token_ids: a turn goes on after a resume or an interrupt
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    min_version: int = 0
    seed: int = 0
    oldest_version: int | None = None  # of the tokens sampled so far in this rollout
    state: int | None = None  # id of a saved state whose keys and values fit the first tokens (`EngineClient.save`)
    messages: tuple[dict[str, Any], ...] = ()  # the conversation in words, for an engine that takes no tokens; else empty

    @property
    def key(self) -> RequestKey:
        return (self.purpose.value, self.group_id, self.sample, self.attempt, self.turn)


class Frame(Record, kw_only=True, frozen=True):
    """All that one engine tick produced: B sampled tokens and the generations that ended."""

    tick: int
    engine_id: str
    incarnation: int
    version: int  # of the live weights (pinned ones for pinned requests) that made these tokens
    handles: np.ndarray  # int32[B]
    token_ids: np.ndarray  # int32[B]
    logprobs: np.ndarray  # float32[B]
    kept: tuple[bytes, ...] = ()  # per token, or none: the vocabulary that truncated sampling left (`sampling_mask.py`)
    finished: tuple[tuple[int, StopReason], ...] = ()
    prefilled: tuple[tuple[int, int, int], ...] = ()  # (handle, incarnation, version) whose weights made the prompt's KV
    num_prefill_tokens: int = 0
    saved: tuple[tuple[int, int], ...] = ()  # (handle, state id): the state of an interrupted request was kept under this id
    recomputed: tuple[int, ...] = ()  # handles whose keys and values were made again, by the weights of this frame's version
    routing: dict[int, np.ndarray] = {}  # handle -> [n, experts per token]: how the n tokens before the last were routed (keep_routing)


# ---- encoding ----------------------------------------------------------------------------------------------------------------

_MAX_ARRAY_DIMS = 4


_dtype = lru_cache(maxsize=64)(np.dtype)  # of its name
_dtype_name = lru_cache(maxsize=64)(attrgetter("str"))  # made anew by numpy at each look, it took half of an array's encoding


def _enc_hook(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return _dtype_name(obj.dtype), obj.shape, obj.tobytes()  # a copy of a few KiB costs less than a view of it
    if isinstance(obj, np.generic):
        return obj.item()
    raise NotImplementedError(f"{type(obj).__name__} cannot be put into a record")


def _dec_hook(kind: type, obj: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = obj
        known = _dtype(dtype)
        if known.hasobject or len(shape) > _MAX_ARRAY_DIMS or (len(shape) != 1 and min(shape, default=0) < 0):
            raise ValueError(f"array of dtype {dtype} and shape {shape} is not allowed in a record")
        if len(shape) == 1:  # nearly always, and twice as fast
            array = np.frombuffer(data, known)  # read-only view of the message
            fits = len(array) == shape[0]
        else:
            array = np.ndarray(shape, known, data)
            fits = array.nbytes == len(data)
        if not fits:
            raise ValueError(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
        return array
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoders: dict[Any, msgspec.msgpack.Decoder] = {}


def encode(record: Any) -> bytes:
    """The record's bytes (msgpack; arrays as [dtype, shape, raw little-endian buffer])."""
    return _encoder.encode(record)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """The record in these bytes; raises msgspec.ValidationError where they are not one."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook)
    return decoder.decode(data)  # type: ignore[return-value]
