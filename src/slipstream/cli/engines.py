"""`slipstream engines`: the engines of a run that trains; add one, drop one."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.arguments import add_json, run_folder
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.launch.control import EngineFacts

HELP = "list the engines of a run that trains, add one or drop one"
EPILOG = """examples:
  slipstream engines list runs/quickstart-20250101-120000
  slipstream engines add  runs/quickstart-20250101-120000             returns once the new engine serves
  slipstream engines add  runs/quickstart-20250101-120000 --url http://127.0.0.1:8001      a vLLM server that runs already
  slipstream engines drop runs/quickstart-20250101-120000 engine-1

An added engine joins at the current version. What a dropped one was generating goes on elsewhere from its tokens."""
TAKES_SETTINGS = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="{list,add,drop}", choices=("list", "add", "drop"), help="what to do")
    parser.add_argument("run", metavar="FOLDER", type=Path, help="run folder of a run that trains")
    parser.add_argument("engine", metavar="ENGINE", nargs="?", help="of drop: which one")
    parser.add_argument("--url", help="of add, with engine.type = vllm: a running server, http://host:port or unix:/path")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.launch import control

    folder = run_folder(args.run)
    if (args.what == "drop") != (args.engine is not None):
        raise ConfigError("drop needs the engine to drop: slipstream engines drop FOLDER engine-1; list and add take none")
    if args.url and args.what != "add":
        raise ConfigError(f"--url is of add, not of {args.what}; leave it out")
    if args.what == "list":
        engines = asyncio.run(control.ask(folder, "list_engines"))
        print(json.dumps([_object(engine) for engine in engines]) if args.json else "\n".join(map(in_words, engines)))
        return 0
    sentence = asyncio.run(control.ask(folder, f"{args.what}_engine", args.engine if args.what == "drop" else args.url or ""))
    print(json.dumps({"done": sentence}) if args.json else sentence)
    return 0


def in_words(engine: EngineFacts) -> str:
    """One line."""
    starts = f", started anew {engine.restarts} {'time' if engine.restarts == 1 else 'times'}" if engine.restarts else ""
    if engine.version is None:
        return f"{engine.engine_id}  is starting{starts}"
    if engine.version < 0:
        return f"{engine.engine_id}  waits for its first weights{starts}"
    return f"{engine.engine_id}  at version {engine.version} for {engine.version_s:.1f} s{starts}"


def _object(engine: EngineFacts) -> dict[str, object]:
    return {"engine": engine.engine_id, "version": engine.version, "version_s": engine.version_s, "restarts": engine.restarts}
