"""`slipstream rollout`: sample and score a few groups and look at them, before any training."""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console
from rich.markup import escape

from slipstream.cli.arguments import OVERRIDES_HELP
from slipstream.cli.show import Output, show_sample
from slipstream.cli.target import Target, add_sampling, add_target, find_target, sampling_of
from slipstream.observe.samples import sample_of
from slipstream.observe.state import number
from slipstream.types import Group, Sampling

HELP = "sample and score a few groups and print them; no training"
EPILOG = f"""{OVERRIDES_HELP}

examples:
  slipstream rollout run.toml
  slipstream rollout run.toml --groups 1 --samples 8
  slipstream rollout runs/quickstart-20250101-120000 --version 50"""
TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--groups", type=int, default=2, help="prompts (2)")
    parser.add_argument("--samples", type=int, default=4, help="rollouts per prompt (4)")
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    target = find_target(args)
    sampling = sampling_of(args, target.loaded, target.loaded.config.rollout.temperature)
    console = Output(sys.stdout)
    groups = asyncio.run(sample_groups(target, args.groups, args.samples, sampling))
    console.print(f"{escape(target.label)}, temperature {sampling.temperature:g}, at most {sampling.max_new_tokens} new tokens")
    for group in groups:
        show_group(console, group)
    return 0


async def sample_groups(target: Target, num_groups: int, num_samples: int, sampling: Sampling) -> list[Group]:
    from slipstream.cli.session import open_session
    from slipstream.data import load_data

    rows = load_data(target.loaded.config, target.loaded.base_folder).train[:num_groups]
    async with open_session(target.loaded.config, target.checkpoint) as session:
        for note in session.info.notes:
            print(f"note: {note}", file=sys.stderr)
        return await session.run(rows, num_samples, sampling)


def show_group(console: Console, group: Group) -> None:
    for rollout in group.rollouts:
        show_sample(console, sample_of(0, 1, group, rollout), f"prompt {group.group_id} · sample {rollout.sample}")
    rewards = group.rewards
    if rewards:
        console.print(f"[dim]prompt {group.group_id}: mean reward {number(sum(rewards) / len(rewards))} over {len(rewards)} rollouts[/dim]")
    if len(rewards) > 1 and len(set(rewards)) == 1:
        console.print("[dim]all rewards of this group are equal: it would teach nothing[/dim]")
