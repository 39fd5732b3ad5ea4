"""Weights change between two ticks: what is recorded is what happened."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engine_harness import Driver, change_weights, make_engine, plain, prompt, replay, request, tiny_model

from slipstream.types import Purpose, Span, StopReason

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_straddling_sequence_is_the_new_weights_over_old_keys_and_values(kind: str) -> None:
    model = tiny_model(kind)
    driver = Driver(make_engine(model))
    handles = driver.submit(request(0, 0, prompt(18), 16), request(1, 0, prompt(5), 16))
    old = plain(model)
    for _ in range(7):
        driver.tick()
    change_weights(model)
    new = plain(model)
    driver.engine.set_version(1, 1, "sum-1")
    driver.drain()
    for handle in handles:
        generation, n = driver.generations[handle], driver.generations[handle].start
        assert generation.spans == [Span(n, n + 7, 1, 0, "engine-0"), Span(n + 7, n + 16, 1, 1, "engine-0")]
        expected = replay(old, new, driver.ids(handle), num_old=n + 6, start=n)
        assert (expected - torch.tensor(generation.logprobs)).abs().max() < 1e-4
        assert driver.gap(handle, new) > 1e-3, "kept keys and values are not the new weights' own"


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_sequence_started_after_the_swap_matches_the_new_weights(kind: str) -> None:
    model = tiny_model(kind)
    driver = Driver(make_engine(model))
    driver.submit(request(0, 0, prompt(18), 30))
    driver.tick()
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    (handle,) = driver.submit(request(1, 0, prompt(18), 10))
    driver.drain()
    assert driver.gap(handle, plain(model)) < 1e-4
    assert driver.generations[handle].prefill_version == (1, 1)


def test_a_late_sample_starts_on_the_prompt_of_the_earlier_version() -> None:
    """And the record says so: prefill_version 0, tokens of version 1."""
    model = tiny_model()
    driver = Driver(make_engine(model, slots=1))
    early, late = driver.submit(request(0, 0, prompt(18), 4), request(0, 1, prompt(18), 4))
    old = plain(model)
    for _ in range(4):
        driver.tick()
    change_weights(model)
    new = plain(model)
    driver.engine.set_version(1, 1, "sum-1")
    driver.drain()
    generation = driver.generations[late]
    assert driver.generations[early].prefill_version == generation.prefill_version == (1, 0)
    assert generation.spans == [Span(18, 22, 1, 1, "engine-0")]
    expected = replay(old, new, driver.ids(late), num_old=17, start=18)  # its own last prompt token is fed under version 1
    assert (expected - torch.tensor(generation.logprobs)).abs().max() < 1e-4
    assert driver.num_prefill_tokens == 17


def test_a_permit_newer_than_the_prompt_makes_the_prompt_anew() -> None:
    model = tiny_model()
    driver = Driver(make_engine(model, slots=1))
    driver.submit(request(0, 0, prompt(18), 4))
    (late,) = driver.submit(request(0, 1, prompt(18), 4, min_version=1))
    for _ in range(4):
        driver.tick()
    assert not driver.engine.has_work(), "the late one waits for version 1"
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    driver.drain()
    assert driver.generations[late].prefill_version == (1, 1)
    assert driver.gap(late, plain(model)) < 1e-4
    assert driver.engine._live.cache.blocks.num_taken == 0


def test_no_work_before_the_first_weights() -> None:
    driver = Driver(make_engine(tiny_model(), version=-1))
    driver.submit(request(0, 0, prompt(5), 2))
    assert not driver.engine.has_work()
    assert len(driver.tick().handles) == 0
    driver.engine.set_version(1, 0, "sum-0")
    driver.drain()
    assert driver.num_running == 0


def evaluation(group: int, sample: int, ids, new: int = 8, **fields):
    return request(group, sample, ids, new, purpose=Purpose.EVAL, **fields)


def test_pinned_requests_run_on_the_copy_while_the_live_weights_move_on() -> None:
    model = tiny_model()
    driver = Driver(make_engine(model))
    old = plain(model)
    assert driver.engine.pin() == (1, 0, "sum-0")
    (train,) = driver.submit(request(0, 0, prompt(18), 30))
    (pinned,) = driver.submit(evaluation(0, 0, prompt(18), 12))
    driver.tick()
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    driver.drain()
    assert driver.gap(pinned, old) < 1e-4
    assert [s.version for s in driver.generations[pinned].spans] == [0]
    assert [s.version for s in driver.generations[train].spans] == [0, 1]
    assert driver.engine.unpin() > 0
    assert driver.engine.unpin() == 0.0


def test_pinned_ticks_are_at_most_every_fourth_while_training_runs() -> None:
    driver = Driver(make_engine(tiny_model()))
    driver.engine.pin()
    (train,) = driver.submit(request(0, 0, prompt(5), 30))
    (pinned,) = driver.submit(evaluation(0, 0, prompt(5), 30))
    for _ in range(20):
        driver.tick()
    assert len(driver.generations[pinned].token_ids) == 5
    assert len(driver.generations[train].token_ids) == 15
    driver.drain()
    assert len(driver.generations[pinned].token_ids) == 30


def test_unpin_aborts_what_still_runs_on_the_copy() -> None:
    driver = Driver(make_engine(tiny_model()))
    driver.engine.pin()
    (pinned,) = driver.submit(evaluation(0, 0, prompt(5), 30))
    driver.tick()
    driver.engine.unpin()
    driver.drain()
    assert driver.generations[pinned].stop_reason is StopReason.ABORT
    assert len(driver.generations[pinned].token_ids) == 1


def test_pin_is_checked() -> None:
    engine = make_engine(tiny_model(), version=-1)
    with pytest.raises(ValueError, match="no weights to pin"):
        engine.pin()
    engine.set_version(1, 0, "sum-0")
    with pytest.raises(ValueError, match="no version is pinned"):
        engine.submit(evaluation(0, 0, prompt(5)))
    engine.pin(share=True)
    with pytest.raises(ValueError, match="asks for version 1, but version 0 is pinned"):
        engine.submit(evaluation(0, 0, prompt(5), min_version=1))
    with pytest.raises(ValueError, match="version 0 is pinned already"):
        engine.pin()
    with pytest.raises(ValueError, match="pinned without a copy"):
        engine.set_version(1, 1, "sum-1")
    engine.unpin()
    engine.set_version(1, 1, "sum-1")


def test_a_pinned_copy_is_gone_the_moment_it_is_unpinned() -> None:
    """It is as large as the model: where it waited for the collector of cycles, several stayed, one for each evaluation."""
    driver = Driver(make_engine(tiny_model("llama")))
    before = {id(parameter) for parameter in driver.engine.model.parameters()}
    driver.engine.pin()
    handle = driver.submit(request(0, 0, prompt(9), 4, purpose=Purpose.EVAL))
    driver.drain()
    assert handle and driver.engine._pinned is not None
    parameters = [weakref.ref(p) for p in driver.engine._pinned.stream.model.parameters() if id(p) not in before]
    assert parameters
    gc.collect()
    gc.disable()
    try:
        driver.engine.unpin()
        assert not [p for p in parameters if p() is not None]
    finally:
        gc.enable()
