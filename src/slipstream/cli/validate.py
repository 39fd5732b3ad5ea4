"""`slipstream validate`: everything that can be checked without training, and what the settings amount to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.arguments import OVERRIDES_HELP, add_json, add_run, load_run
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.cli.preflight import Findings
    from slipstream.config.arithmetic import Arithmetic
    from slipstream.config.settings import Config

HELP = "check a run file and print its settings and what they amount to; no training"
EPILOG = f"""{OVERRIDES_HELP}

examples:
  slipstream validate run.toml
  slipstream validate run.toml overlay.toml --trainer.groups_per_step 8 --json

Checked: every setting and what they say of each other, the data and each of its prompts, rewards, tools and loss (imported), the tokenizer,
the model's configuration, devices, memory, the run folder's disk. Not checked: the weights. Where something is wrong, that is all that is
printed. Exit code 2 for wrong settings, 1 for anything else that would stop the run."""
TAKES_SETTINGS = True


class CannotStart(SlipstreamError):
    """What would stop the run, none of it a wrong setting."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        several = f"{len(problems)} problems would stop the run:\n" + "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(problems[0] if len(problems) == 1 else several)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.preflight import check_together, preflight
    from slipstream.config.save import to_toml

    loaded = load_run(args.run, args.overrides, experiments=True)
    runs = {each.name: replace(loaded, config=each.config, experiments=()) for each in loaded.experiments} or {"": loaded}
    found = {name: preflight(one, resumes=args.run[0].is_dir()) for name, one in runs.items()}
    together = check_together(loaded, list(found.values()), resumes=args.run[0].is_dir()) if loaded.experiments else None
    checked = [Checked.of(name, one.config, found[name]) for name, one in runs.items()]
    problems = problems_of(found) + (together.problems if together else [])
    if problems:
        for note in dict.fromkeys(note for each in checked for note in each.notes):
            print(f"note: {note}", file=sys.stderr)
        raise as_one(problems)
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False, markup=False, soft_wrap=True)
    console.print(to_toml(loaded.config, loaded.experiments))
    for each in checked:
        for line in each.lines():
            console.print(line)
    if together:
        console.print(f"\nall of them: {memory_in_words(together.facts)}")
    console.print("valid: the run can start")
    if args.json:
        objects = {each.name: each.to_json() for each in checked}
        print(json.dumps({"valid": True, **(objects[""] if not together else {"experiments": objects, **together.facts})}))
    return 0


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that was checked: what it amounts to, once nothing is wrong with it."""

    name: str  # of the experiment; empty: the only run
    config: Config
    found: Findings
    notes: list[str]

    @classmethod
    def of(cls, name: str, config: Config, found: Findings) -> Checked:
        from slipstream.config.checks import advice

        return cls(name, config, found, [*found.notes, *advice(config)])

    @property
    def numbers(self) -> Arithmetic:
        from slipstream.config.arithmetic import arithmetic

        engine = self.config.engine.model_copy(update={"max_context": self.found.facts["context_tokens"]})
        return arithmetic(self.config.model_copy(update={"engine": engine}), self.found.facts["train_rows"])

    def lines(self) -> list[str]:
        from slipstream.config.losses import resolve
        from slipstream.controller.thresholds import in_words

        limits = [f"threshold: {in_words(limit)}" for limit in self.config.threshold]
        head = [f"\nexperiment {self.name}"] if self.name else []
        notes = [f"note: {note}" for note in self.notes]
        return [*head, *self.numbers.lines(), *resolve(self.config.loss).lines(), *limits, *facts_in_words(self.found.facts), *notes]

    def to_json(self) -> dict[str, Any]:
        from slipstream.config.losses import resolve

        settings, loss = self.config.model_dump(mode="json"), resolve(self.config.loss).to_json()
        return {"settings": settings, "arithmetic": self.numbers.to_json(), "loss": loss, **self.found.facts, "notes": self.notes}


def problems_of(found: Mapping[str, Findings]) -> list[SlipstreamError]:
    """Those of one run; of several, each once, and which of them have it where not all do."""
    named: dict[tuple[bool, str], list[str]] = {}
    for name, findings in found.items():
        for problem in findings.problems:
            for line in getattr(problem, "problems", [str(problem)]):
                named.setdefault((isinstance(problem, ConfigError), line), []).append(name)
    out: list[SlipstreamError] = []
    for (wrong_setting, line), names in named.items():
        text = line if len(names) == len(found) else f"experiment {', '.join(names)}: {line}"
        out.append(ConfigError(text) if wrong_setting else CannotStart([text]))
    return out


def as_one(problems: Sequence[SlipstreamError]) -> SlipstreamError:
    """One error that lists them all: ConfigError (exit code 2) if any of them is a wrong setting."""
    lines = [line for problem in problems for line in getattr(problem, "problems", [str(problem)])]
    return ConfigError(lines) if any(isinstance(problem, ConfigError) for problem in problems) else CannotStart(lines)


def facts_in_words(facts: dict[str, Any]) -> list[str]:
    rows = f"{facts['train_rows']:,} training rows, {facts['eval_rows']:,} evaluation rows"
    prompt = f"longest prompt {facts['longest_prompt_tokens']:,} of {facts['context_tokens']:,} tokens"
    memory = memory_in_words(facts)
    if files := facts.get("weight_file_bytes"):
        memory += f"; weights in flight take {files / 2**30:.2f} GiB of disk"
    adapter = [facts["adapter"]] if facts.get("adapter") else []
    return [f"{rows}; {prompt}, vocabulary {facts['vocabulary']:,}", *adapter, *facts.get("frozen_models", ()), memory]


def memory_in_words(facts: dict[str, Any]) -> str:
    return f"memory about {facts['memory']}" if facts["memory"] else "memory unknown until the model is on this machine"
