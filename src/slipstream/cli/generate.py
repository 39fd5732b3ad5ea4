"""`slipstream generate`: ask a model something."""

from __future__ import annotations

import argparse
import asyncio
import sys

from slipstream.cli.arguments import OVERRIDES_HELP
from slipstream.cli.target import Target, add_sampling, add_target, find_target, sampling_of
from slipstream.errors import ConfigError, RunFailed
from slipstream.types import Sampling

HELP = "let a model answer prompts that you give it"
EPILOG = f"""{OVERRIDES_HELP}

examples:
  slipstream generate runs/quickstart-20250101-120000 --prompt "sort 4132"
  slipstream generate run.toml --model model/ --prompt "2 + 2 =" --temperature 1 --samples 4
  echo "sort 4132" | slipstream generate runs/quickstart-20250101-120000

Without --prompt, each line of standard input is a prompt. data.system_prompt applies, data.prompt_template does not. Answers go to
stdout, one after the other; greedy unless --temperature says otherwise."""
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--prompt", metavar="TEXT", action="append", help="a user message; may be given several times")
    parser.add_argument("--samples", type=int, default=1, help="answers per prompt (1)")
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    target = find_target(args, checked=False)
    sampling = sampling_of(args, target.loaded, 0.0)
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT, or lines on standard input")
    for answer in asyncio.run(answers(target, prompts, args.samples, sampling)):
        print(answer)
    return 0


async def answers(target: Target, prompts: list[str], num_samples: int, sampling: Sampling) -> list[str]:
    """The texts, prompt by prompt; RunFailed with the reason where one could not be generated."""
    from slipstream.cli.session import open_session

    config = target.loaded.config
    config = config.model_copy(update={"data": config.data.model_copy(update={"prompt_template": None})})
    async with open_session(config, target.checkpoint, scored=False) as session:
        rollouts = await session.complete([{"prompt": prompt} for prompt in prompts], num_samples, sampling)
    failed = [rollout.error for rollout in rollouts if rollout.error]
    if failed:
        raise RunFailed(failed[0])
    return [rollout.completion for rollout in rollouts]
