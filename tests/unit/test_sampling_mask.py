"""Truncated sampling: what the engine kept is recorded, travels with the token, and is what the trainer normalises over."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from engine_harness import Driver, make_engine, prompt, request, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.settings import Config
from slipstream.errors import DataError
from slipstream.models.attention import attach
from slipstream.rollout.trajectory import Trajectory
from slipstream.sampling_mask import decode_kept, encode_kept, join_kept, split_kept
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import token_table
from slipstream.trainer.trainer import Trainer
from slipstream.types import (
    SAMPLING_MASK,
    SAMPLING_MASK_SIZES,
    Batch,
    Draw,
    Group,
    PrefixChunk,
    Purpose,
    Sampling,
    Span,
    StopReason,
    decode,
    encode,
    merge_chunks,
)

CUTS = [Sampling(top_k=5), Sampling(top_p=0.8, temperature=0.7), Sampling(min_p=0.05), Sampling(top_k=20, top_p=0.9, min_p=0.01)]
GROUPS, SAMPLES, TOKENS = 2, 3, 12


@given(st.sampled_from([9, 97, 49_152, 65_536, 65_537, 151_936]), st.data())
def test_a_set_comes_back_from_its_bytes(vocabulary: int, data: st.DataObject) -> None:
    seed, share = data.draw(st.integers(0, 1000)), data.draw(st.sampled_from([0.0, 0.001, 0.1, 1.0]))
    rng = np.random.default_rng(seed)
    ids = np.flatnonzero(rng.random(vocabulary) < share)
    ids = ids if len(ids) else np.array([int(rng.integers(vocabulary))])
    kept = encode_kept(ids, vocabulary)
    assert np.array_equal(decode_kept(kept), ids)
    assert len(kept) <= -(-vocabulary // 8) + 1


def test_what_is_no_set_is_refused() -> None:
    for wrong in (b"\x02", b"\x02\x01", b"\x07\x01\x02"):
        with pytest.raises(ValueError, match="kept vocabulary"):
            decode_kept(wrong)


def test_the_sets_of_a_rollout_come_back_by_position() -> None:
    parts = [b"", b"", encode_kept(np.array([3]), 97), b"", encode_kept(np.arange(50), 97)]
    arrays = join_kept(parts)
    assert split_kept(arrays, np.array([4, 2, 3])) == [parts[4], parts[2], b""]
    assert join_kept([b"", b""]) == {} and split_kept({}, np.array([0])) is None
    with pytest.raises(ValueError, match="sampling mask"):
        split_kept(arrays | {SAMPLING_MASK: arrays[SAMPLING_MASK][:-1]}, np.array([2]))
    with pytest.raises(ValueError, match="for 5 tokens"):
        split_kept(arrays, np.array([5]))


def sampled(model, sampling: Sampling) -> Batch:
    """One batch as a worker would record it, at lag 0."""
    driver = Driver(make_engine(model))
    groups = []
    for number in range(GROUPS):
        ids = prompt(10 + number, number)
        handles = driver.submit(
            *(request(number, s, ids, sampling=msgspec.structs.replace(sampling, max_new_tokens=TOKENS)) for s in range(SAMPLES))
        )
        driver.drain()
        rollouts = []
        for sample, handle in enumerate(handles):
            trajectory = Trajectory(number, sample, 0, Purpose.TRAIN)
            trajectory.add_prompt(ids)
            trajectory.add_generation(driver.generations[handle])
            trajectory.end_turn(len(ids), sampling, 0.0, "")
            rollouts.append(trajectory.rollout(0.0))
        draw = Draw(number=number, row=number, epoch=0, dataset="d")
        groups.append(Group(group_id=number, draw=draw, row={}, rollouts=tuple(rollouts)))
    batch = Batch(step=0, groups=tuple(groups), num_loss_tokens=GROUPS * SAMPLES * TOKENS)
    return decode(encode(batch), Batch)  # as it travels and is stored


def trainer_gap(batch: Batch, learning, max_tokens: int = 10_000, **settings) -> float:
    """The largest |log ratio| of the batch."""
    attach(learning)
    trainer = Trainer(Config.model_validate(settings), learning)
    worst = 0.0
    for micro_batch in pack(token_table(batch, np.zeros(GROUPS * SAMPLES)), max_tokens):
        with torch.no_grad():
            outputs = trainer.forward(micro_batch)
        assert torch.isfinite(outputs.entropy).all()
        worst = max(worst, float((outputs.logprob - micro_batch.sampler_logprob).abs().max()))
    return worst


@pytest.mark.parametrize("sampling", CUTS, ids=["top_k", "top_p", "min_p", "all three"])
def test_ratios_at_lag_0_are_1(sampling: Sampling) -> None:
    model, learning = tiny_model("llama"), tiny_model("llama")
    attach(model)
    batch = sampled(model, sampling)
    assert trainer_gap(batch, learning) < 1e-5
    assert trainer_gap(batch, learning, 30, trainer={"logprob_chunk_tokens": 16}) < 1e-5, "in parts"
    sizes = [decode_kept(part) for g in batch.groups for r in g.rollouts for part in split_kept(r.arrays, np.flatnonzero(r.loss_mask))]
    assert all(1 <= len(ids) < 97 for ids in sizes)
    if sampling.top_k == 5:
        assert all(len(ids) == 5 for ids in sizes)


def test_without_the_record_the_ratios_would_be_wrong_and_the_batch_is_refused() -> None:
    model, learning = tiny_model("llama"), tiny_model("llama")
    attach(model)
    batch = sampled(model, CUTS[0])
    bare = [msgspec.structs.replace(g, rollouts=tuple(msgspec.structs.replace(r, arrays={}) for r in g.rollouts)) for g in batch.groups]
    lost = msgspec.structs.replace(batch, groups=tuple(bare))
    with pytest.raises(DataError, match="not what they kept"):
        token_table(lost, np.zeros(GROUPS * SAMPLES))
    unsaid = [
        msgspec.structs.replace(g, rollouts=tuple(msgspec.structs.replace(r, arrays={}, turns=()) for r in g.rollouts))
        for g in batch.groups
    ]
    assert trainer_gap(msgspec.structs.replace(batch, groups=tuple(unsaid)), learning) > 0.1


def test_gradients_stay_within_the_kept_vocabulary() -> None:
    """A loss of masked rows: entries that were cut off get no gradient from the head, and none is NaN."""
    model, learning = tiny_model("llama"), tiny_model("llama")
    attach(model)
    batch = sampled(model, Sampling(top_k=1))
    attach(learning)
    trainer = Trainer(Config.model_validate({"loss": {"entropy_coefficient": 0.1}}), learning)
    (micro_batch,) = pack(token_table(batch, np.zeros(GROUPS * SAMPLES)), 10_000)
    outputs = trainer.forward(micro_batch)
    (outputs.logprob.sum() + outputs.entropy.sum()).backward()
    assert all(p.grad is None or not p.grad.abs().max() > 1e-6 for p in learning.parameters()), "one entry is left: nothing can change"
    assert outputs.logprob.abs().max() < 1e-6


def test_entropy_and_the_divergence_from_a_teacher_are_over_the_kept_vocabulary() -> None:
    model, learning, teacher = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=3)
    attach(model)
    batch = sampled(model, CUTS[0])
    attach(learning)
    attach(teacher)
    trainer = Trainer(Config.model_validate({"loss": {"teacher": "t", "teacher_kl": "full"}}), learning, teacher)
    rollout = batch.groups[0].rollouts[0]
    one = msgspec.structs.replace(batch, groups=(msgspec.structs.replace(batch.groups[0], rollouts=(rollout,)),))
    (micro_batch,) = pack(token_table(one, np.zeros(1)), 10_000)
    outputs = trainer.forward(micro_batch)
    at = np.flatnonzero(rollout.loss_mask)
    log_p, log_q = (_logits(m, micro_batch)[at - 1].log_softmax(-1) for m in (learning, teacher))
    for row, part in enumerate(split_kept(rollout.arrays, at) or ()):
        ids = torch.from_numpy(decode_kept(part))
        p, q = log_p[row, ids].log_softmax(-1), log_q[row, ids].log_softmax(-1)
        assert outputs.entropy[row].item() == pytest.approx(-(p.exp() * p).sum().item(), abs=1e-5)
        assert outputs.divergence[row].item() == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-5)
    assert outputs.divergence.max() > 0.01
    outputs.divergence.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in learning.parameters())
    assert learning.lm_head.weight.grad.abs().max() > 1e-3


@torch.no_grad()
def _logits(model, m) -> torch.Tensor:
    return model(input_ids=m.input_ids, position_ids=m.position_ids, layout=m.layout, use_cache=False).logits[0].float()


def test_siblings_of_one_predictor_keep_their_own_sets() -> None:
    """The last prompt token predicts the first token of all samples; where they were cut differently, each has its own row of logits."""
    model = tiny_model("llama")
    attach(model)
    batch = sampled(model, CUTS[0])
    (same,) = pack(token_table(batch, np.zeros(GROUPS * SAMPLES)), 10_000)
    first = batch.groups[0].rollouts[0]
    parts = split_kept(first.arrays, np.arange(len(first.token_ids)))
    parts[first.prompt_length] = encode_kept(np.arange(97), 97)
    other = msgspec.structs.replace(first, arrays=join_kept(parts))
    group = msgspec.structs.replace(batch.groups[0], rollouts=(other, *batch.groups[0].rollouts[1:]))
    changed = msgspec.structs.replace(batch, groups=(group, *batch.groups[1:]))
    (apart,) = pack(token_table(changed, np.zeros(GROUPS * SAMPLES)), 10_000)
    assert len(same.rows.positions) == GROUPS * (1 + SAMPLES * (TOKENS - 1))
    assert len(apart.rows.positions) == len(same.rows.positions) + 1
    assert apart.input_ids.shape == same.input_ids.shape, "the body still computes the prompt once"


def test_recorded_prefixes_keep_the_sets() -> None:
    parts = [encode_kept(np.array([i, i + 1]), 97) for i in range(4)]

    def chunk(start: int, stop: int, reason: StopReason | None = None) -> PrefixChunk:
        n = stop - start
        return PrefixChunk(
            group_id=0,
            sample=0,
            attempt=0,
            prompt_length=3,
            start=start,
            token_ids=np.arange(start, stop, dtype=np.int32),
            logprobs=np.full(n, -0.5, dtype=np.float32),
            kept=tuple(parts[start:stop]),
            spans=(Span(3 + start, 3 + stop, 1, 0, "e"),),
            stop_reason=reason,
        )

    merged = merge_chunks([chunk(2, 4), chunk(0, 2)])
    trajectory = Trajectory(0, 0, 0, Purpose.TRAIN)
    trajectory.add_prompt(np.array([7, 8, 9], dtype=np.int32))
    trajectory.add_recorded(merged)
    arrays = trajectory.rollout(0.0).arrays
    assert split_kept(arrays, np.arange(7)) == [b"", b"", b"", *parts]
    assert arrays[SAMPLING_MASK_SIZES].tolist() == [0, 0, 0, *map(len, parts)]


def test_evaluation_records_nothing() -> None:
    model = tiny_model("llama")
    engine = make_engine(model)
    driver = Driver(engine)
    engine.pin()
    (handle,) = driver.submit(request(0, 0, prompt(5), sampling=Sampling(top_k=3, max_new_tokens=4), purpose=Purpose.EVAL))
    driver.drain()
    assert not driver.generations[handle].kept
