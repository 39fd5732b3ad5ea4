"""`slipstream export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.cli.arguments import run_folder
from slipstream.config.settings import ModelSettings
from slipstream.errors import ConfigError

HELP = "write a checkpoint as a Hugging Face folder that from_pretrained loads"
EPILOG = """examples:
  slipstream export runs/quickstart-20250101-120000 model/          the newest checkpoint
  slipstream export runs/quickstart-20250101-120000 model/ --version 50

  slipstream export runs/lora-20250101-120000 adapter/              the LoRA adapter, as peft and vLLM load it
  slipstream export runs/lora-20250101-120000 model/ --merged       whole weights with the adapter in them

The folder holds safetensors, config and tokenizer with its chat template; the loaded model gives the same greedy tokens. That of a run with
[lora] holds the adapter alone, unless --merged folds it into the weights."""
TAKES_SETTINGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="FOLDER", type=Path, help="run folder")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write; must be empty or not there")
    parser.add_argument("--merged", action="store_true", help="of a run with [lora]: whole weights, not the adapter")
    parser.add_argument("--version", metavar="STEP", type=int, help="step of the checkpoint; the newest by default")


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.weights import checkpoint_folder
    from slipstream.config.load import load_config

    folder = run_folder(args.run)
    checkpoint = checkpoint_folder(folder, args.version)
    refuse_occupied(args.target)
    settings = load_config([folder], checked=False).config.model
    adapter = checkpoint / "adapter"
    if args.merged and not adapter.is_dir():
        raise ConfigError(f"--merged is about a run with [lora]; {checkpoint} holds whole weights already, leave --merged out")
    if adapter.is_dir() and not args.merged:
        export_adapter(settings, checkpoint, args.target)
        print(f"the adapter of {checkpoint} written to {args.target}")
        return 0
    num_parameters = export(settings, checkpoint, args.target)
    print(f"{checkpoint} ({num_parameters:,} parameters) written to {args.target}")
    return 0


def refuse_occupied(target: Path) -> None:
    """ConfigError where something is at `target` that export would overwrite or mix with."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; nothing was written, give another place")


def export(settings: ModelSettings, checkpoint: Path, target: Path) -> int:
    """Write the checkpoint's model, an adapter merged, and tokenizer to `target`; the number of parameters."""
    from transformers.utils.logging import disable_progress_bar

    from slipstream.cli.weights import load_trained

    disable_progress_bar()
    model, tokenizer, info = load_trained(settings, checkpoint)
    model.set_attn_implementation("sdpa")  # slipstream's own function is nothing a stranger's transformers knows
    with _written_whole(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return info.num_parameters


def export_adapter(settings: ModelSettings, checkpoint: Path, target: Path) -> None:
    """Write the checkpoint's adapter to `target`, with the tokenizer, whose chat template it was trained with."""
    from slipstream.checkpoint_files import verify_checkpoint
    from slipstream.models.loading import load_tokenizer

    verify_checkpoint(checkpoint)
    tokenizer, _ = load_tokenizer(settings)
    with _written_whole(target) as folder:
        shutil.copytree(checkpoint / "adapter", folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """A folder beside the target, not there yet, that is renamed to it in the end: a folder with the target's name is whole."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    yield temporary
    if target.is_dir():
        target.rmdir()
    temporary.rename(target)
