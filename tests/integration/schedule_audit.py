"""What may never happen in a simulated run, checked by its own count: of tokens, groups, slots, ages and waste.

The audit sees what the engine samples, what the worker reports, what the trainer gets, and the events that the ledger takes. It writes the
rules out again (bound, window, what is done with stale data) and uses none of the controller's arithmetic.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from staleness_harness import Broken

from slipstream.controller import events as ev
from slipstream.controller.ledger import Ledger
from slipstream.types import Batch, Group, Rollout

Owner = tuple[int, int, int]  # (group, sample, attempt)
ONE_VERSION = ("drain", "abort_retry", "barrier")  # interrupts that leave a sequence one version, unless the run is resumed amid it


class Audit:
    """Of one run. Raises Broken where a rule is broken."""

    def __init__(self, setting: Any):
        self.setting = setting
        self.S, self.W = setting.S, own_window(setting)
        self.log: list[ev.Event] = []  # as the ledger took them, without what a crash lost
        self.num_seen = self.num_durable = 0
        # tokens
        self.made: list[tuple[Owner, tuple[int, int]]] = []  # by number: who got it, from which (incarnation, version)
        self.oldest: dict[int, dict[int, tuple[int, int]]] = {}  # group -> sample -> (attempt, oldest version among its tokens)
        self.reports: dict[tuple[int, int], dict[int, Any]] = {}  # (group, attempt) -> sample -> Sequence
        self.lost = 0  # tokens that the controller never heard of: a crash or a cancellation was quicker
        self.wasted: Counter[str] = Counter()
        self.kept: dict[int, int] = {}  # finished groups -> tokens, of an oversampled one those of the selected rollouts
        self.parked: dict[int, int] = {}  # groups that a crash interrupted -> tokens that are recorded
        # groups and batches
        self.place: dict[int, str] = {}  # group -> live | batched | filtered | dropped
        self.bound: dict[int, int | None] = {}
        self.batches: dict[int, tuple[int, ...]] = {}
        self.limit: dict[int, int] = {}  # step -> S when its batch was recorded
        self.claims: dict[int, int] = {}  # cancelled groups -> tokens that the controller counted
        self.steps: dict[int, Step] = {}  # made ones
        self.next_step = self.confirmed_version = 0
        self.crashes = self.num_dropped_running = self.adoptions_amid_sequences = 0

    def watch(self, ledger: Ledger) -> Ledger:
        """Read along: every event that the ledger takes, and keeps."""
        append, commit, abandon = ledger.append, ledger.commit, ledger.abandon

        def appended(event: ev.Event, incarnation: int) -> int:
            self.log.append(event)
            return append(event, incarnation)

        def committed() -> None:
            commit()
            self.num_durable = len(self.log)

        def abandoned() -> None:
            abandon()
            del self.log[self.num_durable :]

        ledger.append, ledger.commit, ledger.abandon = appended, committed, abandoned  # type: ignore[method-assign]
        return ledger

    # -- what is done

    def opened(self, from_step: int) -> None:
        """An incarnation starts: steps from there on are made again; whatever engine serves it holds that version or a later one."""
        self.next_step = self.confirmed_version = from_step
        self.steps = {step: made for step, made in self.steps.items() if step < from_step}
        self.look()

    def sampled(self, owner: Owner, version: tuple[int, int], num: int) -> range:
        """`num` new tokens; their numbers."""
        first = len(self.made)
        self.made += [(owner, version)] * num
        group, sample, attempt = owner
        of_group = self.oldest.setdefault(group, {})
        before = of_group.get(sample, (-1, 0))
        of_group[sample] = (attempt, min(before[1], version[1]) if before[0] == attempt else version[1])
        return range(first, first + num)

    def taken(self, group: int) -> None:
        self.parked.pop(group, None)

    def reported(self, task: Any) -> None:
        a = task.assignment
        self.reports[a.group_id, a.attempt] = {s.sample: s for s in task.sequences}
        if a.group_id in self.claims:
            self._never_told(task)

    def cancelled(self, task: Any) -> None:
        self.look()
        if task.assignment.group_id not in self.claims:
            raise Broken(f"the worker is told to cancel group {task.assignment.group_id}, which was not dropped")
        self._never_told(task)

    def crashed(self, tasks: Any) -> None:
        self.crashes += 1
        for task in tasks:
            if task.assignment.group_id in self.claims:
                self._never_told(task)
                continue
            self.parked[task.assignment.group_id] = sum(s.recorded for s in task.sequences)
            self.lost += sum(len(s.ids) - s.recorded for s in task.sequences)

    def _never_told(self, task: Any) -> None:
        """Tokens of a cancelled group beyond those that the controller had when it dropped it."""
        tokens, claimed = sum(len(s.ids) for s in task.sequences), self.claims[task.assignment.group_id]
        if claimed > tokens:
            raise Broken(f"group {task.assignment.group_id} was cancelled with {claimed} tokens, but {tokens} were sampled")
        self.lost += tokens - claimed

    def interrupted(self, num_tokens: int) -> None:
        self.wasted["interrupted"] += num_tokens

    def lowered(self, done: bool) -> None:
        if done != (self.S > self.setting.every - 1):
            raise Broken(f"max_staleness {self.S} with weights every {self.setting.every} steps: lowered is {done}")
        if done:
            self.S -= 1
            self.W = None if self.W is None and self.S else 1 if self.S == 0 else min(self.W, (self.S + 1) * self.setting.P)

    def adopts(self, generating: bool) -> None:
        """The engine, which has weights already, takes newer ones, perhaps while groups are at the worker."""
        self.adoptions_amid_sequences += generating
        if generating and self.setting.interrupt == "barrier":
            raise Broken("new weights came while groups were out, under a barrier")

    def confirmed(self, version: int) -> None:
        self.confirmed_version = version

    # -- events

    def look(self) -> None:
        """Take in the events since the last look."""
        while self.num_seen < len(self.log):
            self.num_seen += 1
            self._take(self.log[self.num_seen - 1])

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.Admitted(group_id=group):
                self._admitted(group)
            case ev.GroupFinished(group_id=group):
                self.kept[group] = self._tokens(event) - self._left_out(event)
            case ev.AttemptFailed():
                self.wasted["failed"] += self._tokens(event)
            case ev.Filtered(group_id=group):
                self._leave(group, "filtered")
                self.wasted["filtered"] += self._tokens(event) - self._left_out(event)
            case ev.Dropped(reason="stale" | "cancelled"):
                self._dropped_stale(event)
            case ev.Dropped(group_id=group, reason=reason):
                self._leave(group, "dropped")
                self.wasted[reason] += self._tokens(event)
            case ev.BatchRecorded(step=step, group_ids=groups):
                for group in groups:
                    self._leave(group, "batched")
                self.batches[step], self.limit[step] = groups, self.S

    def _admitted(self, group: int) -> None:
        if group in self.place:
            raise Broken(f"group {group} was drawn twice")
        self.place[group] = "live"
        self.bound[group] = own_bound(self.S, self.setting.P, self.W)
        taken = sum(where == "live" for where in self.place.values())
        taken += sum(len(groups) for step, groups in self.batches.items() if step >= self.confirmed_version)
        slots = self.setting.max_groups if self.W is None else (self.S + 1) * self.setting.P
        if taken > slots:
            raise Broken(f"{taken} groups in flight, {slots} slots")

    def _leave(self, group: int, to: str) -> None:
        if self.place.get(group) != "live":
            raise Broken(f"group {group} becomes {to}, but is {self.place.get(group)}")
        self.place[group] = to
        self.parked.pop(group, None)

    def _dropped_stale(self, event: ev.Dropped) -> None:
        group, next_batch = event.group_id, max(self.batches, default=-1) + 1
        self._leave(group, "dropped")
        if (event.reason == "stale") != (group in self.kept):
            raise Broken(f"group {group} was dropped as {event.reason}, but is {'' if group in self.kept else 'not '}finished")
        oldest = min(version for _, version in self.oldest[group].values())
        if self.setting.on_stale not in ("drop", "cancel_early") or next_batch - oldest <= self.S:
            raise Broken(f"group {group} with tokens of version {oldest} was dropped before batch {next_batch}: max_staleness {self.S}")
        if group in self.kept:
            self.wasted["stale"] += self.kept.pop(group)
        else:
            self.num_dropped_running += 1
            self.claims[group] = event.num_tokens
            self.wasted["cancelled"] += event.num_tokens

    def _tokens(self, event: Any) -> int:
        """Of the reported attempt, by our own count."""
        return sum(len(s.ids) for s in self.reports[event.group_id, event.attempt].values())

    def _left_out(self, event: ev.GroupFinished | ev.Filtered) -> int:
        """Tokens of the rollouts that were not kept: the failed ones are ours to know, whom the selection left out is its choice."""
        if event.left_out is None:
            return 0
        failed = sum(len(s.ids) for s in self.reports[event.group_id, event.attempt].values() if s.error)
        others = event.left_out.num_tokens - failed
        self.wasted.update({"failed": failed, "not selected": others})
        return failed + others

    # -- batches

    def consumed(self, batch: Batch) -> None:
        """The trainer gets this batch, to train it at once."""
        if batch.step != self.next_step or tuple(g.group_id for g in batch.groups) != self.batches[batch.step]:
            raise Broken(f"batch {batch.step} comes at step {self.next_step} with {[g.group_id for g in batch.groups]}")
        made = self.steps[batch.step] = Step()
        for group in batch.groups:
            if self.place[group.group_id] != "batched":
                raise Broken(f"batch {batch.step} holds group {group.group_id}, which is {self.place[group.group_id]}")
            versions = {r.sample: self._versions(batch.step, group, r) for r in group.rollouts}
            self._check_rule(batch.step, group, versions)
            in_batch = sum(map(len, versions.values()))
            made.stale += self.kept[group.group_id] - in_batch
            for rollout in group.rollouts:
                mask = rollout.loss_mask[1:]
                made.ages.update((batch.step - versions[rollout.sample][mask]).tolist())
                made.masked += int((~mask).sum())
                made.samples += bool(mask.any())

    def _versions(self, step: int, group: Group, rollout: Rollout) -> np.ndarray:
        """int[tokens]: which versions sampled this rollout, by the engine's own record, which the rollout must agree with."""
        name = f"group {group.group_id} sample {rollout.sample} in batch {step}"
        ids = rollout.token_ids[1:].tolist()
        sequence = self.reports[group.group_id, group.attempt][rollout.sample]
        if ids != sequence.ids or len(ids) != sequence.length or sequence.error:
            raise Broken(f"{name} has other tokens than were sampled, not all of them, or failed")
        made = [self.made[i] for i in ids]
        if {owner for owner, _ in made} != {(group.group_id, rollout.sample, rollout.attempt)}:
            raise Broken(f"{name} has tokens of another rollout or attempt")
        versions = np.array([version for _, (_, version) in made])
        if not np.array_equal(rollout.model_versions()[1:], versions):
            raise Broken(f"{name} does not say which versions sampled it")
        ages, bound = step - versions, self.bound[group.group_id]
        if ages.min() < 0 or (bound is not None and ages.max() > bound):
            raise Broken(f"{name}: staleness {ages.min()} to {ages.max()}, claimed are 0 to {bound}")
        self._check_interrupt(name, step, {named for _, named in made})
        return versions

    def _check_interrupt(self, name: str, step: int, versions: set[tuple[int, int]]) -> None:
        """What an interrupt promises of a sequence sampled by these (incarnation, version)."""
        s = self.setting
        if s.interrupt in ONE_VERSION and s.interrupt_after is None and len({i for i, _ in versions}) < len(versions):
            raise Broken(f"{name} has tokens of versions {sorted(versions)} with interrupt = {s.interrupt}")
        plain = s.interrupt == "barrier" and s.window == 1 and s.every == 1 and not s.crashes and not s.lowered
        if plain and s.S <= 1 and {step - v for _, v in versions} != {min(step, s.S)}:
            raise Broken(f"{name} has tokens of versions {sorted(versions)}: not sampled exactly {s.S} behind")

    def _check_rule(self, step: int, group: Group, versions: dict[int, np.ndarray]) -> None:
        """What is trained of a group is what `on_stale` leaves of it."""
        s, name = self.setting, f"group {group.group_id} in batch {step}"
        whole = len(group.rollouts) == s.G or (s.on_stale == "drop" and s.stale_level == "rollout" and len(group.rollouts) >= 2)
        if not whole:
            raise Broken(f"{name} has {len(group.rollouts)} rollouts")
        level = s.stale_level or ("group" if s.on_stale in ("drop", "cancel_early") else "token")
        oldest = min(int(v.min()) for v in versions.values())
        for rollout in group.rollouts:
            own = versions[rollout.sample]
            judged = {"token": own, "rollout": np.full_like(own, own.min()), "group": np.full_like(own, oldest)}[level]
            excess = np.maximum(step - judged - self.limit[step], 0)
            stale, mask, weight = excess > 0, rollout.loss_mask[1:], rollout.arrays.get("loss_weight")
            expected = ~stale if s.on_stale == "mask_tokens" else np.ones_like(stale)
            if s.on_stale in ("drop", "cancel_early") and stale.any():
                raise Broken(f"{name} holds stale tokens, which were to be dropped")
            if not np.array_equal(mask, expected):
                raise Broken(f"{name}: {mask.sum()} of {len(mask)} tokens are trained, {expected.sum()} should be")
            expected = np.float32(0.5) ** excess if s.on_stale == "down_weight" and stale.any() else None
            if (weight is None) != (expected is None) or (weight is not None and not np.array_equal(weight[1:], expected)):
                raise Broken(f"{name} has weights {weight} for ages {step - own}")

    def trained(self, step: int, skipped: bool) -> None:
        self.steps[step].skipped = skipped
        self.next_step = step + 1

    # -- the end

    def finish(self, state: Any, tasks: Any) -> None:
        """All steps are made: the accounts close."""
        self.look()
        if sorted(self.place) != list(range(state.next_draw)) or sorted(self.steps) != list(range(self.setting.steps)):
            raise Broken("groups or steps are missing")
        places = Counter(self.place.values())
        claimed = Counter(
            live=len(state.live), batched=state.totals.trained_groups, filtered=state.totals.filtered, dropped=state.totals.dropped.total()
        )
        if +places != +claimed or state.totals.trained_groups != self.setting.steps * self.setting.P:
            raise Broken(f"groups are {places}, the controller counts {claimed}")
        self._close_tokens(state, tasks)

    def _close_tokens(self, state: Any, tasks: Any) -> None:
        """Every token is trained, masked, wasted for a cause (a skipped update is one), in flight, or was never told of."""
        totals, trained = state.totals, [made for made in self.steps.values() if not made.skipped]
        ages = sum((made.ages for made in trained), Counter())
        masked = sum(made.masked for made in trained)
        skipped = sum(made.ages.total() + made.masked for made in self.steps.values() if made.skipped)
        self.wasted = +(self.wasted + Counter(stale=sum(made.stale for made in self.steps.values()), skipped=skipped))
        ours = {"ages": +ages, "masked": masked, "wasted": self.wasted, "samples": sum(made.samples for made in trained)}
        theirs = {
            "ages": +totals.staleness,
            "masked": totals.masked_tokens,
            "wasted": +totals.wasted_tokens,
            "samples": totals.trained_samples,
        }
        if ours != theirs:
            raise Broken(f"counted were {ours}, the controller has {theirs}")
        running = sum(len(s.ids) for task in tasks for s in task.sequences) + sum(self.parked.values())
        finished = sum(tokens for group, tokens in self.kept.items() if self.place[group] == "live")
        if len(self.made) != ages.total() + masked + self.wasted.total() + running + finished + self.lost:
            raise Broken(
                f"{len(self.made)} tokens were sampled: {ages.total()} trained, {masked} masked, {running} "
                f"running, {finished} finished, {self.lost} never told of, wasted {dict(self.wasted)}"
            )


class Step:
    """What a step trained."""

    def __init__(self) -> None:
        self.ages: Counter[int] = Counter()  # staleness -> trained tokens
        self.masked = self.stale = self.samples = 0  # tokens; tokens of rollouts that were dropped from its groups; trained rollouts
        self.skipped = False


def own_window(setting: Any) -> int | None:
    if setting.window == "unbounded":
        return None
    return 1 if setting.S == 0 else setting.window or max(1, int(0.3 * (setting.S + 1) * setting.P))


def own_bound(S: int, P: int, W: int | None) -> int | None:
    if S == 0:
        return 0
    return None if W is None else S + (W - 1 + P - 1) // P
