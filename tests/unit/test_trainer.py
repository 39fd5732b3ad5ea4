"""The train step: it improves, it repeats bit for bit, it skips what is not finite, it says what it did."""

import doctest
import importlib

import msgspec
import numpy as np
import pytest
import torch
from trainer_models import batch_of, config, eager_twin, make_batch, make_group, plain_logprobs, tiny_model

from slipstream.controller import buffer
from slipstream.controller.events import StaleRule
from slipstream.errors import DataError, RunFailed
from slipstream.trainer.trainer import Trainer
from slipstream.types import Span
from slipstream.weight_sync.packing import checksum


def trainer_of(model=None, loss=None, rollout=None, **settings):
    tables = {"trainer": {"learning_rate": 1e-3, "steps": 20, **settings}, "loss": loss or {}, "rollout": rollout or {}}
    return Trainer(config(**tables), model or tiny_model())


def with_current_logprobs(model, batch):
    """The batch as the model itself would have sampled it."""
    twin = eager_twin(model)
    groups = []
    for group in batch.groups:
        rollouts = []
        for r in group.rollouts:
            logprobs = r.logprobs.copy()
            logprobs[r.loss_mask] = plain_logprobs(twin, r).detach().numpy()
            rollouts.append(msgspec.structs.replace(r, logprobs=logprobs))
        groups.append(make_group(rollouts))
    return batch_of(batch.step, groups)


def test_fresh_batch():
    """Sampled by the very weights that train it: ratio 1, nothing clipped, no divergence, no gap."""
    trainer = trainer_of()
    step = trainer.train_step(with_current_logprobs(trainer.model, make_batch()))
    assert step.skipped is None and trainer.version == 1
    m = step.metrics
    assert m["ratio_mean"] == pytest.approx(1, abs=1e-4) and m["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert m["clipped_fraction"] == 0
    assert abs(m["kl_k1"]) < 1e-4 and 0 <= m["kl_k3"] < 1e-6
    assert 0 < m["logprob_gap"] < 1e-4
    assert 0 < m["entropy"] < np.log(61)
    assert m["grad_norm"] > 0.01 and m["learning_rate"] == 1e-3
    assert m["num_loss_tokens"] == make_batch().num_loss_tokens
    assert all(np.isfinite(v) for v in m.values())


def test_logprob_gap_is_left_out_where_no_token_is_fresh():
    trainer = trainer_of()
    trainer.step = 2
    metrics = trainer.train_step(make_batch(step=2, version=1)).metrics
    assert "logprob_gap" not in metrics and "entropy" in metrics


def test_rewarded_rollouts_become_likelier():
    trainer = trainer_of()
    batch = with_current_logprobs(trainer.model, make_batch(groups=1, samples=2))
    good, bad = (msgspec.structs.replace(r, reward=v) for r, v in zip(batch.groups[0].rollouts, (1.0, 0.0), strict=True))
    before = [plain_logprobs(eager_twin(trainer.model), r).sum().item() for r in (good, bad)]
    for step in range(3):
        trainer.train_step(msgspec.structs.replace(batch_of(step, [make_group([good, bad])])))
    after = [plain_logprobs(eager_twin(trainer.model), r).sum().item() for r in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_same_batches_same_bits(dtype, checkpointing):
    checksums = []
    for _ in range(2):
        trainer = trainer_of(tiny_model(dtype=dtype), gradient_checkpointing=checkpointing, max_tokens_per_micro_batch=40)
        for step in range(3):
            assert trainer.train_step(make_batch(step)).skipped is None
        checksums.append(checksum(trainer.model))
    assert checksums[0] == checksums[1] != checksum(tiny_model(dtype=dtype))


def test_learning_rate_zero_ends_where_it_began():
    trainer = trainer_of(learning_rate=0.0)
    for step in range(3):
        trainer.train_step(make_batch(step))
    assert checksum(trainer.model) == checksum(tiny_model())


def test_equal_rewards_give_no_gradient():
    trainer = trainer_of()
    batch = make_batch()
    groups = [make_group([msgspec.structs.replace(r, reward=0.3) for r in g.rollouts]) for g in batch.groups]
    step = trainer.train_step(batch_of(0, groups))
    assert step.metrics["grad_norm"] == 0 and step.metrics["loss"] == 0


def test_dropout_is_switched_off():
    model = tiny_model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.transformer.h[0].attn.attention_dropout = 0.5
    trainer = trainer_of(model, gradient_checkpointing=True)  # which needs train mode, where dropout would act
    step = trainer.train_step(with_current_logprobs(model, make_batch()))
    assert step.metrics["ratio_max"] == pytest.approx(1, abs=1e-3)


def test_dr_grpo_weighs_tokens_by_a_constant():
    """Twice the longest completion, half the gradient."""
    norms = []
    for longest in (10, 20):
        trainer = trainer_of(loss={"preset": "dr_grpo"}, rollout={"max_new_tokens": longest})
        norms.append(trainer.train_step(make_batch()).metrics["grad_norm"])
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4)


# ---- tokens out of the loss mask


@pytest.mark.parametrize("on_stale", ["mask_tokens", "keep"])
def test_stale_tokens_train_only_where_the_settings_say_so(on_stale):
    """The controller takes them out of the loss mask and counts them; the trainer's gradient is then that of the others alone."""
    whole = make_batch(step=4, groups=1, samples=3)
    old, *others = whole.groups[0].rollouts
    old_span = (Span(old.spans[0].start, old.spans[0].end, 1, 0, "e0"),)
    stale = make_group([msgspec.structs.replace(old, spans=old_span), *others])
    masked = make_group([msgspec.structs.replace(old, loss_mask=np.zeros_like(old.loss_mask)), *others])
    batch, record = buffer.make_batch(4, [stale], [4], StaleRule(on_stale, limit=3))
    expected = batch_of(4, [masked]) if on_stale == "mask_tokens" else whole
    assert record.num_masked_tokens == whole.num_loss_tokens - expected.num_loss_tokens
    metrics = []
    for each in (batch, expected):
        trainer = trainer_of()
        trainer.step = 4
        metrics.append(trainer.train_step(each).metrics)
    assert metrics[0]["num_loss_tokens"] == metrics[1]["num_loss_tokens"] == batch.num_loss_tokens
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-5)
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-6)


def test_masked_tokens_have_zero_gradient():
    """Whatever their logprob: a masked token has no share in the gradient, though its rollout is trained."""
    batch = make_batch(groups=1, samples=3)
    norms = []
    for logprob in (-0.1, -9.0):
        first, *others = batch.groups[0].rollouts[::-1]
        assert first.loss_mask.sum() >= 2
        at = int(np.flatnonzero(first.loss_mask)[0])
        mask, logprobs = first.loss_mask.copy(), first.logprobs.copy()
        mask[at], logprobs[at] = False, logprob
        changed = msgspec.structs.replace(first, loss_mask=mask, logprobs=logprobs)
        norms.append(trainer_of().train_step(batch_of(0, [make_group([changed, *others])])).metrics["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_a_batch_without_trained_tokens_is_skipped():
    trainer = trainer_of(max_skipped_steps=2)
    groups = [
        make_group([msgspec.structs.replace(r, loss_mask=np.zeros_like(r.loss_mask)) for r in group.rollouts])
        for group in make_batch().groups
    ]
    assert trainer.train_step(batch_of(0, groups)).skipped == "no token to train"
    assert checksum(trainer.model) == checksum(tiny_model()) and trainer.version == 1
    with pytest.raises(RunFailed, match=r"no token to train\. What can help: where buffer\.on_stale masks"):
        trainer.train_step(batch_of(1, groups))


# ---- updates that are skipped


def poison(model):
    """From now on the gradient is infinite, the loss is not."""
    return model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_gradient_skips_the_update_whole(dtype):
    trainer = trainer_of(tiny_model(dtype=dtype))
    trainer.train_step(make_batch(0))
    before, state = checksum(trainer.model), {k: v.clone() for k, v in trainer.optimizer.state_tensors().items()}
    hook = poison(trainer.model)
    step = trainer.train_step(make_batch(1))
    hook.remove()
    assert step.skipped.startswith("non-finite gradient") and trainer.version == 2
    assert checksum(trainer.model) == before
    assert all(torch.equal(v, state[k]) for k, v in trainer.optimizer.state_tensors().items())
    assert trainer.train_step(make_batch(2)).skipped is None  # nothing of it is left in the gradients
    assert checksum(trainer.model) != before


def test_a_non_finite_loss_skips_the_update(monkeypatch):
    trainer = trainer_of()
    before = checksum(trainer.model)
    policy = trainer.objective._policy
    monkeypatch.setattr(trainer.objective, "_policy", lambda t: (policy(t).per_token * float("nan"), policy(t).cut))
    assert trainer.train_step(make_batch(0)).skipped.startswith("non-finite loss")
    assert checksum(trainer.model) == before


def test_too_many_skipped_updates_in_a_row_end_the_run():
    trainer = trainer_of(max_skipped_steps=3)
    hook = poison(trainer.model)
    trainer.train_step(make_batch(0))
    trainer.train_step(make_batch(1))
    hook.remove()
    trainer.train_step(make_batch(2))  # a good one: the count starts again
    poison(trainer.model)
    trainer.train_step(make_batch(3))
    trainer.train_step(make_batch(4))
    with pytest.raises(RunFailed, match=r"3 updates in a row were skipped, the last at step 5: non-finite gradient"):
        trainer.train_step(make_batch(5))


# ---- what is refused


def test_the_wrong_batch_is_refused():
    with pytest.raises(DataError, match="at step 0 but was given batch 3"):
        trainer_of().train_step(make_batch(3))


def test_a_wrong_count_of_loss_tokens_is_refused():
    batch = msgspec.structs.replace(make_batch(), num_loss_tokens=7)
    with pytest.raises(DataError, match="says 7 loss tokens"):
        trainer_of().train_step(batch)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    trainer_of(threads=before + 1).train_step(make_batch())
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("module", ["advantages", "aggregation", "optimizer"])
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"slipstream.trainer.{module}"))
    assert result.attempted and not result.failed
