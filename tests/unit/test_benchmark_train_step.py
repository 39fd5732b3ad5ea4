"""The bound of the training-step benchmark, and that its three ways are the same step."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from trainer_models import VOCABULARY, tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from sharing_bounds import sharing_gain
from smollm2 import BODY_PARAMETERS, HEAD_PARAMETERS
from train_step_ways import (
    Bare,
    Padded,
    Shape,
    Shipped,
    gradient_of,
    make_batch,
    matrix_parameters,
    padded_twin,
    record_sampler,
    relative_distance,
)

SMOLLM2 = (BODY_PARAMETERS, HEAD_PARAMETERS)


def test_the_gain_of_equal_lengths_is_the_formula():
    body, head = SMOLLM2
    prompt, completion, size = 52, 24, 8
    padded = size * (prompt + completion) * body + size * completion * head
    packed = (prompt + size * completion) * body + size * completion * head
    assert sharing_gain(prompt, [completion] * size, body, head) == pytest.approx(padded / packed)
    assert padded / packed == pytest.approx(2.23, abs=0.005)


def test_the_gain_counts_padding_to_the_longest():
    assert sharing_gain(10, (2, 6), body=1, head=0) == pytest.approx(2 * 16 / 18)
    assert sharing_gain(10, (2, 6), body=0, head=1) == pytest.approx(2 * 6 / 8)


def test_nothing_is_gained_with_one_completion_or_no_prompt():
    assert sharing_gain(52, [24], *SMOLLM2) == sharing_gain(0, [24] * 8, *SMOLLM2) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_the_three_ways_are_one_step(tied):
    """Same loss and gradient with completions of different lengths, and the same packed tokens in the trainer and the bare loop."""
    model = tiny_model("llama", tie_word_embeddings=tied)
    plain, twin, batch = copy.deepcopy(model), padded_twin(model), make_batch(Shape(9, (4, 2, 7), groups=2), VOCABULARY)
    with torch.no_grad():
        record_sampler(batch, Padded(twin, batch, threads=1).logprob(), spread=0.3)
    shipped, padded, bare = Shipped(model, batch, 1), Padded(twin, batch, 1), Bare(plain, batch, 1)
    shipped.keep_gradient = True
    loss = shipped()
    assert shipped.metrics["clipped_fraction"] > 0 and shipped.metrics["packed_tokens"] == bare.ids.numel()
    for way in (padded, bare):
        assert way() == pytest.approx(loss, abs=1e-6)
        assert relative_distance(gradient_of(way.model), shipped.gradient) < 1e-5
    assert shipped() == pytest.approx(loss, abs=1e-7)  # at learning rate 0 the weights stay


def test_matrix_parameters_leave_out_what_is_looked_up():
    model = tiny_model("llama")
    assert matrix_parameters(model) == (2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48), VOCABULARY * 32)
