"""Engine and trainer agree: with the same weights, the trainer's logprobs are those that the engine recorded, and so is its routing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine, prompt, request, tiny_model
from mixture_models import MIXTURES, tiny_mixture

from slipstream.config.settings import Config
from slipstream.models.attention import attach
from slipstream.models.routing import kept_routers
from slipstream.protocols import WeightsOffer
from slipstream.rollout.trajectory import Trajectory
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import token_table
from slipstream.trainer.trainer import Trainer
from slipstream.types import Batch, Draw, Group, Purpose, Sampling
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher, MemoryWeights

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


def test_the_gap_stays_at_its_floor_over_200_versions() -> None:
    """At lag 0, a version per step: what the engine reports is what the trainer computes, at the end as in the beginning."""
    sampling, learning = (tiny_model(seed=seed, num_hidden_layers=1) for seed in (1, 0))
    for model in (sampling, learning):
        attach(model)
    trainer = Trainer(Config.model_validate({"trainer": {"learning_rate": 3e-3, "steps": 201}}), learning)
    driver, ids, slots = Driver(make_engine(sampling, version=-1)), prompt(9), [MemoryFile.create("slot")]
    publisher, weights = MemoryPublisher(learning, slots), MemoryWeights(sampling, slots)

    def step(version: int) -> float:
        """Mean difference of the logprobs of a batch that the engine samples now and the trainer then learns from, nats."""
        trajectories = [Trajectory(version, sample, 0, Purpose.TRAIN) for sample in range(2)]
        for trajectory in trajectories:
            trajectory.add_prompt(ids)
        handles = driver.submit(*(request(version, t.sample, ids, 2) for t in trajectories))
        driver.drain()
        for trajectory, handle in zip(trajectories, handles, strict=True):
            trajectory.add_generation(driver.generations[handle])
            trajectory.end_turn(len(ids), Sampling(temperature=1.0), 0.0, "")
        rollouts = tuple(msgspec.structs.replace(t.rollout(0.0), reward=float(t.sample)) for t in trajectories)
        group = Group(group_id=version, draw=Draw(number=version, row=0, epoch=0, dataset="d"), row={}, rollouts=rollouts)
        tokens = sum(int(r.loss_mask.sum()) for r in rollouts)
        return trainer.train_step(Batch(step=version, groups=(group,), num_loss_tokens=tokens)).metrics["logprob_gap"]

    gaps = []
    for version in range(200):
        driver.engine.set_version(1, version, weights(WeightsOffer(slot=0, manifest=publisher.pack(0, 1, version))))
        gaps.append(step(version))
    assert max(gaps) < 1e-5 and np.mean(gaps[-50:]) < 2 * np.mean(gaps[:50])
    driver.engine.set_version(1, 200, "")  # an update that was missed: the number is new, the weights are not
    assert step(200) > 100 * max(gaps)
    slots[0].close()
