"""`slipstream validate`: everything that can be checked without training, and what the settings amount to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from slipstream.cli.arguments import OVERRIDES_HELP, add_json, add_run, load_run
from slipstream.errors import ConfigError, SlipstreamError

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
    from slipstream.cli.preflight import preflight
    from slipstream.config.arithmetic import arithmetic
    from slipstream.config.checks import advice
    from slipstream.config.losses import resolve
    from slipstream.config.save import to_toml
    from slipstream.controller.thresholds import in_words

    loaded = load_run(args.run, args.overrides)
    found = preflight(loaded, resumes=args.run[0].is_dir())
    notes = [*found.notes, *advice(loaded.config)]
    if found.problems:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        raise as_one(found.problems)
    engine = loaded.config.engine.model_copy(update={"max_context": found.facts["context_tokens"]})
    numbers = arithmetic(loaded.config.model_copy(update={"engine": engine}), found.facts["train_rows"])
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False, markup=False, soft_wrap=True)
    console.print(to_toml(loaded.config))
    loss = resolve(loaded.config.loss)
    limits = [f"threshold: {in_words(limit)}" for limit in loaded.config.threshold]
    for line in [*numbers.lines(), *loss.lines(), *limits, *facts_in_words(found.facts), *(f"note: {note}" for note in notes)]:
        console.print(line)
    console.print("valid: the run can start")
    if args.json:
        settings = loaded.config.model_dump(mode="json")
        derived = {"arithmetic": numbers.to_json(), "loss": loss.to_json(), **found.facts}
        print(json.dumps({"valid": True, "settings": settings, **derived, "notes": notes}))
    return 0


def as_one(problems: Sequence[SlipstreamError]) -> SlipstreamError:
    """One error that lists them all: ConfigError (exit code 2) if any of them is a wrong setting."""
    lines = [line for problem in problems for line in getattr(problem, "problems", [str(problem)])]
    return ConfigError(lines) if any(isinstance(problem, ConfigError) for problem in problems) else CannotStart(lines)


def facts_in_words(facts: dict[str, Any]) -> list[str]:
    rows = f"{facts['train_rows']:,} training rows, {facts['eval_rows']:,} evaluation rows"
    prompt = f"longest prompt {facts['longest_prompt_tokens']:,} of {facts['context_tokens']:,} tokens"
    memory = f"memory about {facts['memory']}" if facts["memory"] else "memory unknown until the model is on this machine"
    if files := facts.get("weight_file_bytes"):
        memory += f"; weights in flight take {files / 2**30:.2f} GiB of disk"
    adapter = [facts["adapter"]] if facts.get("adapter") else []
    return [f"{rows}; {prompt}, vocabulary {facts['vocabulary']:,}", *adapter, *facts.get("frozen_models", ()), memory]
