"""Engine and trainer agree: with the same weights, the trainer's logprobs are those that the engine recorded, and so is its routing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine, prompt, request, tiny_model
from mixture_models import MIXTURES, tiny_mixture

from slipstream.config.settings import Config
from slipstream.models.attention import attach
from slipstream.models.routing import kept_routers
from slipstream.rollout.trajectory import Trajectory
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import token_table
from slipstream.trainer.trainer import Trainer
from slipstream.types import Batch, Draw, Group, Purpose, Sampling

SAMPLES = 3
TEMPERATURES = {0: 1.0, 1: 0.7}  # group -> of its sampling
LENGTHS = ((4, 15), (1, 9), (20, 6))  # sample -> sampled tokens of its two turns: within blocks of 16, up to and across their ends
TOLERANCE = 1e-4


def sample_group(driver: Driver, number: int) -> Group:
    """A group of two-turn rollouts as a worker would record it: a shared prompt, a turn, an environment's reply, another turn."""
    ids = prompt(18 + number, number)
    sampling = Sampling(temperature=TEMPERATURES[number])
    trajectories = [Trajectory(number, sample, 0, Purpose.TRAIN) for sample in range(SAMPLES)]
    for trajectory in trajectories:
        trajectory.add_prompt(ids)
    for turn in range(2):
        requests = [
            request(
                number,
                t.sample,
                np.asarray(t.token_ids, dtype=np.int32),
                LENGTHS[t.sample][turn],
                temperature=sampling.temperature,
                turn=turn,
                prompt_length=len(ids),
                num_sampled=t.num_sampled,
            )
            for t in trajectories
        ]
        handles = driver.submit(*requests)
        driver.drain()
        for trajectory, handle in zip(trajectories, handles, strict=True):
            start = len(trajectory)
            trajectory.add_generation(driver.generations[handle])
            trajectory.end_turn(start, sampling, 0.0, "")
            if turn == 0:
                trajectory.add_given(prompt(5, 100 + trajectory.sample), "tool")
    rollouts = tuple(t.rollout(0.0) for t in trajectories)
    return Group(group_id=number, draw=Draw(number=number, row=number, epoch=0, dataset="d"), row={}, rollouts=rollouts)


@pytest.mark.parametrize("max_tokens", [70, 10_000], ids=["many micro-batches", "one"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", *MIXTURES])
def test_the_trainer_computes_the_logprobs_that_the_engine_recorded(kind: str, max_tokens: int) -> None:
    model, learning = (tiny_mixture(kind) if kind in MIXTURES else tiny_model(kind) for _ in range(2))
    attach(model)
    driver = Driver(make_engine(model, routers=kept_routers(model, None)))
    groups = tuple(sample_group(driver, number) for number in TEMPERATURES)
    batch = Batch(step=0, groups=groups, num_loss_tokens=sum(int(r.loss_mask.sum()) for g in groups for r in g.rollouts))
    assert batch.num_loss_tokens == len(TEMPERATURES) * sum(map(sum, LENGTHS))
    attach(learning)
    trainer = Trainer(Config(), learning)
    width = trainer.routers.width if trainer.routers else 0
    assert (width == 4) == (kind in MIXTURES)
    sequences = token_table(batch, np.zeros(len(TEMPERATURES) * SAMPLES), routing_width=width)
    seen = 0
    for micro_batch in pack(sequences, max_tokens):
        with torch.no_grad(), trainer._routed(micro_batch) as replayed:
            logprob = trainer.forward(micro_batch).logprob
        if replayed is not None:
            assert (replayed.num_different, replayed.num_recorded) == (0, replayed.num_choices)
        assert (logprob - micro_batch.sampler_logprob).abs().max() < TOLERANCE
        assert logprob.std() > 0.3, "logprobs that are all alike would hide an error"
        seen += len(logprob)
    assert seen == batch.num_loss_tokens
