"""Requests: how they end, wait, are refused, repeated and cancelled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_harness import VOCABULARY, Driver, make_engine, prompt, request, run, tiny_model

from slipstream.errors import ModelError, RunFailed
from slipstream.types import StopReason


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def sampled(model) -> list[int]:
    """What group 0, sample 0 generates undisturbed."""
    return run(make_engine(model), request(0, 0, prompt(9), 30))[0].token_ids


def test_a_stop_token_is_kept_and_ends_the_sequence(model, sampled) -> None:
    stop = sampled[12]
    (generation,) = run(make_engine(model), request(0, 0, prompt(9), 30, stop_token_ids=(1000, stop)))
    assert generation.token_ids == sampled[: sampled.index(stop) + 1]
    assert generation.stop_reason is StopReason.STOP


def test_a_stop_string_across_tokens_is_kept(model, sampled) -> None:
    letters = "".join(chr(ord("A") + t % 26) for t in sampled)
    stop = letters[9:12]
    engine = make_engine(model)
    engine._decode = lambda ids: "".join(chr(ord("A") + t % 26) for t in ids)
    (generation,) = run(engine, request(0, 0, prompt(9), 30, stop_strings=("no such", stop)))
    assert generation.token_ids == sampled[: letters.index(stop) + 3]
    assert generation.stop_reason is StopReason.STOP


def test_a_stop_string_may_begin_in_a_recorded_prefix(model, sampled) -> None:
    letters = "".join(chr(ord("A") + t % 26) for t in sampled)
    stop = letters[9:12]
    assert letters.index(stop) == 9
    engine = make_engine(model)
    engine._decode = lambda ids: "".join(chr(ord("A") + t % 26) for t in ids)
    prefix = np.concatenate([prompt(9), np.array(sampled[:11], dtype=np.int32)])
    (generation,) = run(engine, request(0, 0, prefix, 19, prompt_length=9, num_sampled=11, num_sampled_in_turn=11, stop_strings=(stop,)))
    assert generation.token_ids == sampled[11:12]


def test_a_later_turn_that_goes_on_looks_at_its_own_tokens_alone(model, sampled) -> None:
    """One whose turn began 2 tokens ago: a stop string may begin there, one in what was given before does not count."""
    engine = make_engine(model)
    engine._decode = lambda ids: "".join(chr(33 + t) for t in ids)
    given, own = prompt(9), sampled[:2]
    ids = np.array([*given, *own], dtype=np.int32)
    fields = {"turn": 1, "prompt_length": 4, "num_sampled": 4, "num_sampled_in_turn": 2}
    (whole,) = run(engine, request(0, 0, ids, 10, **fields))
    straddling = engine._decode([*own, *whole.token_ids])[1:4]
    (generation,) = run(engine, request(0, 0, ids, 10, stop_strings=(straddling,), **fields))
    assert generation.token_ids == whole.token_ids[:2] and generation.stop_reason is StopReason.STOP
    before = engine._decode([*given.tolist(), *own, *whole.token_ids])[7:12]  # begins in what was given
    (generation,) = run(engine, request(0, 0, ids, 10, stop_strings=(before,), **fields))
    assert generation.token_ids == whole.token_ids


def test_a_stop_string_in_the_prompt_does_not_count(model, sampled) -> None:
    engine = make_engine(model)
    engine._decode = lambda ids: "".join(chr(33 + t) for t in ids)
    text = engine._decode(prompt(9).tolist())
    (generation,) = run(engine, request(0, 0, prompt(9), 5, stop_strings=(text[-2:],)))
    assert generation.token_ids == sampled[:5]


def test_length_and_context_end_a_sequence(model) -> None:
    by_length, by_context = run(make_engine(model, max_context=32), request(0, 0, prompt(9), 5), request(1, 0, prompt(30), 50))
    assert (len(by_length.token_ids), by_length.stop_reason) == (5, StopReason.LENGTH)
    assert (len(by_context.token_ids), by_context.stop_reason) == (2, StopReason.LENGTH)


def test_a_key_that_is_in_the_engine_gives_the_same_handle(model) -> None:
    driver = Driver(make_engine(model))
    (first,) = driver.submit(request(0, 0, prompt(9)))
    assert driver.engine.submit(request(0, 0, prompt(9))) == first
    driver.tick()
    assert driver.engine.submit(request(0, 0, prompt(9))) == first
    assert driver.num_running == 1
    driver.drain()
    assert driver.engine.submit(request(0, 0, prompt(9))) != first


def test_requests_start_in_order_as_slots_come_free(model) -> None:
    driver = Driver(make_engine(model, slots=2))
    handles = driver.submit(*(request(g, 0, prompt(5, g), 3) for g in range(5)))
    started = []
    while driver.engine.has_work():
        started += [h for h, *_ in driver.tick().prefilled]
        assert driver.num_running <= 2
    assert started == handles


def test_a_request_without_its_permit_does_not_hold_up_the_others(model) -> None:
    driver = Driver(make_engine(model, slots=1))
    held, free = driver.submit(request(0, 0, prompt(5), 3, min_version=2), request(1, 0, prompt(5), 3))
    driver.drain()
    assert driver.generations[free].stop_reason and not driver.generations[held].token_ids
    driver.engine.set_version(1, 2, "sum-2")
    driver.drain()
    assert [s.version for s in driver.generations[held].spans] == [2]


def test_the_prefill_budget_spreads_prompts_over_ticks(model) -> None:
    driver = Driver(make_engine(model, prefill_budget=50))
    driver.submit(*(request(g, 0, prompt(31, g), 5) for g in range(3)), request(3, 0, prompt(101), 5))
    per_tick = []
    while driver.engine.has_work():
        per_tick.append(driver.tick().num_prefill_tokens)
    assert per_tick[:4] == [30, 30, 30, 100], "the first of a tick goes in whole, whatever its length"


def test_cancelling_frees_at_once_and_names_no_more(model) -> None:
    driver = Driver(make_engine(model, slots=2))
    running, waiting, other = driver.submit(request(0, 0, prompt(20)), request(0, 1, prompt(20)), request(1, 0, prompt(20)))
    driver.tick()
    driver.engine.cancel(running)
    driver.engine.cancel(running)
    driver.engine.cancel(other)
    assert driver.num_running == 1
    while driver.engine.has_work():
        assert set(driver.tick().handles.tolist()) == {waiting}
    assert driver.engine._live.cache.blocks.num_taken == 0
    assert len(driver.engine._live.cache.prompts) == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"ids": prompt(128)}, "no room for a new one within engine.max_context = 128"),
        ({"ids": np.zeros(0, dtype=np.int32)}, "prompt_length 0 is not within 1 and the 0 tokens"),
        ({"ids": prompt(5), "prompt_length": 6}, "prompt_length 6"),
        ({"ids": np.array([3, VOCABULARY], dtype=np.int32)}, f"token id {VOCABULARY} is outside the model's vocabulary of {VOCABULARY}"),
        ({"ids": np.array([-1, 3], dtype=np.int32)}, "token id -1"),
        ({"ids": prompt(5), "num_sampled": 2, "num_sampled_in_turn": 3}, "num_sampled_in_turn 3 is not within 0 and num_sampled 2"),
        ({"ids": prompt(5), "new": 0}, "max_new_tokens 0"),
        ({"ids": prompt(5), "temperature": 0.0}, "temperature 0 is for evaluation"),
    ],
)
def test_impossible_requests_are_refused(model, bad: dict, says: str) -> None:
    engine = make_engine(model)
    with pytest.raises(ValueError, match=says) as caught:
        engine.submit(request(7, 3, bad.pop("ids"), **bad))
    assert "group 7 sample 3" in str(caught.value)
    assert not engine.has_work()


def test_stop_strings_need_a_tokenizer(model) -> None:
    engine = make_engine(model)
    engine._decode = None
    with pytest.raises(ValueError, match="tokenizer"):
        engine.submit(request(0, 0, prompt(5), stop_strings=("a",)))


def test_a_context_beyond_the_model_is_refused(model) -> None:
    with pytest.raises(ModelError, match=r"engine\.max_context = 300 exceeds the 256 tokens"):
        make_engine(model, max_context=300)


def test_weights_that_diverged_end_the_run_with_that_cause() -> None:
    model = tiny_model()
    driver = Driver(make_engine(model))
    driver.submit(request(4, 0, prompt(9)))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(RunFailed, match=r"not finite \(group 4 sample 0\).*learning_rate"):
        driver.tick()
