"""What can happen in a run, as facts: the ledger's log is a sequence of these, and the run's state is their fold (`state.apply`).

Events carry numbers and causes, no tokens: those lie in the ledger's data tables, committed in the same transaction. Every event has a
sequence number, the incarnation that wrote it and one wall-clock stamp for people; these are columns, not fields.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events."""


class Point(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where the draws stood when a checkpoint was taken: what a rewind returns to and what a prune may delete."""

    step: int  # batches finished
    ledger_seq: int  # the last event that the checkpoint contains
    next_draw: int
    position: int
    redraw: tuple[int, ...] = ()
    watermark: int = 0  # every group below it is final and in no batch from `step` on: the checkpoint covers it


class RunStarted(Event, tag="run_started", frozen=True, kw_only=True):
    """A controller opened the run folder: a new incarnation."""

    run_id: str
    incarnation: int
    kind: str  # fresh | resume | deterministic_resume | rewind
    from_step: int = 0
    from_seq: int = 0  # of the checkpoint; a deterministic resume supersedes every event after it
    point: Point | None = None  # None: no checkpoint, from the initial model
    kept: tuple[int, ...] = ()  # steps of the checkpoints in the folder
    max_staleness: int
    lowered: int = 0  # max_staleness is so much below the setting: thresholds lowered it, in this incarnation or an earlier one
    groups_per_step: int
    window: int | None  # None: unbounded
    max_groups: int = 0  # in flight without a window
    group_size: int
    seed: int
    data_fingerprint: str
    eval_fingerprint: str = ""  # "": no evaluation
    settings_hash: str = ""
    code_version: str = ""
    numerics: dict[str, str] = {}


class SettingsChanged(Event, tag="settings_changed", frozen=True, kw_only=True):
    """Settings that changed while the run went on; key -> new value."""

    changes: dict[str, Any]
    reason: str = ""


class Admitted(Event, tag="admitted", frozen=True, kw_only=True):
    """A prompt was drawn and its group took a slot. The draw is a recorded fact."""

    group_id: int  # = number of the draw
    row: int
    epoch: int
    position: int
    min_version: int  # its permit
    bound: int | None  # worst staleness derived when it was admitted; checked at consumption; None: there is none
    purpose: str = "train"
    origin: str = "pulled"


class PrefixesRecorded(Event, tag="prefixes_recorded", frozen=True, kw_only=True):
    """Sampled tokens of running rollouts: (group_id, sample, attempt, start, tokens, oldest version among them) per chunk."""

    chunks: tuple[tuple[int, int, int, int, int, int], ...]


class SampleInterrupted(Event, tag="sample_interrupted", frozen=True, kw_only=True):
    """New weights stopped one rollout of a running group; it starts anew, its tokens are discarded."""

    group_id: int
    sample: int
    attempt: int  # of the rollout: the group's, and one for each time that it was started anew
    num_tokens: int = 0


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """Lengths and rewards of some rollouts, as sums, so that means over many events are true."""

    rollouts: int = 0
    tokens: int = 0  # sampled
    rewarded: int = 0  # rollouts with a reward
    reward: float = 0.0

    def plus(self, other: Tally, sign: int = 1) -> Tally:
        return Tally(
            self.rollouts + sign * other.rollouts,
            self.tokens + sign * other.tokens,
            self.rewarded + sign * other.rewarded,
            self.reward + sign * other.reward,
        )

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.rollouts if self.rollouts else None

    @property
    def mean_reward(self) -> float | None:
        return self.reward / self.rewarded if self.rewarded else None


class StaleRule(msgspec.Struct, frozen=True, array_like=True):
    """What happened to data that was too old for a batch: `buffer.on_stale` and its settings when it was recorded."""

    on_stale: str = "keep"
    level: str = "token"  # token | rollout | group
    limit: int = 0  # versions: max_staleness then
    decay: float = 1.0  # of down_weight


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rollouts of an oversampled group that were not kept. Their tokens are among the group's `num_tokens`."""

    tokens: dict[str, int] = {}  # "not selected" | "failed" -> sampled tokens
    failures: tuple[str, ...] = ()  # causes of failed rollouts that the group could do without

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())


class GroupFinished(Event, tag="group_finished", frozen=True, kw_only=True):
    """All rollouts finished and scored; the group waits in the buffer."""

    group_id: int
    attempt: int
    rewards: tuple[float, ...]
    oldest_version: int  # of its trained tokens; -1: there are none
    newest_version: int
    num_tokens: int  # sampled
    left_out: LeftOut | None = None  # of an oversampled group


class AttemptFailed(Event, tag="attempt_failed", frozen=True, kw_only=True):
    """A rollout of the group failed; the group is tried again in its place, its tokens are discarded."""

    group_id: int
    attempt: int
    cause: str
    num_tokens: int = 0


class Filtered(Event, tag="filtered", frozen=True, kw_only=True):
    group_id: int
    attempt: int
    reason: str  # "zero variance"
    rewards: tuple[float, ...] = ()
    num_tokens: int = 0
    left_out: LeftOut | None = None  # of an oversampled group


class Dropped(Event, tag="dropped", frozen=True, kw_only=True):
    """The group ends here: running, or finished where it is stale."""

    group_id: int
    attempt: int
    reason: str  # "failed", "bad data", "interrupted", "stale", "cancelled"; of rewound groups there is no event but their RunStarted
    cause: str = ""
    num_tokens: int = 0
    lost: Tally = Tally()  # of a stale one: its rollouts; of a running one their tokens so far, without rewards


class BatchRecorded(Event, tag="batch_recorded", frozen=True, kw_only=True):
    """Batch `step` and its groups, in pull order. Recorded before the trainer gets it."""

    step: int
    group_ids: tuple[int, ...]
    num_loss_tokens: int
    num_samples: int  # rollouts with at least one unmasked token
    num_several_versions: int  # of those, sampled by more than one version
    staleness: tuple[tuple[int, int], ...]  # (staleness, unmasked tokens), sorted
    num_masked_tokens: int = 0  # masked because they were stale
    num_down_weighted_tokens: int = 0  # trained with less weight because they were stale
    kept: Tally = Tally()  # its rollouts
    dropped: Tally = Tally()  # rollouts that left its groups because they were stale
    rule: StaleRule = StaleRule()  # by which: a batch comes out equal whatever changes later
    policy: str = "main"


class StepFinished(Event, tag="step_finished", frozen=True, kw_only=True):
    """The trainer finished batch `step`. The durations are deltas since the step before, so that totals are sums over events."""

    step: int
    version: int  # step + 1, also of a skipped update
    checksum: str  # "": the version is not published
    skipped: str | None = None
    step_s: float = 0.0
    active_s: float = 0.0  # since the first admission or the last step
    rollout_idle_s: float = 0.0  # integral of the share of engine slots left free behind the closed gate
    trainer_active_s: float = 0.0  # since the first batch arrived or the last step
    trainer_wait_s: float = 0.0  # of that, waiting for a batch


class ThresholdsJudged(Event, tag="thresholds_judged", frozen=True, kw_only=True):
    """What the newest step line made of the counts of the thresholds; recorded when they change."""

    counts: dict[str, int]  # `thresholds.name` -> violations in a row, below 0: lines still to be ignored


class VersionPublished(Event, tag="version_published", frozen=True, kw_only=True):
    """Engines can get the weights after batch `version` - 1. Not every version is published: see `weight_sync.every`."""

    version: int
    checksum: str
    policy: str = "main"


class EngineAdded(Event, tag="engine_added", frozen=True, kw_only=True):
    """The engine is in service and holds no weights of this incarnation yet. Also recorded when it comes back."""

    engine_id: str


class EngineRemoved(Event, tag="engine_removed", frozen=True, kw_only=True):
    engine_id: str
    reason: str = ""


class EngineConfirmed(Event, tag="engine_confirmed", frozen=True, kw_only=True):
    """The engine hashed its own copy: it holds these bytes."""

    engine_id: str
    version: int
    checksum: str
    sync_s: float = 0.0


class CheckpointCommitted(Event, tag="checkpoint_committed", frozen=True, kw_only=True):
    """The folder was renamed before this was written: the rename is the commit point, this is an index."""

    point: Point
    weights_checksum: str = ""
    kept: tuple[int, ...]  # steps of the checkpoints kept, this one included
    covers: int = 0  # batches below this step are never trained again: 0 while the initial model is still the one to fall back to


class EvaluationOrdered(Event, tag="evaluation_ordered", frozen=True, kw_only=True):
    number: int
    due: int


class EvaluationFinished(Event, tag="evaluation_finished", frozen=True, kw_only=True):
    number: int
    due: int
    incarnation: int  # (incarnation, version, checksum): the weights that were evaluated
    version: int
    checksum: str
    reward: float | None
    num_failed: int = 0
    duration_s: float = 0.0
    engine_s: float = 0.0


class EvaluationSkipped(Event, tag="evaluation_skipped", frozen=True, kw_only=True):
    due: int
    reason: str = ""


class EvaluationAborted(Event, tag="evaluation_aborted", frozen=True, kw_only=True):
    """Its worker is gone; it stays due."""

    number: int


class StopRequested(Event, tag="stop_requested", frozen=True, kw_only=True):
    reason: str = ""


AnyEvent = (
    RunStarted
    | SettingsChanged
    | Admitted
    | PrefixesRecorded
    | SampleInterrupted
    | GroupFinished
    | AttemptFailed
    | Filtered
    | Dropped
    | BatchRecorded
    | StepFinished
    | ThresholdsJudged
    | VersionPublished
    | EngineAdded
    | EngineRemoved
    | EngineConfirmed
    | CheckpointCommitted
    | EvaluationOrdered
    | EvaluationFinished
    | EvaluationSkipped
    | EvaluationAborted
    | StopRequested
)

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(AnyEvent).decode
