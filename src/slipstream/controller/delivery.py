"""Where groups leave: batches, recorded before the trainer gets them and equal every time, and the steps made of them."""

from __future__ import annotations

from typing import Any

from slipstream.config.settings import Config
from slipstream.controller import buffer, stale
from slipstream.controller import events as ev
from slipstream.controller.engine_times import EngineTimes
from slipstream.controller.journal import Journal
from slipstream.controller.metrics_line import growth, step_line
from slipstream.controller.run_state import LiveGroup, RunState
from slipstream.controller.timing import StepTimes
from slipstream.controller.totals import STALE, Totals
from slipstream.errors import LedgerError, RunFailed
from slipstream.protocols import Clock
from slipstream.types import Batch, Group, StepReport


class Delivery:
    """The trainer's side of the controller."""

    def __init__(self, journal: Journal, config: Config, clock: Clock, times: StepTimes, engine_times: EngineTimes):
        self._journal, self._config, self._clock, self._times, self._engine_times = journal, config, clock, times, engine_times
        self._started_at = clock.now()
        self._groups: dict[int, Group] = {}  # finished groups in memory; after a resume they are read from the ledger when needed
        self._batches: dict[int, Batch] = {}  # handed to the trainer, not finished
        self._totals_before = growth(Totals(), journal.state.totals)  # as of the last metric line: a copy of what it tells
        self._flat_steps = 0  # steps in a row whose groups all had zero variance
        self._sync_s: list[float] = []  # of confirmations since the last step
        self._repairs = 0  # of them

    @property
    def _state(self) -> RunState:
        return self._journal.state

    def keep(self, group: Group) -> None:
        """A finished group: hold it in memory until its step is made."""
        self._groups[group.group_id] = group

    def synced(self, seconds: float, repaired: bool = False) -> None:
        """An engine took new weights in so many seconds; `repaired`: whole ones, because it refused what had changed."""
        self._sync_s.append(seconds)
        self._repairs += repaired

    def try_batch(self, step: int) -> Batch | None:
        """Batch `step`: recorded when it is asked for first, equal every time; None while too few groups may be pulled."""
        if step in self._batches:
            return self._batches[step]
        if step > self._state.next_batch:
            raise LedgerError(f"the trainer asks for batch {step}, but batch {self._state.next_batch} is next")
        batch = self._recorded_batch(step) if step < self._state.next_batch else self._new_batch(step)
        if batch is not None:
            self._batches[step] = batch
        return batch

    def drop_stale(self) -> None:
        """on_stale = "drop", "cancel_early": finished groups that are too old for the next batch, and so for all, give up their places.

        A group that starts now is never too old for the next batch (its permit says so), so this cannot go on without a batch.
        """
        step = self._state.next_batch
        rule = stale.rule_of(self._config.buffer, self._state.max_staleness)
        if rule.on_stale not in stale.DROPPING:
            return
        finished = [self._state.live[group_id] for group_id in self._state.finished]
        for live in [g for g in finished if 0 <= g.oldest_version < step - rule.limit]:
            group = self._group(live.group_id, live.attempt)
            if stale.treat(group, step, rule).group is None:
                self._drop(live, group, step)

    def _drop(self, live: LiveGroup, group: Group, step: int) -> None:
        self._groups.pop(live.group_id, None)
        self._journal.record(
            ev.Dropped(
                group_id=live.group_id,
                attempt=live.attempt,
                reason=STALE,
                cause=f"too old for step {step}: tokens of version {live.oldest_version}",
                num_tokens=live.num_tokens,
                lost=stale.tally(group.rollouts),
            )
        )

    def _new_batch(self, step: int) -> Batch | None:
        self.drop_stale()
        ids = self._state.next_pull()
        if ids is None:
            return None
        live = [self._state.live[i] for i in ids]
        groups = [self._group(g.group_id, g.attempt) for g in live]
        rule = stale.rule_of(self._config.buffer, self._state.max_staleness)
        batch, record = buffer.make_batch(step, groups, [g.bound for g in live], rule)
        self._journal.record(record)
        self._warn_if_flat(step, groups)
        return batch

    def _recorded_batch(self, step: int) -> Batch:
        """After a resume: the same groups in the same order."""
        recorded = self._state.batches.get(step)
        if recorded is None:
            raise LedgerError(f"batch {step} is trained and covered by every kept checkpoint; its groups are gone")
        groups = [self._group(m.group_id, m.attempt) for m in recorded.members]
        batch, record = buffer.make_batch(step, groups, [m.bound for m in recorded.members], recorded.record.rule)
        if record != recorded.record:
            raise LedgerError(f"batch {step} does not come out as it was recorded: {record} instead of {recorded.record}")
        return batch

    def _group(self, group_id: int, attempt: int) -> Group:
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = self._journal.ledger.group(group_id, attempt)
        return group

    def _warn_if_flat(self, step: int, groups: list[Group]) -> None:
        """Say that the rewards of a whole step teach nothing: the first time in a row, then ever more rarely."""
        if self._config.loss.teacher is not None:
            return  # it teaches at any reward
        if not all(buffer.has_zero_variance(g.rewards) for g in groups):
            self._flat_steps = 0
            return
        self._flat_steps += 1
        if self._flat_steps & (self._flat_steps - 1) == 0:
            rewards = sorted({r for g in groups for r in g.rewards})
            again = f" ({self._flat_steps} steps in a row)" if self._flat_steps > 1 else ""
            shown = ", ".join(f"{r:g}" for r in rewards[:4]) + (", ..." if len(rewards) > 4 else "")
            self._journal.observer.note(
                f"step {step}: in every group all rewards are equal ({shown}), so they teach nothing{again}; "
                "is the task too hard or too easy, or the reward constant?"
            )

    def finish_step(self, report: StepReport) -> dict[str, Any] | None:
        """Step s is made; its metric line. A second report of it changes nothing: None."""
        if report.step < self._state.step:
            return None
        batch, now = self._batches.get(report.step), self._clock.now()
        if batch is None:
            raise LedgerError(f"step {report.step} finished, but its batch was not handed out in this incarnation")
        finished = ev.StepFinished(
            step=report.step,
            version=report.version,
            checksum=report.checksum,
            skipped=report.skipped,
            step_s=report.step_s,
            **self._times.take(now),
        )
        self._journal.record(finished)
        del self._batches[report.step]
        for group in batch.groups:
            self._groups.pop(group.group_id, None)
        line = self._report_step(report, finished, batch, now)
        if self._state.skipped_in_a_row >= self._config.trainer.max_skipped_steps:
            self._journal.fail(RunFailed(f"the last {self._state.skipped_in_a_row} updates were skipped; the newest: {report.skipped}"))
        return line

    def _report_step(self, report: StepReport, finished: ev.StepFinished, batch: Batch, now: float) -> dict[str, Any]:
        totals = self._state.totals
        line = step_line(
            report,
            finished,
            self._state.batches[report.step].record,
            batch.groups,
            self._state,
            time_s=now - self._started_at,
            grown=growth(self._totals_before, totals),
            weight_sync_s=sum(self._sync_s) / len(self._sync_s) if self._sync_s else None,
            sync_repairs=self._repairs if self._config.payload == "delta" else None,
            engines=self._engine_times.line(self._state.engines, self._state.engine_starts),
        )
        self._totals_before = growth(Totals(), totals)
        self._sync_s.clear()
        self._repairs = 0
        self._journal.tell(lambda: self._journal.observer.step(line, batch.groups))
        return line
