"""What a step says about itself, against the numbers written out: overall, per version lag, over which keys and values."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from trainer_models import VOCABULARY, batch_of, config, eager_twin, make_batch, make_group, make_rollout, plain_logprobs, tiny_model

from slipstream.trainer.token_table import PrefixKV, token_table
from slipstream.trainer.trainer import Trainer
from slipstream.types import Span

STEP = 12


def old_batch(ages, groups=3, samples=4):
    """A batch of step 12; the rollouts' ages go round."""
    batch = make_batch(step=STEP, groups=groups, samples=samples)
    made, at = [], 0
    for group in batch.groups:
        rollouts = []
        for rollout in group.rollouts:
            (span,) = rollout.spans
            spans = (Span(span.start, span.end, 1, STEP - ages[at % len(ages)], "e0"),)
            rollouts.append(msgspec.structs.replace(rollout, spans=spans))
            at += 1
        made.append(make_group(rollouts))
    return batch_of(STEP, made)


def trained_metrics(batch, loss=None, **settings):
    trainer = Trainer(config(trainer={"learning_rate": 1e-3, "steps": 20, **settings}, loss=loss or {}), tiny_model())
    trainer.step = batch.step
    return trainer.train_step(batch).metrics


def facts(batch):
    """(log π - log μ, staleness) of every trained token, one rollout at a time."""
    model = eager_twin(tiny_model())
    log_ratio, lag = [], []
    for rollout in (r for g in batch.groups for r in g.rollouts):
        log_ratio.append(plain_logprobs(model, rollout).detach().double().numpy() - rollout.logprobs[rollout.loss_mask])
        lag.append(batch.step - rollout.model_versions()[rollout.loss_mask])
    return np.concatenate(log_ratio), np.concatenate(lag)


def expected_statistics(log_r):
    ratio, ascending = np.exp(log_r), np.sort(np.exp(log_r))
    return {
        "kl_k1": -log_r.mean(),
        "kl_k3": (ratio - 1 - log_r).mean(),
        "ess_fraction": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "ratio_max": ratio.max(),
        **{f"ratio_{name}": ascending[round(q * (len(ratio) - 1))] for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))},
    }


@pytest.mark.parametrize("max_tokens", [10_000, 40])
def test_statistics_overall_and_per_lag(max_tokens):
    batch = old_batch([0, 0, 1, 3])
    metrics = trained_metrics(batch, max_tokens_per_micro_batch=max_tokens)
    log_r, lag = facts(batch)
    assert {key: metrics[key] for key in expected_statistics(log_r)} == pytest.approx(expected_statistics(log_r), rel=1e-3)
    assert metrics["ratio_mean"] == pytest.approx(np.exp(log_r).mean(), rel=1e-3)
    assert {type(value) for value in metrics.values()} == {float}, "people print them"
    assert {key.split("/")[1] for key in metrics if key.startswith("lag/")} == {"0", "1", "3"}
    for number in (0, 1, 3):
        expected = expected_statistics(log_r[lag == number])
        assert {key: metrics[f"lag/{number}/{key}"] for key in expected} == pytest.approx(expected, rel=1e-3)
        assert metrics[f"lag/{number}/tokens"] == (lag == number).sum()


def test_old_lags_share_a_bucket():
    batch = old_batch([0, 7, 8, 11])
    metrics = trained_metrics(batch)
    log_r, lag = facts(batch)
    assert {key.split("/")[1] for key in metrics if key.startswith("lag/")} == {"0", "7", "8+"}
    assert metrics["lag/8+/tokens"] == (lag >= 8).sum()
    assert metrics["lag/8+/kl_k3"] == pytest.approx(expected_statistics(log_r[lag >= 8])["kl_k3"], rel=1e-3)


def test_few_keys_however_old_the_data():
    assert len(trained_metrics(old_batch(list(range(12))))) < 130


def test_clipped_and_rejected_tokens_are_counted_where_they_are():
    """The gate rejects what is older than 1; the clip counts by its own rule, whatever the weight."""
    batch = old_batch([0, 1, 3])
    metrics = trained_metrics(batch, {"correction": [{"type": "version_gate", "high": 1}]})
    log_r, lag = facts(batch)
    sampled = np.concatenate([STEP - r.model_versions()[r.spans[0].start :] for g in batch.groups for r in g.rollouts])
    assert metrics["masked_fraction"] == pytest.approx(1 - (lag <= 1).sum() / len(sampled))  # some left the loss mask before
    assert metrics["lag/0/masked_fraction"] == pytest.approx(1 - (lag == 0).sum() / (sampled == 0).sum())
    assert metrics["lag/3/masked_fraction"] == 1 and metrics["lag/3/tokens"] == (lag == 3).sum()
    sequences = token_table(batch, advantages_of(batch))
    advantage = np.concatenate([np.full(len(s.targets), s.advantage) for s in sequences])
    clipped = ((advantage > 0) & (log_r > np.log(1.2))) | ((advantage < 0) & (log_r < np.log(0.8)))
    assert 0.2 < clipped.mean() < 0.9 and metrics["clipped_fraction"] == pytest.approx(clipped.mean())
    assert metrics["lag/3/clipped_fraction"] == pytest.approx(clipped[lag == 3].mean())


def advantages_of(batch):
    (sequences,) = Trainer(config(), tiny_model())._read(batch)
    return np.array([s.advantage for s in sequences])


def test_tokens_that_left_the_loss_mask_count_as_masked():
    """Stale masking by the controller: the whole of lag 3 is gone, which its own line says."""
    batch = old_batch([0, 0, 3])
    groups = [
        make_group([msgspec.structs.replace(r, loss_mask=r.loss_mask & (r.spans[0].version == STEP)) for r in group.rollouts])
        for group in batch.groups
    ]
    metrics = trained_metrics(batch_of(STEP, groups))
    rollouts = [r for g in groups for r in g.rollouts]
    sampled, trained = sum(r.num_sampled_tokens for r in rollouts), sum(int(r.loss_mask.sum()) for r in rollouts)
    assert metrics["masked_fraction"] == pytest.approx(1 - trained / sampled)
    assert metrics["lag/3/tokens"] == 0 and metrics["lag/3/masked_fraction"] == 1 and "lag/3/kl_k1" not in metrics


def test_several_updates_measure_the_start_and_count_every_pass():
    """π in ratio and KL is the model before the first update; clips are counted over all passes."""
    batch = old_batch([0, 1])
    one = trained_metrics(batch, {"old_logprobs": "recomputed"}, learning_rate=0.05)
    several = trained_metrics(batch, {"old_logprobs": "recomputed"}, learning_rate=0.05, updates_per_batch=3, minibatches=2)
    for key in ("kl_k1", "kl_k3", "ratio_max", "ess_fraction", "entropy", "logprob_gap"):
        assert several[key] == pytest.approx(one[key], rel=1e-4), key
    assert one["clipped_fraction"] == 0 < several["clipped_fraction"] < 1
    assert several["updates"] == 6 and one["updates"] == 1


def test_effective_sample_size_of_one_heavy_token():
    """Weights 1, .., 1, w: n tokens count for (n - 1 + w)² / (n - 1 + w²) of them."""
    trainer = Trainer(config(), tiny_model())
    batch = make_batch(groups=1, samples=2)
    model, rollouts = eager_twin(trainer.model), []
    for rollout in batch.groups[0].rollouts:
        logprobs = rollout.logprobs.copy()
        logprobs[rollout.loss_mask] = plain_logprobs(model, rollout).detach().numpy()
        rollouts.append(msgspec.structs.replace(rollout, logprobs=logprobs))
    heavy = int(np.flatnonzero(rollouts[1].loss_mask)[0])
    rollouts[1].logprobs[heavy] -= np.log(100)
    metrics = trainer.train_step(batch_of(0, [make_group(rollouts)])).metrics
    n = batch.num_loss_tokens
    assert metrics["ess_fraction"] == pytest.approx((n - 1 + 100) ** 2 / (n * (n - 1 + 100**2)), rel=1e-3)
    assert metrics["logprob_gap_max"] == pytest.approx(np.log(100), rel=1e-3)


# ---- over which keys and values a fresh token was sampled


def prefix_kv(spans, prefill, kv="kept", length=8, given=()):
    """PrefixKV of the tokens after a prompt of 4, as "F", "K" or "-"; `given` ones were not sampled."""
    rng = np.random.default_rng(0)
    mask = np.ones(4 + length, bool)
    mask[:4] = False
    mask[list(given)] = False
    rollout = make_rollout(rng, 0, 0, rng.integers(3, VOCABULARY, 4).astype(np.int32), length, 0)
    spans = tuple(Span(start, end, 1, version, "e0") for start, end, version in spans)
    fields = {"spans": spans, "loss_mask": mask, "logprobs": np.full(4 + length, -1, np.float32)}
    rollout = msgspec.structs.replace(rollout, prefill_version=prefill and (1, prefill), kv=kv, **fields)
    (sequence,) = token_table(batch_of(5, [make_group([rollout])]), np.zeros(1))
    return "".join({PrefixKV.OTHER: "-", PrefixKV.FRESH: "F", PrefixKV.KEPT: "K"}[x] for x in sequence.prefix_kv.tolist())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([(4, 12, 5)], 5), "FFFFFFFF"),
        (([(4, 12, 5)], None), "FFFFFFFF"),  # not recorded: as the first token
        (([(4, 12, 4)], 4), "--------"),  # none is fresh
        (([(4, 7, 4), (7, 12, 5)], 4), "---KKKKK"),
        (([(4, 12, 5)], 4), "KKKKKKKK"),  # the update came between prompt and first token
        (([(4, 7, 4), (7, 12, 5)], 4, "recomputed"), "-" * 8),  # made again, but it is not said when: no claim
        (([(4, 7, 4), (7, 12, 5)], 5, "recomputed"), "---FFFFF"),  # the prompt's with them, by this version
    ],
)
def test_which_prefix_a_fresh_token_stands_on(arguments, expected):
    assert prefix_kv(*arguments) == expected


def test_a_later_turn_is_not_called_kept():
    """Turns 4..8 and 9..12 around a given token 8; the second turn may have been prefilled as a whole."""
    assert prefix_kv([(4, 6, 4), (6, 8, 5), (9, 12, 5)], 4, given=[8]) == "--KK---"


def test_the_gap_of_fresh_prefixes_and_that_of_kept_ones_are_apart():
    """One rollout sampled by the trainer's own weights, one that straddles an update and is half a nat off."""
    trainer = Trainer(config(), tiny_model())
    trainer.step = 5
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 6).astype(np.int32)
    rollouts = []
    for sample, (spans, prefill, off) in enumerate([([(6, 14, 5)], 5, 0.0), ([(6, 9, 4), (9, 14, 5)], 4, 0.5)]):
        mask = np.arange(14) >= 6
        rollout = make_rollout(rng, 0, sample, prompt, 8, 5, loss_mask=mask, prefill_version=(1, prefill))
        rollout = msgspec.structs.replace(rollout, spans=tuple(Span(a, b, 1, v, "e0") for a, b, v in spans))
        logprobs = rollout.logprobs.copy()
        logprobs[mask] = plain_logprobs(eager_twin(trainer.model), rollout).detach().numpy() - off
        rollouts.append(msgspec.structs.replace(rollout, logprobs=logprobs))
    metrics = trainer.train_step(batch_of(5, [make_group(rollouts)])).metrics
    assert metrics["logprob_gap"] < 1e-4 and metrics["logprob_gap_max"] < 1e-3
    assert metrics["kept_kv_gap"] == pytest.approx(0.5, abs=1e-3)


def test_a_gap_over_no_token_is_absent():
    metrics = trained_metrics(old_batch([1, 2]))
    assert not {"logprob_gap", "logprob_gap_max", "kept_kv_gap"} & metrics.keys() and "entropy" in metrics
