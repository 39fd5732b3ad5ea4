"""What `train` leaves on the screen when it ends: two answers before and after, a few numbers, and where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from slipstream.observe.grid import grid
from slipstream.observe.samples import Sample, read_samples
from slipstream.observe.state import bound_text, duration, number, one_line, percent, shown

ANSWERS = 2
TEXT_WIDTH = 72


def print_report(summary: dict[str, Any], stream: IO[str]) -> None:
    """Print the report of a run that has ended; `summary` is `summarize(...)`'s object."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    folder = Path(summary["run_folder"])
    console.print()
    for before, after in before_and_after(read_samples(folder, kind="evaluation"), ANSWERS):
        console.print(answers(before, after), end="\n\n")
    console.print(numbers(summary))
    if summary["steps"] < summary["steps_planned"]:
        where = f"--resume {shown(folder)}"
        console.print(f"\nstopped after {summary['steps']} of {summary['steps_planned']} steps; go on with\n  slipstream train {where}")


def before_and_after(samples: list[Sample], count: int) -> list[tuple[Sample, Sample]]:
    """The first and the last answer to up to `count` held-out prompts: those answered worst at first, since only there learning shows."""
    versions = sorted({s.step for s in samples})
    if len(versions) < 2:
        return []
    first = {s.group_id: s for s in samples if s.step == versions[0]}
    last = {s.group_id: s for s in samples if s.step == versions[-1]}
    pairs = [(first[item], last[item]) for item in sorted(first.keys() & last.keys())]
    return sorted(pairs, key=lambda pair: pair[0].reward or 0.0)[:count]


def answers(before: Sample, after: Sample) -> Text:
    lines: list[list[Text | str]] = [[Text("held-out prompt", style="dim"), one_line(before.prompt, TEXT_WIDTH)]]
    for label, sample in (("before", before), (f"after {after.step} steps", after)):
        text = one_line(sample.completion, TEXT_WIDTH) or "(nothing)"
        lines.append([Text(label, style="dim"), text, Text(f"reward {number(sample.reward, 2)}", style="dim")])
    return grid(lines)


def numbers(summary: dict[str, Any]) -> Text:
    return grid(rows(summary), bold=(0,))


def rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of the report's lines."""
    held_out = "no evaluation"
    if s["eval_reward_last"] is not None:
        count = f"{s['evaluations']} evaluation" + ("" if s["evaluations"] == 1 else "s")
        skipped = f", {s['evaluations_skipped']} skipped" if s["evaluations_skipped"] else ""
        held_out = f"{number(s['eval_reward_first'])} → {number(s['eval_reward_last'])} ({count}{skipped})"
    wasted = f", {percent(s['wasted_tokens'] / s['generated_tokens'])} of them wasted" if s["wasted_tokens"] else ""
    samples = f"{number(s['trained_samples'], 0)} trained, {number(s['trained_samples_per_s'], 1)} a second"
    return [
        ("held-out reward", held_out),
        ("steps", f"{s['steps']} in {duration(s['wall_s'])}" + (f", {s['skipped_steps']} skipped" if s["skipped_steps"] else "")),
        ("samples", samples),
        ("tokens/s", f"{number(s['generated_tokens_per_s'], 0)} generated{wasted}, {number(s['trained_tokens_per_s'], 0)} trained"),
        (
            "staleness",
            f"mean {number(s['staleness_mean'], 2)}, max {_whole(s['staleness_max'])} "
            f"{bound_text(s['staleness_limit'], s['staleness_bound'])}; "
            f"rollouts with several versions: {s['rollouts_with_several_versions']}",
        ),
        ("idle", f"trainer {percent(s['trainer_idle_fraction'])}, rollout {percent(s['rollout_idle_fraction'])}"),
        ("run folder", shown(Path(s["run_folder"]))),
    ]


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
