"""`slipstream train`: run it, show it, say how it ended."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from slipstream.cli.arguments import OVERRIDES_HELP, add_json, add_run, load_run
from slipstream.errors import ConfigError

HELP = "train a model as a run file says"
EPILOG = f"""{OVERRIDES_HELP}

examples:
  slipstream train recipes/quickstart.toml
  slipstream train run.toml big.toml --trainer.steps 200 --run.name big
  slipstream train --resume                     go on with the newest run here
  slipstream train run.toml --resume runs/x --trainer.steps 400
  slipstream train --resume runs/x --rewind 50  go back to the checkpoint of step 50, on purpose
  slipstream train experiments.toml             [[experiment]] tables: several runs over one model, an adapter each

The first Ctrl-C saves and ends with the command that resumes; the second stops at once (exit code 130)."""
TAKES_SETTINGS = True
NEWEST = "newest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, optional=True)
    parser.add_argument(
        "--resume", metavar="FOLDER", nargs="?", const=NEWEST, help="go on with the run in FOLDER; without FOLDER, the newest of this name"
    )
    parser.add_argument(
        "--rewind", metavar="STEP", type=int, help="with --resume: go back to this step's checkpoint and drop what came after"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    paths, resume = where_to_resume(args.run, args.resume)
    if args.rewind is not None and resume is None:
        raise ConfigError("--rewind goes with --resume: it goes back within an existing run")
    loaded = load_run(paths, args.overrides, experiments=True)
    from slipstream.observe.report import print_report
    from slipstream.observe.state import shown
    from slipstream.run import train

    stream = sys.stderr if args.json else sys.stdout
    result = train(loaded, resume=resume, rewind=args.rewind, stream=stream, started=started)
    for name, experiment in result.experiments.items():
        print(f"\n── {name} ──", file=stream)
        print_report(experiment.metrics, stream)
    if not result.experiments:
        print_report(result.metrics, stream)
    elif any(each.metrics["steps"] < each.metrics["steps_planned"] for each in result.experiments.values()):
        print(f"\nall of them go on with\n  slipstream train --resume {shown(result.run_folder)}", file=stream)
    if args.json:
        print(json.dumps(result.metrics), flush=True)
    return 0


def where_to_resume(paths: list[Path], resume: str | None) -> tuple[list[Path], str | None]:
    """(run files, folder to resume or "newest" or None). With --resume the folder's own config.toml serves where no run file is given."""
    if resume is not None and resume.endswith(".toml"):  # `--resume run.toml`: argparse took the run file for the folder
        return [Path(resume), *paths], NEWEST
    if resume is None:
        if not paths:
            raise ConfigError("no run file: slipstream train RUN.toml, or slipstream train --resume [FOLDER]")
        return paths, None
    if not paths and resume == NEWEST:
        newest = newest_run(Path("runs"))
        return [newest], str(newest)
    if resume == NEWEST and paths[0].is_dir():
        return paths, str(paths[0])
    return paths or [Path(resume)], resume


def newest_run(folder: Path) -> Path:
    """The run folder below `folder` that was written to last."""
    runs = [path.parent for path in folder.glob("*/config.toml")] if folder.is_dir() else []
    if not runs:
        raise ConfigError(f"--resume: there is no run in {folder.absolute()}; give the run folder: --resume FOLDER")
    return max(runs, key=lambda run: (run / "config.toml").stat().st_mtime)
