"""The run's state as a fold over the ledger's events: the one place where the rules of accounting live.

`apply(state, event)` is the reducer. By contract it is pure: it takes ownership of the state it is given and returns the next one, which
may be the same object changed in place (so that an event costs no copy); a caller who needs the old state copies it first. An event that
is not legal raises `LedgerError` and leaves the state as it was.

A group is in exactly one place:

    admitted ──► RUNNING ──► FINISHED ──► BATCHED ──► TRAINED          counted when its step has finished
                  │ ▲  │         │
                  └─┘  └────────►└──► FILTERED, DROPPED(reason)        (failed attempt: RUNNING again, same place;
                                                                        only what is stale is dropped when FINISHED)

A group keeps the slot it took until it is filtered or dropped, or until every engine in service has confirmed a version that contains its
batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from slipstream.controller import events as ev
from slipstream.controller.run_state import LiveGroup, Member, RecordedBatch, RunState, refuse_unless
from slipstream.controller.starts import run_started
from slipstream.controller.totals import CANCELLED, INTERRUPTED, STALE
from slipstream.errors import LedgerError
from slipstream.types import GroupStatus


def fold(events: Iterable[ev.Event], state: RunState | None = None) -> RunState:
    """The state after these events."""
    state = RunState() if state is None else state
    for event in events:
        state = apply(state, event)
    return state


def apply(state: RunState, event: ev.Event) -> RunState:
    """The state after this event; raises LedgerError, without effect, for one that is not legal here."""
    if (state.incarnation == 0) != (type(event) is ev.RunStarted and event.kind == "fresh"):
        raise LedgerError(f"{type(event).__name__} in a ledger that {'has not started' if state.incarnation == 0 else 'has started'}")
    _HANDLERS[type(event)](state, event)
    return state


def _settings_changed(state: RunState, event: ev.SettingsChanged) -> None:
    lower = int(event.changes.get("buffer.max_staleness", state.max_staleness))
    state.lowered += state.max_staleness - lower
    state.max_staleness = lower
    state.window = event.changes.get("buffer.window", state.window)


def _stop_requested(state: RunState, event: ev.StopRequested) -> None:
    state.stop_reason = event.reason or "asked to stop"


# ---- groups ------------------------------------------------------------------------------------------------------------------


def _admitted(state: RunState, event: ev.Admitted) -> None:
    refuse_unless(event.group_id == state.next_draw, f"draw {event.group_id} after draw {state.next_draw - 1}")
    due = state.redraw[0] if state.redraw else state.position
    refuse_unless(event.position == due, f"draw {event.group_id} is of position {event.position}, position {due} is next")
    if state.redraw:
        state.redraw.popleft()
    else:
        state.position += 1
    state.next_draw += 1
    state.live[event.group_id] = LiveGroup(
        event.group_id, event.row, event.epoch, event.position, bound=event.bound, min_version=event.min_version
    )
    state.order.append(event.group_id)
    state.places.append(event.group_id)


def _prefixes_recorded(state: RunState, event: ev.PrefixesRecorded) -> None:
    lengths: dict[tuple[int, int], int] = {}
    group = None
    for group_id, sample, attempt, start, num_tokens, _ in event.chunks:
        if group is None or group.group_id != group_id:
            group = state.running_group(group_id)
        if attempt != group.attempt_of(sample):
            _check_sample(group, sample, attempt)
        length = lengths.get((group_id, sample))
        if length is None:
            length = group.prefix_tokens.get(sample, 0)
        if start != length:
            raise LedgerError(f"prefix of group {group_id} sample {sample} starts at token {start}, but {length} tokens are recorded")
        lengths[group_id, sample] = start + num_tokens
    for group_id, sample, _, start, num_tokens, version in event.chunks:  # all of it is legal
        group = state.live[group_id]
        group.prefix_tokens[sample] = start + num_tokens
        if num_tokens and version < group.prefix_versions.get(sample, version + 1):
            group.prefix_versions[sample] = version


def _sample_interrupted(state: RunState, event: ev.SampleInterrupted) -> None:
    group = state.running_group(event.group_id)
    _check_sample(group, event.sample, event.attempt)
    group.retries[event.sample] = group.retries.get(event.sample, 0) + 1
    group.prefix_tokens.pop(event.sample, None)
    group.prefix_versions.pop(event.sample, None)
    state.totals.count_waste(INTERRUPTED, event.num_tokens)


def _check_sample(group: LiveGroup, sample: int, attempt: int) -> None:
    due = group.attempt_of(sample)
    refuse_unless(attempt == due, f"attempt {attempt} of group {group.group_id} sample {sample}, which is at attempt {due}")


def _group_finished(state: RunState, event: ev.GroupFinished) -> None:
    group = _current_attempt(state, event.group_id, event.attempt)
    left_out = state.totals.count_left_out(event.left_out)
    group.status, group.num_tokens = GroupStatus.FINISHED, event.num_tokens - left_out
    insort(state.finished, event.group_id)
    group.oldest_version = event.oldest_version
    _forget_prefixes(group)
    state.totals.generated_tokens += group.num_tokens
    state.barren_in_a_row, state.first_barren_cause, state.productive = 0, "", True


def _attempt_failed(state: RunState, event: ev.AttemptFailed) -> None:
    group = _current_attempt(state, event.group_id, event.attempt)
    group.attempt += 1 + max(group.retries.values(), default=0)  # above every attempt that a rollout of it has used
    group.failures += 1
    group.retries.clear()
    _forget_prefixes(group)
    state.totals.count_failure(event.cause)
    state.totals.count_waste("failed", event.num_tokens)


def _forget_prefixes(group: LiveGroup) -> None:
    group.prefix_tokens.clear()
    group.prefix_versions.clear()


def _filtered(state: RunState, event: ev.Filtered) -> None:
    _current_attempt(state, event.group_id, event.attempt)
    _leave(state, event.group_id)
    state.totals.filtered += 1
    state.totals.count_waste("filtered", event.num_tokens - state.totals.count_left_out(event.left_out))
    state.productive = True
    _count_barren(state, f"group {event.group_id} was filtered: {event.reason}")


def _dropped(state: RunState, event: ev.Dropped) -> None:
    if event.reason in (STALE, CANCELLED):
        return _dropped_stale(state, event)
    _current_attempt(state, event.group_id, event.attempt)
    _leave(state, event.group_id)
    state.totals.dropped[event.reason] += 1
    state.totals.count_failure(event.cause)
    state.totals.count_waste(event.reason, event.num_tokens)
    if event.reason != INTERRUPTED:  # that takes new weights, so groups were trained meanwhile: the run gets on
        _count_barren(state, f"group {event.group_id} {event.reason}: {event.cause}")


def _dropped_stale(state: RunState, event: ev.Dropped) -> None:
    """A finished group, whose tokens were counted when it finished, or a running one. It is no failure, and says nothing of whether the run
    gets on: a group that starts now is never too old for the next batch."""
    group = state.live.get(event.group_id)
    due = GroupStatus.FINISHED if event.reason == STALE else GroupStatus.RUNNING
    if group is None or (group.attempt, group.status) != (event.attempt, due):
        raise LedgerError(f"attempt {event.attempt} of group {event.group_id} cannot be dropped: {state.where(event.group_id)}")
    counted = due is GroupStatus.FINISHED
    refuse_unless(not counted or event.num_tokens == group.num_tokens, f"group {event.group_id} has {group.num_tokens} tokens")
    _leave(state, event.group_id)
    state.totals.dropped[event.reason] += 1
    state.totals.wasted_tokens[event.reason] += event.num_tokens
    state.totals.stale = state.totals.stale.plus(event.lost)
    if not counted:
        state.totals.generated_tokens += event.num_tokens


def _current_attempt(state: RunState, group_id: int, attempt: int) -> LiveGroup:
    group = state.running_group(group_id)
    refuse_unless(attempt == group.attempt, f"attempt {attempt} of group {group_id}, which is at attempt {group.attempt}")
    return group


def _leave(state: RunState, group_id: int) -> None:
    """A filtered or dropped group gives up its place and its slot."""
    if state.live.pop(group_id).status is GroupStatus.FINISHED:
        del state.finished[bisect_left(state.finished, group_id)]
    del state.order[bisect_left(state.order, group_id)]
    del state.places[bisect_left(state.places, group_id)]
    _move_anchor(state)


def _move_anchor(state: RunState) -> None:
    """`places` begins with an unpulled group."""
    start = next((i for i, g in enumerate(state.places) if g not in state.passed), len(state.places))
    state.passed.difference_update(state.places[:start])
    del state.places[:start]


def _count_barren(state: RunState, cause: str) -> None:
    state.barren_in_a_row += 1
    state.first_barren_cause = state.first_barren_cause or cause


# ---- batches and versions ----------------------------------------------------------------------------------------------------


def _batch_recorded(state: RunState, event: ev.BatchRecorded) -> None:
    refuse_unless(event.step == state.next_batch, f"batch {event.step} after batch {state.next_batch - 1}")
    refuse_unless(len(set(event.group_ids)) == len(event.group_ids) > 0, f"batch {event.step} holds a group twice, or none")
    for group_id in event.group_ids:
        group = state.live.get(group_id)
        if group is None or group.status is not GroupStatus.FINISHED:
            raise LedgerError(f"group {group_id} cannot go into batch {event.step}: {state.where(group_id)}")
    members = []
    for group_id in event.group_ids:
        g = state.live.pop(group_id)
        members.append(Member(g.group_id, g.attempt, g.row, g.epoch, g.position, g.bound, g.num_tokens))
        del state.order[bisect_left(state.order, group_id)]
        del state.finished[bisect_left(state.finished, group_id)]
        if state.window is None:
            del state.places[bisect_left(state.places, group_id)]  # nobody counts places that were passed
        else:
            state.passed.add(group_id)
    state.batches[event.step] = RecordedBatch(tuple(members), event)
    state.next_batch += 1
    _move_anchor(state)


def _step_finished(state: RunState, event: ev.StepFinished) -> None:
    refuse_unless(event.step == state.step, f"step {event.step} finished, but step {state.step} is next")
    refuse_unless(event.step < state.next_batch, f"step {event.step} finished, but its batch is not recorded")
    refuse_unless(event.version == event.step + 1, f"step {event.step} made version {event.version}, not {event.step + 1}")
    published = state.published.get(event.version)
    refuse_unless(
        event.checksum == (published or ""),
        f"step {event.step} reports weights {event.checksum or '(not published)'}; version {event.version} was "
        + (f"published as {published}" if published else "not published"),
    )
    batch = state.batches[event.step]
    batch.skipped = event.skipped is not None
    state.totals.count_batch(batch.record, skipped=batch.skipped)
    state.step += 1
    state.skipped_in_a_row = state.skipped_in_a_row + 1 if batch.skipped else 0
    state.unconfirmed.append((event.version, len(batch.members)))
    totals = state.totals
    totals.active_s += event.active_s
    totals.rollout_idle_s += event.rollout_idle_s
    totals.trainer_active_s += event.trainer_active_s
    totals.trainer_wait_s += event.trainer_wait_s
    _release(state)


def _thresholds_judged(state: RunState, event: ev.ThresholdsJudged) -> None:
    state.threshold_counts = dict(event.counts)


def _version_published(state: RunState, event: ev.VersionPublished) -> None:
    due = state.step + 1 if state.published else state.step  # first of all the start weights; then some, not all, versions
    refuse_unless(event.version == due, f"version {event.version} was published after {state.step} steps, but only {due} can be")
    refuse_unless(event.version not in state.published, f"version {event.version} was published twice")
    state.published[event.version] = event.checksum
    state.newest_version[state.incarnation] = event.version


def _engine_added(state: RunState, event: ev.EngineAdded) -> None:
    state.engines[event.engine_id] = -1
    state.engine_starts[event.engine_id] = state.engine_starts.get(event.engine_id, 0) + 1


def _engine_removed(state: RunState, event: ev.EngineRemoved) -> None:
    refuse_unless(event.engine_id in state.engines, f"engine {event.engine_id} is not in service")
    del state.engines[event.engine_id]
    _release(state)


def _engine_confirmed(state: RunState, event: ev.EngineConfirmed) -> None:
    refuse_unless(event.engine_id in state.engines, f"engine {event.engine_id} is not in service")
    refuse_unless(
        state.published.get(event.version) == event.checksum,
        f"engine {event.engine_id} holds {event.checksum} as version {event.version}, published was {state.published.get(event.version)}",
    )
    state.engines[event.engine_id] = event.version
    _release(state)


def _release(state: RunState) -> None:
    """Give back the slots of batches that every engine in service has, and forget versions that no engine can report any more."""
    while state.unconfirmed and state.unconfirmed[0][0] <= state.confirmed:
        state.unconfirmed.popleft()
    for version in [v for v in state.published if v < min(state.confirmed, state.step)]:
        del state.published[version]


# ---- checkpoints and evaluations ---------------------------------------------------------------------------------------------


def _checkpoint_committed(state: RunState, event: ev.CheckpointCommitted) -> None:
    refuse_unless(event.point.step == state.step, f"a checkpoint of step {event.point.step} while {state.step} steps are finished")
    older = [p for p in state.checkpoints if p.step in event.kept and p.step != event.point.step]
    state.checkpoints = [*older, event.point]
    for step in [s for s in state.batches if s < event.covers]:
        del state.batches[step]


def _evaluation_ordered(state: RunState, event: ev.EvaluationOrdered) -> None:
    evaluations = state.evaluations
    refuse_unless(evaluations.running is None, f"evaluation {event.number} ordered while another runs")
    refuse_unless(event.number == evaluations.num_ordered, f"evaluation {event.number} after {evaluations.num_ordered} ordered")
    refuse_unless(event.due not in evaluations.handled, f"the evaluation due at version {event.due} was ordered twice")
    evaluations.running = event
    evaluations.num_ordered += 1


def _evaluation_finished(state: RunState, event: ev.EvaluationFinished) -> None:
    running = state.evaluations.running
    refuse_unless(running is not None and running.number == event.number, f"evaluation {event.number} finished, but does not run")
    state.evaluations.running = None
    state.evaluations.handled[event.due] = event.version
    state.evaluations.results.append(event)
    state.evaluations.engine_s += event.engine_s


def _evaluation_skipped(state: RunState, event: ev.EvaluationSkipped) -> None:
    refuse_unless(event.due not in state.evaluations.handled, f"the evaluation due at version {event.due} was already handled")
    state.evaluations.handled[event.due] = -1
    state.evaluations.num_skipped += 1


def _evaluation_aborted(state: RunState, event: ev.EvaluationAborted) -> None:
    running = state.evaluations.running
    refuse_unless(running is not None and running.number == event.number, f"evaluation {event.number} was aborted, but does not run")
    state.evaluations.running = None


_HANDLERS = {
    ev.RunStarted: run_started,
    ev.SettingsChanged: _settings_changed,
    ev.Admitted: _admitted,
    ev.PrefixesRecorded: _prefixes_recorded,
    ev.SampleInterrupted: _sample_interrupted,
    ev.GroupFinished: _group_finished,
    ev.AttemptFailed: _attempt_failed,
    ev.Filtered: _filtered,
    ev.Dropped: _dropped,
    ev.BatchRecorded: _batch_recorded,
    ev.StepFinished: _step_finished,
    ev.ThresholdsJudged: _thresholds_judged,
    ev.VersionPublished: _version_published,
    ev.EngineAdded: _engine_added,
    ev.EngineRemoved: _engine_removed,
    ev.EngineConfirmed: _engine_confirmed,
    ev.CheckpointCommitted: _checkpoint_committed,
    ev.EvaluationOrdered: _evaluation_ordered,
    ev.EvaluationFinished: _evaluation_finished,
    ev.EvaluationSkipped: _evaluation_skipped,
    ev.EvaluationAborted: _evaluation_aborted,
    ev.StopRequested: _stop_requested,
}
