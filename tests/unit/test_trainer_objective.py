"""The step's objective: splits equal the whole for every loss, the terms beside the policy loss, the arrays they need."""

from __future__ import annotations

import functools
import itertools

import msgspec
import numpy as np
import pytest
import torch
from trainer_models import (
    batch_of,
    config,
    eager_twin,
    gradient,
    make_batch,
    make_group,
    plain_logprobs,
    relative_distance,
    tiny_model,
)

from slipstream.config.loss_tables import AGGREGATIONS, CORRECTIONS, POLICY_LOSSES, PRESETS
from slipstream.errors import DataError
from slipstream.trainer import logprobs
from slipstream.trainer.advantages import group_mean_std
from slipstream.trainer.logprobs import TokenOutputs
from slipstream.trainer.objective import Objective, Value
from slipstream.trainer.packing import pack
from slipstream.trainer.trainer import Trainer
from slipstream.types import Batch

# Bounds in the midst of the test batch's ratios, so that every correction keeps some tokens and rejects others.
BOUNDS = {
    "truncate": {"high": 0.9},
    "mask": {"low": 0.02, "high": 3.0},
    "geometric": {"low": 0.1, "high": 0.8},
    "opsm": {"high": 0.5},
    "m2po": {"high": 0.5},
    "version_gate": {"high": 1.0},
}
REJECT_BOUNDS = {"k1": {"low": 0.3, "high": 8.0}, "k2": {"high": 2.0}, "k3": {"high": 2.0}}
REJECT_MEAN_BOUNDS = {"k1": {"low": 0.8, "high": 1.5}, "k2": {"high": 0.7}, "k3": {"high": 0.7}}  # a mean is less spread than a token


def correction_tables():
    for name, table in CORRECTIONS.items():
        for level in table.levels or (None,):
            bounds = REJECT_MEAN_BOUNDS if level == "sequence_mean" else REJECT_BOUNDS
            for extra in [{"statistic": s, **b} for s, b in bounds.items()] if name == "reject" else [BOUNDS[name]]:
                yield {"type": name, **({"level": level} if level else {}), **extra}


CORRECTION_TABLES = list(correction_tables())


def allowed(policy: str, correction: dict | None) -> bool:
    """A weight by ρ beside a loss that has it already is refused by the settings."""
    return correction is None or not (CORRECTIONS[correction["type"]].weighs and POLICY_LOSSES[policy].weighs_by_sampler)


def loss_of(policy, aggregation, correction):
    return {"policy": policy, "aggregation": aggregation, "correction": [correction] if correction else []}


def stale_batch() -> Batch:
    """Three groups of four at step 3: tokens up to three versions old, some of them weighing less."""
    batch = make_batch(step=3, groups=3, samples=4, version=3)
    groups = []
    for group in batch.groups:
        rollouts = []
        for rollout in group.rollouts:
            (span,) = rollout.spans
            version = 3 - (rollout.sample + group.group_id) % 4
            weight = np.where(np.arange(len(rollout.token_ids)) % 3 == 0, 0.5, 1.0).astype(np.float32)
            spans = (span.__class__(span.start, span.end, 1, version, "e0"),)
            rollouts.append(msgspec.structs.replace(rollout, spans=spans, arrays={"loss_weight": weight}))
        groups.append(make_group(rollouts))
    return batch_of(3, groups)


# ---- splits equal the whole
#
# Of the model's part in a gradient test_packing_gradient.py makes sure; here each loss's derivative by the logprob of every token is held
# against the unsplit one, for every combination, and through the whole trainer for a set that has each name.


@functools.cache
def micro_batches_of(aggregation, max_tokens):
    """(micro-batch, its logprobs at the start) of the stale batch."""
    trainer = Trainer(config(loss={"aggregation": aggregation}), tiny_model())
    (sequences,) = trainer._read(stale_batch())
    with torch.no_grad():
        return [(m, trainer.forward(m).logprob) for m in pack(sequences, max_tokens)]


def token_gradients(loss, max_tokens):
    """(loss, its derivative by each token's logprob, which tokens are rejected), in an order that splits do not change."""
    objective = Objective(config(loss=loss))
    parts = micro_batches_of(loss["aggregation"], max_tokens)
    starts, samplers = (torch.cat(column) for column in zip(*((start, m.sampler_logprob) for m, start in parts), strict=True))
    whole_batch = objective.whole_batch_weight(starts, samplers).split([len(start) for _, start in parts])
    total, derivatives, rejected = 0.0, [], []
    for (m, start), weight in zip(parts, whole_batch, strict=True):
        logprob = (start + 0.3 * torch.sin(37 * m.sampler_logprob)).requires_grad_()  # a later update: the model has moved off the start
        value = objective(m, TokenOutputs(logprob, torch.zeros_like(start), None), start, weight)
        total += value.loss.item()
        derivatives.append(torch.autograd.grad(value.loss, logprob)[0])
        rejected.append(value.rejected)
    names, order = samplers.sort()  # the sampler's logprobs are all different, so each names its token
    assert len(names.unique()) == len(names)
    return total, torch.cat(derivatives)[order], torch.cat(rejected)[order]


@pytest.mark.parametrize("policy", POLICY_LOSSES)
def test_splits_equal_the_whole_at_every_token(policy):
    assert len(micro_batches_of("token_mean", 10_000)) == 1 and len(micro_batches_of("token_mean", 25)) > 4
    seen = 0
    for aggregation, correction in itertools.product(AGGREGATIONS, [None, *CORRECTION_TABLES]):
        if not allowed(policy, correction):
            continue
        loss = loss_of(policy, aggregation, correction)
        value, derivative, rejected = token_gradients(loss, 10_000)
        split_value, split_derivative, split_rejected = token_gradients(loss, 25)
        assert torch.equal(rejected, split_rejected), loss
        assert split_value == pytest.approx(value, rel=1e-5, abs=1e-6), loss
        assert derivative.abs().sum() > 0, loss
        assert torch.allclose(split_derivative, derivative, rtol=1e-5, atol=1e-5 * derivative.abs().max().item()), loss
        if correction and correction["type"] != "truncate":
            assert rejected.any() and not rejected.all(), f"{correction} judges all tokens alike: the test would show nothing"
        seen += 1
    assert seen >= len(AGGREGATIONS) * (len(CORRECTION_TABLES) - 4)


# ---- a token's loss by itself


def test_losses_by_token_are_those_that_any_part_of_a_micro_batch_may_be_judged_by():
    """Cut within rollouts, a loss adds up to the whole exactly where the objective says that it goes by token."""
    ((m, start),) = micro_batches_of("token_mean", 10_000)
    logprob = start + 0.3 * torch.sin(37 * m.sampler_logprob)
    chunks = list(m.chunks(7))
    assert len(chunks) > 3 and torch.cat([chunk.sampler_logprob for _, chunk in chunks]).equal(m.sampler_logprob)
    seen = {True: 0, False: 0}
    for policy, correction in itertools.product(POLICY_LOSSES, [None, *CORRECTION_TABLES]):
        if not allowed(policy, correction):
            continue
        objective = Objective(config(loss=loss_of(policy, "token_mean", correction)))
        whole = objective(m, TokenOutputs(logprob, torch.zeros_like(start), None), start, None)
        parts = Value.joined(
            [objective(c, TokenOutputs(logprob[at], torch.zeros_like(start[at]), None), start[at], None) for at, c in chunks]
        )
        same = parts.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5) and parts.rejected.equal(whole.rejected)
        assert same == objective.by_token, (policy, correction)
        seen[same] += 1
    assert seen[True] > 40 and seen[False] > 40


@pytest.mark.parametrize("loss", [{}, {"entropy_coefficient": 0.1, "correction": ["tis"]}, {"preset": "gspo"}], ids=str)
def test_chunks_of_the_head_change_nothing(loss, monkeypatch):
    """Logits are computed once where the loss goes by token, and twice where it does not."""
    seen = []
    head = logprobs.head_logits
    monkeypatch.setattr(logprobs, "head_logits", lambda model, hidden: (seen.append(len(hidden)), head(model, hidden))[1])

    def step(chunk):
        trainer = Trainer(config(trainer={"logprob_chunk_tokens": chunk, "learning_rate": 0.0}, loss=loss), tiny_model("qwen3"))
        trainer.step, kept, update = 3, [], trainer.optimizer.update
        trainer.optimizer.update = lambda step, norm: (kept.append(gradient(trainer.model)), update(step, norm))
        seen.clear()
        return trainer.train_step(stale_batch()).metrics, kept[0], len(seen)

    whole, expected, once = step(10_000)
    metrics, found, count = step(16)
    ((m, _),) = micro_batches_of("token_mean", 10_000)
    assert once == 1 and count == len(list(m.chunks(16))) * (2 if loss.get("preset") == "gspo" else 1)
    assert relative_distance(found, expected) < 1e-5
    assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-6)


def step_gradient(loss, max_tokens, checkpointing=False):
    """(gradient, loss) of a step as the trainer makes it; the update itself is left out by a learning rate of 0."""
    settings = {"max_tokens_per_micro_batch": max_tokens, "gradient_checkpointing": checkpointing, "learning_rate": 0.0}
    trainer = Trainer(config(trainer=settings, loss=loss), tiny_model())
    trainer.step = 3
    found = []
    update = trainer.optimizer.update
    trainer.optimizer.update = lambda step, norm: (found.append(gradient(trainer.model)), update(step, norm))
    step = trainer.train_step(stale_batch())
    assert step.skipped is None and (step.metrics["micro_batches"] > 3) == (max_tokens < 100)
    return found[0], step.metrics["loss"]


COVERING = (
    [  # every policy loss, every aggregation, every correction
        (policy, list(AGGREGATIONS)[i % 3], next(c for c in [*CORRECTION_TABLES[i:], None] if allowed(policy, c)))
        for i, policy in enumerate(POLICY_LOSSES)
    ]
    + [("ppo_clip", "token_mean", c) for c in CORRECTION_TABLES if c["type"] in ("m2po", "version_gate", "opsm", "geometric")]
)


@pytest.mark.parametrize(("policy", "aggregation", "correction"), COVERING, ids=lambda x: x["type"] if isinstance(x, dict) else str(x))
def test_splits_equal_the_whole_through_the_model(policy, aggregation, correction):
    loss = loss_of(policy, aggregation, correction)
    whole, value = step_gradient(loss, 10_000)
    split, split_value = step_gradient(loss, 25)
    assert relative_distance(split, whole) < 1e-5
    assert split_value == pytest.approx(value, rel=1e-5, abs=1e-6)


def test_the_covering_set_covers():
    policies, aggregations, corrections = (
        set(column) for column in zip(*((p, a, (c or {}).get("type")) for p, a, c in COVERING), strict=True)
    )
    assert policies == set(POLICY_LOSSES) and aggregations == set(AGGREGATIONS)
    assert corrections >= set(CORRECTIONS) - {"mask"}


@pytest.mark.parametrize(
    ("policy", "aggregation", "correction"),
    [
        ("ppo_clip", "token_mean", {"type": "truncate", **BOUNDS["truncate"]}),  # of each token by itself
        ("gspo", "sequence_mean_of_token_mean", {"type": "geometric", **BOUNDS["geometric"]}),  # of rollouts
        ("reinforce", "sequence_mean_of_token_sum_over_max_length", {"type": "m2po", **BOUNDS["m2po"]}),  # of the batch
    ],
)
def test_gradient_checkpointing_changes_nothing(policy, aggregation, correction):
    loss = loss_of(policy, aggregation, correction)
    expected, value = step_gradient(loss, 10_000)
    found, found_value = step_gradient(loss, 25, checkpointing=True)
    assert relative_distance(found, expected) < 1e-5 and found_value == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains(preset):
    trainer = Trainer(config(trainer={"learning_rate": 1e-3}, loss={"preset": preset}), tiny_model())
    trainer.step = 3
    step = trainer.train_step(stale_batch())
    assert step.skipped is None and step.metrics["grad_norm"] > 0


# ---- the weight of a token


def test_a_loss_weight_weighs_the_tokens_gradient():
    """Weight 0 is as good as out of the loss mask, but for the number that the sum is divided by."""
    batch = make_batch(groups=1, samples=3)
    first, *others = batch.groups[0].rollouts[::-1]
    weight = np.ones(len(first.token_ids), np.float32)
    weight[np.flatnonzero(first.loss_mask)[0]] = 0
    mask = first.loss_mask & (weight > 0)
    weighed = batch_of(0, [make_group([msgspec.structs.replace(first, arrays={"loss_weight": weight}), *others])])
    masked = batch_of(0, [make_group([msgspec.structs.replace(first, loss_mask=mask), *others])])
    norms = [Trainer(config(), tiny_model()).train_step(b).metrics["grad_norm"] * b.num_loss_tokens for b in (weighed, masked)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# ---- KL, entropy, distillation: against one sequence per row, written out


def other_model():
    return eager_twin(tiny_model(seed=5))


def with_arrays(batch: Batch, **names_and_models) -> Batch:
    """The batch with logprobs of other models as aligned arrays."""
    groups = []
    for group in batch.groups:
        rollouts = []
        for rollout in group.rollouts:
            arrays = {}
            for name, other in names_and_models.items():
                values = np.zeros(len(rollout.token_ids), np.float32)
                sampled = msgspec.structs.replace(rollout, loss_mask=rollout.model_versions() >= 0)
                values[sampled.loss_mask] = plain_logprobs(other, sampled).detach().numpy()
                arrays[name] = values
            rollouts.append(msgspec.structs.replace(rollout, arrays=arrays))
        groups.append(make_group(rollouts))
    return batch_of(batch.step, groups)


def trained_gradient(loss, batch, teacher=None):
    trainer = Trainer(config(trainer={"learning_rate": 0.0}, loss=loss), tiny_model(), teacher)
    found = []
    trainer.optimizer.update = lambda step, norm: found.append(gradient(trainer.model))
    metrics = trainer.train_step(batch).metrics
    return found[0], metrics


def naive(batch, term):
    """(gradient, loss) of the token mean of `term(rollout, advantage, log-softmax rows [n, V], logprob [n])`."""
    model = eager_twin(tiny_model())
    rollouts = [r for g in batch.groups for r in g.rollouts]
    advantages = group_mean_std([r.reward for r in rollouts], [r.group_id for r in rollouts])
    total = torch.zeros(())
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rows, logprob = full_rows(model, rollout)
        total = total + term(rollout, float(advantage), rows, logprob).sum()
    loss = total / batch.num_loss_tokens
    model.zero_grad()
    loss.backward()
    return gradient(model), loss.item()


def full_rows(model, rollout):
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))[None]
    targets = torch.from_numpy(np.flatnonzero(rollout.loss_mask))
    rows = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)[targets - 1]
    return rows, rows.gather(1, ids[0, targets][:, None])[:, 0]


def clipped(rollout, advantage, logprob):
    ratio = (logprob - torch.from_numpy(rollout.logprobs[rollout.loss_mask])).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def of(rollout, name):
    return torch.from_numpy(rollout.arrays[name][rollout.loss_mask])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_in_the_loss(estimator):
    batch = with_arrays(make_batch(), reference_logprobs=other_model())

    def term(rollout, advantage, rows, logprob):
        x = logprob - of(rollout, "reference_logprobs")
        divergence = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() - 1 + x}[estimator]
        return clipped(rollout, advantage, logprob) + 0.3 * divergence

    expected, loss = naive(batch, term)
    found, metrics = trained_gradient({"kl_coefficient": 0.3, "kl_estimator": estimator}, batch)
    assert relative_distance(found, expected) < 1e-4 and metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["reference_kl"] > 0


def test_entropy_bonus():
    batch = make_batch()
    expected, loss = naive(batch, lambda r, a, rows, logprob: clipped(r, a, logprob) + 0.2 * (rows.exp() * rows).sum(-1))
    found, metrics = trained_gradient({"entropy_coefficient": 0.2}, batch)
    assert relative_distance(found, expected) < 1e-5 and metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert relative_distance(found, naive(batch, lambda r, a, rows, logprob: clipped(r, a, logprob))[0]) > 0.01


def test_distillation_from_sampled_tokens():
    batch = with_arrays(make_batch(), teacher_logprobs=other_model())

    def term(rollout, advantage, rows, logprob):
        return clipped(rollout, advantage + 0.5 * (of(rollout, "teacher_logprobs") - logprob.detach()), logprob)

    expected, loss = naive(batch, term)
    found, metrics = trained_gradient({"teacher": "t", "teacher_coefficient": 0.5}, batch)
    assert relative_distance(found, expected) < 1e-4 and metrics["loss"] == pytest.approx(loss, rel=1e-4)
    logprobs = [(full_rows(eager_twin(tiny_model()), r)[1], of(r, "teacher_logprobs")) for g in batch.groups for r in g.rollouts]
    assert metrics["teacher_kl"] == pytest.approx(torch.cat([a - b for a, b in logprobs]).mean().item(), rel=1e-4)


@pytest.mark.parametrize("max_tokens", [10_000, 30])
def test_distillation_over_the_whole_vocabulary(max_tokens):
    batch, teacher, plain_teacher = make_batch(), tiny_model("qwen3", seed=5), eager_twin(tiny_model("qwen3", seed=5))

    def term(rollout, advantage, rows, logprob):
        with torch.no_grad():
            theirs, _ = full_rows(plain_teacher, rollout)
        return clipped(rollout, advantage, logprob) + 0.5 * (rows.exp() * (rows - theirs)).sum(-1)

    expected, loss = naive(batch, term)
    settings = {"teacher": "t", "teacher_kl": "full", "teacher_coefficient": 0.5}
    trainer = Trainer(config(trainer={"max_tokens_per_micro_batch": max_tokens}, loss=settings), tiny_model(), teacher)
    found = []
    trainer.optimizer.update = lambda step, norm: found.append(gradient(trainer.model))
    metrics = trainer.train_step(batch).metrics
    assert relative_distance(found[0], expected) < 1e-5 and metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["teacher_kl"] > 0.1 and not any(p.requires_grad for p in teacher.parameters())


def test_a_token_that_the_teacher_does_not_know_is_refused():
    teacher = tiny_model("qwen3", seed=5)
    teacher.resize_token_embeddings(20)
    trainer = Trainer(config(loss={"teacher": "t", "teacher_kl": "full"}), tiny_model(), teacher)
    with pytest.raises(DataError, match=r"batch 0: group 0 sample \d has token id \d+, but loss.teacher has only 20 embeddings"):
        trainer.train_step(make_batch())


def test_a_teacher_is_held_only_where_the_settings_say_so():
    for loss, teacher in (({}, tiny_model()), ({"teacher": "t"}, tiny_model()), ({"teacher": "t", "teacher_kl": "full"}, None)):
        with pytest.raises(ValueError, match="holds a teacher"):
            Trainer(config(loss=loss), tiny_model(), teacher)


# ---- rewards


def advantages_of(batch, **tables):
    (sequences,) = Trainer(config(**tables), tiny_model())._read(batch)
    return [s.advantage for s in sequences]


def test_kl_in_the_reward():
    """R - β Σ k1 over the sampled tokens, those that are not trained included: what is masked does not change what a rollout is worth."""
    batch = with_arrays(make_batch(), reference_logprobs=other_model())
    rollouts = [r for g in batch.groups for r in g.rollouts]
    rewards = []
    for r in rollouts:
        sampled = r.model_versions() >= 0
        x = (r.logprobs - r.arrays["reference_logprobs"])[sampled].astype(np.float64)
        rewards.append(r.reward - 0.1 * x.sum())
    expected = group_mean_std(rewards, [r.group_id for r in rollouts])
    found = advantages_of(batch, loss={"kl_coefficient": 0.1, "kl_in": "reward"})
    assert found == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
    assert found != pytest.approx(advantages_of(batch), rel=0.1)


def test_overlong_rollouts_lose_reward():
    batch = make_batch()
    rollouts = [r for g in batch.groups for r in g.rollouts]
    lengths = [r.num_sampled_tokens for r in rollouts]
    assert max(lengths) > 8 > min(lengths)
    rewards = [r.reward - min(1.0, max(0.0, (n - 8) / 4)) for r, n in zip(rollouts, lengths, strict=True)]
    expected = group_mean_std(rewards, [r.group_id for r in rollouts])
    found = advantages_of(batch, loss={"overlong_tokens": 4}, rollout={"max_new_tokens": 12})
    assert found == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)


# ---- arrays that are not there or not logprobs


def broken(**arrays):
    rollout = make_batch(groups=1, samples=1).groups[0].rollouts[0]
    return batch_of(0, [make_group([msgspec.structs.replace(rollout, arrays={k: v(rollout) for k, v in arrays.items()})])])


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "has no reference_logprobs"),
        ({"reference_logprobs": lambda r: np.full(len(r.token_ids), np.nan, np.float32)}, "has reference_logprobs nan"),
        ({"reference_logprobs": lambda r: np.full(len(r.token_ids), 0.5, np.float32)}, "has reference_logprobs 0.5"),
        ({"reference_logprobs": lambda r: np.zeros(3, np.float32)}, r"of shape \(3,\)"),
    ],
)
def test_bad_logprobs_of_other_models_are_refused(arrays, message, kl_in):
    trainer = Trainer(config(loss={"kl_coefficient": 0.1, "kl_in": kl_in}), tiny_model())
    with pytest.raises(DataError, match=message):
        trainer.train_step(broken(**arrays))


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_bad_loss_weights_are_refused(value):
    with pytest.raises(DataError, match="loss weight"):
        Trainer(config(), tiny_model()).train_step(broken(loss_weight=lambda r: np.full(len(r.token_ids), value, np.float32)))
