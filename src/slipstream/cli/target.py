"""What rollout, eval and generate have in common: RUN, which weights, and how to sample."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.arguments import add_run, load_run
from slipstream.cli.weights import checkpoint_folder, kept_checkpoints
from slipstream.errors import ConfigError
from slipstream.types import Sampling

if TYPE_CHECKING:
    from slipstream.config.load import LoadedConfig


@dataclass(frozen=True, slots=True)
class Target:
    """The settings, and the weights meant."""

    loaded: LoadedConfig
    checkpoint: Path | None  # None: the model as it is before training
    label: str  # the model in words


def add_target(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--version", metavar="STEP", type=int, help="of a run folder: the checkpoint of this step; the newest by default")
    which.add_argument("--untrained", action="store_true", help="of a run folder: the model before training")
    which.add_argument("--model", metavar="NAME", help="another model: a folder (from export, say), GGUF file, Hugging Face id")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest tokens; 0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens that make up this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="sample among tokens at least this share as likely as the likeliest")
    parser.add_argument("--max-new-tokens", type=int, help="tokens per turn at most; rollout.max_new_tokens by default")


def find_target(args: argparse.Namespace, *, checked: bool = True) -> Target:
    """The settings (see `load_run`) and weights that the arguments mean; says so on stderr where a choice was made."""
    overrides = list(args.overrides)
    if args.model is not None:
        overrides += ["--model.name", args.model, "--model.quantize", "none"]  # which is about the base of the run's adapter
    loaded = load_run(args.run, overrides, checked=checked, trains=False)
    folder = args.run[0]
    name = loaded.config.model.name
    if loaded.config.engine.type == "openai":
        return _server_target(args, loaded)
    if args.model is not None:
        return Target(loaded, None, name)
    if not folder.is_dir():
        if args.version is not None or args.untrained:
            option = "--version" if args.version is not None else "--untrained"
            raise ConfigError(f"{option} is about a run folder; {folder} is a run file, whose model is untrained")
        return Target(loaded, None, f"{name}, untrained")
    if args.untrained:
        return Target(loaded, None, f"{name}, untrained")
    if args.version is None and not kept_checkpoints(folder):
        print(f"{folder} has no checkpoint yet: this is the model before training", file=sys.stderr)
        return Target(loaded, None, f"{name}, untrained")
    checkpoint = checkpoint_folder(folder, args.version)
    return Target(loaded, checkpoint, f"{name} after {checkpoint.name.removeprefix('step-')} steps")


def _server_target(args: argparse.Namespace, loaded: LoadedConfig) -> Target:
    """A server has its own model. `[model]` gives the tokenizer that counts its tokens."""
    given = {"--version": args.version is not None, "--untrained": args.untrained, "--model": args.model is not None}
    for option in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f'{option} with engine.type = "openai": the server has its own model; --engine.model NAME says which of its models'
        )
    engine = loaded.config.engine
    return Target(loaded, None, f"{engine.model or 'the model'} at {', '.join(engine.urls)}")


def sampling_of(args: argparse.Namespace, loaded: LoadedConfig, temperature: float) -> Sampling:
    """The sampling settings of the arguments, `temperature` where none is given; ConfigError for values that mean nothing."""
    rollout = loaded.config.rollout
    chosen = temperature if args.temperature is None else args.temperature
    problems = []
    if chosen < 0:
        problems.append(f"--temperature {chosen:g}: 0 (greedy) or more")
    if args.top_k < 0:
        problems.append(f"--top-k {args.top_k}: 0 (off) or more")
    if not 0 < args.top_p <= 1:
        problems.append(f"--top-p {args.top_p:g}: above 0, at most 1 (off)")
    if not 0 <= args.min_p < 1:
        problems.append(f"--min-p {args.min_p:g}: 0 (off) or more, below 1")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        problems.append(f"--max-new-tokens {args.max_new_tokens}: 1 or more")
    if problems:
        raise ConfigError(problems)
    return Sampling(
        temperature=chosen,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_new_tokens=args.max_new_tokens or rollout.max_new_tokens,
        stop_strings=tuple(rollout.stop),
    )
