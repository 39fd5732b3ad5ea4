"""The part of `state` that handles `RunStarted`: a new incarnation, whose state goes back to the checkpoint that survived."""

from __future__ import annotations

from collections import deque

from slipstream.controller import events as ev
from slipstream.controller.run_state import RunState, refuse_unless
from slipstream.controller.totals import REWOUND


def run_started(state: RunState, event: ev.RunStarted) -> None:
    if event.kind == "fresh":
        state.run_id, state.group_size = event.run_id, event.group_size
        state.groups_per_step = event.groups_per_step
    else:
        _check_restart(state, event)
        _go_back(state, event.from_step, event.point, event.kept)
        if event.kind == "rewind":
            _rewind(state, event)
    state.incarnation = event.incarnation
    state.max_staleness, state.window, state.max_groups = event.max_staleness, event.window, event.max_groups
    state.lowered = event.lowered
    state.published.clear()
    state.engines.clear()
    state.engine_starts.clear()
    state.unconfirmed.clear()  # every engine of this incarnation starts at from_step or later
    state.stop_reason = None
    state.skipped_in_a_row = state.barren_in_a_row = 0
    if event.kind != "deterministic_resume":  # that one goes on with the counts as of its checkpoint
        state.threshold_counts = {}
    state.first_barren_cause, state.productive = "", False


def _check_restart(state: RunState, event: ev.RunStarted) -> None:
    refuse_unless(event.run_id == state.run_id, f"run {event.run_id} cannot start in the ledger of run {state.run_id}")
    refuse_unless(event.incarnation > state.incarnation, f"incarnation {event.incarnation} after incarnation {state.incarnation}")
    refuse_unless(
        event.groups_per_step == state.groups_per_step,
        f"groups_per_step was {state.groups_per_step} and is now {event.groups_per_step}: it is constant in a run",
    )
    over = event.kind == "rewind" and event.from_step == 0  # needs no old batch
    missing = [] if over else [s for s in range(event.from_step, state.step) if s not in state.batches]
    refuse_unless(
        event.from_step <= state.step and not missing,
        f"the run cannot go on from step {event.from_step}: {state.step} steps are recorded"
        + (f" and the groups of batch {missing[0]} are gone" if missing else ""),
    )


def _go_back(state: RunState, step: int, point: ev.Point | None, kept: tuple[int, ...]) -> None:
    """The checkpoint at `step` is what survived: batches from there on are to be trained again, in recorded order."""
    for later in [s for s in state.batches if step <= s < state.step]:
        state.totals.count_batch(state.batches[later].record, skipped=state.batches[later].skipped, sign=-1)
    state.step = step
    state.checkpoints = [p for p in state.checkpoints if p.step < step and p.step in kept] + ([point] if point else [])
    evaluations = state.evaluations
    evaluations.running = None
    evaluations.results = [r for r in evaluations.results if r.version <= step]
    evaluations.handled = {due: version for due, version in evaluations.handled.items() if due <= step and version <= step}


def _rewind(state: RunState, event: ev.RunStarted) -> None:
    """What was admitted after the checkpoint, and what it had not trained, is dropped; its prompts are drawn again."""
    point = event.point or ev.Point(step=0, ledger_seq=0, next_draw=0, position=0)
    batched = [m for s, batch in state.batches.items() if s >= event.from_step for m in batch.members]
    gone = sorted([*batched, *state.live.values()], key=lambda g: g.group_id)
    for group in gone:
        state.totals.dropped[REWOUND] += 1
        state.totals.wasted_tokens[REWOUND] += group.num_tokens
    for group in state.live.values():
        state.totals.count_waste(REWOUND, sum(group.prefix_tokens.values()))  # running: not counted so far
    if event.from_step == 0:
        state.totals.uncount_covered()
    for step in [s for s in state.batches if s >= event.from_step]:
        del state.batches[step]
    state.next_batch = event.from_step
    state.live.clear()
    state.order.clear()
    state.finished.clear()
    state.places.clear()
    state.passed.clear()
    state.position = point.position
    state.redraw = deque([*point.redraw, *(g.position for g in gone if g.group_id < point.next_draw)])
