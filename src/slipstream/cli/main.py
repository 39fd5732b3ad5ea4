"""`slipstream VERB ...`: finds the verb, runs it, and turns how it ended into an exit code.

0 done; 1 failed, with one clear message; 2 wrong usage or settings; 130 stopped by a second Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence

import slipstream
from slipstream.cli import engines, evaluate, export, generate, init, inspect, rollout, samples, train, validate
from slipstream.cli.arguments import split_overrides
from slipstream.cli.show import ReaderLeft
from slipstream.config.keys import nearest
from slipstream.errors import ConfigError, ResumeError, SlipstreamError

VERBS = {
    "train": train,
    "validate": validate,
    "rollout": rollout,
    "eval": evaluate,
    "generate": generate,
    "samples": samples,
    "inspect": inspect,
    "engines": engines,
    "export": export,
    "init": init,
}

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code. (The console script passes it to `sys.exit`.)"""
    own, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    args = parse(own, overrides)
    try:
        return VERBS[args.verb].run(args)
    except KeyboardInterrupt:
        return _told(args, "stopped at once", INTERRUPTED)
    except Exception as error:
        if isinstance(error, ReaderLeft) or (isinstance(error, BrokenPipeError) and _stdout_is_broken()):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at exit
            return DONE  # the reader has what it wanted
        return _failed(args, error)


def parse(own: Sequence[str], overrides: Sequence[str]) -> argparse.Namespace:
    """The arguments of one verb, with `overrides` beside them; exits with code 2 and a hint where they are wrong."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(own)
    if unknown:
        options = [option for option in unknown if option.startswith("--")]
        near = {option: nearest(option[2:].replace("-", "_")) for option in options}
        hints = [f"{option}: did you mean --{key}?" for option, key in near.items() if key]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"\n  {hint}" for hint in hints))
    if overrides and not VERBS[args.verb].TAKES_SETTINGS:
        parser.error(f"{args.verb} takes no settings, given were: {' '.join(overrides)}")
    args.overrides = list(overrides)
    return args


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Asynchronous reinforcement-learning post-training of language models.",
        epilog="Start with `slipstream init DIR` or `slipstream train recipes/quickstart.toml`; `slipstream VERB --help` tells more.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=verb.HELP,
            description=verb.HELP[0].upper() + verb.HELP[1:] + ".",
            epilog=verb.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_arguments(sub)
        sub.add_argument("--traceback", action="store_true", help="on failure, show where in the code (also SLIPSTREAM_DEBUG=1)")
    return parser


def _stdout_is_broken() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _failed(args: argparse.Namespace, error: Exception) -> int:
    """The exit code of this error, told in one message; the traceback where asked for."""
    error = first_cause(error)
    code = WRONG_USAGE if isinstance(error, ConfigError | ResumeError) else FAILED
    ours = isinstance(error, SlipstreamError)
    message = str(error) if ours else f"{type(error).__name__}: {error}"
    if args.traceback or os.environ.get("SLIPSTREAM_DEBUG") == "1":
        traceback.print_exception(error)
    elif not ours:
        message += "\n(not one of slipstream's own errors; --traceback shows where it came from)"
    return _told(args, message, code, getattr(error, "problems", None))


def _told(args: argparse.Namespace, message: str, code: int, problems: list[str] | None = None) -> int:
    """Say it on stderr, and with --json as an object on stdout, too: `problems` one by one, where the error lists them."""
    print(f"slipstream {args.verb}: {message}", file=sys.stderr)
    if getattr(args, "json", False):
        listed = {} if problems is None else {"problems": problems}
        print(json.dumps({"error": message, "exit_code": code, **listed}))
    return code


def first_cause(error: Exception) -> Exception:
    """The error of the first task that failed where several ended together; one of slipstream's own comes first."""
    while isinstance(error, ExceptionGroup):
        ours, _ = error.split(SlipstreamError)
        error = (ours or error).exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
