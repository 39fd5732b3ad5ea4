"""New weights stop rollouts, and the controller drops groups: what the worker does then. Fake engine, fake controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import END, CharTokenizer, FakeController, FakeEngine, assignment, config, ids_of

from slipstream.protocols import EnvironmentReply, Message
from slipstream.rollout.prefixes import PREFIX_CHUNK_TOKENS
from slipstream.rollout.worker import RolloutWorker
from slipstream.scoring.scorers import make_scorers
from slipstream.types import GenerateRequest, PrefixChunk, SealedChunk, Span, StopReason, merge_chunks

PROMPT = "[u]hi<end>[a]"
START = len(ids_of(PROMPT))


def run(
    engine: FakeEngine, settings: Any, assignments: Any, during: Callable[[FakeController], Awaitable[None]] | None = None, **more: Any
) -> FakeController:
    """Run until every assignment has come back, or `during` has returned."""

    async def main():
        controller = more.pop("controller", None) or FakeController(assignments)
        worker = RolloutWorker(controller, engine, CharTokenizer(), settings, make_scorers(settings.reward), max_context=400, **more)
        running = asyncio.create_task(worker.run())
        ended = asyncio.ensure_future(
            controller.until(lambda: len(controller.groups) == len(assignments)) if during is None else during(controller)
        )
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            ended.cancel()
            running.result()
        ended.result()
        await controller.stop()
        await running
        return controller

    return asyncio.run(main())


def goes_on(text: str) -> Callable[[GenerateRequest], list[int]]:
    """The rest of `text` and the end token, wherever the request stands."""
    return lambda request: [*ids_of(text), END][request.num_sampled_in_turn :]


def at(*points: tuple[int, int]) -> Callable[[GenerateRequest, int], bool]:
    """Interrupt sample s before its nth sampled token, once for each (s, n)."""
    left = list(points)

    def interrupt(request: GenerateRequest, index: int) -> bool:
        point = (request.sample, request.num_sampled + index)
        if point in left:
            left.remove(point)
            return True
        return False

    return interrupt


# ---- abort_resume ---------------------------------------------------------------------------------------------------------------


def test_a_resumed_rollout_keeps_tokens_logprobs_and_versions_and_goes_on_exactly_there() -> None:
    engine = FakeEngine(goes_on("abcdef"))
    engine.interrupt, engine.state = at((0, 2), (0, 5)), 77
    controller = run(engine, config(interrupt="abort_resume"), [assignment()])
    first, other = controller.groups[0].rollouts
    assert (first.completion, first.interrupts, first.kv) == ("abcdef", 2, "kept")
    assert (other.completion, other.interrupts) == ("abcdef", 0)
    assert first.spans == (
        Span(START, START + 2, 1, 0, "fake"),
        Span(START + 2, START + 5, 1, 1, "fake"),
        Span(START + 5, START + 7, 1, 2, "fake"),
    )
    assert first.stop_reason is StopReason.STOP
    assert [(t.role, t.start, t.end) for t in first.turns] == [("prompt", 0, START), ("assistant", START, START + 7)]
    asked = [r for r in engine.requests if r.sample == 0]
    assert len({r.key for r in asked}) == 1, "the same rollout, attempt and turn"
    assert [r.token_ids.tolist() for r in asked] == [[*ids_of(PROMPT), *ids_of("abcdef")[:n]] for n in (0, 2, 5)]
    assert [(r.num_sampled, r.num_sampled_in_turn, r.sampling.max_new_tokens) for r in asked] == [(0, 0, 16), (2, 2, 14), (5, 5, 11)]
    assert [(r.oldest_version, r.state, r.prompt_length) for r in asked] == [(None, None, START), (0, 77, START), (0, 77, START)]
    assert not controller.interruptions, "nothing is discarded, so nothing is reported"


def test_a_resumption_whose_keys_were_made_again_says_so() -> None:
    engine = FakeEngine(goes_on("abcdef"))
    engine.interrupt, engine.remakes = at((0, 2)), True
    controller = run(engine, config(interrupt="abort_resume", kv="recompute"), [assignment()])
    first, other = controller.groups[0].rollouts
    assert (first.kv, first.prefill_version) == ("recomputed", (1, 1))
    assert (other.kv, other.prefill_version) == ("kept", (1, 0))
    recorded = [merge_chunks([c for c in controller.chunks if c.sample == sample]) for sample in (0, 1)]
    assert [(c.recomputed, c.prefill_version) for c in recorded] == [(True, (1, 1)), (False, (1, 0))]
    whole = [msgspec.structs.replace(c, stop_reason=StopReason.STOP) for c in recorded]
    resumed = run(FakeEngine(goes_on("never asked")), config(), [assignment(prefixes=tuple(whole))]).groups[0].rollouts
    assert [(r.kv, r.prefill_version) for r in resumed] == [("recomputed", (1, 1)), ("kept", (1, 0))], "also where it had ended"


def test_what_is_recorded_of_a_resumed_rollout_is_one_contiguous_prefix() -> None:
    text = "x" * (2 * PREFIX_CHUNK_TOKENS + 5)
    engine = FakeEngine(goes_on(text))
    # The second one comes with the last token of a chunk: the recorder is at work while the interrupt is told.
    engine.interrupt = at((0, 10), (0, PREFIX_CHUNK_TOKENS), (0, 2 * PREFIX_CHUNK_TOKENS + 3))
    controller = run(engine, config(interrupt="abort_resume", max_new_tokens=200, group_size=1), [assignment()])
    chunks = controller.chunks
    assert [c.stop_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1) and len(chunks) == 3
    merged = merge_chunks(chunks)
    assert merged.token_ids.tolist() == [*ids_of(text), END] and merged.stop_reason is StopReason.STOP
    assert merged.spans == controller.groups[0].rollouts[0].spans and len(merged.spans) == 4


def test_a_turn_that_goes_on_counts_only_its_own_tokens() -> None:
    class Twice:
        def __init__(self) -> None:
            self.turns = 0

        async def start(self) -> tuple[Message, ...]:
            return (Message(role="user", content="hi"),)

        async def step(self, message: Message) -> EnvironmentReply:
            self.turns += 1
            return EnvironmentReply(done=True) if self.turns == 2 else EnvironmentReply(messages=(Message(role="tool", content="7"),))

        async def close(self) -> None:
            pass

    engine = FakeEngine(lambda request: [*ids_of("abc" if request.turn == 0 else "defg"), END][request.num_sampled_in_turn :])
    engine.interrupt = at((0, 1), (0, 6))
    settings = config(interrupt="abort_resume", max_turns=2, environment="tools", group_size=1)
    controller = run(engine, settings, [assignment()], make_environment=lambda row: Twice())
    rollout = controller.groups[0].rollouts[0]
    assert rollout.completion == "abc\ndefg"
    asked = [(r.turn, r.num_sampled, r.num_sampled_in_turn, r.oldest_version, r.sampling.max_new_tokens) for r in engine.requests]
    assert asked == [(0, 0, 0, None, 16), (0, 1, 1, 0, 15), (1, 4, 0, 0, 16), (1, 6, 2, 0, 14)]
    assert [t.role for t in rollout.turns] == ["prompt", "assistant", "tool", "assistant"]
    assert [s.version for s in rollout.spans] == [0, 1, 1, 2]


def test_the_deadline_runs_on_over_interrupts() -> None:
    async def hold(request: GenerateRequest, index: int) -> None:
        if request.num_sampled:
            await asyncio.Event().wait()  # the resumption never gets a token

    engine = FakeEngine(goes_on("abcdef"))
    engine.interrupt, engine.before_token = at((0, 2)), hold
    controller = run(engine, config(interrupt="abort_resume", timeout_s=0.3, group_size=1), [assignment()])
    rollout = controller.groups[0].rollouts[0]
    assert rollout.error == "deadline: rollout took longer than 0.3 s" and engine.active == 0
    assert rollout.token_ids[START:].tolist() == ids_of("ab")


# ---- abort_retry ----------------------------------------------------------------------------------------------------------------


def by_attempt(request: GenerateRequest) -> list[int]:
    return [*ids_of("old one" if request.attempt == 0 else "ok"), END]


def test_a_retried_rollout_starts_anew_and_its_siblings_keep_theirs() -> None:
    opened: list[int] = []
    closed: list[int] = []

    class Counted:
        def __init__(self) -> None:
            self.number = len(opened)
            opened.append(self.number)

        async def start(self) -> tuple[Message, ...]:
            return (Message(role="user", content="hi"),)

        async def step(self, message: Message) -> EnvironmentReply:
            return EnvironmentReply(done=True)

        async def close(self) -> None:
            closed.append(self.number)

    engine = FakeEngine(by_attempt)
    engine.interrupt = at((1, 4))
    controller = run(engine, config(interrupt="abort_retry", group_size=3), [assignment()], make_environment=lambda row: Counted())
    first, retried, third = controller.groups[0].rollouts
    assert controller.interruptions == [(0, 1, 0, 4)]
    assert (retried.completion, retried.attempt, retried.interrupts) == ("ok", 1, 1)
    assert [s.version for s in retried.spans] == [1], "wholly of the new version"
    assert [(r.completion, r.attempt, r.interrupts) for r in (first, third)] == [("old one", 0, 0)] * 2
    asked = [r for r in engine.requests if r.sample == 1]
    assert [(r.attempt, r.num_sampled, r.token_ids.tolist()) for r in asked] == [(n, 0, ids_of(PROMPT)) for n in (0, 1)]
    assert len({r.key for r in asked}) == 2
    assert sorted(closed) == opened == [0, 1, 2, 3], "a new environment, and the old one is closed"


def test_no_chunk_of_a_discarded_attempt_comes_after_it_was_reported() -> None:
    class Watched(FakeController):
        async def progress(self, chunks: list[SealedChunk]) -> None:
            for _ in range(20):  # a slow ledger: the interrupt comes while a chunk is under way
                await asyncio.sleep(0)
            await super().progress(chunks)
            order.extend(("chunk", c.sample, c.attempt, c.num_tokens, c.ended) for c in chunks)

        async def interrupted(self, group_id: int, sample: int, attempt: int, num_tokens: int) -> bool:
            order.append(("interrupted", sample, attempt, num_tokens))
            return await super().interrupted(group_id, sample, attempt, num_tokens)

    order: list[tuple[Any, ...]] = []
    engine = FakeEngine(lambda request: [*ids_of("x" * 100), END])
    engine.interrupt = at((0, PREFIX_CHUNK_TOKENS + 3))
    settings = config(interrupt="abort_retry", group_size=1, max_new_tokens=200)
    run(engine, settings, [assignment()], controller=Watched([assignment()]))
    assert order == [
        ("chunk", 0, 0, 64, False),
        ("interrupted", 0, 0, 67),
        ("chunk", 0, 1, 64, False),
        ("chunk", 0, 1, 37, True),
    ]


def test_a_rollout_that_may_not_start_anew_fails_with_that_cause() -> None:
    engine = FakeEngine(lambda request: [*ids_of("abc"), END])
    engine.interrupt = lambda request, index: request.sample == 0 and index == 2
    controller = FakeController([assignment()])
    controller.max_interrupts = 3
    run(engine, config(interrupt="abort_retry"), [assignment()], controller=controller)
    failed, ok = controller.groups[0].rollouts
    assert failed.error == "interrupted: new weights stopped it, and no further attempt is due after 4"
    assert (failed.attempt, failed.interrupts, failed.reward) == (3, 4, None) and not failed.status.ok
    assert ok.status.ok and [i[2] for i in controller.interruptions] == [0, 1, 2, 3]


def recorded(text: str, *, sample: int = 0, attempt: int = 0) -> PrefixChunk:
    """What version 2 had sampled of a rollout before the run was resumed."""
    return PrefixChunk(
        group_id=0,
        sample=sample,
        attempt=attempt,
        prompt_length=START,
        start=0,
        token_ids=np.array(ids_of(text), dtype=np.int32),
        logprobs=np.full(len(text), -2.0, dtype=np.float32),
        spans=(Span(START, START + len(text), 1, 2, "old"),),
        prefill_version=(1, 2),
    )


def test_after_a_resume_the_attempts_go_on_where_they_were() -> None:
    prefixes = (recorded("o", sample=1, attempt=5),)
    engine = FakeEngine(goes_on("ok"), version=5)
    controller = run(engine, config(interrupt="abort_retry"), [assignment(attempt=3, retries={1: 2}, prefixes=prefixes)])
    (group,) = controller.groups
    assert group.attempt == 3 and [(r.attempt, r.interrupts, r.completion) for r in group.rollouts] == [(3, 0, "ok"), (5, 2, "ok")]
    assert {(r.sample, r.attempt, r.num_sampled, r.oldest_version) for r in engine.requests} == {(0, 3, 0, None), (1, 5, 1, 2)}
    assert {(c.sample, c.attempt, c.start) for c in controller.chunks} == {(0, 3, 0), (1, 5, 1)}


def test_a_recorded_prefix_is_not_taken_into_a_new_attempt() -> None:
    engine = FakeEngine(lambda request: [*ids_of("no" if request.attempt == 0 else "ok"), END][request.num_sampled :], version=5)
    engine.interrupt = at((0, 2))
    controller = run(engine, config(interrupt="abort_retry", group_size=1), [assignment(prefixes=(recorded("n"),))])
    (rollout,) = controller.groups[0].rollouts
    assert rollout.completion == "ok" and [s.version for s in rollout.spans] == [6] and rollout.kv == "kept"
    assert controller.interruptions == [(0, 0, 0, 2)], "recorded tokens are discarded with the rest"


# ---- groups that the controller drops -------------------------------------------------------------------------------------------


class Endless(FakeEngine):
    """Group 0 never gets further than 100 tokens."""

    def __init__(self) -> None:
        super().__init__(lambda request: [*ids_of("x" * 200 if request.group_id == 0 else "ok"), END])
        self.before_token = self._hold

    async def _hold(self, request: GenerateRequest, index: int) -> None:
        if index == 100:
            await asyncio.Event().wait()


def test_a_dropped_group_leaves_the_engine_at_once_and_is_not_heard_of_again() -> None:
    async def during(controller: FakeController) -> None:
        await controller.until(lambda: sum(c.group_id == 0 for c in controller.chunks) == 2)
        controller.waiting = [assignment(1), assignment(2)]
        await controller.drop((0, 0), (9, 9))  # the worker knows nothing of the second
        await controller.until(lambda: len(controller.groups) == 2)
        assert engine.active == 0

    engine = Endless()
    controller = run(engine, config(max_new_tokens=300, slots=1), [assignment(0)], during)
    assert sorted(g.group_id for g in controller.groups) == [1, 2]
    dropped = [c for c in controller.chunks if c.group_id == 0]
    assert [len(c.token_ids) for c in dropped] == [PREFIX_CHUNK_TOKENS] * 2, "not at the end of the run either"
    assert not any(c.stop_reason for c in dropped)


def test_only_the_dropped_attempt_of_a_group_is_ended() -> None:
    async def during(controller: FakeController) -> None:
        await controller.until(lambda: controller.chunks)
        await controller.drop((1, 0))
        release.set()
        await controller.until(lambda: controller.groups)

    release = asyncio.Event()

    async def hold(request: GenerateRequest, index: int) -> None:
        if index == PREFIX_CHUNK_TOKENS + 1:
            await release.wait()

    engine = FakeEngine(lambda request: [*ids_of("x" * 70), END])
    engine.before_token = hold
    controller = run(engine, config(max_new_tokens=100), [assignment(1, attempt=1)], during)
    assert [(g.group_id, g.attempt) for g in controller.groups] == [(1, 1)]


def test_a_group_dropped_before_it_has_begun_gives_its_room_back() -> None:
    """The order comes in the same answer as the group itself."""

    async def during(controller: FakeController) -> None:
        await controller.until(lambda: len(controller.groups) == 3)

    class Hasty(FakeController):
        async def admit(self, room: int) -> Any:
            work = await super().admit(room)
            worker._take(work)
            return type(work)(cancel=tuple((a.group_id, a.attempt) for a in work.assignments if a.group_id == 0), stop=work.stop)

    settings = config(slots=2)
    engine = Endless()

    async def main() -> None:
        nonlocal worker
        controller = Hasty([assignment(n) for n in range(4)])
        worker = RolloutWorker(controller, engine, CharTokenizer(), settings, make_scorers(settings.reward), max_context=400)
        running = asyncio.create_task(worker.run())
        await during(controller)
        for _ in range(5):  # until the last one's task has ended
            await asyncio.sleep(0)
        assert not worker._num_sequences and not worker._running and not worker._dropped
        await controller.stop()
        await running
        assert {r.group_id for r in engine.requests} == {1, 2, 3}

    worker: Any = None
    asyncio.run(main())


@pytest.mark.parametrize("interrupt", ["abort_resume", "abort_retry"])
def test_a_stop_amid_interrupts_records_what_may_go_on(interrupt: str) -> None:
    async def during(controller: FakeController) -> None:
        await asyncio.wait_for(reached.wait(), 5)

    reached = asyncio.Event()

    async def hold(request: GenerateRequest, index: int) -> None:
        if engine.version == 1 and index == 2:
            reached.set()
            await asyncio.Event().wait()

    engine = FakeEngine(goes_on("abcdefgh"))
    engine.interrupt, engine.before_token = at((0, 3)), hold
    settings = config(interrupt=interrupt, group_size=1)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"stop_grace_s": 0.0})})
    controller = run(engine, settings, [assignment()], during)
    (chunk,) = controller.chunks
    assert (chunk.attempt, chunk.stop_reason) == (0 if interrupt == "abort_resume" else 1, None)
    assert chunk.token_ids.tolist() == ids_of("abcde" if interrupt == "abort_resume" else "ab")
