"""The whole algorithm in one file, one thing at a time: for learning it, and for debugging a task before it runs asynchronously.

    python recipes/sync_loop.py [RUN.toml] [--steps N]

It uses the records, the engine and the trainer of the real thing. What is missing is what makes the real thing asynchronous and safe:
controller, buffer, ledger, checkpoints, processes. Every token here is sampled by the weights that it trains, so staleness is 0.

    rows ──► prompts ──► engine: G samples each ──► rewards ──► advantages, loss, update ──► weights back into the engine
      ▲                                                                                            │
      └────────────────────────────────────── next step ◄──────────────────────────────────────────┘
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.config.load import load_config
from slipstream.config.settings import Config
from slipstream.data import load_data, render_messages
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.models.loading import load_model
from slipstream.protocols import Generation
from slipstream.scoring.builtin import exact
from slipstream.trainer.trainer import Trainer
from slipstream.types import (
    Batch,
    Draw,
    GenerateRequest,
    Group,
    Purpose,
    Rollout,
    Sampling,
    StopReason,
    Turn,
)
from slipstream.weight_sync.packing import checksum

Row = dict[str, Any]
Reward = Callable[[str, Row], float]  # (completion, row) -> reward
INCARNATION = 1  # nothing here survives a restart, so there is only one


@dataclass
class Loop:
    """What the steps share."""

    config: Config
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    engine: EmbeddedEngine  # samples, with a model of its own
    trainer: Trainer  # learns
    reward: Reward
    train_rows: list[Row]
    eval_rows: list[Row]
    dataset: str  # fingerprint of the training rows


def train(config: Config, base_folder: Path, reward: Reward = exact) -> Iterator[dict[str, float]]:
    """Yield one line of metrics per optimizer step (and per evaluation)."""
    loop = set_up(config, base_folder, reward)
    yield {"step": 0, "eval_reward": evaluate(loop)}
    draws = draw_rows(len(loop.train_rows), config.run.seed)
    for step in range(config.trainer.steps):
        started = time.perf_counter()
        chosen = [next(draws) for _ in range(config.trainer.groups_per_step)]
        groups = sample_groups(loop, chosen, Purpose.TRAIN, config.rollout.group_size, config.rollout.temperature)
        sampled = time.perf_counter()

        # The trainer compares each rollout with its siblings (advantage), and raises the probability of the tokens of the better ones.
        batch = Batch(step=step, groups=groups, num_loss_tokens=sum(int(r.loss_mask.sum()) for g in groups for r in g.rollouts))
        result = loop.trainer.train_step(batch)
        hand_over_weights(loop)

        rewards = [reward for group in groups for reward in group.rewards]
        line = {
            "step": loop.trainer.step,
            "reward_mean": float(np.mean(rewards)),
            "completion_tokens_mean": batch.num_loss_tokens / len(rewards),
            "sample_s": sampled - started,
            "train_s": time.perf_counter() - sampled,
            **{name: result.metrics[name] for name in ("loss", "entropy", "ratio_max", "grad_norm") if name in result.metrics},
        }
        if loop.trainer.step % config.evaluation.every == 0 or loop.trainer.step == config.trainer.steps:
            line["eval_reward"] = evaluate(loop)
        yield line


def set_up(config: Config, base_folder: Path, reward: Reward) -> Loop:
    """Two copies of the model: one samples, one learns. They are equal whenever sampling begins."""
    torch.set_num_threads(max(config.engine.threads, config.trainer.threads))
    data = load_data(config, base_folder)
    learner, tokenizer, info = load_model(config.model)
    sampler, _, _ = load_model(config.model)
    engine = EmbeddedEngine(
        sampler.requires_grad_(False),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        slots=config.engine.slots,
        max_context=min(config.engine.max_context or 4096, info.context_tokens),
        seed=config.run.seed,
    )
    loop = Loop(config, tokenizer, info.stop_token_ids, engine, Trainer(config, learner), reward, data.train, data.eval, data.fingerprint)
    hand_over_weights(loop)
    return loop


def draw_rows(num_rows: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """(number of the draw, epoch, row) without end: every epoch is a new shuffle of all rows."""
    number, epoch = 0, 0
    while True:
        order = list(range(num_rows))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for row in order:
            yield number, epoch, row
            number += 1
        epoch += 1


def sample_groups(
    loop: Loop, draws: list[tuple[int, int, int]], purpose: Purpose, group_size: int, temperature: float
) -> tuple[Group, ...]:
    """One scored group per draw: `group_size` completions of the row's prompt."""
    rows = loop.train_rows if purpose is Purpose.TRAIN else loop.eval_rows
    sampling = Sampling(
        temperature=temperature, max_new_tokens=loop.config.rollout.max_new_tokens, stop_strings=tuple(loop.config.rollout.stop)
    )
    prompts = {number: render_messages(rows[row], loop.config.data) for number, _, row in draws}
    requests = [
        request for number, messages in prompts.items() for request in make_requests(loop, number, messages, purpose, group_size, sampling)
    ]
    generations = generate(loop.engine, requests)  # all of them at once: the engine batches
    groups = []
    for number, epoch, row in draws:
        rollouts = tuple(
            make_rollout(loop, request, generation, rows[row])
            for request, generation in zip(requests, generations, strict=True)
            if request.group_id == number
        )
        draw = Draw(number=number, row=row, epoch=epoch, dataset=loop.dataset)
        groups.append(Group(group_id=number, draw=draw, row=rows[row], prompt=prompts[number], purpose=purpose, rollouts=rollouts))
    return tuple(groups)


def make_requests(
    loop: Loop, number: int, messages: list[dict[str, Any]], purpose: Purpose, group_size: int, sampling: Sampling
) -> list[GenerateRequest]:
    """The same prompt `group_size` times; the sample's number gives each its own random numbers."""
    text = loop.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = np.asarray(loop.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    return [
        GenerateRequest(
            group_id=number,
            sample=sample,
            attempt=0,
            turn=0,
            purpose=purpose,
            token_ids=prompt_ids,
            prompt_length=len(prompt_ids),
            num_sampled=0,
            sampling=sampling,
            stop_token_ids=loop.stop_token_ids,
            seed=loop.config.run.seed,
        )
        for sample in range(group_size)
    ]


def generate(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[Generation]:
    """Run the engine until every request has ended. One tick samples one token for each running sequence."""
    generations = [Generation(start=request.prompt_length) for request in requests]
    by_handle = {engine.submit(request): generation for request, generation in zip(requests, generations, strict=True)}
    while engine.has_work():
        frame = engine.tick()
        for handle, incarnation, version in frame.prefilled:
            by_handle[handle].prefill_version = (incarnation, version)
        for handle, token_id, logprob in zip(frame.handles.tolist(), frame.token_ids.tolist(), frame.logprobs.tolist(), strict=True):
            by_handle[handle].append(token_id, logprob, frame.incarnation, frame.version, frame.engine_id)
        for handle, reason in frame.finished:
            by_handle[handle].stop_reason = StopReason(reason)
    return generations


def make_rollout(loop: Loop, request: GenerateRequest, generation: Generation, row: Row) -> Rollout:
    """Prompt and completion as one record, scored. Only sampled tokens have a logprob and are trained, the end token among them."""
    prompt, sampled = request.prompt_length, len(generation.token_ids)
    completion = loop.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    return Rollout(
        group_id=request.group_id,
        sample=request.sample,
        purpose=request.purpose,
        stop_reason=generation.stop_reason,
        prompt_length=prompt,
        token_ids=np.concatenate([request.token_ids, np.asarray(generation.token_ids, dtype=np.int32)]),
        logprobs=np.minimum(np.asarray([0.0] * prompt + generation.logprobs, dtype=np.float32), 0.0),
        loss_mask=np.asarray([False] * prompt + [True] * sampled),
        spans=tuple(generation.spans),
        prefill_version=generation.prefill_version,
        turns=(
            Turn(start=0, end=prompt, role="prompt"),
            Turn(start=prompt, end=prompt + sampled, role="assistant", sampling=request.sampling),
        ),
        completion=completion,
        reward=loop.reward(completion, row),
    )


def hand_over_weights(loop: Loop) -> None:
    """Copy the learner's weights into the sampler, between two forward passes."""
    loop.engine.model.load_state_dict(loop.trainer.model.state_dict())
    loop.engine.set_version(INCARNATION, loop.trainer.version, checksum(loop.engine.model))


def evaluate(loop: Loop) -> float:
    """Mean reward on the held-out rows; NaN without any."""
    rows = loop.eval_rows[: loop.config.evaluation.limit]
    draws = [(index, 0, index) for index in range(len(rows))]
    loop.engine.pin(share=True)  # nobody changes the weights meanwhile
    groups = sample_groups(loop, draws, Purpose.EVAL, loop.config.evaluation.samples, loop.config.evaluation.temperature)
    loop.engine.unpin()
    return float(np.mean([reward for group in groups for reward in group.rewards])) if groups else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path(__file__).with_name("quickstart.toml"))
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    overrides = [] if args.steps is None else ["--trainer.steps", str(args.steps)]
    loaded = load_config([args.run], overrides)
    for line in train(loaded.config, loaded.base_folder):
        print("  ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)


if __name__ == "__main__":
    main()
