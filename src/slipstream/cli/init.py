"""`slipstream init`: a folder to start from, with a run file, a reward function and a README that run as they are."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from slipstream.errors import ConfigError

HELP = "write a run file, a reward function and a README to start from"
EPILOG = """example:
  slipstream init my-task
  slipstream train my-task/run.toml

Nothing that exists is overwritten."""
TAKES_SETTINGS = False

FILES = ("run.toml", "rewards.py", "README.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write; made if it is not there")


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    taken = [name for name in FILES if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{folder} already has {', '.join(taken)}; nothing was written, give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    templates = resources.files("slipstream.cli") / "template"
    for name in FILES:
        (folder / name).write_text((templates / name).read_text(encoding="utf-8").replace("@FOLDER@", str(folder)), encoding="utf-8")
    print(f"wrote {', '.join(FILES)} to {folder}\n\n  slipstream train {folder}/run.toml")
    return 0
