"""Several updates on one batch: passes over it, minibatches, the pass before the first update, updates that are left out."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from trainer_models import batch_of, config, make_batch, make_group, relative_distance, tiny_model

import slipstream.trainer.trainer as trainer_module
from slipstream.errors import RunFailed
from slipstream.trainer.checkpoint import load_checkpoint, write_checkpoint
from slipstream.trainer.packing import pack
from slipstream.trainer.trainer import Trainer
from slipstream.types import Batch
from slipstream.weight_sync.packing import checksum


def trainer_of(loss=None, model=None, **settings):
    return Trainer(config(trainer={"learning_rate": 1e-2, "steps": 20, **settings}, loss=loss or {}), model or tiny_model())


def weights(trainer):
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()])


def forwards(monkeypatch):
    """Counts the trainer's forward passes, with and without a gradient."""
    seen = []
    hidden = trainer_module._hidden
    monkeypatch.setattr(trainer_module, "_hidden", lambda model, m: (seen.append(torch.is_grad_enabled()), hidden(model, m))[1])
    return seen


def at_step(batch: Batch, step: int) -> Batch:
    """The same batch as another step's; its tokens stay of the version that they were."""
    return msgspec.structs.replace(batch, step=step)


# ---- what the updates are


def test_minibatches_are_batches_of_their_own_groups():
    """Sampler's denominator, nothing over the whole batch: the same bits as two steps on the two halves, the longer part first."""
    batch = make_batch(groups=3)
    whole = trainer_of(minibatches=2)
    assert whole.train_step(batch).metrics["updates"] == 2
    halves = trainer_of()
    halves.train_step(batch_of(0, list(batch.groups[:2])))
    halves.train_step(batch_of(1, list(batch.groups[2:])))
    assert checksum(whole.model) == checksum(halves.model) != checksum(tiny_model())
    assert whole.version == 1 and halves.version == 2


def test_passes_over_a_batch_with_the_samplers_denominator():
    batch = make_batch()
    twice = trainer_of(updates_per_batch=2)
    step = twice.train_step(batch)
    once = trainer_of()
    once.train_step(batch)
    once.train_step(at_step(batch, 1))
    assert checksum(twice.model) == checksum(once.model)
    assert step.metrics["updates"] == 2 and twice.version == 1


def test_recomputed_denominator_is_that_of_the_first_update():
    """Equal to training twice on a batch whose recorded logprobs are those of the start weights."""
    batch, settings = make_batch(groups=3), {"loss": {"old_logprobs": "recomputed"}, "updates_per_batch": 2, "minibatches": 3}
    several = trainer_of(**settings)
    several.train_step(batch)
    expected = trainer_of(updates_per_batch=2, minibatches=3)
    expected.train_step(with_start_logprobs(batch))
    assert relative_distance(weights(several) - weights(trainer_of()), weights(expected) - weights(trainer_of())) < 1e-4
    other = trainer_of(updates_per_batch=2, minibatches=3)
    other.train_step(batch)
    assert relative_distance(weights(several) - weights(trainer_of()), weights(other) - weights(trainer_of())) > 0.05


def with_start_logprobs(batch: Batch) -> Batch:
    """The batch as the start weights would have sampled it."""
    trainer = trainer_of()
    (sequences,) = trainer._read(batch)
    rollouts = {(s.group, s.sample): batch.groups[s.group].rollouts[s.sample] for s in sequences}
    for sequence in sequences:  # one by one, so that each token is in its place
        (m,) = pack([sequence], 10_000)
        with torch.no_grad():
            logprob = trainer.forward(m).logprob
        rollout = rollouts[sequence.group, sequence.sample]
        logprobs = rollout.logprobs.copy()
        logprobs[sequence.targets] = logprob.numpy()
        rollouts[sequence.group, sequence.sample] = msgspec.structs.replace(rollout, logprobs=logprobs)
    groups = [make_group([rollouts.get((place, r.sample), r) for r in group.rollouts]) for place, group in enumerate(batch.groups)]
    return batch_of(batch.step, groups)


@pytest.mark.parametrize(
    ("loss", "settings", "passes"),
    [
        ({}, {}, [True]),
        ({"old_logprobs": "recomputed"}, {}, [True]),  # one update: its own forward pass has them
        ({"correction": ["tis"]}, {}, [True]),
        ({}, {"updates_per_batch": 2}, [True, True]),  # nothing asks for the start weights
        ({"old_logprobs": "recomputed"}, {"updates_per_batch": 2}, [False, True, True]),
        ({"correction": ["tis"]}, {"minibatches": 2}, [False, False, True, True]),
        ({"preset": "m2po"}, {}, [False, True]),
    ],
)
def test_a_first_pass_is_made_only_where_something_needs_it(loss, settings, passes, monkeypatch):
    trainer = trainer_of(loss, **settings)
    seen = forwards(monkeypatch)
    trainer.train_step(make_batch(groups=2))
    assert seen == passes


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_of_token_mean", "sequence_mean_of_token_sum_over_max_length"])
def test_a_minibatch_has_the_gradient_scale_of_a_batch(aggregation):
    """Two equal groups: each half's gradient is the whole's, not half of it."""
    group = make_batch(groups=1).groups[0]
    twin = msgspec.structs.replace(group, group_id=1, rollouts=tuple(msgspec.structs.replace(r, group_id=1) for r in group.rollouts))
    norms = [
        trainer_of({"aggregation": aggregation}, learning_rate=0.0, minibatches=m)
        .train_step(batch_of(0, [group, twin]))
        .metrics["grad_norm"]
        for m in (1, 2)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


def test_the_learning_rate_is_the_batchs():
    """Warm-up counts batches, not updates."""
    trainer = trainer_of(warmup_steps=4, updates_per_batch=3)
    assert trainer.train_step(make_batch(0)).metrics["learning_rate"] == pytest.approx(1e-2 / 4)
    assert trainer.optimizer._adamw.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)
    assert trainer.train_step(make_batch(1)).metrics["learning_rate"] == pytest.approx(1e-2 / 2)


def test_a_minibatch_without_trained_tokens_makes_no_update():
    batch = make_batch(groups=2)
    masked = make_group([msgspec.structs.replace(r, loss_mask=r.loss_mask & False) for r in batch.groups[1].rollouts])
    trainer = trainer_of(minibatches=2)
    step = trainer.train_step(batch_of(0, [batch.groups[0], masked]))
    assert step.skipped is None and step.metrics["updates"] == 1
    alone = trainer_of()
    alone.train_step(batch_of(0, [batch.groups[0]]))
    assert checksum(trainer.model) == checksum(alone.model)


# ---- updates that are left out


def poison_backward(trainer, bad):
    """The gradient of each backward pass whose number (from 0) is in `bad` is infinite."""
    count = iter(range(1000))
    return trainer.model.lm_head.weight.register_hook(lambda g: g * math.inf if next(count) in bad else g)


def test_an_update_in_the_middle_that_is_not_finite_is_left_out_alone():
    batch = make_batch(groups=3)
    trainer = trainer_of(minibatches=3)
    poison_backward(trainer, {1})
    step = trainer.train_step(batch)
    assert step.skipped is None and step.metrics["updates"] == 2 and trainer.skipped_in_a_row == 0
    assert all(math.isfinite(value) for value in step.metrics.values()) and step.metrics["grad_norm"] > 0
    without = trainer_of(minibatches=2)
    without.train_step(batch_of(0, [batch.groups[0], batch.groups[2]]))
    assert checksum(trainer.model) == checksum(without.model)
    counts = {value.item() for name, value in trainer.optimizer.state_tensors().items() if name.endswith(".step")}
    assert counts == {2}  # updates that were made


def test_a_step_is_skipped_where_no_update_was_made():
    trainer = trainer_of(minibatches=2, updates_per_batch=2, max_skipped_steps=2)
    before = checksum(trainer.model)
    poison_backward(trainer, set(range(100)))
    step = trainer.train_step(make_batch(0))
    assert step.skipped.startswith("non-finite gradient") and step.metrics["updates"] == 0
    assert trainer.version == 1 and checksum(trainer.model) == before
    with pytest.raises(RunFailed, match="2 updates in a row were skipped"):
        trainer.train_step(make_batch(1))


def test_logprobs_that_are_not_finite_skip_the_update_with_that_cause():
    trainer = trainer_of()
    with torch.no_grad():
        trainer.model.lm_head.weight[5] = math.nan
    assert trainer.train_step(make_batch(0)).skipped.startswith("non-finite loss (nan)")


# ---- exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_exact_with_several_updates(dtype, tmp_path):
    settings = {"updates_per_batch": 2, "minibatches": 2, "max_tokens_per_micro_batch": 40}
    loss = {"old_logprobs": "recomputed", "correction": ["m2po"]}
    through = trainer_of(loss, tiny_model(dtype=dtype), **settings)
    for step in range(4):
        through.train_step(make_batch(step, groups=3, version=max(0, step - 1)))
        if step == 1:
            name, _ = write_checkpoint(tmp_path, through, run_id="r", incarnation=1, ledger_seq=0, weights_checksum="")
    resumed = trainer_of(loss, tiny_model(seed=9, dtype=dtype), **settings)
    load_checkpoint(tmp_path / name, resumed)
    for step in (2, 3):
        resumed.train_step(make_batch(step, groups=3, version=step - 1))
    assert checksum(resumed.model) == checksum(through.model)
    ours, theirs = resumed.optimizer.state_tensors(), through.optimizer.state_tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
