"""Saved states and forks: keys and values by reference, streams of their own, bounds that hold."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_harness import VOCABULARY, Driver, change_weights, make_engine, plain, prompt, request, tiny_model

from slipstream.engines.embedded.versions import VersionMarks
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.types import GenerateRequest, Purpose, StopReason

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def started(driver: Driver, length: int = 18, ticks: int = 9, group: int = 0, new: int = 30) -> int:
    (handle,) = driver.submit(request(group, 0, prompt(length, group), new))
    for _ in range(ticks):
        driver.tick()
    return handle


def save(driver: Driver, handle: int) -> int:
    state = driver.engine.save(handle)
    assert state is not None
    return state


def fork(driver: Driver, parent: int, state: int, sample: int, at: int | None = None, new: int = 10, tail: tuple[int, ...] = ()) -> int:
    """A fork of the parent's first `at` tokens (all it has by default), followed by `tail`."""
    ids = np.array([*driver.ids(parent)[:at], *tail], dtype=np.int32)
    original = driver.requests[parent]
    sampled = len(ids) - original.prompt_length
    (handle,) = driver.submit(
        request(original.group_id, sample, ids, new, prompt_length=original.prompt_length, num_sampled=sampled, state=state)
    )
    return handle


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_a_fork_samples_what_a_fresh_prefill_of_its_tokens_would_and_prefills_nothing(kind: str) -> None:
    driver = Driver(make_engine(tiny_model(kind)))
    reference = plain(driver.engine.model)
    parent = started(driver)
    state = save(driver, parent)
    before = driver.num_prefill_tokens
    forks = [fork(driver, parent, state, sample) for sample in (1, 2, 3)]
    driver.drain()
    assert driver.num_prefill_tokens == before
    for handle in forks:
        assert driver.gap(handle, reference) < 1e-4
        assert driver.generations[handle].prefill_version == (1, 0)
    fresh = Driver(make_engine(tiny_model(kind)))
    for handle in forks:
        wanted = driver.requests[handle]
        again = request(0, wanted.sample, wanted.token_ids, 10, prompt_length=wanted.prompt_length, num_sampled=wanted.num_sampled)
        (other,) = fresh.submit(again)
        fresh.drain()
        assert fresh.generations[other].token_ids == driver.generations[handle].token_ids
        gap = np.abs(np.array(fresh.generations[other].logprobs) - np.array(driver.generations[handle].logprobs))
        assert gap.max() < 1e-4
    streams = [driver.generations[h].token_ids for h in (*forks, parent)]
    assert len({tuple(s[:10]) for s in streams}) == 4, "forks have their own random streams"


def test_the_parent_does_not_notice(model) -> None:
    alone, driver = Driver(make_engine(model)), Driver(make_engine(model))
    undisturbed = started(alone)
    alone.drain()
    parent = started(driver)
    state = save(driver, parent)
    for sample in (1, 2):
        fork(driver, parent, state, sample)  # they write into copies of the block that the parent goes on to fill
    driver.drain()
    a, b = alone.generations[undisturbed], driver.generations[parent]
    assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


def test_whole_blocks_are_shared_the_partly_filled_one_is_copied_and_all_come_back(model) -> None:
    driver = Driver(make_engine(model))
    blocks = driver.engine._live.cache.blocks
    parent = started(driver, length=40, ticks=6)  # 45 keys: two whole blocks and 13 more
    alone = blocks.num_taken
    state = save(driver, parent)
    assert blocks.num_taken == alone, "a state takes no memory while its sequence runs"
    first, second = (fork(driver, parent, state, s) for s in (1, 2))
    driver.tick()
    by_handle = {s.handle: s for s in driver.engine._live.running}
    assert by_handle[first].blocks[:2] == by_handle[second].blocks[:2] == by_handle[parent].blocks[:2]
    assert len({by_handle[h].blocks[2] for h in (first, second, parent)}) == 3
    driver.drain()
    assert blocks.num_taken == 3, "the state outlives its sequence"
    driver.engine.free(state)
    driver.engine.free(state)
    assert blocks.num_taken == 0


def test_a_fork_may_begin_in_the_middle_and_go_another_way(model) -> None:
    driver = Driver(make_engine(model))
    reference = plain(model)
    parent = started(driver, length=18, ticks=20)
    state = save(driver, parent)
    shorter = fork(driver, parent, state, 1, at=25)
    elsewhere = fork(driver, parent, state, 2, at=25, tail=(5, 6, 7))
    longer = fork(driver, parent, state, 3, tail=(8, 9))
    within_prompt = fork(driver, parent, state, 4, at=18)
    before = driver.num_prefill_tokens
    driver.drain()
    assert max(driver.gap(h, reference) for h in (shorter, elsewhere, longer, within_prompt)) < 1e-4
    # The second makes keys for 5 and 6, the third for the parent's last token and 8; the last token is fed by the decode pass.
    assert driver.num_prefill_tokens - before == 0 + 2 + 2 + 0


def test_a_fork_without_a_common_token_is_refused(model) -> None:
    driver = Driver(make_engine(model))
    state = save(driver, started(driver))
    other = (prompt(18) + 1 - 3) % (VOCABULARY - 3) + 3
    with pytest.raises(ValueError, match=rf"group 5 sample 0: its tokens and those of state {state} differ from the first one on"):
        driver.engine.submit(request(5, 0, other, state=state))
    driver.engine.pin()
    with pytest.raises(ValueError, match="an evaluation runs on a pinned copy"):
        driver.engine.submit(request(5, 0, prompt(18), state=state, purpose=Purpose.EVAL))


def test_only_what_runs_can_be_saved(model) -> None:
    driver = Driver(make_engine(model, slots=1))
    running, waiting = driver.submit(request(0, 0, prompt(9), 4), request(0, 1, prompt(9), 4))
    driver.tick()
    driver.engine.pin()
    (pinned,) = driver.submit(request(0, 0, prompt(9), 4, purpose=Purpose.EVAL))
    for _ in range(4):
        driver.tick()
    assert driver.engine.handle(driver.requests[running].key) is None, "it has ended by now"
    assert driver.engine.save(running) is None and driver.engine.save(pinned) is None
    assert driver.engine.handle(driver.requests[waiting].key) == waiting


def test_a_state_knows_its_counters_and_whose_weights_made_its_keys(model) -> None:
    model = tiny_model()
    driver = Driver(make_engine(model))
    parent = started(driver, length=18, ticks=5)
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    for _ in range(3):
        driver.tick()
    state = driver.engine._live.cache.states.get(save(driver, parent))
    assert state is not None
    assert list(state.tokens) == driver.ids(parent) and state.num_sampled == 8
    # 17 prompt tokens and 5 fed under version 0; the fifth sampled token was fed under version 1
    assert state.spans == ((0, 22, (1, 0)), (22, 25, (1, 1)))
    fork(driver, parent, save(driver, parent), 1, at=20)
    driver.engine.set_version(1, 2, "sum-2")
    driver.tick()
    forked = driver.engine._live.running[-1]
    assert forked.marks.spans(20) == ((0, 19, (1, 0)), (19, 20, (1, 2)))


def test_version_marks_overwrite_what_comes_after_them() -> None:
    marks = VersionMarks()
    for start, version in ((0, 3), (10, 4), (20, 5), (15, 6), (15, 4)):
        marks.add(start, (1, version))
    assert marks.spans(30) == ((0, 10, (1, 3)), (10, 30, (1, 4)))
    assert marks.spans(5) == ((0, 5, (1, 3)),) and marks.spans(0) == ()


def test_states_of_a_cancelled_request_are_freed(model) -> None:
    driver = Driver(make_engine(model))
    parent = started(driver)
    state = save(driver, parent)
    forked = fork(driver, parent, state, 1)
    driver.tick()
    driver.engine.cancel(parent)
    assert len(driver.engine._live.cache.states) == 0
    driver.drain()
    assert driver.generations[forked].stop_reason is StopReason.LENGTH, "a fork keeps what it shares"
    assert driver.engine._live.cache.blocks.num_taken == 0


def test_the_oldest_state_gives_way_and_its_fork_falls_back_to_prefill(model) -> None:
    driver = Driver(make_engine(model, saved_states=2))
    parent = started(driver)
    ids = [save(driver, parent) for _ in range(3)]
    store = driver.engine._live.cache.states
    assert [store.get(i) is not None for i in ids] == [False, True, True] and store.num_evicted == 1
    before = driver.num_prefill_tokens
    forked = fork(driver, parent, ids[0], 1)
    driver.drain()
    assert driver.num_prefill_tokens - before == 9, "of the parent's 27 tokens the prompt's 17 are shared, the last is fed"
    assert driver.gap(forked, plain(model)) < 1e-4


def test_bytes_are_bounded_and_shared_blocks_count_once(model) -> None:
    sizing = Driver(make_engine(model))
    started(sizing)
    pool = sizing.engine._live.cache.pool
    block_bytes = pool.num_bytes // pool.num_blocks
    driver = Driver(make_engine(model, saved_bytes=4 * block_bytes))
    store = driver.engine._live.cache.states
    long = started(driver, length=40, ticks=5)  # 3 blocks
    for _ in range(3):
        save(driver, long)
    assert len(store) == 3 and store.num_bytes == 3 * block_bytes
    other = started(driver, length=40, ticks=5, group=1)
    save(driver, other)
    assert len(store) == 1 and store.num_bytes == 3 * block_bytes, "the others had to go"
    nothing = Driver(make_engine(model, saved_bytes=0))
    parent = started(nothing)
    state = save(nothing, parent)
    assert nothing.engine._live.cache.states.get(state) is None, "there is an id, and nothing behind it"


def test_recomputation_leaves_no_state_of_older_weights() -> None:
    model = tiny_model()
    driver = Driver(make_engine(model, policy=InterruptPolicy("in_flight", "recompute"), prefill_budget=10))
    started(driver, group=1)
    parent = started(driver)
    state = save(driver, parent)
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    assert len(driver.engine._live.cache.states) == 0
    driver.tick()
    assert len(driver.engine._live._stale) == 1
    paused = save(driver, parent)  # it still has the old keys
    forks = [fork(driver, parent, s, n) for n, s in ((1, state), (2, paused))]
    driver.drain()
    assert max(driver.gap(h, plain(model)) for h in forks) < 1e-4


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [("in_flight", "keep"), ("in_flight", "recompute"), ("abort_resume", "keep"), ("abort_retry", "keep")])
def test_bounds_hold_and_everything_comes_back(model, seed: int, policy: tuple[str, str]) -> None:
    """Random saves, forks, cancellations, updates among requests for three slots: nobody starves or reads another's keys, nothing leaks."""
    rng = random.Random(f"{seed} {policy}")
    engine = make_engine(model, slots=3, max_context=64, saved_states=3, prefill_budget=50, policy=InterruptPolicy(*policy))
    driver, cache, reference = Driver(engine), engine._live.cache, plain(model)
    states: list[tuple[int, int]] = []  # (state, the request it is of)
    # Samples of twelve groups in turn: their prompts are kept for those that wait, and some must give way.
    live = driver.submit(*(request(10 + g, s, prompt(50, g), rng.randint(1, 6)) for s in range(3) for g in range(12)))
    for step in range(150):
        (kind,) = rng.choices(["submit", "save", "fork", "free", "cancel", "update"], [6, 4, 4, 1, 2, 2])
        if kind == "submit":
            group = rng.randrange(4)
            live += driver.submit(request(group, 1000 + step, prompt(rng.randint(1, 50), group), rng.randint(1, 14)))
        elif kind == "save" and live:
            handle = rng.choice(live)
            if (state := engine.save(handle)) is not None:
                states.append((state, handle))
        elif kind == "fork" and states:
            state, parent = rng.choice(states)
            ids = driver.ids(parent)
            at = rng.randint(1, len(ids))
            live += driver.submit(_forked(driver.requests[parent], ids[:at], 5000 + step, state))
        elif kind == "free" and states:
            engine.free(rng.choice(states)[0])
        elif kind == "cancel" and live:
            engine.cancel(rng.choice(live))
        elif kind == "update":
            engine.set_version(1, step + 1, "sum")
        driver.tick()
        live = [h for h in live if h in engine._sequences]
        assert len(cache.states) <= 3 and cache.states.num_bytes <= engine_bytes(cache)
    driver.drain(2000)
    sampled = [h for h, g in driver.generations.items() if g.token_ids]
    assert len(sampled) > 40 and max(driver.gap(h, reference) for h in sampled) < 1e-4, "all versions have equal bytes here"
    engine.free_all_states()
    assert (cache.blocks.num_taken, len(cache.prompts), len(cache.states), len(cache.states._held)) == (0, 0, 0, 0)
    assert not engine._saved and not engine._ended and not engine._live._stale and not engine._handles


def engine_bytes(cache) -> int:
    return 3 * cache.blocks_per_sequence * (cache.pool.num_bytes // cache.pool.num_blocks)


def _forked(parent: GenerateRequest, ids: list[int], sample: int, state: int) -> GenerateRequest:
    ids = ids[:60]
    length = min(parent.prompt_length, len(ids))
    sampled = len(ids) - length
    return request(parent.group_id, sample, np.array(ids, dtype=np.int32), 4, prompt_length=length, num_sampled=sampled, state=state)
