"""`slipstream validate`: everything that can be checked without training, and what the settings amount to."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.arguments import OVERRIDES_HELP, add_json, add_run, load_run
from slipstream.config.settings import Config
from slipstream.errors import DataError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.config.load import LoadedConfig

HELP = "check a run file and print its settings and what they amount to; no training"
EPILOG = f"""{OVERRIDES_HELP}

examples:
  slipstream validate run.toml
  slipstream validate run.toml overlay.toml --trainer.groups_per_step 8 --json

Checked: every setting and what they say of each other, the data and each of its prompts, the rewards (imported), the tokenizer and the
model's configuration, the run folder's disk. Exit code 2 for wrong settings, 1 for anything else that would stop the run."""
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.config.arithmetic import arithmetic
    from slipstream.config.checks import advice
    from slipstream.config.save import to_toml

    loaded = load_run(args.run, args.overrides)
    console = Console(file=sys.stderr if args.json else sys.stdout, highlight=False, markup=False, soft_wrap=True)
    console.print(to_toml(loaded.config))
    facts, notes = check(loaded)
    limits = loaded.config.engine.model_copy(update={"max_context": facts["context_tokens"]})
    numbers = arithmetic(loaded.config.model_copy(update={"engine": limits}), facts["train_rows"])
    for line in [*numbers.lines(), *facts_in_words(facts)]:
        console.print(line)
    for note in [*notes, *advice(loaded.config)]:
        console.print(f"note: {note}")
    console.print("valid: the run can start")
    if args.json:
        settings = loaded.config.model_dump(mode="json")
        print(json.dumps({"valid": True, "settings": settings, "arithmetic": numbers.to_json(), **facts, "notes": notes}))
    return 0


def check(loaded: LoadedConfig) -> tuple[dict[str, Any], list[str]]:
    """Check data, model, prompts, rewards, sinks and disk: (facts, notes). Raises the first group of problems, all of one kind together."""
    from slipstream.data import load_data
    from slipstream.models.loading import load_tokenizer
    from slipstream.models.memory import check_memory
    from slipstream.observe.sinks import check_installed

    config = loaded.config
    check_installed(list(config.metrics.sinks))
    data = load_data(config, loaded.base_folder)
    tokenizer, info = load_tokenizer(config.model)
    limit = min(config.engine.max_context or info.context_tokens, info.context_tokens)
    longest = check_prompts(config, [*data.train, *data.eval], tokenizer, limit)
    memory = check_memory(config, info.source, longest)
    asyncio.run(check_rewards(config))
    check_disk(config)
    facts = {
        "train_rows": len(data.train),
        "eval_rows": len(data.eval),
        "longest_prompt_tokens": longest,
        "context_tokens": limit,
        "vocabulary": info.vocab_size,
        "memory_bytes": None if memory is None else memory.parts,
        "memory": None if memory is None else str(memory),
    }
    return facts, [*info.notes, *data.notes()]


def check_prompts(config: Config, rows: list[dict[str, Any]], tokenizer: Any, max_context: int) -> int:
    """Render every prompt; the longest in tokens. DataError names how many do not fit, with an example."""
    from slipstream.data import render_messages
    from slipstream.rollout.rendering import PromptDoesNotFit, Renderer

    renderer = Renderer(tokenizer, max_context)
    longest, misfits = 0, []
    for number, row in enumerate(rows, start=1):
        try:
            ids = renderer.prompt(render_messages(row, config.data, f"row {number}"), config.rollout.max_new_tokens)
            longest = max(longest, len(ids))
        except PromptDoesNotFit as error:
            misfits.append(f"row {number}: {error}")
    if len(misfits) == len(rows):
        raise DataError(f"no prompt fits: {misfits[0]}; raise engine.max_context or lower rollout.max_new_tokens")
    if misfits:
        print(f"note: {len(misfits)} of {len(rows)} prompts do not fit and would be skipped; {misfits[0]}", file=sys.stderr)
    return longest


async def check_rewards(config: Config) -> None:
    """Import every reward in the process that would run it."""
    from slipstream.scoring.score import close_scorers, start_scorers
    from slipstream.scoring.scorers import make_scorers

    scorers = make_scorers(config.reward)
    try:
        await start_scorers(scorers)
    finally:
        await close_scorers(scorers)


def check_disk(config: Config) -> None:
    """The run folder's disk can hold a ledger."""
    from slipstream.controller.run_folder import NETWORK_FILE_SYSTEMS, file_system

    folder = Path(config.run.folder or "runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    kind = file_system(existing)
    if kind in NETWORK_FILE_SYSTEMS:
        raise SlipstreamError(
            f"{folder} is on a network file system ({kind}), where the ledger cannot live; set run.folder to a local disk"
        )


def facts_in_words(facts: dict[str, Any]) -> list[str]:
    rows = f"{facts['train_rows']:,} training rows, {facts['eval_rows']:,} evaluation rows"
    prompt = f"longest prompt {facts['longest_prompt_tokens']:,} of {facts['context_tokens']:,} tokens"
    memory = f"memory about {facts['memory']}" if facts["memory"] else "memory unknown until the model is on this machine"
    return [f"{rows}; {prompt}, vocabulary {facts['vocabulary']:,}", memory]
