"""An adversary that drives the real controller core: it chooses who moves next, and checks by its own count what may never happen.

Engines lag, hold leases, restart (also with old weights); groups fail, are filtered, are slow; updates are skipped; batches are prefetched;
the run crashes, also between an answer and its commit, and resumes. Nothing here uses the controller's arithmetic: the bound is written
out again, and slots are counted from what the adversary itself saw.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np

from slipstream.config import Config
from slipstream.controller import checkpoints
from slipstream.controller.core import ControllerCore
from slipstream.controller.ledger import Ledger
from slipstream.controller.recovery import Identity, start_run
from slipstream.protocols import CheckpointManifest, Manifest
from slipstream.types import EngineReport, Group, PrefixChunk, Rollout, RolloutStatus, Span, StepReport
from slipstream.weight_sync.slots import SlotBroker

ROWS = [{"n": i} for i in range(7)]
SILENT = SimpleNamespace(step=lambda *a: None, evaluation=lambda *a: None, note=lambda *a: None)
CLOCK = SimpleNamespace(now=lambda: 0.0)
MASK = np.array([False, True])


class Broken(AssertionError):
    """The harness caught a violation."""


class Stuck(AssertionError):
    """Nobody can move, or the run does not get on."""


@dataclass(slots=True)
class Task:
    """A group at a worker."""

    assignment: object
    engine: int | None = None  # None: not started, or its engine went away
    versions: list[tuple[int, int]] = field(default_factory=list)  # (incarnation, version) of each token
    recorded: int = 0  # tokens that the controller has
    slow: bool = False


@dataclass(slots=True)
class Engine:
    held: tuple[int, int] = (0, -1)  # (incarnation, version) of the weights it computes with
    confirmed: int = -1  # what it told the controller
    offer: object = None
    known: bool = False


@dataclass(frozen=True, slots=True)
class Adversary:
    """How hard it plays: probabilities, and what it likes to put off."""

    filtered: float = 0.0
    failed: float = 0.0
    skipped: float = 0.0
    engines: int = 1
    restart: float = 0.0
    crash: float = 0.0
    checkpoint_every: int = 4
    prefetch: int = 1
    bias: str | None = None  # "lag" puts syncs off, "slow" keeps some groups running


class Schedule:
    """One run of the real core under one seed. `run` returns the worst staleness seen."""

    def __init__(self, seed: int, S: int, P: int, W: int, steps: int, adversary: Adversary):
        self.random = random.Random(seed)
        self.S, self.P, self.W, self.steps, self.adversary = S, P, W, steps, adversary
        self.claim = 0 if S == 0 else S + -(-(W - 1) // P)
        self.config = Config.model_validate(
            {
                "launch": "inline",
                "run": {"seed": seed},
                "rollout": {"group_size": 2, "max_attempts": 3},
                "trainer": {"steps": steps, "groups_per_step": P, "max_skipped_steps": 1000},
                "buffer": {
                    "max_staleness": S,
                    "window": W if S else 1,
                    "on_stale": "keep",
                    "filter_zero_variance": True,
                    "max_barren_groups": 10**6,
                },
                "checkpoint": {"keep": 2},
            }
        )
        self.ledger = Ledger.open(":memory:")
        self.saved: dict[int, CheckpointManifest] = {}  # the checkpoint folders
        self.delivered: dict[int, tuple[int, ...]] = {}
        self.worst, self.crashes, self.finished_some = 0, 0, False
        self.open()

    # -- the run's parts

    def open(self) -> None:
        """Start an incarnation on what the ledger and the checkpoints hold."""
        with checkpoint_folders(self.saved):
            state, start = start_run(self.ledger, Path("/nowhere/checkpoints"), self.config, Identity("data"))
        self.broker = SlotBroker(self.adversary.engines + 2)
        self.core = ControllerCore(self.config, self.ledger, state, ROWS, (), "data", self.broker, SILENT, CLOCK)
        self.engines = [Engine() for _ in range(self.adversary.engines)]
        self.tasks: dict[int, Task] = {}
        self.queue: list[int] = []  # batches handed over, not begun
        self.on: int | None = None  # the step being made
        self.asked = start.step  # next batch to ask for
        self.in_flight = self.holding_slots()
        self.released_through = start.step
        self.publish(start.step)

    def holding_slots(self) -> set[int]:
        """After a start: what is live or to be trained again (as the recovery handed it over)."""
        state = self.core.state
        return {*state.live, *(m.group_id for s in range(state.step, state.next_batch) for m in state.batches[s].members)}

    def publish(self, version: int) -> None:
        inc = self.core.state.incarnation
        slot = self.core.begin_write()
        self.core.publish(slot, Manifest(incarnation=inc, version=version, checksum=f"{inc}.{version}", total_bytes=0, entries=()))
        self.core.commit()

    def run(self) -> int:
        for _ in range(4000 * self.steps):
            if self.core.state.step >= self.steps:
                return self.worst
            actions = self.actions()
            if not actions:
                raise Stuck(self.core.why_no_batch(self.asked) + "; " + self.core.why_no_work())
            action, *arguments = self.random.choice(self.biased(actions))
            getattr(self, action)(*arguments)
        raise Stuck(f"step {self.core.state.step} of {self.steps} after many turns")

    def actions(self) -> list[tuple]:
        a, r, state = self.adversary, self.random, self.core.state
        if a.crash and r.random() < a.crash:
            return [("crash",)]
        if a.restart and r.random() < a.restart:
            return [("restart", r.randrange(a.engines))]
        out: list[tuple] = []
        if self.core.intake.may_hand_out:
            out.append(("admit",))
        for group_id, task in self.tasks.items():
            if task.engine is None:
                able = [j for j, e in enumerate(self.engines) if e.held[1] >= task.assignment.min_version]
                out += [("place", group_id, j) for j in able]
            else:
                if self.engines[task.engine].held[1] >= task.assignment.min_version and len(task.versions) < 4:
                    out.append(("token", group_id))
                out.append(("finish", group_id))
                if len(task.versions) > task.recorded:
                    out.append(("record", group_id))
        if self.asked < self.steps and len(self.queue) < a.prefetch and (self.asked < state.next_batch or state.next_pull()):
            out.append(("ask",))
        if self.on is None and self.queue:
            out.append(("begin",))
        if self.on is not None:
            out.append(("end",))
        for j, engine in enumerate(self.engines):
            if engine.offer is not None:
                out.append(("confirm", j))
            elif engine.confirmed < max(state.published):
                out.append(("lease", j))
        if a.checkpoint_every and self.on is None and state.step - max(self.saved, default=0) >= a.checkpoint_every:
            return [("checkpoint",)]
        return out

    def biased(self, actions: list[tuple]) -> list[tuple]:
        bias, r = self.adversary.bias, self.random
        if bias == "lag" and r.random() < 0.9:
            return [a for a in actions if a[0] not in ("lease", "confirm")] or actions
        if bias == "slow" and r.random() < 0.97:
            return [a for a in actions if not (a[0] == "finish" and self.tasks[a[1]].slow)] or actions
        return actions

    # -- moves

    def admit(self) -> None:
        before = self.core.state.next_draw
        work = self.core.admit(self.random.randint(1, 3))
        self.core.commit()
        if work is None:
            raise Broken("the gate was open, but nothing was admitted")
        for assignment in work.assignments:
            task = Task(assignment, slow=self.random.random() < 0.2)
            for prefix in assignment.prefixes[:1]:
                for span in prefix.spans:
                    task.versions += [(span.incarnation, span.version)] * (span.end - span.start)
                task.recorded = len(task.versions)
            self.tasks[assignment.group_id] = task
            self.in_flight.add(assignment.group_id)
        if self.core.state.next_draw > before and len(self.in_flight) > (self.S + 1) * self.P:
            raise Broken(f"{len(self.in_flight)} groups in flight, {(self.S + 1) * self.P} slots")

    def place(self, group_id: int, engine: int) -> None:
        task = self.tasks[group_id]
        task.engine = engine
        if not task.versions:
            self.token(group_id)

    def token(self, group_id: int) -> None:
        task = self.tasks[group_id]
        task.versions.append(self.engines[task.engine].held)

    def record(self, group_id: int) -> None:
        task = self.tasks[group_id]
        fresh = task.versions[task.recorded :]
        chunks = [
            PrefixChunk(
                group_id=group_id,
                sample=sample,
                attempt=task.assignment.attempt,
                prompt_length=1,
                start=task.recorded,
                token_ids=np.ones(len(fresh), np.int32),
                logprobs=np.zeros(len(fresh), np.float32),
                spans=spans(fresh, 1 + task.recorded),
            )
            for sample in (0, 1)
        ]
        self.core.progress(chunks)
        self.core.commit()
        task.recorded = len(task.versions)

    def finish(self, group_id: int) -> None:
        task, r, a = self.tasks.pop(group_id), self.random, self.adversary
        failed = self.finished_some and r.random() < a.failed
        flat = self.finished_some and r.random() < a.filtered
        self.core.finish_group(group_record(task, "it broke" if failed else None, (1.0, 1.0) if flat else (0.0, 1.0)))
        self.core.commit()
        if group_id not in self.core.state.live:
            self.in_flight.discard(group_id)
        self.finished_some = True

    def ask(self) -> None:
        batch = self.core.try_batch(self.asked)
        self.core.commit()
        assert batch is not None and len(batch.groups) == self.P
        ids = tuple(g.group_id for g in batch.groups)
        if self.delivered.setdefault(batch.step, ids) != ids:
            raise Broken(f"batch {batch.step} was {self.delivered[batch.step]} and is now {ids}")
        ages = [batch.step - s.version for g in batch.groups for r in g.rollouts for s in r.spans]
        if min(ages) < 0 or max(ages) > self.claim:
            raise Broken(f"staleness {min(ages)} to {max(ages)} at step {batch.step}, claimed are 0 to {self.claim}")
        self.worst = max(self.worst, *ages)
        self.queue.append(self.asked)
        self.asked += 1

    def begin(self) -> None:
        self.on = self.queue.pop(0)

    def end(self) -> None:
        step, inc = self.on, self.core.state.incarnation
        self.on = None
        self.publish(step + 1)
        skipped = "non-finite gradient" if self.random.random() < self.adversary.skipped else None
        self.core.finish_step(StepReport(step=step, version=step + 1, checksum=f"{inc}.{step + 1}", skipped=skipped))
        self.core.commit()
        self.release()

    def lease(self, j: int) -> None:
        engine, inc = self.engines[j], self.core.state.incarnation
        engine.offer = self.core.try_weights(f"e{j}", inc, engine.confirmed)
        engine.known = True
        self.core.commit()

    def confirm(self, j: int) -> None:
        engine = self.engines[j]
        manifest = engine.offer.manifest
        report = EngineReport(engine_id=f"e{j}", incarnation=manifest.incarnation, version=manifest.version, checksum=manifest.checksum)
        self.core.confirm_weights(engine.offer.slot, report)
        self.core.commit()
        engine.held, engine.confirmed, engine.offer = (manifest.incarnation, manifest.version), manifest.version, None
        self.release()

    def release(self) -> None:
        """By the adversary's own count: batches that every engine in service has confirmed hold no slots."""
        known = [e.confirmed for e in self.engines if e.known]
        for step in range(self.released_through, min(min(known, default=-1), self.core.state.step)):
            self.in_flight -= set(self.delivered[step])
            self.released_through = step + 1

    def restart(self, j: int) -> None:
        """The engine goes away; it comes back empty, or with the weights of the checkpoint that the run goes on from."""
        engine = self.engines[j]
        self.core.engine_gone(f"e{j}", "it died")
        self.core.commit()
        old = (self.core.state.incarnation, min(self.core.state.published)) if self.random.random() < 0.5 else (0, -1)
        engine.held, engine.confirmed, engine.offer, engine.known = old, -1, None, False
        for task in self.tasks.values():
            if task.engine == j:
                task.engine = None
        self.release()

    def checkpoint(self) -> None:
        run_id, inc, seq = self.core.checkpoint_context()
        step = self.core.state.step
        manifest = CheckpointManifest(run_id=run_id, incarnation=inc, step=step, ledger_seq=seq, weights_checksum=f"{inc}.{step}", files={})
        self.core.check_checkpoint(manifest)
        self.core.commit()
        self.saved[step] = manifest  # the rename
        if self.random.random() < 0.1 and self.adversary.crash:
            return self.crash()
        gone = self.core.checkpoint_committed(manifest)
        self.core.commit()
        for old in gone:
            del self.saved[old]
        self.core.prune()

    def crash(self) -> None:
        """Everything dies; sometimes just after the core has decided something that is not yet durable."""
        if self.random.random() < 0.5 and self.core.intake.gate:
            self.core.admit(2)
        if self.random.random() < 0.5 and self.asked < self.steps and len(self.queue) < self.adversary.prefetch:
            self.core.try_batch(self.asked)
        self.ledger.abandon()
        recorded = {step: ids for step, ids in self.delivered.items()}
        self.open()
        self.crashes += 1
        for step, batch in self.core.state.batches.items():
            if step in recorded and tuple(m.group_id for m in batch.members) != recorded[step]:
                raise Broken(f"batch {step} was {recorded[step]}, after the crash it is {batch.record.group_ids}")
        self.delivered = {step: ids for step, ids in recorded.items() if step < self.core.state.next_batch}


def spans(versions: list[tuple[int, int]], start: int) -> tuple[Span, ...]:
    """One span per run of equal versions."""
    out: list[Span] = []
    for i, (incarnation, version) in enumerate(versions, start):
        if out and (out[-1].incarnation, out[-1].version) == (incarnation, version):
            out[-1] = Span(out[-1].start, i + 1, incarnation, version, "e")
        else:
            out.append(Span(i, i + 1, incarnation, version, "e"))
    return tuple(out)


def group_record(task: Task, error: str | None, rewards: tuple[float, float]) -> Group:
    a, n = task.assignment, 1 + len(task.versions)
    mask = np.ones(n, bool)
    mask[0] = False
    tokens, logprobs, made = np.ones(n, np.int32), np.zeros(n, np.float32), spans(task.versions, 1)
    rollouts = tuple(
        Rollout(
            group_id=a.group_id,
            sample=i,
            attempt=a.attempt,
            status=RolloutStatus.FAILED if error and i == 0 else RolloutStatus.FINISHED,
            error=error if i == 0 else None,
            prompt_length=1,
            token_ids=tokens,
            logprobs=logprobs,
            loss_mask=mask,
            spans=made,
            reward=None if error and i == 0 else rewards[i],
        )
        for i in (0, 1)
    )
    return Group(group_id=a.group_id, attempt=a.attempt, draw=a.draw, row=a.row, rollouts=rollouts, min_version=a.min_version)


class checkpoint_folders:
    """Recovery looks at these manifests instead of at folders."""

    def __init__(self, saved: dict[int, CheckpointManifest]):
        self._saved = saved

    def __enter__(self) -> None:
        self._real = (checkpoints.sweep, checkpoints.found_steps, checkpoints.verify)
        checkpoints.sweep = lambda folder: None
        checkpoints.found_steps = lambda folder: sorted(self._saved, reverse=True)
        checkpoints.verify = lambda place: self._saved[int(place.name.removeprefix("step-"))]

    def __exit__(self, *_: object) -> None:
        checkpoints.sweep, checkpoints.found_steps, checkpoints.verify = self._real


def census(ledger: Ledger) -> dict[int, list[str]]:
    """Where every group is, counted from the raw events: group id -> its places, of which there must be one."""
    places: dict[int, list[str]] = defaultdict(list)
    batches: dict[int, tuple[int, ...]] = {}
    done = 0
    for *_, event in ledger.live_events():
        match msgspec.to_builtins(event):
            case {"type": "run_started", "kind": "resume", **rest}:
                done = rest.get("from_step", 0)
            case {"type": "admitted", "group_id": g}:
                places[g] = ["live"]
            case {"type": "filtered" | "dropped" as end, "group_id": g}:
                places[g].remove("live")
                places[g].append(end)
            case {"type": "batch_recorded", "step": step, "group_ids": ids}:
                batches[step] = ids
                for g in ids:
                    places[g].remove("live")
            case {"type": "step_finished", "step": step}:
                assert step == done
                done += 1
    for step, ids in batches.items():
        for g in ids:
            places[g].append("trained" if step < done else "batched")
    return places
