"""A whole run on a simulated clock, around the real controller core: who waits for whom, how stale tokens get, what is wasted, how fast.

    worker      admits groups by the real worker's room rule; their rollouts wait for an engine slot, are recorded, fail, start anew, are
                cancelled; scores a while later
    engine      one token per tick for each of `slots` sequences; takes new weights some ticks after they are offered, and does with
                sequences that run what `rollout.interrupt` says
    trainer     asks for batch s, trains it for some ticks, publishes, reports, checkpoints
    fate        crashes the run, which resumes; lowers max_staleness

Time is a heap of events, counted in engine ticks; between two of them everybody who waits looks again, in random order. Every token has a
number of its own and the engine remembers who got it from which weights, so `schedule_audit.Audit` can check what reaches the trainer, and
every group on its way, by its own count. Lengths, failures and rewards are functions of (seed, group, sample, attempt).

`python tests/integration/schedule_simulator.py` prints what interrupts and gates cost.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from schedule_audit import Audit
from schedule_world import Engine, Sequence, Setting, Task
from staleness_harness import ROWS, SILENT, Stuck, checkpoint_folders

from slipstream.config.arithmetic import publishes
from slipstream.controller.core import ControllerCore
from slipstream.controller.ledger import Ledger
from slipstream.controller.recovery import Identity, start_run
from slipstream.errors import RunFailed
from slipstream.protocols import CheckpointManifest, Manifest
from slipstream.types import EngineReport, Group, PrefixChunk, Rollout, RolloutStatus, Span, StepReport, StopReason, seal
from slipstream.weight_sync.slots import SlotBroker

LOOK_AHEAD_GROUPS = 1  # as in rollout/worker.py
CHUNK_TOKENS = 8  # recorded at a time, as rollout/prefixes.py does with 64
MAX_EVENTS = 50_000


class Simulation:
    """One run under one seed; `run` plays it to its end."""

    def __init__(self, setting: Setting, seed: int):
        self.setting, self.seed, self.random = setting, seed, random.Random(seed)
        self.config = setting.config(seed)
        self.audit = Audit(setting)
        self.ledger = self.audit.watch(Ledger.open(":memory:"))
        self.now, self.life, self.serial, self.heap = 0, 0, itertools.count(), []
        self.cause: str | None = None  # of a run that ended with an error
        self.saved: dict[int, CheckpointManifest] = {}  # the checkpoint folders
        self.trainer_from: int | None = None
        self.trainer_idle = 0
        self.open()
        horizon = int(setting.steps * max(setting.step_ticks, setting.length))
        for action, times in ((self.crash, setting.crashes), (self.lower, setting.lowered)):
            for _ in range(times):
                heapq.heappush(self.heap, (self.random.randint(1, horizon), 1, next(self.serial), None, action, ()))

    def open(self) -> None:
        """Start an incarnation on what the ledger and the checkpoints hold."""
        self.life += 1
        with checkpoint_folders(self.saved):
            state, start = start_run(self.ledger, Path("/nowhere/checkpoints"), self.config, Identity("data"))
        clock = SimpleNamespace(now=lambda: float(self.now))
        self.core = ControllerCore(self.config, self.ledger, state, ROWS, (), "data", SlotBroker(3), SILENT, clock)
        self.engine = Engine(self.setting.slots, self.audit)
        self.tasks: dict[int, Task] = {}
        self.num_sequences = 0
        self.step, self.training, self.waits_since = start.step, False, self.now
        self.audit.opened(start.step)
        self.publish(start.step)
        self.core.commit()

    def run(self) -> Simulation:
        """To the last step, or to the error that ends the run; Stuck where neither comes."""
        try:
            for _ in range(MAX_EVENTS):
                self.let_everybody_look()
                if self.core.finished:
                    self.engine.catch_up(self.now)
                    self.audit.finish(self.core.state, self.tasks.values())
                    return self
                if not self.heap:
                    raise Stuck(f"nothing happens any more: {self.core.why_no_batch(self.step)}; {self.core.why_no_work()}")
                self.now, _, _, life, action, arguments = heapq.heappop(self.heap)
                if life in (None, self.life):
                    action(*arguments)
                    self.core.commit()
                    self.audit.look()
            raise Stuck(f"step {self.step} of {self.setting.steps} after {MAX_EVENTS} events: {self.core.why_no_batch(self.step)}")
        except RunFailed as error:
            self.cause = str(error)
            return self

    def after(self, ticks: int, action: Any, *arguments: Any, first: bool = False) -> None:
        heapq.heappush(
            self.heap, (self.now + ticks, 0 if first else 1 + self.random.random(), next(self.serial), self.life, action, arguments)
        )

    def let_everybody_look(self) -> None:
        while True:
            parties = [self.worker_looks, self.engine_looks, self.trainer_looks]
            self.random.shuffle(parties)
            if not any([party() for party in parties]):
                return
            self.core.commit()
            self.audit.look()

    # -- the worker

    def worker_looks(self) -> bool:
        size = self.config.rollout.num_samples
        room = -(-(self.setting.slots + LOOK_AHEAD_GROUPS * size - self.num_sequences) // size)
        work = self.core.admit(max(0, room))
        if work is None or work.stop:
            return False
        for group, attempt in work.cancel:
            self.cancel(group, attempt)
        for assignment in work.assignments:
            self.take(assignment)
        return True

    def take(self, assignment: Any) -> None:
        a, prefixes = assignment, {p.sample: p for p in assignment.prefixes}
        sequences = [self.sequence(a, sample, prefixes.get(sample)) for sample in range(self.config.rollout.num_samples)]
        self.tasks[a.group_id] = Task(a, sequences)
        self.audit.taken(a.group_id)
        self.num_sequences += len(sequences)
        for sequence in sequences:
            if len(sequence.ids) < sequence.length:
                self.engine.waiting.append(sequence)
            else:
                self.sequence_ended(sequence)

    def sequence(self, assignment: Any, sample: int, prefix: PrefixChunk | None) -> Sequence:
        a = assignment
        attempt = a.attempt + a.retries.get(sample, 0)
        sequence = Sequence(a.group_id, sample, attempt, *self.setting.fate(self.seed, a.group_id, sample, attempt), a.min_version)
        if prefix is not None:
            sequence.ids, sequence.spans, sequence.recorded = prefix.token_ids.tolist(), list(prefix.spans), len(prefix.token_ids)
        return sequence

    def sequence_ended(self, sequence: Sequence) -> None:
        """It leaves the engine; what is sampled of others is recorded with it, and the last of a group lets it be scored."""
        sequence.ended = True
        self.num_sequences -= 1
        if sequence.fails:
            sequence.error = sequence.error or "it broke"
        self.record(sequence)
        task = self.tasks.get(sequence.group)
        if task is not None and all(s.ended for s in task.sequences):
            self.after(self.random.randint(0, self.setting.score_ticks), self.finish_group, task)

    def record(self, ended: Sequence) -> None:
        """Tell the controller that it has ended, with its tokens and what others have got, if tokens are recorded."""
        self.engine.catch_up(self.now)
        due = [s for s in self.engine.running if len(s.ids) - s.recorded >= CHUNK_TOKENS] if self.setting.records else []
        self.core.progress([seal(self.chunk(s)) for s in [*due, ended]])

    def chunk(self, s: Sequence) -> PrefixChunk:
        start, end = s.recorded, len(s.ids) if self.setting.records else 0
        s.recorded = end
        return PrefixChunk(
            group_id=s.group,
            sample=s.sample,
            attempt=s.attempt,
            prompt_length=1,
            start=start,
            token_ids=np.array(s.ids[start:end], np.int32),
            logprobs=np.zeros(end - start, np.float32),
            spans=tuple(
                Span(max(p.start, 1 + start), p.end, p.incarnation, p.version, "e0") for p in s.spans if 1 + start < p.end <= 1 + end
            ),
            stop_reason=StopReason.STOP if s.ended else None,
        )

    def cancel(self, group: int, attempt: int) -> None:
        """The controller has dropped it: nothing of it runs any more, nothing more is reported."""
        task = self.tasks.get(group)
        if task is None or task.assignment.attempt != attempt:
            return
        del self.tasks[group]
        self.engine.catch_up(self.now, task.sequences)
        for sequence in task.sequences:
            if not sequence.ended:
                self.engine.remove(sequence)
                self.num_sequences -= 1
        self.audit.cancelled(task)

    def finish_group(self, task: Task) -> None:
        a = task.assignment
        if self.tasks.get(a.group_id) is not task:
            return  # cancelled while it was scored
        del self.tasks[a.group_id]
        dice = random.Random(f"{self.seed} rewards {a.group_id} {a.attempt}")
        flat = dice.random() < self.setting.flat
        rewards = [float(flat or s == 1 or (s > 1 and dice.random() < 0.5)) for s in range(len(task.sequences))]
        rollouts = tuple(self.rollout(s, r) for s, r in zip(task.sequences, rewards, strict=True))
        self.audit.reported(task)
        self.core.finish_group(
            Group(group_id=a.group_id, attempt=a.attempt, draw=a.draw, row=a.row, rollouts=rollouts, min_version=a.min_version)
        )

    def rollout(self, s: Sequence, reward: float) -> Rollout:
        n = 1 + len(s.ids)
        mask = np.ones(n, bool)
        mask[0] = False
        return Rollout(
            group_id=s.group,
            sample=s.sample,
            attempt=s.attempt,
            status=RolloutStatus.FAILED if s.error else RolloutStatus.FINISHED,
            error=s.error,
            prompt_length=1,
            token_ids=np.array([-1, *s.ids], np.int32),
            logprobs=np.zeros(n, np.float32),
            loss_mask=mask,
            spans=tuple(s.spans),
            reward=None if s.error else reward,
            interrupts=s.interrupts,
        )

    # -- the engine

    def engine_looks(self) -> bool:
        engine, changed = self.engine, False
        if engine.offer is None:
            engine.offer = self.core.try_weights("e0", self.core.state.incarnation, engine.version[1])
            if engine.offer is not None:
                self.after(self.random.randint(0, self.setting.sync_ticks), self.weights_arrive)
                changed = True
        if engine.draining and not engine.running:
            self.adopt()
            changed = True
        for sequence in engine.start_ready(self.now):
            self.after(sequence.length - len(sequence.ids), self.last_token, sequence, sequence.run, first=True)
            changed = True
        return changed

    def last_token(self, sequence: Sequence, run: int) -> None:
        if sequence.since is None or sequence.run != run:
            return  # it was interrupted or cancelled
        self.engine.catch_up(self.now, [sequence])
        self.engine.remove(sequence)
        self.sequence_ended(sequence)

    def weights_arrive(self) -> None:
        self.engine.draining = self.setting.interrupt == "drain"
        if not (self.engine.draining and self.engine.running):
            self.adopt()

    def adopt(self) -> None:
        engine, made = self.engine, self.engine.offer.manifest
        engine.catch_up(self.now)
        if engine.version[1] >= 0:
            self.audit.adopts(generating=bool(self.tasks))
        engine.version, engine.draining = (made.incarnation, made.version), False
        interrupted = [s for s in engine.running if s.ids and self.aborts(s)]
        for sequence in interrupted:
            engine.remove(sequence)
            sequence.interrupts += 1
        if interrupted:
            engine.holding = True
            self.after(1, self.worker_hears, interrupted)
        report = EngineReport(engine_id="e0", incarnation=made.incarnation, version=made.version, checksum=made.checksum)
        self.core.confirm_weights(engine.offer.slot, report)
        engine.offer = None
        self.audit.confirmed(made.version)

    def aborts(self, sequence: Sequence) -> bool:
        after, oldest = self.setting.interrupt_after, min(s.version for s in sequence.spans)
        return self.setting.interrupt.startswith("abort") and (after is None or self.engine.version[1] - oldest > after)

    def worker_hears(self, interrupted: list[Sequence]) -> None:
        """A tick later."""
        self.engine.holding = False
        for sequence in interrupted:
            self.come_back(sequence)

    def come_back(self, old: Sequence) -> None:
        """With its tokens, or anew, or as a failure."""
        task = self.tasks.get(old.group)
        if task is None or task.sequences[old.sample] is not old:
            return  # cancelled meanwhile
        if self.setting.interrupt == "abort_resume":
            self.engine.waiting.append(old)
        elif self.core.interrupted(old.group, old.sample, old.attempt, len(old.ids)):
            self.audit.interrupted(len(old.ids))
            name = (old.group, old.sample, old.attempt + 1)
            new = Sequence(*name, *self.setting.fate(self.seed, *name), old.min_version, interrupts=old.interrupts)
            task.sequences[old.sample] = new
            self.engine.waiting.append(new)
        else:
            old.error = "interrupted: too often"
            self.sequence_ended(old)

    # -- the trainer

    def trainer_looks(self) -> bool:
        if self.training or self.core.no_batch(self.step):
            return False
        seq = self.ledger.last_seq
        batch = self.core.try_batch(self.step)
        if batch is None:
            return self.ledger.last_seq > seq  # stale groups were dropped
        self.core.commit()
        self.audit.look()
        self.audit.consumed(batch)
        self.trainer_idle += 0 if self.trainer_from is None else self.now - self.waits_since
        self.trainer_from = self.now if self.trainer_from is None else self.trainer_from
        self.training = True
        ticks = self.setting.step_ticks * math.exp(self.setting.step_sigma * self.random.gauss(0, 1))
        self.after(max(1, round(ticks)), self.step_ends)
        return True

    def step_ends(self) -> None:
        version, checksum = self.step + 1, ""
        if publishes(self.config, version):
            checksum = self.publish(version)
        skipped = "non-finite gradient" if random.Random(f"{self.seed} step {self.step}").random() < self.setting.skipped else None
        self.core.finish_step(StepReport(step=self.step, version=version, checksum=checksum, skipped=skipped))
        self.audit.trained(self.step, skipped is not None)
        self.step, self.training, self.waits_since = version, False, self.now
        if version % self.config.checkpoint.every == 0:
            self.checkpoint()

    def publish(self, version: int) -> str:
        inc = self.core.state.incarnation
        checksum = f"{inc}.{version}"
        made = Manifest(incarnation=inc, version=version, checksum=checksum, total_bytes=0, entries=())
        self.core.publish(self.core.begin_write(), made)
        return checksum

    def checkpoint(self) -> None:
        run_id, incarnation, seq = self.core.checkpoint_context()
        manifest = CheckpointManifest(
            run_id=run_id, incarnation=incarnation, step=self.step, ledger_seq=seq, weights_checksum=f"{incarnation}.{self.step}", files={}
        )
        self.core.check_checkpoint(manifest)
        self.core.commit()
        self.saved[self.step] = manifest  # the rename
        for old in self.core.checkpoint_committed(manifest):
            del self.saved[old]
        self.core.commit()
        self.core.prune()

    # -- fate

    def crash(self) -> None:
        """Everything dies, now and then just after the core has decided what is not yet durable."""
        if self.random.random() < 0.5:
            self.core.admit(2)
        if self.random.random() < 0.5 and not self.training and not self.core.no_batch(self.step):
            self.core.try_batch(self.step)
        self.engine.catch_up(self.now)
        self.audit.crashed(self.tasks.values())
        self.ledger.abandon()
        self.open()

    def lower(self) -> None:
        self.audit.lowered(self.core.lower_max_staleness("a diagnostic"))


# ---- what it costs -----------------------------------------------------------------------------------------------------------

WORLD = Setting(P=4, G=8, slots=32, length=100.0, max_tokens=1000, max_interrupts=8, step_ticks=80.0, step_sigma=0.1, steps=40)
INTERRUPTS = {
    "in_flight": {},
    "abort_resume": {"interrupt": "abort_resume"},
    "abort_retry": {"interrupt": "abort_retry"},
    "abort_retry after 1": {"interrupt": "abort_retry", "interrupt_after": 1},
    "drain": {"interrupt": "drain"},
    "barrier": {"interrupt": "barrier"},
}
GATES = {
    "fifo": {},
    "default, masked": {"window": None},
    "largest, masked": {"window": "largest"},
    "largest, dropped": {"window": "largest", "on_stale": "drop"},
    "largest, cancelled": {"window": "largest", "on_stale": "cancel_early"},
    "unbounded, masked": {"window": "unbounded"},
    "unbounded, cancelled": {"window": "unbounded", "on_stale": "cancel_early"},
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Of some runs that differ in their seed."""

    samples_per_tick: float
    tokens_per_sample: float  # trained ones; where long sequences are lost, it is less than what was sampled
    trainer_idle: float  # share of the time since the first batch
    wasted: float  # share of the sampled tokens that were not trained, masked ones included; what is in flight at the end aside
    mean_age: float
    max_age: int


def costs(setting: Setting, seeds: int = 2) -> Costs:
    runs = [Simulation(setting, seed).run() for seed in range(seeds)]
    assert all(run.cause is None for run in runs), [run.cause for run in runs]
    made = [step for run in runs for step in run.audit.steps.values()]
    ages = sum((step.ages for step in made), Counter())
    samples, wasted = sum(step.samples for step in made), sum(run.audit.wasted.total() + run.audit.lost for run in runs)
    wasted += sum(step.masked for step in made)
    return Costs(
        samples_per_tick=samples / sum(run.now for run in runs),
        tokens_per_sample=ages.total() / samples,
        trainer_idle=sum(run.trainer_idle for run in runs) / sum(run.now - (run.trainer_from or 0) for run in runs),
        wasted=wasted / (wasted + ages.total()),
        mean_age=sum(age * tokens for age, tokens in ages.items()) / ages.total(),
        max_age=max(ages),
    )


def table(rows: dict[str, dict[str, Any]], sigmas: tuple[float, ...]) -> None:
    """Samples per second and tokens per sample are relative to those of the first row."""
    print(f"{'sigma':5} {'S':>2}  {'':20} {'samples/s':>9} {'tokens':>7} {'idle %':>7} {'waste %':>8} {'mean age':>9} {'max':>4}")
    for sigma, S in itertools.product(sigmas, (1, 2, 4)):
        first = None
        for name, changes in rows.items():
            if changes.get("interrupt_after", -1) >= S:
                continue  # nothing would ever be aborted
            window = {"window": (S + 1) * WORLD.P} if changes.get("window") == "largest" else {}
            of = costs(replace(WORLD, S=S, sigma=sigma, **(changes | window)))
            first = first or of
            print(
                f"{sigma:<5} {S:>2}  {name:20} {of.samples_per_tick / first.samples_per_tick:9.2f} "
                f"{of.tokens_per_sample / first.tokens_per_sample:7.2f} {100 * of.trainer_idle:7.0f} {100 * of.wasted:8.1f} "
                f"{of.mean_age:9.2f} {of.max_age:4}",
                flush=True,
            )


if __name__ == "__main__":
    world = f"{WORLD.P} groups of {WORLD.G}, {WORLD.slots} engine slots, {WORLD.length:g} tokens on average (lognormal)"
    print(f"{world}; a step takes {WORLD.step_ticks / 100:g} of the time in which a batch is sampled\n\nInterrupts, window 1")
    table(INTERRUPTS, (0.0, 0.5, 1.0, 1.5))
    print("\nGates, in_flight")
    table(GATES, (0.5, 1.0))
