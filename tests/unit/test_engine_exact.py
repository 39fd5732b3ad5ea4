"""What the engine generates has the logprobs that plain transformers forwards give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_harness import ARCHITECTURES, VOCABULARY, Driver, make_engine, plain, prompt, request, run, tiny_model

from slipstream.types import Purpose, Sampling


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logprobs_equal_plain_forwards(kind: str) -> None:
    model = tiny_model(kind)
    reference = plain(model)
    driver = Driver(make_engine(model))
    # 1: nothing to prefill; 16 and 17: a block's end and beginning; 37: a part of the third block, and past every window
    handles = [driver.submit(request(g, s, prompt(n, g), 20))[0] for g, n in enumerate((1, 16, 17, 37)) for s in range(3)]
    driver.drain()
    for handle in handles:
        assert len(driver.generations[handle].token_ids) == 20
        assert driver.gap(handle, reference) < 1e-4
    assert len({tuple(driver.generations[h].token_ids) for h in handles}) == len(handles), "samples of a group differ"


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_continuing_from_a_prefix_equals_plain_forwards(kind: str) -> None:
    """A later turn or a resumed rollout: tokens after the shared prompt are prefilled from an offset."""
    model = tiny_model(kind)
    reference = plain(model)
    driver = Driver(make_engine(model))
    shared = prompt(21)
    lengths = (0, 1, 11, 12, 40)
    requests = [request(0, s, np.concatenate([shared, prompt(n, n + 1)]), prompt_length=21, num_sampled=n) for s, n in enumerate(lengths)]
    handles = driver.submit(*requests)
    driver.drain()
    assert max(driver.gap(h, reference) for h in handles) < 1e-4


def test_temperature_is_part_of_the_distribution() -> None:
    model = tiny_model()
    reference = plain(model)
    driver = Driver(make_engine(model))
    cold, hot = driver.submit(request(0, 0, prompt(9), temperature=0.5), request(0, 1, prompt(9), temperature=1.5))
    driver.drain()
    assert driver.gap(cold, reference, 0.5) < 1e-4
    assert driver.gap(hot, reference, 1.5) < 1e-4
    assert driver.gap(hot, reference, 1.0) > 0.1


def test_greedy_equals_transformers_generate() -> None:
    model = tiny_model()
    reference = plain(model)
    engine = make_engine(model)
    engine.pin()
    ids = prompt(19)
    (generation,) = run(engine, request(0, 0, ids, 24, temperature=0.0, purpose=Purpose.EVAL))
    out = reference.generate(torch.from_numpy(ids.astype(np.int64))[None], do_sample=False, max_new_tokens=24, min_new_tokens=24)
    # min_new_tokens bans the end token there
    expected = out[0, 19:].tolist()
    end = expected.index(2) if 2 in expected else 24
    assert generation.token_ids[:end] == expected[:end] and end == 24


def test_cut_vocabulary_is_renormalised() -> None:
    """Evaluation may cut the vocabulary; the logprob is that under the cut distribution."""
    model = tiny_model()
    reference = plain(model)
    engine = make_engine(model)
    engine.pin()
    ids = prompt(9)
    sampling = Sampling(max_new_tokens=1, top_k=3)
    generations = run(engine, *(request(0, s, ids, purpose=Purpose.EVAL, sampling=sampling) for s in range(40)))
    with torch.no_grad():
        top = reference(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1].topk(3)
    expected = dict(zip(top.indices.tolist(), top.values.log_softmax(0).tolist(), strict=True))
    assert {g.token_ids[0] for g in generations} == set(expected)
    for g in generations:
        assert g.logprobs[0] == pytest.approx(expected[g.token_ids[0]], abs=1e-4)


def test_a_group_prompt_is_prefilled_once_and_shared() -> None:
    driver = Driver(make_engine(tiny_model()))
    driver.submit(*(request(0, s, prompt(50), 4) for s in range(8)))
    driver.tick()
    assert driver.num_prefill_tokens == 49  # the last token is fed by every sample's first decode
    stream = driver.engine._live
    shared = {tuple(s.blocks[:3]) for s in stream.running}
    assert len(shared) == 1, "whole blocks of the prompt are shared by reference"
    assert len({s.blocks[3] for s in stream.running}) == 8, "the partial one is each sample's own"
    assert stream.cache.blocks.num_taken == 4 + 8
    driver.drain()
    assert driver.num_prefill_tokens == 49


def test_everything_is_freed() -> None:
    driver = Driver(make_engine(tiny_model(), slots=4))
    stream = driver.engine._live
    for round_ in range(3):
        driver.submit(*(request(10 * round_ + g, s, prompt(7 * g + 1, g), 3 + 5 * s) for g in range(4) for s in range(3)))
        driver.drain()
        assert (stream.cache.blocks.num_taken, len(stream.cache.prompts), len(stream.running), len(stream.waiting)) == (0, 0, 0, 0)
        if round_ == 0:
            size = stream.cache.pool.num_bytes
    assert stream.cache.pool.num_bytes == size


def test_the_pool_grows_with_use() -> None:
    driver = Driver(make_engine(tiny_model(), slots=2, max_context=250))
    reference = plain(driver.engine.model)
    handles = driver.submit(request(0, 0, prompt(5), 3))
    driver.drain()
    small = driver.engine._live.cache.pool.num_blocks
    handles += driver.submit(request(1, 0, prompt(60), 180), request(2, 0, prompt(50), 190))
    driver.drain()
    assert driver.engine._live.cache.pool.num_blocks > small
    assert max(driver.gap(h, reference) for h in handles) < 1e-4


def test_prompts_of_waiting_groups_give_way_when_blocks_run_out() -> None:
    """Two slots; groups whose other samples wait keep their prompts only as long as there is room."""
    driver = Driver(make_engine(tiny_model(), slots=2, max_context=64, saved_states=0))
    reference = plain(driver.engine.model)
    first = driver.submit(*(request(g, 0, prompt(60, g), 2) for g in range(6)))
    later = driver.submit(*(request(g, 1, prompt(60, g), 2) for g in range(6)))
    driver.drain()
    assert max(driver.gap(h, reference) for h in first + later) < 1e-4
    assert driver.num_prefill_tokens > 6 * 59, "some prompt had to be made twice"
    assert driver.engine._live.cache.blocks.num_taken == 0


def test_bfloat16_logprobs_are_finite_and_not_positive() -> None:
    generations = run(make_engine(tiny_model().to(torch.bfloat16)), *(request(0, s, prompt(20), 12) for s in range(4)))
    logprobs = np.concatenate([g.logprobs for g in generations])
    assert np.isfinite(logprobs).all() and (logprobs <= 0).all()
    assert all(0 <= t < VOCABULARY for g in generations for t in g.token_ids)
