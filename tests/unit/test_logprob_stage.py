"""What the logprob stage writes on a rollout is what the model itself says of its tokens; what is no logprob never reaches the trainer."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np
import pytest
import torch
from trainer_models import VOCABULARY, eager_twin, make_group, make_rollout, tiny_model

from slipstream.logprobs.stage import LogprobStage
from slipstream.sampling_mask import encode_kept, join_kept
from slipstream.types import Group, Rollout, RolloutStatus, Sampling, Span, Turn

REFERENCE, TEACHER = "reference_logprobs", "teacher_logprobs"


def stage(models: dict, max_tokens: int = 8192, chunk_rows: int = 1024) -> LogprobStage:
    return LogprobStage(models, max_tokens, chunk_rows, default_temperature=1.0)


def annotated(made: LogprobStage, group: Group) -> Group:
    return asyncio.run(made.annotate(group))


def several_turns(rng: np.random.Generator, sample: int, prompt: np.ndarray, temperatures: tuple[float, ...]) -> Rollout:
    """A turn of 4 sampled tokens at each temperature, 3 tokens of a tool between them; the turns have versions 2, 3, ..."""
    ids, spans, turns = [*prompt.tolist()], [], []
    for number, temperature in enumerate(temperatures):
        start = len(ids)
        ids += rng.integers(3, VOCABULARY, 4).tolist()
        spans.append(Span(start, start + 4, 1, 2 + number, "e0"))
        turns.append(Turn(start=start, end=start + 4, role="assistant", sampling=Sampling(temperature=temperature)))
        if number + 1 < len(temperatures):
            ids += rng.integers(3, VOCABULARY, 3).tolist()
    sampled = np.zeros(len(ids), dtype=bool)
    for span in spans:
        sampled[span.start : span.end] = True
    return Rollout(
        group_id=0,
        sample=sample,
        prompt_length=len(prompt),
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.where(sampled, np.float32(-1), np.float32(0)),
        loss_mask=sampled,
        spans=tuple(spans),
        turns=tuple(turns),
        reward=0.5,
    )


def group_of_all_kinds() -> Group:
    """One shared prompt: single turns, several turns at several temperatures, masked sampled tokens, a rollout without any token."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(3, VOCABULARY, 11).astype(np.int32)
    empty = Rollout(
        group_id=0,
        sample=4,
        prompt_length=11,
        token_ids=prompt,
        logprobs=np.zeros(11, np.float32),
        loss_mask=np.zeros(11, bool),
        reward=0.0,
    )
    rollouts = [
        make_rollout(rng, 0, 0, prompt, 9, version=3),
        several_turns(rng, 1, prompt, (0.5, 1.0, 1.7)),
        make_rollout(rng, 0, 2, prompt, 1, version=0),
        several_turns(rng, 3, prompt, (0.7, 0.7)),
        empty,
    ]
    return make_group(rollouts)


def plain(model, rollout: Rollout, kept: list[np.ndarray] | None = None) -> np.ndarray:
    """float32[L] by transformers alone: one sequence per row, logits over each token's own temperature, of the ids `kept` for it."""
    out = np.zeros(len(rollout.token_ids), dtype=np.float32)
    temperature = np.ones(len(out), dtype=np.float32)
    for turn in rollout.turns:
        if turn.sampling is not None:
            temperature[turn.start : turn.end] = turn.sampling.temperature
    sampled = np.flatnonzero(rollout.model_versions() >= 0)
    if len(sampled):
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, sampled - 1].float()
        logits = logits / torch.from_numpy(temperature[sampled])[:, None]
        for row, at in enumerate(sampled if kept is not None else ()):
            cut = np.setdiff1d(np.arange(logits.shape[1]), kept[at]) if len(kept[at]) < VOCABULARY else []
            logits[row, cut] = -torch.inf
        logs = logits.log_softmax(-1)
        out[sampled] = logs[torch.arange(len(sampled)), ids[sampled]].numpy()
    return out


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize(("max_tokens", "chunk_rows"), [(8192, 1024), (30, 5)], ids=["whole", "split"])
def test_arrays_are_what_a_plain_forward_gives(kind, max_tokens, chunk_rows):
    reference, teacher = tiny_model(kind, seed=1), tiny_model("qwen3", seed=2)
    group = group_of_all_kinds()
    out = annotated(stage({REFERENCE: reference, TEACHER: teacher}, max_tokens, chunk_rows), group)
    for name, model in ((REFERENCE, eager_twin(reference)), (TEACHER, eager_twin(teacher))):
        for before, after in zip(group.rollouts, out.rollouts, strict=True):
            array, expected = after.arrays[name], plain(model, before)
            assert array.dtype == np.float32 and array.shape == before.token_ids.shape
            assert np.abs(array - expected).max(initial=0) < 1e-4
            assert (array[before.model_versions() < 0] == 0).all()
            assert np.array_equal(after.loss_mask, before.loss_mask) and after.status.ok
    assert np.abs(out.rollouts[1].arrays[REFERENCE] - out.rollouts[1].arrays[TEACHER]).max() > 0.1, "one model under both names"


def test_repeated_it_gives_the_same_bits_and_rollouts_do_not_depend_on_their_siblings():
    made, group = stage({REFERENCE: tiny_model()}), group_of_all_kinds()
    first, again = annotated(made, group), annotated(made, group)
    alone = annotated(made, msgspec.structs.replace(group, rollouts=group.rollouts[1:2]))
    for a, b in zip(first.rollouts, again.rollouts, strict=True):
        assert a.arrays[REFERENCE].tobytes() == b.arrays[REFERENCE].tobytes()
    assert np.abs(first.rollouts[1].arrays[REFERENCE] - alone.rollouts[0].arrays[REFERENCE]).max() < 1e-5


def test_one_model_under_two_names_is_computed_once():
    model, passes = tiny_model(), []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    out = annotated(stage({REFERENCE: model, TEACHER: model}), group_of_all_kinds())
    assert len(passes) == 1
    for rollout in out.rollouts:
        assert np.array_equal(rollout.arrays[REFERENCE], rollout.arrays[TEACHER])
        assert rollout.arrays[REFERENCE] is not rollout.arrays[TEACHER]


def test_a_value_that_is_no_logprob_fails_its_rollout_and_no_other():
    model, group = tiny_model(), group_of_all_kinds()
    odd = 60
    ids = [np.where(r.token_ids == odd, 7, r.token_ids).astype(np.int32) for r in group.rollouts]
    ids[0][-2] = odd  # seen by this rollout alone
    group = msgspec.structs.replace(
        group, rollouts=tuple(msgspec.structs.replace(r, token_ids=i) for r, i in zip(group.rollouts, ids, strict=True))
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[odd] = torch.nan
    out = annotated(stage({REFERENCE: model}), group)
    assert [r.status.ok for r in out.rollouts] == [False, True, True, True, True]
    assert re.fullmatch(rf"bad logprob: {REFERENCE}: token \d+ \(id \d+\) has nan; \d+ such tokens", out.rollouts[0].error or "")
    assert REFERENCE not in out.rollouts[0].arrays and out.rollouts[0].status is RolloutStatus.FAILED


def test_a_token_beyond_the_models_embedding_fails_its_rollout():
    group = group_of_all_kinds()
    ids = group.rollouts[2].token_ids.copy()
    ids[-1] = VOCABULARY + 3
    rollouts = [*group.rollouts]
    rollouts[2] = msgspec.structs.replace(rollouts[2], token_ids=ids)
    out = annotated(stage({TEACHER: tiny_model()}), msgspec.structs.replace(group, rollouts=tuple(rollouts)))
    assert [r.status.ok for r in out.rollouts] == [True, True, False, True, True]
    assert out.rollouts[2].error == f"bad logprob: {TEACHER}: token id 64, but its model has only {VOCABULARY} embeddings"


def test_a_failed_rollout_stays_as_it_is_and_its_siblings_are_read():
    group = group_of_all_kinds()
    failed = msgspec.structs.replace(group.rollouts[1], status=RolloutStatus.FAILED, error="deadline: too slow")
    out = annotated(stage({REFERENCE: tiny_model()}), msgspec.structs.replace(group, rollouts=(group.rollouts[0], failed)))
    assert out.rollouts[1] is failed
    assert REFERENCE in out.rollouts[0].arrays


def test_other_arrays_stay():
    group = group_of_all_kinds()
    kept = np.arange(len(group.rollouts[0].token_ids))
    rollout = msgspec.structs.replace(group.rollouts[0], arrays={"other": kept})
    out = annotated(stage({REFERENCE: tiny_model()}), msgspec.structs.replace(group, rollouts=(rollout,)))
    assert out.rollouts[0].arrays["other"] is kept and len(out.rollouts[0].arrays) == 2


@pytest.mark.parametrize("rows", [VOCABULARY + 3, VOCABULARY - 2], ids=["more", "fewer"])
def test_a_token_of_truncated_sampling_is_read_over_what_was_kept_for_it(rows):
    """Also by a model whose embedding is padded to another size."""
    rng, group = np.random.default_rng(9), group_of_all_kinds()
    kept: dict[int, list[np.ndarray]] = {}
    rollouts = []
    for rollout in group.rollouts:
        ids = np.minimum(rollout.token_ids, VOCABULARY - 3)  # tokens that both models know
        sets = [np.unique([*rng.integers(3, VOCABULARY, 6), VOCABULARY - 1, token]) for token in ids]
        cut = [sampled and at % 3 > 0 for at, sampled in enumerate(rollout.model_versions() >= 0)]
        kept[rollout.sample] = [part if here else np.arange(VOCABULARY) for part, here in zip(sets, cut, strict=True)]
        arrays = join_kept(encode_kept(part, VOCABULARY) if here else b"" for part, here in zip(sets, cut, strict=True))
        rollouts.append(msgspec.structs.replace(rollout, token_ids=ids, arrays=arrays))
    model, padded = tiny_model(), tiny_model(seed=4)
    padded.resize_token_embeddings(rows)
    out = annotated(stage({REFERENCE: model, TEACHER: padded}), msgspec.structs.replace(group, rollouts=tuple(rollouts)))
    for name, twin in ((REFERENCE, eager_twin(model)), (TEACHER, eager_twin(padded))):
        for before, after in zip(rollouts, out.rollouts, strict=True):
            assert np.abs(after.arrays[name] - plain(twin, before, kept[before.sample])).max(initial=0) < 1e-4
