"""recipes/sync_loop.py runs, learns from what it samples, and its pieces are what they say."""

from __future__ import annotations

import importlib.util
import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from slipstream.config.load import load_config
from slipstream.types import Purpose, StopReason

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = "--rollout.group_size 4 --trainer.groups_per_step 3 --trainer.steps 3 --evaluation.every 2 --evaluation.limit 8 --engine.slots 8"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("sync_loop", RECIPES / "sync_loop.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["sync_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sync_loop"]


@pytest.fixture
def loaded():
    return load_config([RECIPES / "quickstart.toml"], SMALL.split())


def test_a_run_of_three_steps(recipe, loaded):
    lines = list(recipe.train(loaded.config, loaded.base_folder))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "eval_reward" in line] == [0, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    # Sampled by the very weights that are trained: the engine's logprobs are the trainer's, so every ratio is 1.
    assert all(line["ratio_max"] == pytest.approx(1.0, abs=1e-3) for line in lines[1:])


def test_the_same_seed_gives_the_same_run(recipe, loaded):
    def run():
        return [{k: v for k, v in line.items() if not k.endswith("_s")} for line in recipe.train(loaded.config, loaded.base_folder)]

    assert run() == run()


def test_groups_are_whole_records(recipe, loaded):
    loop = recipe.set_up(loaded.config, loaded.base_folder, lambda completion, row: float(len(completion)))
    groups = recipe.sample_groups(loop, [(0, 0, 5), (1, 0, 6)], Purpose.TRAIN, 4, 1.0)
    assert [len(group.rollouts) for group in groups] == [4, 4]
    for group in groups:
        assert group.row is loop.train_rows[group.draw.row]
        assert len({r.token_ids[: r.prompt_length].tobytes() for r in group.rollouts}) == 1
        for rollout in group.rollouts:
            assert rollout.reward == len(rollout.completion)
            assert not rollout.loss_mask[: rollout.prompt_length].any()
            assert rollout.loss_mask[rollout.prompt_length :].all()
            assert (rollout.logprobs[rollout.prompt_length :] <= 0).all()
            assert rollout.stop_reason in (StopReason.STOP, StopReason.LENGTH)
            assert {span.version for span in rollout.spans} == {0}


def test_the_sampler_gets_the_learner_s_weights(recipe, loaded):
    loop = recipe.set_up(loaded.config, loaded.base_folder, lambda completion, row: float(len(completion)))
    lines = recipe.draw_rows(len(loop.train_rows), seed=0)
    groups = recipe.sample_groups(loop, list(islice(lines, 3)), Purpose.TRAIN, 4, 1.0)
    before = {name: tensor.clone() for name, tensor in loop.trainer.model.state_dict().items()}
    tokens = sum(int(r.loss_mask.sum()) for g in groups for r in g.rollouts)
    loop.trainer.train_step(recipe.Batch(step=0, groups=groups, num_loss_tokens=tokens))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in loop.trainer.model.state_dict().items())
    recipe.hand_over_weights(loop)
    assert loop.engine.version == (1, 1)
    for name, tensor in loop.engine.model.state_dict().items():
        assert torch.equal(tensor, loop.trainer.model.state_dict()[name])


def test_every_epoch_draws_each_row_once(recipe):
    draws = list(islice(recipe.draw_rows(5, seed=3), 10))
    assert [number for number, _, _ in draws] == list(range(10))
    orders = [[row for _, epoch, row in draws if epoch == e] for e in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(5))] * 2
    assert orders[0] != orders[1]


def test_it_reads_in_one_go():
    assert len((RECIPES / "sync_loop.py").read_text().splitlines()) < 300
