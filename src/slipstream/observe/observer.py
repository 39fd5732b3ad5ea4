"""Who is told what happens in a run: one observer that passes every event on to the files, the display and the sinks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from slipstream.config.settings import Config
from slipstream.data.prompts import prompt_text
from slipstream.observe.display import Display, Silent, open_display
from slipstream.observe.metrics import MetricsFile, read_metrics
from slipstream.observe.samples import SamplesFile, pick_rollouts
from slipstream.observe.sinks import Sink, open_sinks
from slipstream.observe.state import DisplayState
from slipstream.types import EvalResult, Group


class RunObserver:
    """`protocols.Observer`: metrics.jsonl, samples.jsonl, display and sinks, in this order.

    Called by the controller, which must never fail or wait for an onlooker: what goes wrong in one of them is reported once, in a
    note, and the others go on.
    """

    def __init__(
        self, folder: Path, state: DisplayState, files: tuple[MetricsFile, SamplesFile], display: Display, sinks: Iterable[Sink] = ()
    ):
        self._folder, self._state, self._display = folder, state, display
        self._metrics, self._samples = files
        self._sinks = list(sinks)
        self._reported: set[str] = set()
        self._show_history()
        self._safely("display", display.start)

    def step(self, line: dict[str, Any], groups: tuple[Group, ...]) -> None:
        self._safely("metrics.jsonl", self._metrics.write, "step", line)
        self._safely("samples.jsonl", self._samples.write_step, int(line["step"]), int(line["incarnation"]), groups)
        self._safely("display", self._show_step, line, groups)
        for sink in self._sinks:
            self._safely(sink.name, sink.log, "step", line)

    def evaluation(self, line: dict[str, Any], result: EvalResult) -> None:
        line = {"engine_s": result.engine_s, **line}
        self._safely("metrics.jsonl", self._metrics.write, "evaluation", line)
        self._safely("samples.jsonl", self._samples.write_evaluation, result)
        self._state.on_evaluation(line)
        self._safely("display", self._display.evaluation)
        for sink in self._sinks:
            self._safely(sink.name, sink.log, "evaluation", line)

    def note(self, text: str) -> None:
        self._safely("display", self._display.note, text)

    def close(self) -> None:
        """The run has ended: the display leaves its last picture, files and sinks are closed."""
        self._safely("display", self._display.close)
        self._safely("metrics.jsonl", self._metrics.close)
        self._safely("samples.jsonl", self._samples.close)
        for sink in self._sinks:
            self._safely(sink.name, sink.close)

    def _show_step(self, line: dict[str, Any], groups: tuple[Group, ...]) -> None:
        self._state.on_step(line)
        for group, rollout in pick_rollouts(int(line["step"]), groups, 1):
            prompt = prompt_text(group.prompt[-1:])
            self._state.answer = (prompt, rollout.completion, rollout.reward)
        self._display.step()

    def _show_history(self) -> None:
        """A resumed run goes on with the curve it has."""
        past = read_metrics(self._folder)
        for line in past.steps[-1:]:
            self._state.line = line
        self._state.rewards.extend(value for _, value in past.series("reward_mean"))
        for line in past.evaluations:
            self._state.on_evaluation(line)

    def _safely(self, part: str, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            if part in self._reported:
                return
            self._reported.add(part)
            text = f"{part}: {type(error).__name__}: {error} (the run goes on; further failures of it are not reported)"
            if part == "display":
                print(text, file=sys.stderr)
            else:
                self.note(text)


def open_observer(
    folder: Path,
    config: Config,
    *,
    stream: IO[str] | None = None,
    describe_item: Callable[[int], str] | None = None,
    prefix: str = "",
) -> RunObserver:
    """The observer of a run in this folder; the display goes to `stream` (None: nowhere), with `prefix` as plain lines that begin with it.

    `describe_item` gives the prompt text of an evaluation row by index. Raises ConfigError when a sink's package is missing.
    """
    state = DisplayState.of(config, str(folder))
    sinks = open_sinks(list(config.metrics.sinks), folder, config.model_dump(mode="json"))
    files = (MetricsFile(folder), SamplesFile(folder, config.metrics.samples_per_step, describe_item))
    return RunObserver(folder, state, files, open_display(state, stream, prefix) if stream else Silent(), sinks)
