"""The display of a run: a live panel on a terminal, one plain line a step without one."""

from __future__ import annotations

from typing import IO, Any, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.observe.state import DisplayState, bound_text, duration, milliseconds, number, one_line, percent, sparkline

REFRESH_PER_S = 2  # the panel is drawn by rich's own thread: often enough for a clock, too seldom to cost anything


class Display(Protocol):
    """Shows a `DisplayState` that has just changed."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def evaluation(self) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_display(state: DisplayState, stream: IO[str], prefix: str = "") -> Display:
    """A live panel where `stream` is a terminal, else plain lines; these, too, where several runs share it, each with its own `prefix`."""
    console = Console(file=stream, highlight=False)
    live = console.is_terminal and not console.is_dumb_terminal and not prefix
    return LiveDisplay(state, console) if live else PlainDisplay(state, stream, prefix)


class Silent:
    """Shows nothing."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def evaluation(self) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """One line per step and per evaluation, flushed, for logs and pipes."""

    def __init__(self, state: DisplayState, stream: IO[str], prefix: str = ""):
        self._state, self._stream, self._prefix = state, stream, prefix

    def start(self) -> None:
        self._print(f"{self._state.name}: {self._state.steps} steps, run folder {self._state.folder}")

    def step(self) -> None:
        self._print(step_text(self._state))

    def evaluation(self) -> None:
        self._print(evaluation_text(self._state.last_evaluation or {}))

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        print(f"{self._prefix}{text}", file=self._stream, flush=True)


class LiveDisplay:
    """A panel that is drawn in place; notes scroll by above it."""

    def __init__(self, state: DisplayState, console: Console):
        self._state, self._console = state, console
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=REFRESH_PER_S)

    def start(self) -> None:
        self._live.start(refresh=True)

    def step(self) -> None: ...  # the next refresh shows it

    def evaluation(self) -> None: ...

    def note(self, text: str) -> None:
        self._console.print(Text.assemble(("note  ", "yellow"), text))

    def close(self) -> None:
        self._live.stop()  # draws once more and leaves the panel standing

    def _render(self) -> RenderableType:
        return panel(self._state, self._console.width)


def step_text(state: DisplayState) -> str:
    """The plain line of the newest step."""
    m = state.line
    parts = [
        f"step {state.done}/{state.steps}",
        f"reward {number(m.get('reward_mean'))}",
        f"staleness {number(m.get('staleness_mean'), 2)} p99 {_whole(m.get('staleness_p99'))} max {_whole(m.get('staleness_max'))}"
        f" {bound_text(state.limit, m.get('staleness_bound'))}",
        f"idle trainer {percent(m.get('trainer_idle_fraction'))} rollout {percent(m.get('rollout_idle_fraction'))}",
        f"tokens/s {number(m.get('generated_tokens_per_s'), 0)} generated {number(m.get('trained_tokens_per_s'), 0)} trained",
        f"buffer {_whole(m.get('buffer_groups'))}, in flight {_whole(m.get('slots_taken'))}/{_whole(m.get('slots', state.slots))}",
        f"sync {milliseconds(m.get('weight_sync_s'))}",
        f"entropy {number(m.get('entropy'))}",
        duration(state.elapsed_s),
    ]
    if waste := waste_text(m):
        parts.insert(-1, f"wasted tokens: {waste}")
    if m.get("skipped"):
        parts.insert(1, f"update skipped: {m['skipped']}")
    return " | ".join(parts)


def waste_text(m: dict[str, Any]) -> str:
    """Tokens that no step will train, since the step before, by cause; "" where there are none."""
    causes = {key.partition("/")[2]: value for key, value in m.items() if key.startswith("wasted_tokens/")}
    return ", ".join(f"{number(tokens, 0)} {cause}" for cause, tokens in causes.items())


def evaluation_text(line: dict[str, Any]) -> str:
    failed = f", {line['failed']} failed" if line.get("failed") else ""
    return (
        f"evaluation of version {line.get('version')}: reward {number(line.get('eval_reward'))}"
        f" over {line.get('num_items', '–')} prompts{failed}, {number(line.get('duration_s'), 1)} s"
    )


def panel(state: DisplayState, width: int) -> Panel:
    """The live panel: progress, then one row per question a person asks while the run goes on."""
    m = state.line
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rows.add_row("step", _progress(state, width))
    rows.add_row("reward", _reward(state, max(8, width - 60)))
    rows.add_row("staleness", _staleness(m, state.limit))
    rows.add_row("idle", _pairs(("trainer", percent(m.get("trainer_idle_fraction"))), ("rollout", percent(m.get("rollout_idle_fraction")))))
    rows.add_row(
        "tokens/s",
        _pairs(("generated", number(m.get("generated_tokens_per_s"), 0)), ("trained", number(m.get("trained_tokens_per_s"), 0))),
    )
    rows.add_row(
        "flow",
        _pairs(
            ("buffer", f"{_whole(m.get('buffer_groups'))} groups"),
            ("in flight", f"{_whole(m.get('slots_taken'))}/{_whole(m.get('slots', state.slots))}"),
            ("weight sync", milliseconds(m.get("weight_sync_s"))),
        ),
    )
    if waste := waste_text(m):
        rows.add_row("waste", _pairs(("tokens", waste)))
    rows.add_row(
        "policy",
        _pairs(
            ("entropy", number(m.get("entropy"))),
            ("completion", f"{number(m.get('completion_tokens_mean'), 1)} tokens"),
            ("truncated", percent(m.get("truncated_fraction"))),
        ),
    )
    if state.answer:
        rows.add_row("sample", _answer(state.answer, max(20, width - 16)))
    title = Text.assemble((state.name, "bold"), ("  " + state.folder, "dim"))
    return Panel(Group(rows), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1), border_style="cyan")


def _progress(state: DisplayState, width: int) -> Table:
    cells = Table.grid(padding=(0, 2))
    left = state.remaining_s
    clock = f"{duration(state.elapsed_s)} elapsed" + ("" if left is None else f", about {duration(left)} left")
    bar = ProgressBar(total=max(1, state.steps), completed=state.done, width=max(10, min(40, width - 60)))
    cells.add_row(f"{state.done}/{state.steps}", bar, Text(clock, style="dim"))
    return cells


def _reward(state: DisplayState, spark_width: int) -> Text:
    text = Text.assemble(
        (number(state.line.get("reward_mean")), "bold green"), "  ", (sparkline(list(state.rewards), spark_width), "green")
    )
    first, last = state.first_evaluation, state.last_evaluation
    if last is not None and first is not None:
        text.append("   held out ", style="dim")
        if last is not first:
            text.append(f"{number(first.get('eval_reward'))} → ", style="dim")
        text.append(number(last.get("eval_reward")), style="bold green")
        text.append(f" (version {last.get('version')})", style="dim")
    return text


def _staleness(m: dict[str, Any], limit: int | None) -> Text:
    text = _pairs(
        ("mean", number(m.get("staleness_mean"), 2)), ("p99", _whole(m.get("staleness_p99"))), ("max", _whole(m.get("staleness_max")))
    )
    text.append(f" {bound_text(limit, m.get('staleness_bound'))}", style="dim")
    text.append("   several versions ", style="dim")
    text.append(percent(m.get("several_versions_fraction")))
    return text


def _answer(answer: tuple[str, str, float | None], width: int) -> Text:
    prompt, completion, reward = answer
    half = max(10, (width - 16) // 2)
    return Text.assemble(
        (one_line(prompt, half), "dim"), ("  →  ", "dim"), one_line(completion, half), (f"  reward {number(reward, 2)}", "dim")
    )


def _pairs(*pairs: tuple[str, str]) -> Text:
    text = Text()
    for name, value in pairs:
        text.append(("   " if text else "") + name + " ", style="dim")
        text.append(value)
    return text


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
