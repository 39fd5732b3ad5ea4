"""`slipstream export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from slipstream.cli.arguments import run_folder
from slipstream.config.settings import ModelSettings
from slipstream.errors import ConfigError

HELP = "write a checkpoint as a Hugging Face folder that from_pretrained loads"
EPILOG = """examples:
  slipstream export runs/quickstart-20250101-120000 model/          the newest checkpoint
  slipstream export runs/quickstart-20250101-120000 model/ --version 50

The folder holds safetensors, config and tokenizer with its chat template; the loaded model gives the same greedy tokens."""
TAKES_SETTINGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="FOLDER", type=Path, help="run folder")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write; must be empty or not there")
    parser.add_argument("--version", metavar="STEP", type=int, help="step of the checkpoint; the newest by default")


def run(args: argparse.Namespace) -> int:
    from slipstream.cli.weights import checkpoint_folder
    from slipstream.config.load import load_config

    folder = run_folder(args.run)
    checkpoint = checkpoint_folder(folder, args.version)
    refuse_occupied(args.target)
    settings = load_config([folder], checked=False).config.model
    num_parameters = export(settings, checkpoint, args.target)
    print(f"{checkpoint} ({num_parameters:,} parameters) written to {args.target}")
    return 0


def refuse_occupied(target: Path) -> None:
    """ConfigError where something is at `target` that export would overwrite or mix with."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; nothing was written, give another place")


def export(settings: ModelSettings, checkpoint: Path, target: Path) -> int:
    """Write the checkpoint's model and tokenizer to `target`; the number of parameters.

    Written beside the target and renamed, so that a folder with this name is whole.
    """
    from transformers.utils.logging import disable_progress_bar

    from slipstream.cli.weights import load_trained

    disable_progress_bar()
    model, tokenizer, info = load_trained(settings, checkpoint)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("sdpa")  # slipstream's own function is nothing a stranger's transformers knows
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    if target.is_dir():
        target.rmdir()
    temporary.rename(target)
    return info.num_parameters
