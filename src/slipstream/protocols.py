"""The protocols between roles. Each role is a plain class that knows these and not where anything runs.

Who talks to whom (arrows: who calls):

    rollout worker ──► controller   admit, progress, interrupted, finish_group, finish_evaluation, evaluation_lost, next_engines, note
    trainer        ──► controller   get_batch, begin_write, publish, finish_step, commit_checkpoint, weights_taken
    engine         ──► controller   next_weights, confirm_weights
    rollout worker ──► engine       generate, cancel, save, free, pin, unpin
    rollout worker ──► logprobs     annotate

The same calls are direct in one process (`launch/inline.py`) and travel over Unix sockets between processes (`launch/wire.py`).
Every wait inside has a deadline and a reason; the far end's death raises `PeerLost` at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise, repeat
from typing import Any, Protocol

import msgspec
import numpy as np

from slipstream.types import (
    Batch,
    EngineReport,
    EvalResult,
    GenerateRequest,
    Group,
    Record,
    RequestKey,
    Score,
    SealedChunk,
    Span,
    StepReport,
    StopReason,
    Work,
)


class ManifestEntry(Record, kw_only=True, frozen=True):
    """One tensor's place in a packed block."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    offset: int  # bytes, a multiple of 64
    nbytes: int


class Delta(Record, kw_only=True, frozen=True):
    """A part with what changed between two packs, one after the other: see `weight_sync/delta.py`."""

    version: int  # of the later one
    base_checksum: str  # of the earlier one's block, as in its manifest
    checksum: str  # xxh3-128 (hex) of the part's own bytes
    num_bytes: int


class WholeWeights(Record, kw_only=True, frozen=True):
    """Whole weights that lie where an earlier version was published."""

    incarnation: int
    version: int
    checksum: str


class Manifest(Record, kw_only=True, frozen=True):
    """What a packed block of weights holds, and the hash that proves it."""

    incarnation: int
    version: int
    checksum: str  # xxh3-128 (hex) of the block's first `total_bytes` bytes, gaps zero
    base_checksum: str | None = None  # of the frozen weights that an adapter's tensors lie on; None: these are whole weights
    total_bytes: int
    entries: tuple[ManifestEntry, ...]
    aliases: dict[str, str] = {}  # tied name -> the name its storage is sent under
    deltas: tuple[Delta, ...] = ()  # payload "delta": each leads from the one before, the last to these weights
    whole: WholeWeights | None = None  # payload "delta" over files: where `deltas` lead on from; None: these weights lie whole in the slot
    changed_fraction: float | None = None  # payload "delta": of the elements, since the pack before; None: there is none
    probe: tuple[float, ...] = ()  # the trainer's logprobs of fixed tokens, for engines that are servers (`weight_sync/probe.py`)


class WeightsOffer(Record, kw_only=True, frozen=True):
    """A leased slot that holds `manifest`'s bytes; give it back with `confirm_weights`."""

    slot: int
    manifest: Manifest


class EngineInService(msgspec.Struct, kw_only=True, frozen=True):
    """An engine that takes requests, under its id. Compared by value."""

    starts: int  # how often it came into service in this incarnation: a connection to an earlier one leads nowhere
    version: int  # confirmed in this incarnation; -1: none yet


class CheckpointManifest(Record, kw_only=True, frozen=True):
    """What a checkpoint folder holds. Written as manifest.json inside it, last, before the folder is offered for commit."""

    run_id: str
    incarnation: int
    step: int  # batches finished = version of the weights inside
    ledger_seq: int  # the ledger must have reached this event
    weights_checksum: str  # of the packed weights, as in the ledger's version rows
    files: dict[str, tuple[int, str]]  # relative path -> (bytes, xxh3-128 hex)
    numerics: dict[str, str] = {}  # fingerprint: torch, cpu capability, threads, dtype, attention path


class ControllerAPI(Protocol):
    """What the other roles ask of the controller."""

    # -- rollout worker
    async def admit(self, room: int) -> Work:
        """Wait until at most `room` groups may start, an evaluation is due, or the run stops; room 0 waits for the last two only."""
        ...

    async def progress(self, chunks: list[SealedChunk]) -> None:
        """Record sampled tokens of running rollouts (durable soon after it returns; a crash before then costs sampling them again)."""
        ...

    async def interrupted(self, group_id: int, sample: int, attempt: int, num_tokens: int) -> bool:
        """A rollout was aborted by new weights and its tokens are discarded (interrupt = abort_retry). Whether it may start anew."""
        ...

    async def finish_group(self, group: Group) -> None:
        """A group has run: all rollouts finished or failed, scored. Idempotent per (group_id, attempt)."""
        ...

    async def finish_evaluation(self, result: EvalResult) -> None: ...

    async def evaluation_lost(self, number: int) -> None:
        """The engine that held the evaluation's weights is gone: it is ordered again from its beginning."""
        ...

    async def next_engines(self, known: dict[str, EngineInService]) -> dict[str, EngineInService]:
        """The engines in service, by the id that names their sockets, as soon as they or their versions differ from `known`."""
        ...

    async def note(self, text: str) -> None:
        """Tell the person at the display one sentence."""
        ...

    # -- trainer
    async def get_batch(self, step: int) -> Batch | None:
        """The batch of this step: recorded before it is returned, equal every time. None: no further step, checkpoint and leave."""
        ...

    async def begin_write(self) -> int:
        """A weight slot that no engine reads and that does not hold the newest version. Never waits for an engine."""
        ...

    async def publish(self, slot: int, manifest: Manifest) -> None:
        """The slot is complete. Comes before the `finish_step` of the step that made it; version of the start weights: no step."""
        ...

    async def finish_step(self, report: StepReport) -> None: ...

    async def commit_checkpoint(self, temporary: str, manifest: CheckpointManifest) -> None:
        """Verify checkpoints/<temporary>, rename it to checkpoints/step-<step>, prune old ones."""
        ...

    async def checkpoint_context(self) -> tuple[str, int, int]:
        """(run_id, incarnation, ledger_seq) that a checkpoint written now must name."""
        ...

    async def weights_taken(self) -> None:
        """Wait until the run is over and every engine in service holds the newest weights: nobody needs the trainer's any more."""
        ...

    # -- engine
    async def next_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer:
        """Wait for weights newer than (incarnation, version), -1 for none yet, and lease their slot."""
        ...

    async def confirm_weights(self, slot: int, report: EngineReport) -> None:
        """Give the lease back and report what the engine now holds; a checksum that differs from the manifest raises WeightSyncError."""
        ...


NEVER = sys.maxsize  # more tokens than a generation will have


class Generation:
    """A generation in progress, filled frame by frame. Read it at any time; `EngineClient.generate` returns when it has ended.

    `append` runs once per token of the run, so it does the least there is to do: spans are made when they are asked for, and whoever waits
    for tokens says for how many (`notify_at`) and is called then (`notify`), not at each.
    """

    __slots__ = (
        "_source", "_sources", "kept", "logprobs", "notify", "notify_at", "on_engine_lost", "prefill_version", "recomputed", "routing",
        "start", "state", "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(self, start: int, notify: Callable[[], None] = lambda: None):
        self.start = start  # position in the rollout of the first token sampled here
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.kept: list[bytes] = []  # per token, or none so far: the vocabulary that truncated sampling left, b"" where nothing was cut off
        self._source: tuple[int, int, str] | None = None  # (incarnation, version, engine id) of the newest token
        self._sources: list[tuple[int, tuple[int, int, str]]] = []  # of each span: index of its first token, its source
        self.notify, self.notify_at = notify, NEVER  # called once there are so many tokens; it sets the next number
        self.on_engine_lost: Callable[[], None] = lambda: None  # called when its engine is gone; `notify` at the next one's first token
        self.prefill_version: tuple[int, int] | None = None
        self.stop_reason: StopReason | None = None
        self.recomputed = False  # newer weights made keys and values of tokens that older ones had sampled
        self.routing: np.ndarray | None = None  # once it has ended, where it is kept: see `Frame.routing`
        self.state: int | None = None  # id of the state that the engine kept when new weights stopped it

    def append(self, token_id: int, logprob: float, incarnation: int, version: int, engine_id: str, kept: bytes = b"") -> None:
        tokens, source = self.token_ids, (incarnation, version, engine_id)
        if source != self._source:
            self._sources.append((len(tokens), source))
            self._source = source
        if kept or self.kept:
            self.kept.extend(repeat(b"", len(tokens) - len(self.kept)))
            self.kept.append(kept)
        tokens.append(token_id)
        self.logprobs.append(logprob)
        if len(tokens) >= self.notify_at:
            self.notify_at = NEVER
            self.notify()

    def engine_lost(self) -> None:
        """Its engine is gone, and what that kept of it; another will go on from its tokens."""
        self.state = None
        self.notify_at = len(self.token_ids) + 1
        self.on_engine_lost()

    @property
    def spans(self) -> list[Span]:
        """Which weights sampled which tokens, in rollout coordinates."""
        bounds = [*(first for first, _ in self._sources), len(self.token_ids)]
        return [Span(self.start + a, self.start + b, *by) for (_, by), (a, b) in zip(self._sources, pairwise(bounds), strict=True)]


class EngineClient(Protocol):
    """What a rollout worker asks of an engine."""

    async def generate(self, request: GenerateRequest, into: Generation) -> None:
        """Queue the request and fill `into` until it ends. Cancelling the awaiting task cancels the request.

        It may end with INTERRUPT: new weights stopped it. To go on, call again with the tokens so far, `into.state` and the same `into`.
        """
        ...

    async def save(self, key: RequestKey) -> int | None:
        """Keep the keys and values of the request of this key as they are now, for forks: the state's id. None where it does not run."""
        ...

    async def free(self, state: int) -> None:
        """Let go of a saved state; nothing where it is gone already."""
        ...

    async def pin(self) -> tuple[int, int, str]:
        """Copy the live weights for evaluation; (incarnation, version, checksum). Requests with purpose EVAL use the copy."""
        ...

    async def unpin(self) -> float:
        """Free the copy; the seconds that the engine spent on pinned passes."""
        ...


class Scorer(Protocol):
    """Turns the finished rollouts of a group into scores, one per rollout, in order; raises ScoringError for the whole group."""

    name: str
    weight: float

    async def score(self, group: Group) -> list[Score]: ...

    async def close(self) -> None: ...


class LogprobClient(Protocol):
    """The logprob stage: what frozen models say of the tokens that were sampled. Computed before the group counts as finished."""

    async def annotate(self, group: Group) -> Group:
        """The group, each rollout with the aligned arrays float32[L] that the settings ask for ("reference_logprobs", "teacher_logprobs").

        They hold the logprob of every sampled token under the distribution it would have been sampled from; 0 where none was sampled.
        A rollout whose values are not finite or above 0 is failed ("bad logprob").
        """
        ...


class Message(Record, kw_only=True, frozen=True):
    """One chat message between a rollout and its environment."""

    role: str  # user | assistant | tool | system
    content: str
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class EnvironmentReply(Record, kw_only=True, frozen=True):
    """What the environment answers to a model turn."""

    messages: tuple[Message, ...] = ()  # appended to the conversation; none with done
    done: bool = False
    reward: float | None = None  # for the turn just made
    truncated: bool = False  # done because of a limit, not by the task
    error: bool = False  # a call in the turn is answered with an error


class Environment(Protocol):
    """Single use: one instance per rollout."""

    async def start(self) -> tuple[Message, ...]:
        """The first messages, as shown to the model."""
        ...

    async def step(self, message: Message) -> EnvironmentReply: ...

    async def close(self) -> None: ...


class Observer(Protocol):
    """Who is told what happens: metrics file, display, samples file, sinks. Never raises into the controller, never waits."""

    def step(self, line: dict[str, Any], groups: tuple[Group, ...]) -> None:
        """A step has finished: its metric line and the groups it trained."""
        ...

    def evaluation(self, line: dict[str, Any], result: EvalResult) -> None: ...

    def note(self, text: str) -> None:
        """One sentence for people (a warning, a resume, a skipped evaluation)."""
        ...


class Progress(Protocol):
    """How a role's working loop says what it does, for whoever watches it (`launch/page.py`)."""

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        """From now on and for at most `deadline_s` seconds: this phase, for this piece of work."""
        ...

    def idle(self) -> None:
        """Nothing is owed: the role waits for another."""
        ...


class Clock(Protocol):
    """Time as the run sees it: monotonic seconds."""

    def now(self) -> float: ...
