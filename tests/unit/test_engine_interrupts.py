"""New weights come while sequences run: for each interrupt, what becomes of their tokens, logprobs, versions, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from engine_harness import Driver, change_weights, make_engine, plain, prompt, replay, request, tiny_model

from slipstream.engines.interrupts import InterruptPolicy
from slipstream.protocols import Generation
from slipstream.types import GenerateRequest, Purpose, Span, StopReason

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")]


@dataclass
class Story:
    """What one rollout came to, over its requests."""

    request: GenerateRequest
    generation: Generation
    handle: int = -1
    ends: list[StopReason] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.request.token_ids.tolist() + self.generation.token_ids

    def resumption(self) -> GenerateRequest:
        """As the worker asks for it."""
        done = len(self.generation.token_ids)
        return request(
            self.request.group_id,
            self.request.sample,
            np.array(self.ids, dtype=np.int32),
            self.request.sampling.max_new_tokens - done,
            prompt_length=self.request.prompt_length,
            num_sampled=done,
            num_sampled_in_turn=done,
            oldest_version=self.generation.spans[0].version,
            state=self.generation.state,
        )


class Worker(Driver):
    """A driver that sends interrupted requests again, as the rollout worker does after `abort_resume`."""

    def __init__(self, model, *, interrupt: str = "in_flight", kv: str = "keep", after: int | None = None, **options):
        super().__init__(make_engine(model, policy=InterruptPolicy(interrupt, kv, after), **options))
        self.model = model
        self.stories: list[Story] = []
        self.frames: list = []

    def begin(self, *requests: GenerateRequest) -> list[Story]:
        stories = [Story(r, Generation(len(r.token_ids))) for r in requests]
        for story in stories:
            self._send(story, story.request)
        self.stories += stories
        return stories

    def _send(self, story: Story, wanted: GenerateRequest) -> None:
        story.handle = self.engine.submit(wanted)
        self.generations[story.handle] = story.generation

    def tick(self):
        frame = super().tick()
        self.frames.append(frame)
        for handle, state in frame.saved:
            self.generations[handle].state = state
        for handle in frame.recomputed:
            self.generations[handle].recomputed = True
        for story in self.stories:
            for handle, reason in frame.finished:
                if handle == story.handle:
                    story.ends.append(StopReason(reason))
                    if reason is StopReason.INTERRUPT:
                        story.generation.stop_reason = None
                        self._send(story, story.resumption())
        return frame

    def update(self, version: int):
        """The weights change as a weight sync changes them; a plain copy of the new ones."""
        change_weights(self.model, seed=version)
        self.engine.set_version(1, version, f"sum-{version}")
        return plain(self.model)


def told(stories: list[Story]) -> list[tuple]:
    return [(s.generation.token_ids, s.generation.logprobs, s.generation.spans, s.generation.prefill_version) for s in stories]


def whole_prefix_gap(story: Story, reference, since: int) -> float:
    """Largest difference of the logprobs of the tokens from the `since`th sampled one on from plain forwards of the whole prefix."""
    generation = story.generation
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([story.ids]), use_cache=False).logits[0]
    at = range(generation.start + since - 1, len(story.ids) - 1)
    expected = logits[list(at)].log_softmax(-1).gather(1, torch.tensor(generation.token_ids[since:])[:, None])[:, 0]
    return float((expected - torch.tensor(generation.logprobs[since:])).abs().max())


def requests(new: int = 16) -> list[GenerateRequest]:
    """Two samples that share a prompt, and one of another group."""
    return [request(0, 0, prompt(18), new), request(0, 1, prompt(18), new), request(1, 0, prompt(5), new)]


def run(kind: str = "llama", ticks: int = 7, **options) -> tuple[Worker, list[Story]]:
    """Seven tokens of each, then version 1, then the rest."""
    worker = Worker(tiny_model(kind), **options)
    stories = worker.begin(*requests())
    for _ in range(ticks):
        worker.tick()
    worker.update(1)
    worker.drain()
    return worker, stories


def expect_spans(story: Story, old: int = 7) -> None:
    n = story.generation.start
    assert story.generation.spans == [Span(n, n + old, 1, 0, "engine-0"), Span(n + old, n + 16, 1, 1, "engine-0")]


# ---- in_flight ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_in_flight_recompute_goes_on_as_if_the_new_weights_had_read_the_whole_prefix(kind: str) -> None:
    worker, stories = run(kind, kv="recompute")
    _, kept = run(kind)
    reference = plain(worker.model)
    for story, other in zip(stories, kept, strict=True):
        expect_spans(story)
        assert story.ends == [StopReason.LENGTH], "it was never taken out"
        assert whole_prefix_gap(story, reference, since=7) < 1e-4
        assert whole_prefix_gap(other, reference, since=7) > 1e-3, "kept keys and values differ: the test can fail"
        assert story.generation.prefill_version == (1, 1) and story.generation.recomputed
        assert story.generation.token_ids[:7] == other.generation.token_ids[:7], "what was sampled before stays"
        assert story.generation.logprobs[:7] == other.generation.logprobs[:7]
    first = next(f for f in worker.frames if f.version == 1)
    assert first.recomputed == tuple(s.handle for s in stories)
    assert first.num_prefill_tokens == 17 + 7 + 7 + 4 + 7, "the shared prompt once, then everyone's own tokens"
    assert [f.num_prefill_tokens for f in worker.frames if f.version == 1][1:] == [0] * 8
    assert worker.engine._live.cache.blocks.num_taken == 0


def test_recomputation_is_spread_over_ticks_and_those_that_wait_for_it_pause() -> None:
    """Five sequences of 40 tokens at 60 tokens a tick: one of them a tick; each goes on as soon as it is done."""
    worker = Worker(tiny_model(), kv="recompute", prefill_budget=60)
    stories = worker.begin(*(request(g, 0, prompt(31, g), 30) for g in range(5)))
    while any(len(s.generation.token_ids) < 10 for s in stories):
        worker.tick()
    counts = [len(s.generation.token_ids) for s in stories]
    reference = worker.update(1)
    started = len(worker.frames)
    (late,) = worker.begin(request(9, 0, prompt(31, 9), 4))
    worker.drain()
    after = worker.frames[started:]
    assert [len(f.recomputed) for f in after[:6]] == [1, 1, 1, 1, 1, 0]
    assert [len(f.handles) for f in after[:5]] == [1, 2, 3, 4, 5], "the others pause meanwhile, for one tick per sequence before them"
    assert late.handle not in after[4].handles and late.handle in after[5].handles, "nobody new starts before those are done"
    for story, count in zip(stories, counts, strict=True):
        assert whole_prefix_gap(story, reference, since=count) < 1e-4


def test_versions_that_come_faster_than_recomputation_starve_nobody() -> None:
    worker = Worker(tiny_model(), kv="recompute", prefill_budget=30)
    stories = worker.begin(*(request(g, 0, prompt(25, g), 40) for g in range(4)))
    while any(not s.generation.token_ids for s in stories):
        worker.tick()
    before = [len(s.generation.token_ids) for s in stories]
    for version in range(1, 13):
        worker.update(version)
        worker.tick()
    assert [len(s.generation.token_ids) - n for s, n in zip(stories, before, strict=True)] == [3, 3, 3, 3], "in turns"


def test_a_paused_sequence_may_be_cancelled() -> None:
    worker = Worker(tiny_model(), kv="recompute", prefill_budget=30)
    first, second = worker.begin(request(0, 0, prompt(25), 10), request(1, 0, prompt(25, 1), 10))
    worker.tick()
    worker.tick()
    worker.update(1)
    worker.tick()
    worker.engine.cancel(second.handle)
    worker.drain()
    assert len(first.generation.token_ids) == 10 and worker.engine._live.cache.blocks.num_taken == 0


# ---- abort_resume ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_abort_resume_with_kept_keys_is_in_flight_bit_for_bit(kind: str) -> None:
    worker, stories = run(kind, interrupt="abort_resume")
    _, in_flight = run(kind)
    assert told(stories) == told(in_flight)
    for story in stories:
        assert story.ends == [StopReason.INTERRUPT, StopReason.LENGTH]
        assert not story.generation.recomputed
    assert sum(f.num_prefill_tokens for f in worker.frames) == 17 + 4, "nothing is prefilled twice"
    assert len(worker.engine._live.cache.states) == 0 and worker.engine._live.cache.blocks.num_taken == 0


def test_abort_resume_with_recomputed_keys_is_in_flight_recompute() -> None:
    worker, stories = run(interrupt="abort_resume", kv="recompute")
    _, in_flight = run(kv="recompute")
    reference = plain(worker.model)
    for story, other in zip(stories, in_flight, strict=True):
        assert story.ends == [StopReason.INTERRUPT, StopReason.LENGTH]
        expect_spans(story)
        assert story.generation.token_ids == other.generation.token_ids, "the same random stream goes on"
        assert np.abs(np.array(story.generation.logprobs) - np.array(other.generation.logprobs)).max() < 1e-4
        assert whole_prefix_gap(story, reference, since=7) < 1e-4
        assert story.generation.prefill_version == (1, 1) and story.generation.recomputed
    assert not any(f.saved for f in worker.frames)


def test_a_kept_state_is_old_keys_below_the_interrupt_and_new_ones_above() -> None:
    model = tiny_model()
    old = plain(model)
    worker = Worker(model, interrupt="abort_resume")
    (story,) = worker.begin(request(0, 0, prompt(18), 16))
    for _ in range(7):
        worker.tick()
    new = worker.update(1)
    worker.drain()
    expected = replay(old, new, story.ids, num_old=18 + 6, start=18)
    assert (expected - torch.tensor(story.generation.logprobs)).abs().max() < 1e-4


def test_a_state_that_gave_way_is_made_again_and_the_record_says_so() -> None:
    """One state is kept, three are interrupted: the newest is resumed as it was, the others are prefilled by the new weights."""
    worker, stories = run(interrupt="abort_resume", saved_states=1)
    _, in_flight = run()
    reference = plain(worker.model)
    assert [s.generation.recomputed for s in stories] == [True, True, False]
    assert told(stories[2:]) == told(in_flight[2:])
    for story in stories[:2]:
        expect_spans(story)
        assert whole_prefix_gap(story, reference, since=7) < 1e-4
        assert story.generation.prefill_version == (1, 1)
    assert worker.engine._live.cache.states.num_evicted == 2


def test_interrupted_sequences_come_back_before_those_that_wait() -> None:
    worker = Worker(tiny_model(), interrupt="abort_resume", slots=2)
    running = worker.begin(request(0, 0, prompt(9), 10), request(0, 1, prompt(9), 10))
    (waiting,) = worker.begin(request(1, 0, prompt(9), 10))
    for _ in range(3):
        worker.tick()
    worker.update(1)
    telling = worker.tick()
    assert not len(telling.handles) and {h for h, _ in telling.finished} == {0, 1}
    assert set(worker.tick().handles.tolist()) == {s.handle for s in running}
    worker.drain()
    assert waiting.ends == [StopReason.LENGTH] and [s.version for s in waiting.generation.spans] == [1]


def test_a_sequence_that_is_interrupted_twice_in_a_row_keeps_its_stream() -> None:
    whole = Worker(tiny_model())
    (undisturbed,) = whole.begin(request(0, 0, prompt(9), 12))
    whole.drain()
    worker = Worker(tiny_model(), interrupt="abort_resume")
    (story,) = worker.begin(request(0, 0, prompt(9), 12))
    for version in range(1, 40):  # a new version, of equal bytes, between any two ticks
        worker.engine.set_version(1, version, "sum-0")
        if not worker.engine.has_work():
            break
        worker.tick()
    assert story.generation.token_ids == undisturbed.generation.token_ids
    assert story.generation.logprobs == undisturbed.generation.logprobs
    assert len(story.generation.spans) == 12 and story.ends.count(StopReason.INTERRUPT) == 11


def test_cancelling_an_interrupted_request_before_it_is_told_frees_its_state() -> None:
    worker = Worker(tiny_model(), interrupt="abort_resume")
    (story,) = worker.begin(request(0, 0, prompt(18), 16))
    worker.tick()
    worker.update(1)
    worker.engine.cancel(story.handle)
    assert not worker.engine.has_work() and worker.engine._live.cache.blocks.num_taken == 0


# ---- interrupt_after ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupt", ["abort_resume", "abort_retry"])
def test_interrupt_after_picks_those_whose_oldest_token_would_be_too_old(interrupt: str) -> None:
    driver = Driver(make_engine(tiny_model(), policy=InterruptPolicy(interrupt, after=1), version=3))
    carried = request(2, 0, prompt(12), 30, prompt_length=9, num_sampled=3, oldest_version=1)
    (oldest,) = driver.submit(request(0, 0, prompt(9), 30))
    driver.tick()
    driver.engine.set_version(1, 4, "sum-4")  # 4 - 3 is not more than 1
    (newer, older) = driver.submit(request(1, 0, prompt(9), 30), carried)
    driver.tick()
    assert not any(g.stop_reason for g in driver.generations.values())
    driver.engine.set_version(1, 5, "sum-5")
    driver.tick()
    stopped = {h for h, g in driver.generations.items() if g.stop_reason is StopReason.INTERRUPT}
    assert stopped == {oldest, older}, "5 - 3 and 5 - 1 are more than 1; 5 - 4 is not"
    assert [s.version for s in driver.generations[newer].spans] == [4, 5], "it goes on in flight, in the very next tick"


def test_with_interrupt_after_the_others_keep_their_keys_also_where_kv_is_recompute() -> None:
    driver = Driver(make_engine(tiny_model(), policy=InterruptPolicy("abort_resume", "recompute", after=1)))
    driver.submit(request(0, 0, prompt(9), 30))
    driver.tick()
    driver.engine.set_version(1, 1, "sum-1")
    frame = driver.tick()
    assert len(frame.handles) == 1 and not frame.recomputed and not frame.num_prefill_tokens


# ---- abort_retry ----------------------------------------------------------------------------------------------------------------


def test_abort_retry_ends_what_runs_and_the_next_attempt_is_wholly_of_the_new_version() -> None:
    """Also where a sample of the group that waits would have kept the prompt's old keys and values alive."""
    model = tiny_model()
    driver = Driver(make_engine(model, slots=1, policy=InterruptPolicy("abort_retry")))
    running, waiting = driver.submit(request(0, 0, prompt(18), 8), request(0, 1, prompt(18), 8))
    for _ in range(3):
        driver.tick()
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    frame = driver.tick()
    assert frame.finished == ((running, StopReason.INTERRUPT),) and not frame.saved
    (again,) = driver.submit(request(0, 0, prompt(18), 8, attempt=1))
    driver.drain()
    reference = plain(model)
    for handle in (waiting, again):
        assert [s.version for s in driver.generations[handle].spans] == [1]
        assert driver.generations[handle].prefill_version == (1, 1)
        assert driver.gap(handle, reference) < 1e-4
    assert driver.generations[again].token_ids[:3] != driver.generations[running].token_ids[:3], "another attempt draws other numbers"


def test_a_prompt_made_anew_gives_way_to_the_sequences_that_stand_on_its_old_keys() -> None:
    """Those that `interrupt_after` spares share no block with it any more, so in a pool without room for states it cannot stay."""
    driver = Driver(make_engine(tiny_model(), slots=2, max_context=64, saved_states=0, policy=InterruptPolicy("abort_retry", after=1)))
    (spared,) = driver.submit(request(0, 0, prompt(34), 30))
    while len(driver.ids(spared)) < 46:
        driver.tick()
    driver.engine.set_version(1, 1, "sum-1")
    (sibling,) = driver.submit(request(0, 1, prompt(34), 1))
    driver.tick()
    assert driver.generations[sibling].prefill_version == (1, 1)
    driver.submit(request(1, 0, prompt(58), 6, prompt_length=1))  # all the blocks that one sequence may have
    driver.drain()
    assert len(driver.ids(spared)) == 64 and driver.generations[spared].stop_reason is StopReason.LENGTH
    assert driver.engine._live.cache.blocks.num_taken == 0


# ---- drain ----------------------------------------------------------------------------------------------------------------------


def test_drain_lets_what_runs_end_and_starts_nothing_until_the_weights_are_in() -> None:
    model = tiny_model()
    driver = Driver(make_engine(model, slots=2, policy=InterruptPolicy("drain")))
    old = plain(model)
    short, long, waiting = driver.submit(request(0, 0, prompt(9), 4), request(0, 1, prompt(9), 8), request(0, 2, prompt(9), 4))
    driver.tick()
    ticks = 0
    while not driver.engine.may_adopt():  # the offer is in hand from here on
        frame = driver.tick()
        assert waiting not in frame.handles, "a slot came free, but nothing new starts"
        ticks += 1
    assert ticks == 7 and not driver.engine.has_work()
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    driver.drain()
    assert [[s.version for s in driver.generations[h].spans] for h in (short, long, waiting)] == [[0], [0], [1]]
    assert driver.gap(long, old) < 1e-4
    assert driver.gap(waiting, plain(model)) < 1e-4, "keys and values of the prompt included"
    assert driver.generations[waiting].prefill_version == (1, 1)


def test_other_interrupts_adopt_at_once() -> None:
    for interrupt in ("in_flight", "abort_resume", "abort_retry", "barrier"):
        driver = Driver(make_engine(tiny_model(), policy=InterruptPolicy(interrupt)))
        driver.submit(request(0, 0, prompt(9), 4))
        driver.tick()
        assert driver.engine.may_adopt()


# ---- evaluation -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        InterruptPolicy("in_flight", "recompute"),
        InterruptPolicy("abort_resume"),
        InterruptPolicy("abort_retry"),
        InterruptPolicy("drain"),
    ],
)
def test_evaluations_on_a_pinned_version_are_never_interrupted(policy: InterruptPolicy) -> None:
    model = tiny_model()
    driver = Driver(make_engine(model, policy=policy))
    old = plain(model)
    driver.engine.pin()
    (pinned,) = driver.submit(request(0, 0, prompt(18), 12, purpose=Purpose.EVAL))
    for _ in range(3):
        driver.tick()
    assert driver.engine.may_adopt(), "a pinned sequence holds no weights back"
    change_weights(model)
    driver.engine.set_version(1, 1, "sum-1")
    driver.drain()
    assert driver.generations[pinned].stop_reason is StopReason.LENGTH
    assert [s.version for s in driver.generations[pinned].spans] == [0]
    assert driver.gap(pinned, old) < 1e-4
