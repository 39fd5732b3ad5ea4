"""`samples.jsonl`: the text of a few rollouts of every step, and of every evaluation, for people to read.

Which rollouts are kept depends on the step alone (one per group, going round), never on their rewards: what is read here is what the
model does, not its best day. `slipstream samples` shows them by step, best or worst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.data.prompts import prompt_text
from slipstream.observe.jsonl import JsonLines, read_jsonl
from slipstream.types import EvalItem, EvalResult, Group, Rollout

FILE_NAME = "samples.jsonl"
EVALUATION_ITEMS = 8  # items kept of every evaluation: always the same ones, so that answers can be compared over time


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout as text."""

    kind: str  # "train" | "evaluation"
    step: int  # of a train sample; the version, of an evaluation
    incarnation: int
    group_id: int  # of an evaluation: the item's index
    sample: int
    prompt: str
    completion: str
    reward: float | None
    parts: dict[str, float | None]  # score name -> value, before weighting
    versions: tuple[int, int] | None  # oldest and newest version among the sampled tokens
    num_tokens: int  # sampled
    stop_reason: str | None
    error: str | None = None  # of a failed rollout


class SamplesFile:
    """Writes the samples."""

    def __init__(self, folder: Path, per_step: int, describe_item: Callable[[int], str] | None = None):
        """`describe_item` gives the prompt text of an evaluation row, by index."""
        self._lines = JsonLines(folder / FILE_NAME)
        self._per_step = per_step
        self._describe_item = describe_item

    def write_step(self, step: int, incarnation: int, groups: tuple[Group, ...]) -> None:
        for group, rollout in pick_rollouts(step, groups, self._per_step):
            self._lines.write(sample_of(step, incarnation, group, rollout))

    def write_evaluation(self, result: EvalResult) -> None:
        for item in sorted(result.items, key=lambda i: i.row)[:EVALUATION_ITEMS]:
            if item.completions:
                prompt = self._describe_item(item.row) if self._describe_item else ""
                self._lines.write(_sample_of_item(result, item, prompt))

    def close(self) -> None:
        self._lines.close()


def pick_rollouts(step: int, groups: tuple[Group, ...], count: int) -> list[tuple[Group, Rollout]]:
    """`count` rollouts of the step, spread over its groups; which ones is a function of the step alone."""
    filled = [g for g in groups if g.rollouts]
    total = sum(len(g.rollouts) for g in filled)
    picked = []
    for n in range(min(count, total)):
        group = filled[n % len(filled)]
        picked.append((group, group.rollouts[(step + n // len(filled)) % len(group.rollouts)]))
    return picked


def read_samples(folder: Path | str, *, step: int | None = None, kind: str | None = None) -> list[Sample]:
    """The samples in the order they were written, the last incarnation's where a step was trained twice."""
    names = {f for f in Sample.__dataclass_fields__}
    out: dict[tuple, Sample] = {}
    for line in read_jsonl(Path(folder) / FILE_NAME):
        values = {k: v for k, v in line.items() if k in names}
        values["versions"] = tuple(values["versions"]) if values.get("versions") else None
        sample = Sample(**values)
        if (step is None or sample.step == step) and (kind is None or sample.kind == kind):
            out[(sample.kind, sample.step, sample.incarnation, sample.group_id, sample.sample)] = sample
    latest: dict[tuple[str, int], int] = {}
    for s in out.values():
        latest[(s.kind, s.step)] = max(latest.get((s.kind, s.step), 0), s.incarnation)
    return [s for s in out.values() if s.incarnation == latest[(s.kind, s.step)]]


def best(samples: list[Sample], count: int, *, worst: bool = False) -> list[Sample]:
    """The `count` samples with the highest (with `worst`, lowest) reward, newest first among equals; those without one are left out."""
    scored = [s for s in samples if s.reward is not None]
    return sorted(scored, key=lambda s: ((s.reward or 0.0) * (1 if worst else -1), -s.step))[:count]


def sample_of(step: int, incarnation: int, group: Group, rollout: Rollout) -> Sample:
    """A rollout as text."""
    oldest, newest = rollout.oldest_version, rollout.newest_version
    parts = {f"{score.name}/{name}": value for score in rollout.scores for name, value in score.parts.items()}
    return Sample(
        kind="train",
        step=step,
        incarnation=incarnation,
        group_id=group.group_id,
        sample=rollout.sample,
        prompt=prompt_text(group.prompt),
        completion=rollout.completion,
        reward=rollout.reward,
        parts={score.name: score.value for score in rollout.scores} | parts,
        versions=None if oldest is None or newest is None else (oldest, newest),
        num_tokens=rollout.num_sampled_tokens,
        stop_reason=None if rollout.stop_reason is None else rollout.stop_reason.value,
        error=rollout.error,
    )


def _sample_of_item(result: EvalResult, item: EvalItem, prompt: str) -> Sample:
    return Sample(
        kind="evaluation",
        step=result.version,
        incarnation=result.incarnation,
        group_id=item.row,
        sample=0,
        prompt=prompt,
        completion=item.completions[0],
        reward=item.rewards[0],
        parts={},
        versions=(result.version, result.version),
        num_tokens=item.num_tokens[0],
        stop_reason=None,
    )
