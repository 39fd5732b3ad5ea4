"""An adversary that drives the real controller core: it chooses who moves next, and checks by its own count what may never happen.

Engines lag, hold leases, restart (also with old weights); groups fail, are filtered, are slow, are told late that they are cancelled;
rollouts start anew when weights change; updates are skipped, versions not published; batches are prefetched; max_staleness is lowered; the
run crashes, also between an answer and its commit, and resumes. Nothing here uses the controller's arithmetic: bounds are written out
again, and slots, ages and what may be dropped are counted from what the adversary itself saw.
"""

from __future__ import annotations

import math
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
from slipstream.types import EngineReport, Group, PrefixChunk, Rollout, RolloutStatus, Span, StepReport, Work, seal
from slipstream.weight_sync.slots import SlotBroker

ROWS = [{"n": i} for i in range(7)]
SILENT = SimpleNamespace(step=lambda *a: None, evaluation=lambda *a: None, note=lambda *a: None)
DROPPING = ("drop", "cancel_early")
CLOCK = SimpleNamespace(now=lambda: 0.0)


class Broken(AssertionError):
    """The harness caught a violation."""


class Stuck(AssertionError):
    """Nobody can move, or the run does not get on."""


@dataclass(slots=True)
class Task:
    """A group at a worker."""

    assignment: object
    engine: int | None = None  # None: not started, or its engine went away
    versions: list[list[tuple[int, int]]] = field(default_factory=lambda: [[], []])  # (incarnation, version) of each token, per sample
    recorded: list[int] = field(default_factory=lambda: [0, 0])  # tokens that the controller has
    retries: list[int] = field(default_factory=lambda: [0, 0])
    slow: bool = False

    @property
    def oldest(self) -> int:
        """Of the tokens that the controller has; a large number where it has none."""
        return min((v for tokens, n in zip(self.versions, self.recorded, strict=True) for _, v in tokens[:n]), default=10**9)


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
    lowered: float = 0.0  # max_staleness, per turn


@dataclass(frozen=True, slots=True)
class Gate:
    """How the controller is set, besides S, P and W."""

    on_stale: str = "keep"
    level: str | None = None
    interrupt: str = "in_flight"
    every: int = 1


class Schedule:
    """One run of the real core under one seed, W = None without a window. `run` returns the worst staleness seen."""

    def __init__(self, seed: int, S: int, P: int, W: int | None, steps: int, adversary: Adversary, gate: Gate = Gate()):
        self.random = random.Random(seed)
        self.S, self.P, self.W, self.steps, self.adversary, self.gate = S, P, W, steps, adversary, gate
        self.max_groups = (S + 3) * P  # without a window
        self.claims: dict[int, float] = {}  # group -> worst staleness derived when it was admitted
        self.finished: dict[int, int] = {}  # groups in the buffer -> oldest version
        self.parked: dict[int, int] = {}  # running groups that no worker has after a crash -> oldest version
        self.dropped = self.barren = 0  # stale groups in all, and since the last batch
        self.config = Config.model_validate(
            {
                "launch": "inline",
                "run": {"seed": seed},
                "rollout": {"group_size": 2, "max_attempts": 3, "max_interrupts": 2, "interrupt": gate.interrupt},
                "trainer": {"steps": steps, "groups_per_step": P, "max_skipped_steps": 1000},
                "buffer": {
                    "max_staleness": S,
                    "window": "unbounded" if W is None else W if S else 1,
                    "max_groups": self.max_groups if W is None else None,
                    "on_stale": gate.on_stale,
                    "stale_level": gate.level,
                    "filter_zero_variance": True,
                    "max_barren_groups": 10**6,
                },
                "weight_sync": {"every": gate.every},
                "checkpoint": {"keep": 2},
            }
        )
        self.ledger = Ledger.open(":memory:")
        self.saved: dict[int, CheckpointManifest] = {}  # the checkpoint folders
        self.delivered: dict[int, tuple[int, ...]] = {}
        self.limits: dict[int, int] = {}  # batch -> max_staleness when it was made
        self.worst, self.crashes, self.lowered, self.retried, self.finished_some = 0, 0, 0, 0, False
        self.open()

    @property
    def claim(self) -> float:
        """The worst staleness of what is admitted now."""
        return math.inf if self.W is None else 0 if self.S == 0 else self.S + -(-(self.W - 1) // self.P)

    @property
    def slots(self) -> int:
        return self.max_groups if self.W is None else (self.S + 1) * self.P

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
            if self.gate.on_stale in DROPPING:
                self.watch()
        raise Stuck(f"step {self.core.state.step} of {self.steps} after many turns")

    def actions(self) -> list[tuple]:
        a, r, state = self.adversary, self.random, self.core.state
        if a.crash and r.random() < a.crash:
            return [("crash",)]
        if a.restart and r.random() < a.restart:
            return [("restart", r.randrange(a.engines))]
        if a.lowered and r.random() < a.lowered:
            return [("lower",)]
        out: list[tuple] = []
        if self.core.intake.may_hand_out:
            out.append(("admit",))
        for group_id, task in self.tasks.items():
            if group_id not in state.live:
                out.append(("too_late", group_id))
            elif task.engine is None:
                able = [j for j, e in enumerate(self.engines) if e.held[1] >= task.assignment.min_version]
                out += [("place", group_id, j) for j in able]
            else:
                if self.engines[task.engine].held[1] >= task.assignment.min_version:
                    short = [i for i in (0, 1) if len(task.versions[i]) < 4]
                    if short:
                        out.append(("token", group_id, r.choice(short)))
                out.append(("finish", group_id))
                if [len(made) for made in task.versions] != task.recorded:
                    out.append(("record", group_id))
        if self.gate.on_stale in DROPPING and self.core.intake._cancelled:
            out.append(("orders",))
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
            for sample, times in assignment.retries.items():
                task.retries[sample] = times
            for prefix in assignment.prefixes:
                for span in prefix.spans:
                    task.versions[prefix.sample] += [(span.incarnation, span.version)] * (span.end - span.start)
                if prefix.attempt != assignment.attempt + task.retries[prefix.sample]:
                    raise Broken("a prefix of a rollout that has started anew since")
                task.recorded[prefix.sample] = len(task.versions[prefix.sample])
            self.tasks[assignment.group_id] = task
            self.parked.pop(assignment.group_id, None)
            self.in_flight.add(assignment.group_id)
            self.claims.setdefault(assignment.group_id, self.claim)
        self.end_cancelled(work)
        if self.core.state.next_draw > before and len(self.in_flight) > self.slots:
            raise Broken(f"{len(self.in_flight)} groups in flight, {self.slots} slots")

    def orders(self) -> None:
        work = self.core.admit(0)
        self.core.commit()
        self.end_cancelled(work)

    def end_cancelled(self, work: Work) -> None:
        for group_id, attempt in work.cancel:
            if self.tasks.pop(group_id).assignment.attempt != attempt:
                raise Broken(f"attempt {attempt} of group {group_id} was cancelled, which does not run")

    def too_late(self, group_id: int) -> None:
        """The worker has not heard that the group is dropped: what it says of it changes nothing."""
        before = self.core.ledger.last_seq
        task = self.tasks[group_id]
        if self.random.random() < 0.5:
            self.core.finish_group(group_record(task, None, (0.0, 1.0)))
        elif self.core.interrupted(group_id, 0, task.assignment.attempt, 1):
            raise Broken("a rollout of a dropped group may start anew")
        if self.core.ledger.last_seq != before:
            raise Broken("a report of a dropped group was recorded")

    def watch(self) -> None:
        """Stale groups may be dropped at any move, but none that the next batch could train within max_staleness."""
        live = self.core.state.live
        oldest = {g: task.oldest for g, task in self.tasks.items() if g in self.in_flight} | self.finished | self.parked
        for group_id in [g for g in self.in_flight & oldest.keys() if g not in live]:
            if self.asked_most - oldest[group_id] <= self.S:
                raise Broken(
                    f"group {group_id} was dropped: its oldest token is of version {oldest[group_id]}, batch {self.asked_most} is next"
                )
            self.in_flight.discard(group_id)
            self.finished.pop(group_id, None)
            self.parked.pop(group_id, None)
            self.dropped += 1
            self.barren += 1
        if self.barren > self.slots + (self.lowered + self.crashes) * self.P * 4:
            raise Broken(f"{self.barren} stale groups were dropped without a batch")

    @property
    def asked_most(self) -> int:
        """The next batch, of those that were ever made."""
        return max(self.delivered, default=-1) + 1

    def lower(self) -> None:
        lowest = self.gate.every - 1
        if self.core.lower_max_staleness("for fun") != (self.S > lowest):
            raise Broken(f"max_staleness {self.S} with every = {self.gate.every}")
        self.core.commit()
        if self.S > lowest:
            self.S, self.lowered = self.S - 1, self.lowered + 1
            self.W = 1 if self.S == 0 else None if self.W is None else min(self.W, (self.S + 1) * self.P)

    def place(self, group_id: int, engine: int) -> None:
        task = self.tasks[group_id]
        task.engine = engine
        for sample in (0, 1):
            if not task.versions[sample]:
                self.token(group_id, sample)

    def token(self, group_id: int, sample: int) -> None:
        task = self.tasks[group_id]
        task.versions[sample].append(self.engines[task.engine].held)

    def record(self, group_id: int) -> None:
        task = self.tasks[group_id]
        chunks = []
        for sample, (made, told) in enumerate(zip(task.versions, task.recorded, strict=True)):
            if fresh := made[told:]:
                chunks.append(
                    PrefixChunk(
                        group_id=group_id,
                        sample=sample,
                        attempt=task.assignment.attempt + task.retries[sample],
                        prompt_length=1,
                        start=told,
                        token_ids=np.ones(len(fresh), np.int32),
                        logprobs=np.zeros(len(fresh), np.float32),
                        spans=spans(fresh, 1 + told),
                    )
                )
                task.recorded[sample] = len(made)
        self.core.progress([seal(chunk) for chunk in chunks])
        self.core.commit()

    def finish(self, group_id: int) -> None:
        task, r, a = self.tasks[group_id], self.random, self.adversary
        failed = self.finished_some and r.random() < a.failed
        flat = self.finished_some and r.random() < a.filtered
        self.report(group_id, group_record(task, "it broke" if failed else None, (1.0, 1.0) if flat else (0.0, 1.0)), failed or flat)

    def report(self, group_id: int, group: Group, barren: bool) -> None:
        self.core.finish_group(group)
        self.core.commit()
        self.tasks.pop(group_id)
        self.finished_some = True
        if not barren:
            self.finished[group_id] = min(s.version for r in group.rollouts for s in r.spans)
        elif group_id not in self.core.state.live:
            self.in_flight.discard(group_id)

    def ask(self) -> None:
        batch = self.core.try_batch(self.asked)
        self.core.commit()
        if batch is None:
            if self.core.state.next_pull():
                raise Broken("a batch is there, and is not given")
            return  # some of it was stale
        assert len(batch.groups) == self.P
        ids = tuple(g.group_id for g in batch.groups)
        if self.delivered.setdefault(batch.step, ids) != ids:
            raise Broken(f"batch {batch.step} was {self.delivered[batch.step]} and is now {ids}")
        for group in batch.groups:
            ages = [batch.step - s.version for r in group.rollouts for s in r.spans]
            if min(ages) < 0 or max(ages) > self.claims[group.group_id]:
                raise Broken(f"staleness {min(ages)} to {max(ages)} at step {batch.step}, claimed are 0 to {self.claims[group.group_id]}")
            self.worst = max(self.worst, *ages)
            if self.gate.on_stale in ("mask_tokens", *DROPPING):
                trained = [batch.step - v for r in group.rollouts for v in r.model_versions()[r.loss_mask].tolist()]
                if max(trained, default=0) > self.limits.setdefault(batch.step, self.S):
                    raise Broken(f"a token of age {max(trained)} is trained with on_stale = {self.gate.on_stale}")
            self.finished.pop(group.group_id, None)
        self.barren = 0
        self.queue.append(self.asked)
        self.asked += 1

    def begin(self) -> None:
        self.on = self.queue.pop(0)

    def end(self) -> None:
        step, inc = self.on, self.core.state.incarnation
        self.on = None
        published = (step + 1) % self.gate.every == 0 or step + 1 == self.steps
        if published:
            self.publish(step + 1)
        skipped = "non-finite gradient" if self.random.random() < self.adversary.skipped else None
        name = f"{inc}.{step + 1}" if published else ""
        self.core.finish_step(StepReport(step=step, version=step + 1, checksum=name, skipped=skipped))
        self.core.commit()
        self.release()

    def lease(self, j: int) -> None:
        engine, inc = self.engines[j], self.core.state.incarnation
        engine.offer = self.core.try_weights(f"e{j}", inc, engine.confirmed)
        engine.known = True
        self.core.commit()
        out = [g for g in self.tasks if g in self.core.state.live]
        if self.gate.interrupt == "barrier" and engine.confirmed >= 0 and engine.offer is not None and out:
            raise Broken(f"new weights came while groups {out} were out, under a barrier")

    def confirm(self, j: int) -> None:
        engine = self.engines[j]
        manifest = engine.offer.manifest
        report = EngineReport(engine_id=f"e{j}", incarnation=manifest.incarnation, version=manifest.version, checksum=manifest.checksum)
        self.core.confirm_weights(engine.offer.slot, report)
        self.core.commit()
        engine.held, engine.confirmed, engine.offer = (manifest.incarnation, manifest.version), manifest.version, None
        self.release()
        if self.gate.interrupt == "abort_retry":
            for group_id in [g for g, task in self.tasks.items() if task.engine == j and g in self.core.state.live]:
                self.interrupt(group_id)

    def interrupt(self, group_id: int) -> None:
        """Its engine has taken other weights: each of its rollouts starts anew, or has done so too often."""
        task = self.tasks[group_id]
        for sample in (0, 1):
            if not task.versions[sample]:
                continue
            attempt = task.assignment.attempt + task.retries[sample]
            again = self.core.interrupted(group_id, sample, attempt, len(task.versions[sample]))
            self.core.commit()
            if again != (task.retries[sample] < 2):
                raise Broken(f"sample {sample} of group {group_id} has started anew {task.retries[sample]} times; may it again? {again}")
            if not again:
                self.report(group_id, group_record(task, "interrupted: too often", (0.0, 1.0)), barren=True)
                return
            self.retried += 1
            task.retries[sample] += 1
            task.versions[sample], task.recorded[sample] = [], 0
            self.token(group_id, sample)

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
        self.parked |= {g: task.oldest for g, task in self.tasks.items()}
        recorded = {step: ids for step, ids in self.delivered.items()}
        self.open()
        self.crashes += 1
        for step, batch in self.core.state.batches.items():
            if step in recorded and tuple(m.group_id for m in batch.members) != recorded[step]:
                raise Broken(f"batch {step} was {recorded[step]}, after the crash it is {batch.record.group_ids}")
        self.delivered = {step: ids for step, ids in recorded.items() if step < self.core.state.next_batch}
        self.limits = {step: limit for step, limit in self.limits.items() if step < self.core.state.next_batch}
        self.finished = {g: oldest for g, oldest in self.finished.items() if g in self.core.state.live}
        self.parked = {g: oldest for g, oldest in self.parked.items() if g in self.core.state.live}
        self.finished_some = False
        if self.core.state.max_staleness != self.S:
            raise Broken(f"max_staleness was {self.S} and is {self.core.state.max_staleness} after a crash")


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
    a, lengths = task.assignment, [1 + len(made) for made in task.versions]
    rollouts = tuple(
        Rollout(
            group_id=a.group_id,
            sample=i,
            attempt=a.attempt + task.retries[i],
            status=RolloutStatus.FAILED if error and i == 0 else RolloutStatus.FINISHED,
            error=error if i == 0 else None,
            prompt_length=1,
            token_ids=np.ones(lengths[i], np.int32),
            logprobs=np.zeros(lengths[i], np.float32),
            loss_mask=np.arange(lengths[i]) > 0,
            spans=spans(task.versions[i], 1),
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
