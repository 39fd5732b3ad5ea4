"""Opening a run folder: a fresh run, or going on with what survived.

The newest checkpoint that verifies, at step c, survives. What the ledger knows beyond it is not lost: batches recorded after c are trained
again first, with their recorded groups in recorded order; finished groups keep their place; running groups go on from their recorded
prefixes once their permits allow; filtered and dropped stay so; the cursor never moves back.

    resume                 as above
    deterministic_resume   the state as of the checkpoint's last event; what came after is superseded and generated again
    rewind                 on purpose: what was admitted after c or not trained by c is dropped("rewound"), its prompts are drawn again
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.config import Config, settings_hash
from slipstream.config.arithmetic import pull_window
from slipstream.controller import checkpoints
from slipstream.controller import events as ev
from slipstream.controller.admission import clipped_window
from slipstream.controller.ledger import Ledger
from slipstream.controller.state import RunState, apply, fold
from slipstream.errors import CheckpointError, ResumeError
from slipstream.protocols import CheckpointManifest


@dataclass(slots=True)
class Start:
    """Where this incarnation starts."""

    kind: str  # fresh | resume | deterministic_resume | rewind
    step: int = 0
    folder: Path | None = None  # the checkpoint to load; None: the initial model
    manifest: CheckpointManifest | None = None
    notes: list[str] = field(default_factory=list)  # for people: what was refused, where the run goes on


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is, besides its settings."""

    data_fingerprint: str
    eval_fingerprint: str = ""  # "": no evaluation
    code_version: str = ""
    numerics: dict[str, str] = field(default_factory=dict)


def start_run(ledger: Ledger, folder: Path, config: Config, identity: Identity, rewind: int | None = None) -> tuple[RunState, Start]:
    """Write the incarnation's first event and return the state it starts with. `folder`: the checkpoints of the run.

    Raises ResumeError where data or settings that make the run differ, CheckpointError where no checkpoint verifies and the groups needed
    to start over are gone.
    """
    if ledger.last_seq > 0:
        _check_identity(ledger, config, identity)
    checkpoints.sweep(folder)  # what is refused up to here has changed nothing
    if ledger.last_seq == 0:
        if rewind is not None:
            raise ResumeError(f"there is no step {rewind} to rewind to: the run in {folder.parent} has not started")
        start = Start("fresh")
        state = RunState()
        event = _started(state, config, identity, start, incarnation=1, run_id=uuid.uuid4().hex)
    else:
        state = fold(event for _, _, _, event in ledger.live_events())
        start = _rewind(ledger, folder, state, rewind) if rewind is not None else _resume(ledger, folder, state, config)
        if start.kind == "deterministic_resume":
            start.notes += _inexact(ledger.last_start.numerics, identity.numerics)
            state = fold(event for _, _, _, event in ledger.live_events(until=_regenerate_from(ledger, start)))
        event = _restarted(ledger, folder, state, config, identity, start)
    state = apply(state, event)
    if start.kind == "deterministic_resume":
        ledger.supersede(event.from_seq)
    elif start.kind == "rewind":
        ledger.forget_batches(start.step)
    ledger.append(event, event.incarnation)
    ledger.commit()
    if start.kind == "rewind":
        for step in checkpoints.found_steps(folder):
            if step > start.step:
                checkpoints.set_aside(checkpoints.step_folder(folder, step), "rewound")
    return state, start


def _started(state: RunState, config: Config, identity: Identity, start: Start, *, incarnation: int, run_id: str, **more) -> ev.RunStarted:
    per_step = config.trainer.groups_per_step
    stale = max(0, config.buffer.max_staleness - state.lowered)  # what thresholds lowered stays so over a resume
    return ev.RunStarted(
        run_id=run_id,
        incarnation=incarnation,
        kind=start.kind,
        from_step=start.step,
        max_staleness=stale,
        lowered=config.buffer.max_staleness - stale,
        groups_per_step=per_step,
        window=clipped_window(pull_window(config), stale, per_step),
        max_groups=config.buffer.max_groups or 0,
        group_size=config.rollout.group_size,
        seed=config.run.seed,
        data_fingerprint=identity.data_fingerprint,
        eval_fingerprint=identity.eval_fingerprint,
        settings_hash=settings_hash(config),
        code_version=identity.code_version,
        numerics=identity.numerics,
        **more,
    )


def _restarted(ledger: Ledger, folder: Path, state: RunState, config: Config, identity: Identity, start: Start) -> ev.RunStarted:
    incarnation = ledger.last_incarnation + 1
    manifest = start.manifest
    point = None
    if manifest is not None:
        known = [p for p in state.checkpoints if (p.step, p.ledger_seq) == (start.step, manifest.ledger_seq)]
        point = known[0] if known else _point_at(ledger, manifest.ledger_seq)
    return _started(
        state,
        config,
        identity,
        start,
        incarnation=incarnation,
        run_id=state.run_id,
        from_seq=_regenerate_from(ledger, start),
        point=point,
        kept=tuple(sorted(s for s in checkpoints.found_steps(folder) if s <= start.step)),
    )


def _regenerate_from(ledger: Ledger, start: Start) -> int:
    """The last event that a deterministic resume keeps: the checkpoint's, or a rewind made since, which is a decision and stands."""
    return max(start.manifest.ledger_seq if start.manifest else 1, ledger.last_rewind_seq)


def _point_at(ledger: Ledger, seq: int) -> ev.Point:
    """Where the draws stood at this event: a checkpoint whose index row was not written before the crash."""
    return fold(event for _, _, _, event in ledger.live_events(until=seq)).point(seq)


def _check_identity(ledger: Ledger, config: Config, identity: Identity) -> None:
    """Refuse to go on with other data or with settings that the recorded draws and groups depend on, showing both values."""
    recorded = ledger.last_start
    given = {
        "data": (recorded.data_fingerprint, identity.data_fingerprint),
        "run.seed": (recorded.seed, config.run.seed),
        "rollout.group_size": (recorded.group_size, config.rollout.group_size),
        "trainer.groups_per_step": (recorded.groups_per_step, config.trainer.groups_per_step),
    }
    if recorded.eval_fingerprint:  # else there was none, or the ledger is of a time that did not record it
        given["evaluation data"] = (recorded.eval_fingerprint, identity.eval_fingerprint)
    changed = [f"{name} was {old!r} and is now {new!r}" for name, (old, new) in given.items() if old != new]
    if changed:
        raise ResumeError(
            f"the run in {Path(ledger.path).parent} cannot go on: " + "; ".join(changed) + ". Set them back or start a new run."
        )


def _inexact(recorded: dict[str, str], now: dict[str, str]) -> list[str]:
    """A note that names what keeps a deterministic run from going on bit for bit; none where the fingerprints agree."""
    names = [name for name in dict.fromkeys((*recorded, *now)) if recorded.get(name) != now.get(name)]
    differences = "; ".join(f"{name} was {recorded.get(name, 'unknown')}, is {now.get(name, 'unknown')}" for name in names)
    return [f"the resumed run cannot be bit-exact: {differences}"] if names else []


def _resume(ledger: Ledger, folder: Path, state: RunState, config: Config) -> Start:
    """The newest checkpoint that verifies; those that do not are named and moved out of the way."""
    start = Start("deterministic_resume" if config.run.deterministic else "resume")
    refused: list[str] = []
    for step in checkpoints.found_steps(folder):
        place = checkpoints.step_folder(folder, step)
        try:
            manifest = _usable(ledger, state, place, step)
        except CheckpointError as error:
            aside = checkpoints.set_aside(place, "refused")
            refused.append(str(error))
            start.notes.append(f"checkpoint {place.name} is refused and kept as {aside.name}: {error}")
            continue
        start.step, start.folder, start.manifest = step, place, manifest
        start.notes.append(_going_on(state, start))
        return start
    if state.step > 0 and 0 not in state.batches and start.kind == "resume":
        raise CheckpointError(
            f"no checkpoint in {folder} can be used and the groups of the first batches are gone, so the run cannot go on: "
            + ("; ".join(refused) or _none_left(folder))
        )
    start.notes.append(_going_on(state, start))
    return start


def _none_left(folder: Path) -> str:
    aside = sorted(p.name for p in folder.glob("refused-*"))
    return f"the folder holds none that is whole, only {', '.join(aside)}" if aside else "the folder holds none"


def _rewind(ledger: Ledger, folder: Path, state: RunState, step: int) -> Start:
    """The checkpoint that a person asks for, or the initial model."""
    found = checkpoints.found_steps(folder)
    if step != 0 and step not in found:
        there = ", ".join(str(s) for s in sorted({0, *found}))
        raise ResumeError(f"there is no checkpoint of step {step} to rewind to; there are {there} (0 is the initial model)")
    if step > state.step:
        raise ResumeError(f"the run is at step {state.step}; it cannot be rewound to step {step}")
    start = Start("rewind", step)
    if step > 0:
        start.folder = checkpoints.step_folder(folder, step)
        start.manifest = _usable(ledger, state, start.folder, step)
    start.notes.append(f"rewound to step {step}: what was admitted after it is dropped, its prompts are drawn again")
    return start


def _usable(ledger: Ledger, state: RunState, place: Path, step: int) -> CheckpointManifest:
    """The manifest of a checkpoint that is whole, of this run, and reached by the ledger."""
    manifest = checkpoints.verify(place)
    if manifest.run_id != state.run_id:
        raise CheckpointError(f"{place} belongs to run {manifest.run_id}, not to {state.run_id}")
    if manifest.step != step:
        raise CheckpointError(f"{place} holds step {manifest.step}")
    if not any(first <= manifest.ledger_seq <= last for first, last in ledger.live_ranges()) or step > state.step:
        raise CheckpointError(
            f"{place} needs event {manifest.ledger_seq} of the ledger, which ends at {ledger.last_seq}, step {state.step}"
        )
    return manifest


def _going_on(state: RunState, start: Start) -> str:
    origin = start.folder.name if start.folder else "the initial model (no checkpoint)"
    if start.kind == "deterministic_resume":
        return f"goes on from {origin}; everything after it is generated again"
    again = state.next_batch - start.step
    batches = "1 recorded batch is" if again == 1 else f"{again} recorded batches are"
    return f"goes on from {origin}" + (f"; {batches} trained again first" if again else "")
