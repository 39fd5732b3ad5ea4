"""One group: its G rollouts side by side, then the scorers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from slipstream.protocols import Scorer
from slipstream.rollout.external import ExternalCalls
from slipstream.rollout.rollout import RolloutJob, RolloutRunner, SharedPrompt
from slipstream.scoring.score import score_group
from slipstream.types import Group, PrefixChunk, Rollout, Sampling


class GroupRunner:
    """Turns a group without rollouts into one with rollouts, scores and rewards."""

    def __init__(self, rollouts: RolloutRunner, scorers: Sequence[Scorer], external: ExternalCalls, *, deterministic: bool = False):
        self._rollouts, self._scorers, self._external, self._deterministic = rollouts, scorers, external, deterministic

    async def run(
        self,
        group: Group,
        num_samples: int,
        sampling: Sampling,
        prefixes: Sequence[PrefixChunk] = (),
        on_rollout_end: Callable[[], None] = lambda: None,
        *,
        needed: int | None = None,
        retries: Mapping[int, int] = {},
    ) -> Group:
        """Roll out `num_samples` times and score. `on_rollout_end` is called once for each rollout that leaves the engine; with fewer than
        `needed` finished ones (all by default) nothing is scored. `retries`: how often new weights had a sample start anew so far.

        Failures of rollouts and scorers are in the returned records; what raises ends the run.
        """
        by_sample = {prefix.sample: prefix for prefix in prefixes}
        shared = SharedPrompt()

        async def one(sample: int) -> Rollout:
            job = RolloutJob(
                group_id=group.group_id,
                sample=sample,
                attempt=group.attempt + retries.get(sample, 0),
                purpose=group.purpose,
                row=group.row,
                sampling=sampling,
                min_version=group.min_version,
                num_retries=retries.get(sample, 0),
                prefix=by_sample.get(sample),
                shared=shared,
            )
            try:
                return await self._rollouts.run(job)
            finally:
                on_rollout_end()

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(s), name=f"{group.purpose} group {group.group_id} sample {s}") for s in range(num_samples)]
        rollouts = tuple(task.result() for task in running)
        group = msgspec.structs.replace(group, rollouts=rollouts, prompt=shared.messages)
        return await score_group(group, self._scorers, self._external, deadlines_are_fatal=self._deterministic, needed=needed)
