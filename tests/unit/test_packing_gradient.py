"""Packed training with shared prompts against one sequence per row by transformers alone: the same loss, the same gradient."""

import msgspec
import numpy as np
import pytest
import torch
from trainer_models import (
    ARCHITECTURES,
    VOCABULARY,
    batch_of,
    config,
    eager_twin,
    gradient,
    make_batch,
    make_group,
    make_rollout,
    plain_logprobs,
    relative_distance,
    tiny_model,
)

from slipstream.trainer.advantages import group_mean_std
from slipstream.trainer.diagnostics import Diagnostics
from slipstream.trainer.packing import pack
from slipstream.trainer.trainer import Trainer, _Work
from slipstream.types import Span


def packed_gradient(model, batch, max_tokens=10_000, checkpointing=False, chunk=1024):
    """(gradient, loss, number of micro-batches) through the trainer's own path."""
    settings = {"max_tokens_per_micro_batch": max_tokens, "gradient_checkpointing": checkpointing, "logprob_chunk_tokens": chunk}
    trainer = Trainer(config(trainer=settings), model)
    (sequences,) = trainer._read(batch)
    micro_batches = pack(sequences, max_tokens)
    model.zero_grad()
    loss = sum(trainer._accumulate(_Work(m), Diagnostics({})).item() for m in micro_batches)
    return gradient(model), loss, len(micro_batches)


def naive_gradient(model, batch, temperature=1.0):
    """The GRPO loss written out, one sequence per row."""
    rollouts = [r for g in batch.groups for r in g.rollouts]
    advantages = group_mean_std([r.reward for r in rollouts], [r.group_id for r in rollouts])
    total = torch.zeros(())
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        logprob = plain_logprobs(model, rollout, temperature)
        ratio = (logprob - torch.from_numpy(rollout.logprobs[rollout.loss_mask])).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    loss = total / batch.num_loss_tokens
    model.zero_grad()
    loss.backward()
    return gradient(model), loss.item()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_equals_naive(kind, checkpointing):
    model, batch = tiny_model(kind), make_batch()
    expected, expected_loss = naive_gradient(eager_twin(model), batch)
    found, loss, _ = packed_gradient(model, batch, checkpointing=checkpointing)
    assert expected.norm() > 1e-3
    assert relative_distance(found, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("max_tokens", [16, 30, 45])
def test_split_groups_equal_whole(kind, max_tokens):
    model, batch = tiny_model(kind), make_batch(groups=3, samples=4)
    whole, loss, count = packed_gradient(model, batch)
    split, split_loss, split_count = packed_gradient(model, batch, max_tokens=max_tokens)
    assert count == 1 and split_count > 2
    assert relative_distance(split, whole) < 1e-5
    assert split_loss == pytest.approx(loss, abs=1e-5)


def test_small_head_chunks_equal_naive():
    model, batch = tiny_model("gemma2"), make_batch(temperature=0.7)
    expected, _ = naive_gradient(eager_twin(model), batch, temperature=0.7)
    found, _, _ = packed_gradient(model, batch, chunk=16)
    assert relative_distance(found, expected) < 1e-5


@pytest.mark.parametrize("max_tokens", [10_000, 30])
def test_rows_of_a_tied_embedding_are_added_to_a_dense_gradient(max_tokens):
    """In float32 alone: in bfloat16 a sum is rounded once, rows that are added one by one are rounded each."""
    model, batch = tiny_model("qwen3"), make_batch()
    expected, _ = naive_gradient(eager_twin(model), batch)
    found, _, _ = packed_gradient(model, batch, max_tokens=max_tokens)
    assert model.get_input_embeddings().sparse and model.get_input_embeddings().weight.grad.layout == torch.strided
    assert relative_distance(found, expected) < 1e-5
    for other in (tiny_model("qwen3", dtype=torch.bfloat16), tiny_model("llama")):  # the second has two matrices
        Trainer(config(), other)
        assert not other.get_input_embeddings().sparse


def fork(rng, origin, sample, offset, length):
    """A rollout that leaves `origin` after `offset` of its tokens; the shared ones are trained in both."""
    tail = make_rollout(rng, origin.group_id, sample, origin.token_ids[:offset], length, 0)
    mask, logprobs = tail.loss_mask.copy(), tail.logprobs.copy()
    mask[:offset], logprobs[:offset] = origin.loss_mask[:offset], origin.logprobs[:offset]
    return msgspec.structs.replace(
        tail,
        loss_mask=mask,
        logprobs=logprobs,
        prompt_length=origin.prompt_length,
        spans=(Span(origin.prompt_length, len(mask), 1, 0, "e0"),),
        parent=(origin.sample, offset),
    )


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("max_tokens", [10_000, 30])
def test_tree_of_forks_equals_naive(kind, max_tokens):
    rng = np.random.default_rng(5)
    prompt = rng.integers(3, VOCABULARY, 11).astype(np.int32)
    first = make_rollout(rng, 0, 0, prompt, 12, 0)
    second = make_rollout(rng, 0, 1, prompt, 5, 0)
    third = fork(rng, first, 2, 17, 6)  # depth 2
    fourth = fork(rng, third, 3, 20, 4)  # depth 3
    fifth = fork(rng, third, 4, 14, 3)  # leaves `third` where it is still `first`
    batch = batch_of(0, [make_group([first, second, third, fourth, fifth])])
    model = tiny_model(kind)
    expected, _ = naive_gradient(eager_twin(model), batch)
    found, _, _ = packed_gradient(model, batch, max_tokens=max_tokens)
    assert relative_distance(found, expected) < 1e-5
    if max_tokens > 100:
        layout = pack(Trainer(config(), model)._read(batch)[0], max_tokens)[0].layout
        assert max(len(layout.ancestors(i)) for i in range(len(layout.segments))) >= 3
        assert layout.num_tokens < sum(len(r.token_ids) for r in batch.groups[0].rollouts) * 0.6
