"""The rollout worker with a fake engine and a fake controller: groups, prefixes, resume, stop, failures, evaluation."""

import asyncio
from typing import Any

import numpy as np
import pytest
from rollout_fakes import END, CharTokenizer, FakeController, FakeEngine, assignment, config, ids_of

from slipstream.errors import ConfigError, DeadlineExceeded, PeerLost, RunFailed, ScoringError
from slipstream.protocols import EnvironmentReply, Message
from slipstream.rollout.external import TickedCalls
from slipstream.rollout.prefixes import PREFIX_CHUNK_TOKENS
from slipstream.rollout.worker import RolloutWorker
from slipstream.scoring.scorers import make_scorers
from slipstream.types import EvalTask, PrefixChunk, Purpose, Span, StopReason, merge_chunks

PROMPT = "[u]hi<end>[a]"


def make_worker(controller: FakeController, engine: FakeEngine, settings: Any, scorers: Any = None, **more: Any) -> RolloutWorker:
    scorers = make_scorers(settings.reward) if scorers is None else scorers
    return RolloutWorker(controller, engine, CharTokenizer(), settings, scorers, **({"max_context": 400} | more))


def run_groups(engine: FakeEngine, settings: Any, assignments: Any, scorers: Any = None, **more: Any):
    """Run until every assignment has come back; (controller, worker)."""

    async def main():
        controller = FakeController(assignments)
        worker = make_worker(controller, engine, settings, scorers, **more)
        running = asyncio.create_task(worker.run())
        ended = asyncio.create_task(controller.until(lambda: len(controller.groups) == len(assignments)))
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            ended.cancel()
            running.result()
        await controller.stop()
        await running
        return controller, worker

    return asyncio.run(main())


def say(*texts: str):
    """Sample k says text k, then the end token."""
    return lambda request: [*ids_of(texts[request.sample % len(texts)]), END]


def test_a_group_is_sampled_scored_and_handed_back():
    engine = FakeEngine(say("ok", "no"), version=4)
    controller, _ = run_groups(engine, config(), [assignment(7, min_version=3)])
    (group,) = controller.groups
    assert [r.reward for r in group.rollouts] == [1.0, 0.0]
    assert [r.completion for r in group.rollouts] == ["ok", "no"]
    assert group.prompt == [{"role": "user", "content": "hi"}]
    rollout = group.rollouts[0]
    assert rollout.token_ids.tolist() == [*ids_of(PROMPT), *ids_of("ok"), END]
    assert rollout.prompt_length == len(ids_of(PROMPT))
    assert rollout.loss_mask.tolist() == [False] * rollout.prompt_length + [True] * 3  # the sampled end token is trained
    assert rollout.spans == (Span(rollout.prompt_length, rollout.prompt_length + 3, 1, 4, "fake"),)
    assert rollout.stop_reason is StopReason.STOP
    assert rollout.prefill_version == (1, 4)
    assert [t.role for t in rollout.turns] == ["prompt", "assistant"]
    assert rollout.turns[1].sampling is not None and rollout.turns[1].sampling.max_new_tokens == 16
    assert rollout.turns[1].terminated and not rollout.turns[1].truncated
    request = engine.requests[0]
    assert (request.min_version, request.num_sampled, request.prompt_length) == (3, 0, rollout.prompt_length)
    assert request.stop_token_ids == (END,)


def test_a_completion_cut_at_max_new_tokens_is_scored_as_it_is():
    controller, _ = run_groups(FakeEngine(say("ok and on")), config(max_new_tokens=2), [assignment()])
    rollout = controller.groups[0].rollouts[0]
    assert (rollout.stop_reason, rollout.completion, rollout.reward) == (StopReason.LENGTH, "ok", 1.0)
    assert rollout.turns[1].truncated


def test_admission_keeps_the_slots_filled_and_looks_one_group_ahead():
    engine = FakeEngine(say("ok"))
    controller, _ = run_groups(engine, config(group_size=4, slots=8), [assignment(n) for n in range(12)])
    assert sorted(group.group_id for group in controller.groups) == list(range(12))
    assert controller.rooms[0] == 3  # 8 slots + one group ahead, in groups of 4
    assert engine.most_active <= 12


def test_a_straggler_does_not_keep_the_free_slots_from_the_next_group():
    async def main():
        release = asyncio.Event()

        async def hold(request, index):
            if request.group_id == 0 and request.sample == 0:
                await release.wait()

        engine = FakeEngine(say("ok"))
        engine.before_token = hold
        controller = FakeController([assignment(n) for n in range(6)])
        worker = make_worker(controller, engine, config(group_size=2, slots=2))
        running = asyncio.create_task(worker.run())
        await controller.until(lambda: len(controller.groups) == 5)  # all but the straggler's
        release.set()
        await controller.until(lambda: len(controller.groups) == 6)
        await worker.stop(0)
        await running

    asyncio.run(main())


def test_tokens_of_running_rollouts_are_recorded_in_chunks_and_at_the_end():
    long = "x" * (2 * PREFIX_CHUNK_TOKENS + 5)

    async def main():
        release, last = asyncio.Event(), asyncio.Event()

        async def hold(request, index):
            if request.sample == 1 and index == PREFIX_CHUNK_TOKENS:
                await release.wait()
            if request.sample == 1 and index == len(long):
                last.set()

        engine = FakeEngine(say(long))
        engine.before_token = hold
        controller = FakeController([assignment()])
        worker = make_worker(controller, engine, config(max_new_tokens=200))
        running = asyncio.create_task(worker.run())
        await controller.until(lambda: any(c.sample == 0 and c.stop_reason for c in controller.chunks))
        await controller.until(lambda: any(c.sample == 1 for c in controller.chunks))
        assert not controller.groups  # recorded while the group still runs
        merged = merge_chunks([c for c in controller.chunks if c.sample == 0])
        assert merged.token_ids.tolist() == [*ids_of(long), END]
        assert merged.stop_reason is StopReason.STOP
        assert merged.spans == (Span(len(ids_of(PROMPT)), len(ids_of(PROMPT)) + len(long) + 1, 1, 0, "fake"),)
        half = [c for c in controller.chunks if c.sample == 1]
        assert [len(c.token_ids) for c in half] == [PREFIX_CHUNK_TOKENS] and half[0].stop_reason is None
        release.set()
        await controller.until(lambda: controller.groups)
        await worker.stop(0)
        await running

    asyncio.run(main())


def test_no_chunk_of_a_group_arrives_after_the_group_itself():
    async def main():
        sending, release = asyncio.Event(), asyncio.Event()

        class SlowLedger(FakeController):
            async def progress(self, chunks):
                sending.set()
                await release.wait()
                order.append("chunks")
                await super().progress(chunks)

            async def finish_group(self, group):
                order.append("group")
                await super().finish_group(group)

        order: list[str] = []
        controller = SlowLedger([assignment()])
        worker = make_worker(controller, FakeEngine(say("ok")), config())
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(sending.wait(), 5)
        for _ in range(50):  # long enough for the group to be scored
            await asyncio.sleep(0)
        release.set()
        await controller.until(lambda: controller.groups)
        await worker.stop(0)
        await running
        assert order == ["chunks", "group"]

    asyncio.run(main())


def prefix(text: str, sample: int = 0, stop: StopReason | None = None, **changes: Any) -> PrefixChunk:
    ids = [END if c == "$" else ord(c) for c in text]
    start = len(ids_of(PROMPT))
    values: dict[str, Any] = {"prompt_length": start} | changes
    return PrefixChunk(
        group_id=0,
        sample=sample,
        attempt=0,
        start=0,
        token_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -2.0, dtype=np.float32),
        spans=(Span(start, start + len(ids), 1, 2, "old"),),
        prefill_version=(1, 2),
        stop_reason=stop,
        **values,
    )


def test_a_resumed_rollout_goes_on_from_its_exact_tokens():
    engine = FakeEngine(lambda request: [ord("k"), END] if request.num_sampled else [*ids_of("no"), END], version=5)
    controller, _ = run_groups(engine, config(), [assignment(prefixes=(prefix("o"),))])
    first, second = controller.groups[0].rollouts
    at = first.prompt_length
    assert (first.completion, first.reward) == ("ok", 1.0)
    assert first.spans == (Span(at, at + 1, 1, 2, "old"), Span(at + 1, at + 3, 1, 5, "fake"))
    assert first.logprobs[at:].tolist() == [-2.0, -0.5, -0.5]
    assert first.prefill_version == (1, 2) and first.kv == "recomputed"
    assert (second.completion, second.kv) == ("no", "kept")
    request = next(r for r in engine.requests if r.sample == 0)
    assert request.token_ids.tolist() == [*ids_of(PROMPT), ord("o")]
    assert (request.num_sampled, request.sampling.max_new_tokens) == (1, 15)
    assert [(c.start, c.token_ids.tolist()) for c in controller.chunks if c.sample == 0] == [(1, [ord("k"), END])]


@pytest.mark.parametrize("recorded", [prefix("ok", stop=StopReason.STOP), prefix("ok$"), prefix("o" * 16)])
def test_a_recorded_rollout_that_has_ended_is_not_generated_again(recorded):
    engine = FakeEngine(say("no"))
    controller, _ = run_groups(engine, config(), [assignment(prefixes=(recorded,))])
    assert [r.sample for r in engine.requests] == [1]
    rollout = controller.groups[0].rollouts[0]
    assert rollout.token_ids[rollout.prompt_length :].tolist() == recorded.token_ids.tolist()
    assert rollout.status.ok and rollout.stop_reason is not None


def test_a_prefix_behind_another_prompt_fails_its_rollout():
    controller, _ = run_groups(FakeEngine(say("ok")), config(), [assignment(prefixes=(prefix("o", prompt_length=3),))])
    assert controller.groups[0].rollouts[0].error.startswith("recorded prefix does not fit: ")
    assert controller.groups[0].rollouts[0].reward is None


def test_stop_records_what_was_sampled_and_the_next_run_completes_it_exactly():
    async def main():
        reached = asyncio.Event()

        async def hold(request, index):
            if index == 3:
                reached.set()
                await asyncio.Event().wait()

        engine = FakeEngine(say("abcdefg"))
        engine.before_token = hold
        controller = FakeController([assignment()])
        worker = make_worker(controller, engine, config(group_size=1))
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(reached.wait(), 5)
        await worker.stop(0)
        await running
        assert not controller.groups and engine.active == 0
        (chunk,) = controller.chunks
        assert chunk.token_ids.tolist() == ids_of("abc") and chunk.stop_reason is None

        engine.before_token = None
        engine.reply = lambda request: [*ids_of("defg"), END]
        controller.waiting = [assignment(prefixes=(chunk,))]
        running = asyncio.create_task(worker.run())  # a worker may run again after a stop
        await controller.until(lambda: controller.groups)
        await worker.stop(0)
        await running
        assert controller.groups[0].rollouts[0].completion == "abcdefg"
        assert merge_chunks(controller.chunks).token_ids.tolist() == [*ids_of("abcdefg"), END]

    asyncio.run(main())


def test_stop_lets_a_group_finish_within_its_grace():
    async def main():
        reached, release = asyncio.Event(), asyncio.Event()

        async def hold(request, index):
            reached.set()
            await release.wait()

        engine = FakeEngine(say("ok"))
        engine.before_token = hold
        controller = FakeController([assignment()])
        worker = make_worker(controller, engine, config())
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(reached.wait(), 5)
        stopping = asyncio.create_task(worker.stop(10))
        await asyncio.sleep(0)
        release.set()
        await stopping
        await running
        assert [r.reward for r in controller.groups[0].rollouts] == [1.0, 1.0]

    asyncio.run(main())


def test_the_controllers_order_to_stop_ends_the_run():
    async def main():
        controller = FakeController()
        running = asyncio.create_task(make_worker(controller, FakeEngine(say("ok")), config()).run())
        await asyncio.sleep(0)
        await controller.stop()
        await asyncio.wait_for(running, 5)

    asyncio.run(main())


def test_a_rollout_past_its_deadline_is_recorded_as_failed_with_its_tokens():
    async def hold(request, index):
        if request.sample == 1 and index == 1:
            await asyncio.Event().wait()

    engine = FakeEngine(say("ok"))
    engine.before_token = hold
    controller, _ = run_groups(engine, config(timeout_s=0.4), [assignment()])
    ok, failed = controller.groups[0].rollouts
    assert failed.error == "deadline: rollout took longer than 0.4 s"
    assert failed.reward is None and not failed.status.ok
    assert failed.token_ids[failed.prompt_length :].tolist() == [ord("o")]
    assert ok.status.ok and ok.reward is None  # a group with a failed rollout is not scored
    assert engine.active == 0  # the request was cancelled


def test_the_deadline_does_not_count_the_wait_for_the_first_token():
    async def main():
        async def hold(request, index):
            if index == 0:
                await asyncio.sleep(0.2)  # real time on purpose: longer than the deadline

        engine = FakeEngine(say("ok"))
        engine.before_token = hold
        controller = FakeController([assignment()])
        worker = make_worker(controller, engine, config(timeout_s=0.1))
        running = asyncio.create_task(worker.run())
        await controller.until(lambda: controller.groups)
        await worker.stop(0)
        await running
        assert all(r.status.ok for r in controller.groups[0].rollouts)

    asyncio.run(main())


def test_in_a_deterministic_run_a_deadline_ends_the_run():
    async def hold(request, index):
        if index == 1:
            await asyncio.Event().wait()

    engine = FakeEngine(say("ok"))
    engine.before_token = hold
    settings = config(timeout_s=0.4)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"deterministic": True})})
    with pytest.raises(DeadlineExceeded, match=r"group 0 sample .*longer than 0.4 s"):
        run_groups(engine, settings, [assignment()])


class Breaks:
    """An environment that raises where it is told to."""

    def __init__(self, where: str):
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError(f"in {where}")

    async def start(self):
        self._maybe("start")
        return (Message(role="user", content="hi"),)

    async def step(self, message):
        self._maybe("step")
        return EnvironmentReply(done=True)

    async def close(self):
        self._maybe("close")


@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_an_environment_that_raises_fails_its_rollout_and_never_gives_a_reward(where):
    controller, _ = run_groups(FakeEngine(say("ok")), config(), [assignment()], make_environment=lambda row: Breaks(where))
    for rollout in controller.groups[0].rollouts:
        assert rollout.error.startswith(f"environment failed: ZeroDivisionError: in {where}\n")
        assert "Traceback" in rollout.error
        assert rollout.reward is None and not rollout.status.ok


def test_the_rollouts_of_a_group_must_begin_with_the_same_prompt():
    class Numbered(Breaks):
        async def start(self):
            return (Message(role="user", content=f"hi {len(made)}"),)

    made: list[Numbered] = []

    def make(row):
        made.append(Numbered("nowhere"))
        return made[-1]

    controller, _ = run_groups(FakeEngine(say("ok")), config(group_size=3), [assignment()], make_environment=make)
    errors = [r.error for r in controller.groups[0].rollouts]
    assert errors[0] is None or len(set(errors)) == 2
    assert any("a group shares one prompt" in (error or "") for error in errors)


def test_a_prompt_that_does_not_fit_is_reported_and_not_generated():
    engine = FakeEngine(say("ok"))
    controller, _ = run_groups(engine, config(), [assignment()], max_context=20)
    wanted = "prompt does not fit: prompt of 9 tokens + max_new_tokens 16 exceed the context 20"
    assert [r.error for r in controller.groups[0].rollouts] == [wanted, wanted]
    assert not engine.requests


def test_a_row_without_a_prompt_says_so():
    controller, _ = run_groups(FakeEngine(say("ok")), config(), [assignment(row={"question": "x"})])
    error = controller.groups[0].rollouts[0].error
    assert error.startswith("bad prompt: ") and "question" in error


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5])
def test_a_logprob_that_no_distribution_gives_fails_the_rollout(logprob):
    engine = FakeEngine(say("ok"))
    engine.logprob = logprob
    controller, _ = run_groups(engine, config(), [assignment()])
    assert controller.groups[0].rollouts[0].error.startswith("bad logprob: token 9 ")


def test_a_logprob_above_zero_by_rounding_is_zero():
    engine = FakeEngine(say("ok"))
    engine.logprob = 5e-7
    controller, _ = run_groups(engine, config(), [assignment()])
    assert controller.groups[0].rollouts[0].logprobs.max() == 0.0
    assert controller.groups[0].rollouts[0].status.ok


class FixedScorer:
    def __init__(self, values, name="fixed", weight=1.0):
        self.values, self.name, self.weight = values, name, weight
        self.closed = False

    async def score(self, group):
        from slipstream.types import Score

        if isinstance(self.values, Exception):
            raise self.values
        return [Score(name=self.name, value=v, weight=self.weight) for v in self.values]

    async def close(self):
        self.closed = True


def test_rewards_are_weighted_sums_of_the_applicable_scores():
    scorers = [FixedScorer([1.0, None], "a", 2.0), FixedScorer([0.5, 0.5], "b", 1.0)]
    controller, worker = run_groups(FakeEngine(say("ok")), config(), [assignment()], scorers)
    assert [r.reward for r in controller.groups[0].rollouts] == [2.5, 0.5]
    assert [[s.value for s in r.scores] for r in controller.groups[0].rollouts] == [[1.0, 0.5], [None, 0.5]]
    asyncio.run(worker.close())
    assert all(s.closed for s in scorers)


def test_a_rollout_to_which_no_reward_applies_is_failed():
    controller, _ = run_groups(FakeEngine(say("ok")), config(), [assignment()], [FixedScorer([1.0, None])])
    ok, failed = controller.groups[0].rollouts
    assert ok.reward == 1.0
    assert failed.error.startswith("no reward applies: ") and failed.reward is None


def test_a_scorer_that_fails_fails_the_group_with_its_message():
    scorers = [FixedScorer(ScoringError("reward 'x' returned 'abc'"))]
    controller, _ = run_groups(FakeEngine(say("ok")), config(), [assignment()], scorers)
    assert [r.error for r in controller.groups[0].rollouts] == ["scoring failed: reward 'x' returned 'abc'"] * 2


def test_a_scorer_with_a_bug_of_its_own_ends_the_run_with_that_error():
    with pytest.raises(AttributeError, match="no such thing"):
        run_groups(FakeEngine(say("ok")), config(), [assignment()], [FixedScorer(AttributeError("no such thing"))])


def test_the_engines_death_ends_the_run_with_its_error():
    async def lost(request, index):
        raise PeerLost("the engine went away")

    engine = FakeEngine(say("ok"))
    engine.before_token = lost
    with pytest.raises(PeerLost, match="went away"):
        run_groups(engine, config(), [assignment()])


def test_a_reward_that_does_not_load_ends_the_run_before_anything_is_generated():
    engine = FakeEngine(say("ok"))
    settings = config()
    reward = settings.reward[0].model_copy(update={"function": "nowhere.py:score"})
    with pytest.raises(ConfigError, match=r"no file .*nowhere\.py"):
        run_groups(engine, settings, [assignment()], make_scorers([reward]))
    assert not engine.requests


def test_outside_calls_go_through_the_ticked_calls():
    async def main():
        controller, calls = FakeController([assignment()]), TickedCalls()
        worker = make_worker(controller, FakeEngine(say("ok")), config(), external=calls)
        running = asyncio.create_task(worker.run())
        kinds = []
        while not controller.groups:
            for _ in range(20):
                await asyncio.sleep(0)
            kinds.append(sorted({key[3] for key in calls._calls}))
            await calls.settle()
            await asyncio.sleep(0)
            if len(kinds) > 20:
                raise AssertionError(kinds)
            for _ in range(5):
                await asyncio.sleep(0)
        calls_seen = ["loading", "environment", "environment", "environment", "score"]  # of an environment: start, step, close
        assert kinds == [[kind] for kind in calls_seen]
        await worker.stop(0)
        await running

    asyncio.run(main())


# ---- evaluation


def evaluate(engine, settings, task, scorers=None):
    async def main():
        controller = FakeController(evaluations=[task])
        worker = make_worker(controller, engine, settings, scorers)
        running = asyncio.create_task(worker.run())
        ended = asyncio.create_task(controller.until(lambda: controller.results))
        await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            ended.cancel()
        await controller.stop()
        await running
        return controller.results[0]

    return asyncio.run(main())


def eval_task(rows: int = 3, samples: int = 2, temperature: float = 0.0) -> EvalTask:
    data = tuple({"prompt": f"hi {n}", "answer": "ok" if n else "no"} for n in range(rows))
    return EvalTask(number=4, rows=data, samples=samples, temperature=temperature)


def test_an_evaluation_runs_on_the_pinned_version_and_unpins():
    engine = FakeEngine(say("ok"), version=2)
    result = evaluate(engine, config(), eval_task())
    assert (result.number, result.incarnation, result.version, result.checksum, result.engine_s) == (4, 1, 2, "sum", 0.25)
    assert [item.rewards for item in result.items] == [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    assert result.items[1].completions == ("ok", "ok") and result.items[1].num_tokens == (3, 3)
    assert engine.pins == engine.unpins == 1
    assert {r.purpose for r in engine.requests} == {Purpose.EVAL}
    assert {r.group_id for r in engine.requests} == {0, 1, 2} and {r.attempt for r in engine.requests} == {4}
    assert all(r.sampling.temperature == 0.0 and r.min_version == 0 for r in engine.requests)
    assert engine.most_active == 6


def test_an_evaluation_asks_for_no_more_sequences_than_there_are_slots():
    engine = FakeEngine(say("ok"))
    evaluate(engine, config(slots=5), eval_task(rows=9))
    assert engine.most_active == 4


def test_an_evaluation_past_its_deadline_reports_what_it_has():
    async def hold(request, index):
        if request.group_id == 1:
            await asyncio.Event().wait()

    engine = FakeEngine(say("ok"))
    engine.before_token = hold
    settings = config()
    settings = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"timeout_s": 0.4})})
    result = evaluate(engine, settings, eval_task())
    assert result.items[0].rewards == (0.0, 0.0)
    assert result.items[1].rewards == (None, None) and result.items[1].completions == ("", "")
    assert engine.unpins == 1


def test_an_evaluation_that_breaks_unpins_and_ends_the_run_with_its_error():
    async def breaks(request, index):
        raise RunFailed("not finite")

    engine = FakeEngine(say("ok"))
    engine.before_token = breaks
    with pytest.raises(RunFailed, match="not finite"):
        evaluate(engine, config(), eval_task())
    assert engine.unpins == 1


def test_an_evaluation_whose_engine_died_is_reported_as_lost_and_may_be_ordered_again():
    async def main():
        dead = True

        async def lost(request, index):
            if dead:
                raise PeerLost("engine-0 was lost")

        engine = FakeEngine(say("ok"))
        engine.before_token = lost
        controller = FakeController(evaluations=[eval_task()])
        worker = make_worker(controller, engine, config())
        running = asyncio.create_task(worker.run())
        await controller.until(lambda: controller.lost_evaluations)
        assert controller.lost_evaluations == [eval_task().number] and not controller.results and engine.unpins == 1
        dead = False
        async with controller.changed:
            controller.evaluations.append(eval_task())
            controller.changed.notify_all()
        await controller.until(lambda: controller.results)
        await controller.stop()
        await running

    asyncio.run(main())


def test_a_stop_cancels_an_evaluation_and_unpins():
    async def main():
        reached = asyncio.Event()

        async def hold(request, index):
            reached.set()
            await asyncio.Event().wait()

        engine = FakeEngine(say("ok"))
        engine.before_token = hold
        controller = FakeController(evaluations=[eval_task()])
        worker = make_worker(controller, engine, config())
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(reached.wait(), 5)
        await worker.stop(0)
        await running
        assert engine.unpins == 1 and not controller.results
        assert not controller.chunks  # evaluations are not recorded token by token

    asyncio.run(main())


# ---- what the worker owes


class KeptProgress:
    def __init__(self):
        self.said: list[str] = []

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        assert deadline_s > 600  # longer than the longest deadline of a call, which the worker's loop keeps itself
        self.said.append(owed)

    def idle(self) -> None:
        self.said.append("idle")


def test_the_worker_owes_calls_of_scorers_and_environments_and_nothing_while_the_engine_works():
    progress = KeptProgress()
    engine = FakeEngine(say("ok"))
    while_generating = []

    async def look(request, index):
        while_generating.append(progress.said[-1])

    engine.before_token = look
    run_groups(engine, config(group_size=1), [assignment(4)], progress=progress)
    assert set(while_generating) == {"idle"}
    assert progress.said[-1] == "idle"
    assert {"environment of train group 4", "score of train group 4"} <= set(progress.said)
