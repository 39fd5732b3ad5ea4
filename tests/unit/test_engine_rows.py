"""A row's result is a function of its own request: neighbours, batch size and interruptions do not matter (one thread)."""

from __future__ import annotations

import numpy as np
import pytest
from engine_harness import Driver, make_engine, prompt, request, run, tiny_model

from slipstream.models.probe import probe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "gpt2"])
def test_rows_are_bit_equal_alone_and_among_neighbours_that_come_and_go(kind: str) -> None:
    model = tiny_model(kind)
    proof = probe(model, slots=8, max_context=128)
    assert proof.row_invariant
    driver = Driver(make_engine(model, slots=8, min_rows=proof.min_rows))
    watched = driver.submit(request(0, 0, prompt(23), 40), request(1, 0, prompt(9), 40))
    for i in range(20):  # neighbours of all lengths join and leave, fewer and more than 4 rows
        driver.tick()
        if i % 3 == 0:
            driver.submit(*(request(10 + i, s, prompt(1 + 5 * i, i), 1 + 3 * s) for s in range(i % 5)))
    driver.drain()
    for handle in watched:
        (alone,) = run(make_engine(model, slots=8, min_rows=proof.min_rows), driver.requests[handle])
        assert alone.token_ids == driver.generations[handle].token_ids
        assert alone.logprobs == driver.generations[handle].logprobs


def test_the_same_seed_gives_the_same_tokens_and_another_seed_does_not() -> None:
    model = tiny_model()
    requests = [request(0, s, prompt(9), 12) for s in range(4)]
    first, again = (run(make_engine(model), *requests) for _ in range(2))
    assert [(g.token_ids, g.logprobs) for g in first] == [(g.token_ids, g.logprobs) for g in again]
    others = [
        run(make_engine(model, seed=1), *requests),
        run(make_engine(model), *(request(0, s, prompt(9), 12, seed=1) for s in range(4))),
        run(make_engine(model), *(request(0, s, prompt(9), 12, attempt=1) for s in range(4))),
    ]
    for other in others:
        assert all(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True))


def test_a_resumed_rollout_samples_what_it_would_have_sampled() -> None:
    model = tiny_model()
    (whole,) = run(make_engine(model), request(3, 2, prompt(9), 20))
    prefix = np.concatenate([prompt(9), np.array(whole.token_ids[:11], dtype=np.int32)])
    (rest,) = run(make_engine(model), request(3, 2, prefix, 9, prompt_length=9, num_sampled=11))
    assert rest.token_ids == whole.token_ids[11:]


def test_padding_to_more_rows_changes_nothing_but_the_shape() -> None:
    model = tiny_model()
    few, many = (run(make_engine(model, min_rows=n), request(0, 0, prompt(9), 8)) for n in (4, 8))
    assert few[0].token_ids == many[0].token_ids
