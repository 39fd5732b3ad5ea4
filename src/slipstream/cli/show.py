"""How a rollout is printed: the same for every verb that prints one."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from slipstream.observe.samples import Sample
from slipstream.observe.state import number


class ReaderLeft(Exception):
    """Nobody reads the output any more, as in `slipstream samples ... | head`."""


class Output(Console):
    """Where a verb prints: plain text in a pipe, colours on a terminal."""

    def __init__(self, stream: IO[str]):
        super().__init__(file=stream, highlight=False)

    def on_broken_pipe(self) -> None:
        raise ReaderLeft


def show_sample(console: Console, sample: Sample, title: str | None = None) -> None:
    """Prompt, completion, and one line of facts: reward and its parts, versions, tokens, why it stopped."""
    console.print(Rule(title or _title(sample), align="left", style="dim"))
    console.print(Text.assemble(("prompt      ", "bold"), _indented(sample.prompt)))
    console.print(Text.assemble(("completion  ", "bold"), _indented(sample.completion)))
    if sample.error:
        console.print(Text.assemble(("failed      ", "bold red"), _indented(sample.error)))
    console.print(Text.assemble(("reward      ", "bold"), (number(sample.reward), "bold green"), ("  " + facts(sample), "dim")))


def facts(sample: Sample) -> str:
    parts = [f"{name} {number(value)}" for name, value in sample.parts.items()]
    if sample.versions:
        oldest, newest = sample.versions
        parts.append(f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}")
    parts.append(f"{sample.num_tokens} tokens")
    if sample.stop_reason:
        parts.append({"stop": "stopped by itself", "length": "cut at the token limit", "abort": "aborted"}[sample.stop_reason])
    return ", ".join(parts)


def _title(sample: Sample) -> str:
    if sample.kind == "evaluation":
        return f"version {sample.step} · held-out prompt {sample.group_id}"
    return f"step {sample.step} · group {sample.group_id} · sample {sample.sample}"


def _indented(text: str) -> str:
    """Further lines below the first; control characters made visible."""
    shown = "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return shown.replace("\n", "\n            ")
