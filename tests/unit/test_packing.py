"""Packing: what is laid where, what predicts what, what is refused."""

import msgspec
import numpy as np
import pytest
import torch
from trainer_models import VOCABULARY, batch_of, make_batch, make_group, make_rollout

from slipstream.errors import DataError, StalenessError
from slipstream.trainer.packing import pack
from slipstream.trainer.token_table import masked_tokens, token_table
from slipstream.types import Sampling, Span, Turn


def table(batch):
    """Every rollout's advantage is its number in the batch, so that tokens show whose they are."""
    count = sum(len(g.rollouts) for g in batch.groups)
    return token_table(batch, np.arange(count, dtype=float))


def owners(m):
    """The rollout of each trained token of a micro-batch, [N]."""
    return [int(advantage) for advantage in m.advantage]


def facts(micro_batches):
    """(rollout, target, logprob, staleness, temperature, predictor's token) of each token of all micro-batches."""
    out = []
    for m in micro_batches:
        predictor = m.input_ids[0, m.rows.positions[m.rows.row]]
        temperature = torch.ones(len(m.rows.row)) if m.rows.temperature is None else m.rows.temperature[m.rows.row]
        columns = (m.advantage, m.rows.target_ids, m.sampler_logprob, m.staleness, temperature, predictor)
        out += zip(*(c.tolist() for c in columns), strict=True)
    return sorted(out)


def expected_facts(batch):
    out, index = [], 0
    for group in batch.groups:
        for r in group.rollouts:
            for t in np.flatnonzero(r.loss_mask):
                stale = int(batch.step - r.model_versions()[t])
                temperature = next(turn.sampling.temperature for turn in r.turns if turn.start <= t < turn.end)
                fact = (index, r.token_ids[t], r.logprobs[t], stale, temperature, r.token_ids[t - 1])
                out.append(tuple(x.item() if hasattr(x, "item") else x for x in fact))
            index += 1
    return sorted(out)


@pytest.mark.parametrize("max_tokens", [16, 25, 40, 10_000])
def test_every_trained_token_once_with_its_own_facts(max_tokens):
    batch = make_batch(step=3, groups=4, samples=5, version=2)
    micro_batches = pack(table(batch), max_tokens)
    assert np.allclose(np.array(facts(micro_batches)), np.array(expected_facts(batch)))
    assert len(facts(micro_batches)) == batch.num_loss_tokens


@pytest.mark.parametrize("max_tokens", [26, 40, 60])
def test_micro_batches_keep_to_their_size(max_tokens):
    micro_batches = pack(table(make_batch(groups=4, samples=5)), max_tokens)
    assert len(micro_batches) > 1
    assert max(m.layout.num_tokens for m in micro_batches) <= max_tokens


def test_a_rollout_longer_than_a_micro_batch_goes_alone():
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 30).astype(np.int32)
    batch = batch_of(0, [make_group([make_rollout(rng, 0, s, prompt, 5, 0) for s in range(3)])])
    assert [len(set(owners(m))) for m in pack(table(batch), 16)] == [1, 1, 1]


def test_groups_stay_whole_where_they_fit():
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 10).astype(np.int32)
    groups = [make_group([make_rollout(rng, g, s, prompt, 6, 0) for s in range(4)]) for g in range(3)]
    micro_batches = pack(table(batch_of(0, groups)), 40)  # a group takes 10 + 4 * 5 = 30
    assert [sorted({owner // 4 for owner in owners(m)}) for m in micro_batches] == [[0], [1], [2]]


def test_shared_prompt_is_packed_once_and_its_last_token_predicts_all_first_tokens():
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 10).astype(np.int32)
    batch = batch_of(0, [make_group([make_rollout(rng, 0, s, prompt, 6, 0, loss_mask=np.arange(16) >= 10) for s in range(4)])])
    (m,) = pack(table(batch), 1000)
    assert m.layout.num_tokens == 10 + 4 * 5  # the last token of each predicts nothing, so it is not computed
    assert m.position_ids[0].tolist() == list(range(10)) + 4 * list(range(10, 15))
    assert torch.bincount(m.rows.row)[m.rows.positions == 9].tolist() == [4]
    assert len(m.rows.positions) == 1 + 4 * 5


def test_siblings_sampled_at_other_temperatures_have_their_own_logits():
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 10).astype(np.int32)
    turns = [(Turn(start=10, end=13, role="assistant", sampling=Sampling(temperature=t)),) for t in (0.5, 1.0)]
    batch = batch_of(0, [make_group([make_rollout(rng, 0, s, prompt, 3, 0, turns=turns[s]) for s in range(2)])])
    (m,) = pack(table(batch), 1000)
    assert np.allclose(np.array(facts([m])), np.array(expected_facts(batch)))


def test_rollouts_with_other_prompts_share_nothing():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 10).astype(np.int32) for _ in range(2)]
    batch = batch_of(0, [make_group([make_rollout(rng, 0, s, prompts[s], 6, 0) for s in range(2)])])
    (m,) = pack(table(batch), 1000)
    assert len(m.layout.children[-1]) == 2 and m.layout.num_tokens == 30


def test_a_rollout_with_nothing_to_train_is_not_computed():
    batch = make_batch(groups=1, samples=3)
    rollouts = list(batch.groups[0].rollouts)
    rollouts[1] = msgspec.structs.replace(rollouts[1], loss_mask=np.zeros_like(rollouts[1].loss_mask))
    (m,) = pack(table(batch_of(0, [make_group(rollouts)])), 1000)
    assert set(owners(m)) == {0, 2}


def test_packing_is_a_pure_function():
    batch = make_batch(groups=4, samples=5)
    for a, b in zip(pack(table(batch), 40), pack(table(make_batch(groups=4, samples=5)), 40), strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and a.layout == b.layout
        assert all(x is y or torch.equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))


# ---- any tree of forks, any mask, any size


def random_forest(seed):
    """A batch of groups whose rollouts share prompts and fork from each other anywhere, with arbitrary loss masks."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(rng.integers(1, 4)):
        prompts = [rng.integers(3, VOCABULARY, rng.integers(1, 6)).astype(np.int32) for _ in range(2)]
        rollouts, offsets = [], [1]
        for sample in range(rng.integers(1, 7)):
            length = int(rng.integers(1, 7))
            if rollouts and rng.random() < 0.7:
                origin = rollouts[rng.integers(len(rollouts))]
                offset = int(rng.choice([o for o in offsets if o <= len(origin.token_ids)] + [len(origin.token_ids)]))
                tail = make_rollout(rng, number, sample, origin.token_ids[:offset], length, 0)
                fields = {"parent": (origin.sample, offset), "prompt_length": min(origin.prompt_length, offset)}
                if rng.random() < 0.1:  # the shared part was rewritten since
                    fields["token_ids"] = np.concatenate([tail.token_ids[:1] + 1, tail.token_ids[1:]]).astype(np.int32)
                rollout = msgspec.structs.replace(tail, **fields)
            else:
                rollout = make_rollout(rng, number, sample, prompts[rng.integers(2)], length, 0)
            total = len(rollout.token_ids)
            offsets += range(1, total)
            mask = rng.random(total) < rng.choice([0.2, 0.9])
            mask[0] = False
            fields = {"logprobs": np.full(total, -1.0, np.float32), "spans": (Span(0, total, 1, 0, "e0"),), "loss_mask": mask, "turns": ()}
            rollouts.append(msgspec.structs.replace(rollout, **fields))
        groups.append(make_group(rollouts))
    return batch_of(0, groups)


def context(micro_batch, position):
    """The tokens that the packed token at `position` sees, itself last."""
    layout = micro_batch.layout
    own = next(i for i, s in enumerate(layout.segments) if s.start <= position < s.end)
    seen = [p for a in layout.ancestors(own) for p in range(layout.segments[a].start, layout.segments[a].end)]
    seen += range(layout.segments[own].start, position + 1)
    assert micro_batch.position_ids[0, seen].tolist() == list(range(len(seen)))
    return micro_batch.input_ids[0, seen].tolist()


@pytest.mark.parametrize("max_tokens", [5, 12, 30, 1000])
@pytest.mark.parametrize("hundred", range(3))
def test_every_token_is_predicted_from_exactly_what_came_before_it(hundred, max_tokens):
    for seed in range(100 * hundred, 100 * hundred + 100):
        check_predictions(random_forest(seed), max_tokens)


def check_predictions(batch, max_tokens):
    rollouts = [r for g in batch.groups for r in g.rollouts]
    found = []
    for m in pack(table(batch), max_tokens):
        indices = owners(m)
        assert m.layout.num_tokens <= max_tokens or len(set(indices)) == 1
        for index, position, target in zip(indices, m.rows.positions[m.rows.row].tolist(), m.rows.target_ids.tolist(), strict=True):
            seen = context(m, position)
            assert seen == rollouts[index].token_ids[: len(seen)].tolist()
            assert target == rollouts[index].token_ids[len(seen)]
            found.append((index, len(seen)))
    assert sorted(found) == [(i, t) for i, r in enumerate(rollouts) for t in np.flatnonzero(r.loss_mask)]


# ---- staleness


def two_versions(step=5, old=2):
    """One group whose first rollout straddles a weight update."""
    batch = make_batch(step=step, groups=1, samples=2)
    rollouts = list(batch.groups[0].rollouts)
    first = make_rollout(np.random.default_rng(1), 0, 0, rollouts[1].token_ids[:9], 8, step)
    spans = (Span(9, 13, 1, old, "e0"), Span(13, 17, 1, step - 1, "e0"))
    rollouts[0] = msgspec.structs.replace(first, spans=spans, loss_mask=np.arange(17) >= 9, logprobs=np.full(17, -1.0, np.float32))
    return batch_of(step, [make_group(rollouts)])


def test_every_token_has_its_own_staleness():
    assert table(two_versions(step=5, old=2))[0].staleness.tolist() == [3] * 4 + [1] * 4


def test_a_token_from_the_future_is_refused():
    with pytest.raises(StalenessError, match=r"group 0 sample 0: token 9 has version 6, newer than the trainer's 5"):
        table(two_versions(step=5, old=6))


# ---- what cannot be trained


def broken(**fields):
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, 4).astype(np.int32)
    rollout = make_rollout(rng, 7, 0, prompt, 3, 0, loss_mask=np.arange(7) >= 4)
    return batch_of(0, [make_group([msgspec.structs.replace(rollout, **fields)])])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": np.array([0, 0, 0, 0, -1, np.nan, -1], np.float32)}, "token 5 has sampler logprob nan"),
        ({"logprobs": np.array([0, 0, 0, 0, -1, -np.inf, -1], np.float32)}, "token 5 has sampler logprob -inf"),
        ({"logprobs": np.array([0, 0, 0, 0, -1, -1, 0.5], np.float32)}, "token 6 has sampler logprob 0.5"),
        ({"spans": (Span(4, 6, 1, 0, "e0"),)}, "token 6 is in the loss but no weights sampled it"),
        ({"loss_mask": np.ones(7, bool)}, "trains its first token"),
        ({"turns": (Turn(start=4, end=7, role="assistant", sampling=Sampling(temperature=0.0)),)}, "sampled greedily"),
    ],
)
def test_bad_tokens_are_named(fields, message):
    with pytest.raises(DataError, match=message):
        table(broken(**fields))


# ---- what a token carries along


def with_arrays(batch):
    """Every rollout with a loss weight and another model's logprobs that name rollout and token."""
    groups = []
    for group in batch.groups:
        rollouts = []
        for r in group.rollouts:
            place = np.arange(len(r.token_ids), dtype=np.float32)
            arrays = {"loss_weight": 1 / (1 + place), "teacher_logprobs": -place - 100 * r.sample}
            rollouts.append(msgspec.structs.replace(r, arrays=arrays))
        groups.append(make_group(rollouts))
    return batch_of(batch.step, groups)


@pytest.mark.parametrize("max_tokens", [16, 40, 10_000])
def test_tokens_know_their_rollout_weight_and_arrays(max_tokens):
    batch = with_arrays(make_batch(groups=3, samples=4))
    rollouts = [r for g in batch.groups for r in g.rollouts]
    weights = np.arange(1, len(rollouts) + 1) / 10
    sequences = token_table(batch, np.arange(len(rollouts), dtype=float), weights, arrays=["teacher_logprobs"])
    total = 0.0
    for m in pack(sequences, max_tokens):
        assert m.arrays.keys() == {"teacher_logprobs"} and m.num_sequences == len(set(m.sequence.tolist())) == len(set(owners(m)))
        assert len({*zip(m.sequence.tolist(), owners(m), strict=True)}) == m.num_sequences  # one number per rollout
        for owner, weight, logprob in zip(owners(m), m.weight.tolist(), m.arrays["teacher_logprobs"].tolist(), strict=True):
            place = -logprob - 100 * rollouts[owner].sample
            assert rollouts[owner].loss_mask[int(place)]
            assert weight == pytest.approx(weights[owner] / (1 + place))
        total += m.weight.sum().item()
    expected = sum((weights[i] * r.arrays["loss_weight"][r.loss_mask]).sum() for i, r in enumerate(rollouts))
    assert total == pytest.approx(expected, rel=1e-5)


def test_masked_tokens_by_their_staleness():
    """Sampled and not in the loss mask, also of rollouts with nothing to train."""
    batch = two_versions(step=5, old=2)
    first, second = batch.groups[0].rollouts
    first = msgspec.structs.replace(first, loss_mask=first.loss_mask & (first.model_versions() > 2))
    second = msgspec.structs.replace(second, loss_mask=second.loss_mask & False)
    assert masked_tokens(batch_of(5, [make_group([first, second])])) == {3: 4, 0: second.num_sampled_tokens}
