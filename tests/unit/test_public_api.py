"""The public API is frozen: what changes it changes `public_api.txt` too, on purpose.

Made by `python tests/unit/test_public_api.py > tests/unit/public_api.txt`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import slipstream
from slipstream import protocols
from slipstream.cli import main as cli
from slipstream.run import Result

FROZEN = Path(__file__).parent / "public_api.txt"
COMMAND = "python tests/unit/test_public_api.py > tests/unit/public_api.txt"


def public_api() -> str:
    """One line per name, parameter, field, method, option and exit code."""
    return "".join(f"{line}\n" for line in [*_python(), "", *_protocols(), "", *_command_line()])


def _python() -> Iterator[str]:
    yield from (f"slipstream.{name}" for name in slipstream.__all__)
    for parameter in inspect.signature(slipstream.train).parameters.values():
        yield f"slipstream.train({parameter.kind.name.lower()}: {parameter})"
    yield from (f"slipstream.Result.{field.name}: {field.type}" for field in dataclasses.fields(Result))


def _protocols() -> Iterator[str]:
    for name, item in vars(protocols).items():
        if not (inspect.isclass(item) and item.__module__ == protocols.__name__):
            continue
        if getattr(item, "_is_protocol", False):
            yield from (f"{name}.{key}: {kind}" for key, kind in getattr(item, "__annotations__", {}).items())
            for key, method in vars(item).items():
                if inspect.isfunction(method) and not key.startswith("_"):
                    yield f"{name}.{'async ' if inspect.iscoroutinefunction(method) else ''}{key}{inspect.signature(method)}"
        else:
            yield from (f"{name}.{key}: {kind}" for key, kind in getattr(item, "__annotations__", {}).items())


def _command_line() -> Iterator[str]:
    codes = {"done": cli.DONE, "failed": cli.FAILED, "wrong usage": cli.WRONG_USAGE, "interrupted": cli.INTERRUPTED}
    yield from (f"exit code {code}: {meaning}" for meaning, code in codes.items())
    parser = cli.build_parser()
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for verb, sub in verbs.choices.items():
        arguments = (" ".join(action.option_strings) or str(action.metavar) for action in sub._actions if action.dest != "help")
        yield f"slipstream {verb}: {', '.join(arguments)}" + (", settings" if cli.VERBS[verb].TAKES_SETTINGS else "")


def test_the_public_api_is_frozen():
    now, committed = public_api(), FROZEN.read_text(encoding="utf-8")
    changes = [line for line in difflib.unified_diff(committed.splitlines(), now.splitlines(), lineterm="", n=0) if line[:1] in "+-"]
    assert now == committed, "the public API has changed:\n" + "\n".join(changes[2:]) + f"\nIf that is meant: {COMMAND}"


def test_what_is_frozen_is_not_empty():
    text = public_api()
    for line in ("slipstream.train", "slipstream.Result.metrics: dict[str, Any]", "ControllerAPI.async admit(self, room: 'int') -> 'Work'"):
        assert line in text
    assert "exit code 130: interrupted" in text and "slipstream init: DIR" in text


def test_every_public_name_is_there():
    assert all(getattr(slipstream, name) is not None for name in slipstream.__all__)
    assert typing.get_type_hints(slipstream.train)["return"] is Result


if __name__ == "__main__":
    sys.stdout.write(public_api())
