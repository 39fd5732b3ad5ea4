"""Limits on diagnostics: what a step line has to say for the run to stop, or to allow less staleness. No torch.

A limit is violated by a value beyond it, and by one that is not a number. A line that lacks the metric, or holds null, says nothing: it
neither counts nor starts the count anew (a step may have no token of lag 2). A limit acts when `steps` lines in a row, of those that say
something, violate it.

One line lowers `max_staleness` by one at most, and the limits that lower it then look away while groups admitted before are still to be
trained; otherwise one cause would lower it with every step, down to 0.

The counts are facts of the run: each line's are recorded (`events.ThresholdsJudged`), so a deterministic resume goes on with those that its
checkpoint had. Any other resume starts them anew.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.settings import ThresholdSettings
from slipstream.controller import events as ev
from slipstream.controller.journal import Journal
from slipstream.errors import RunFailed

LOWER = "lower_max_staleness"
STEPS_TO_APPEAR = 10  # step lines, at most, after which a metric that no line had is named to the person

HINTS = {  # by the beginning of the metric's name
    "logprob_gap": "trainer and sampler held the same weights for these tokens, so beyond rounding they compute differently: compare "
    "model.dtype float32, and report it",
    "lag/": "lower buffer.max_staleness, or choose a correction (loss.correction)",
    "ratio": "lower buffer.max_staleness or trainer.learning_rate, or choose a correction (loss.correction)",
    "kl_": "lower trainer.learning_rate or buffer.max_staleness",
    "entropy": "lower trainer.learning_rate, or raise loss.entropy_coefficient",
    "grad_norm": "lower trainer.learning_rate or trainer.max_grad_norm",
}


@dataclass(frozen=True, slots=True)
class Crossed:
    """A limit that acts now."""

    action: str  # stop | lower_max_staleness
    text: str  # metric, value, step and limit: a sentence without its full stop
    hint: str  # what a person can try; "" where nothing in particular


def name(limit: ThresholdSettings) -> str:
    """What its count is kept under.

    >>> name(ThresholdSettings(metric="kl_k3", above=0.1))
    'kl_k3 above 0.1: stop'
    """
    return f"{limit.metric} {'above' if limit.above is not None else 'below'} {_bound(limit)!r}: {limit.action}"


def in_words(limit: ThresholdSettings) -> str:
    """What the limit does, for `slipstream validate`.

    >>> in_words(ThresholdSettings(metric="entropy", below=0.05, steps=3))
    'the run ends when entropy is below 0.05 for 3 steps in a row'
    """
    does = "the run ends" if limit.action == "stop" else "max_staleness is lowered by one"
    return f"{does} when {limit.metric} is {_limit_in_words(limit)}"


def _limit_in_words(limit: ThresholdSettings) -> str:
    side = "above" if limit.above is not None else "below"
    return f"{side} {_bound(limit):g}" + (f" for {limit.steps} steps in a row" if limit.steps > 1 else "")


def judge(
    limits: Sequence[ThresholdSettings], counts: Mapping[str, int], line: Mapping[str, Any], look_away: int
) -> tuple[dict[str, int], list[Crossed]]:
    """(the counts after this step line, the limits that act).

    counts: name -> violations in a row; below 0: lines that are still to be ignored; 0 is left out. look_away: lines to ignore after
    `max_staleness` is lowered.
    """
    after: dict[str, int] = {}
    crossed = []
    for limit in limits:
        key = name(limit)
        count = _next_count(limit, counts.get(key, 0), line.get(limit.metric))
        if count >= limit.steps:
            crossed.append(_crossed(limit, line))
            count = 0
        if count:
            after[key] = count
    lowering = [limit for limit in crossed if limit.action == LOWER]
    if lowering:
        after |= {name(limit): -look_away for limit in limits if limit.action == LOWER and look_away}
    return after, [limit for limit in crossed if limit.action != LOWER] + lowering[:1]


def _next_count(limit: ThresholdSettings, count: int, value: Any) -> int:
    if count < 0:
        return count + 1
    if not isinstance(value, int | float):
        return count
    beyond = value > _bound(limit) if limit.above is not None else value < _bound(limit)
    return count + 1 if beyond or math.isnan(value) else 0


def _bound(limit: ThresholdSettings) -> float:
    bound = limit.above if limit.above is not None else limit.below
    assert bound is not None  # checked when the settings are loaded
    return bound


def _crossed(limit: ThresholdSettings, line: Mapping[str, Any]) -> Crossed:
    text = f"{limit.metric} is {line[limit.metric]:g} at step {line['step']}; the threshold is {_limit_in_words(limit)}"
    return Crossed(limit.action, text, next((hint for start, hint in HINTS.items() if limit.metric.startswith(start)), ""))


class Thresholds:
    """The limits of a run of so many `steps`, over its journal. `lower(reason)` lowers `max_staleness` by one; False where it is at its
    lowest."""

    def __init__(self, journal: Journal, limits: Sequence[ThresholdSettings], steps: int, lower: Callable[[str], bool]):
        self._journal, self._limits, self._steps, self._lower = journal, limits, steps, lower
        self._seen: set[str] = set()  # metrics that the lines of this start had
        self._lines = 0  # judged since the start; names are told of once
        self._told = False
        self._at_lowest = False  # the person knows

    def look(self, line: Mapping[str, Any]) -> None:
        """Judge the line of a step that has just finished, record the counts, act."""
        if not self._limits:
            return
        self._note_unknown(line)
        state = self._journal.state
        batches_admitted = -(-(len(state.live) + state.pulled) // state.groups_per_step)
        counts, crossed = judge(self._limits, state.threshold_counts, line, batches_admitted)
        if counts != state.threshold_counts:
            self._journal.record(ev.ThresholdsJudged(counts=counts))
        for limit in crossed:
            self._act(limit)

    def _act(self, crossed: Crossed) -> None:
        if crossed.action == "stop":
            what = crossed.hint or "lower trainer.learning_rate or buffer.max_staleness, or move the limit"
            self._journal.fail(RunFailed(f"{crossed.text}. What can help: {what}. --resume goes on from the newest checkpoint"))
        elif self._lower(crossed.text):
            self._journal.observer.note(f"buffer.max_staleness is {self._journal.state.max_staleness} from now on: {crossed.text}")
        elif not self._at_lowest:
            self._at_lowest = True
            lowest = self._journal.state.max_staleness
            self._journal.observer.note(f"{crossed.text}; buffer.max_staleness is {lowest} and cannot be lowered further")

    def _note_unknown(self, line: Mapping[str, Any]) -> None:
        """Say once that a threshold is on a name that no line has had."""
        self._seen |= line.keys()
        self._lines += 1
        if self._told or (self._lines < STEPS_TO_APPEAR and self._journal.state.step < self._steps):
            return
        self._told = True
        for metric in dict.fromkeys(limit.metric for limit in self._limits):
            if metric not in self._seen:
                near = difflib.get_close_matches(metric, sorted(self._seen), n=3, cutoff=0.4)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                lines = f"no step line so far (there were {self._lines}) has such a metric"
                self._journal.observer.note(f'the threshold on "{metric}" judges nothing: {lines}{hint}')
