"""A vLLM server as an engine, against a fake one: true versions, interrupts, retries from the last token, pins, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vllm import LOGPROB
from vllm_bench import LABELS, Bench, manifest, request, run

from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm import loop
from slipstream.engines.vllm.client import Refused, Transient
from slipstream.engines.vllm.labels import StartedAnew
from slipstream.engines.vllm.server import ServerDied
from slipstream.engines.vllm.weights import NotWhole
from slipstream.errors import PeerLost, RunFailed, WeightSyncError
from slipstream.launch.supervisor import Evidence, decide
from slipstream.launch.wire import Failure
from slipstream.types import EngineReport, Purpose, Sampling, Span, StopReason
from slipstream.weight_sync.probe import NUM_TOKENS


def test_tokens_logprobs_versions_and_the_end(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        into, ended, _ = bench.open(request())
        await bench.publish(0)
        await bench.until(ended)
        assert into.token_ids == [102, 103, 104, 105] and into.logprobs == [LOGPROB] * 4
        assert into.spans == [Span(2, 6, 1, 0, "engine-0")]
        assert (into.stop_reason, into.prefill_version, into.recomputed) == (StopReason.LENGTH, (1, 0), False)
        asked = bench.fake.requests[0]
        assert asked["cache_salt"] == LABELS.of((1, 0)) and "seed" not in asked["sampling_params"]
        assert bench.engine.handle(request().key) is None and bench.engine.num_running == 0

    run(tmp_path, body)


def test_an_update_is_one_pause_and_is_confirmed_with_the_hash_that_the_workers_computed(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.calls.clear()
        await bench.publish(1)
        assert bench.fake.calls == [
            "pause?mode=keep,clear_cache=false", "start_weight_update", "update_weights", "collective_rpc", "finish_weight_update",
            "resume",
        ]  # fmt: skip
        assert bench.fake.label == LABELS.of((1, 1))
        assert [(r.version, r.checksum) for r in bench.controller.reports] == [(0, "hash-0"), (1, "hash-1")]

    run(tmp_path, body)


def test_the_first_update_clears_what_another_run_may_have_left_in_the_cache(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        assert bench.fake.calls[0] == "pause?mode=keep,clear_cache=true"

    run(tmp_path, body)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_in_flight_goes_on_and_each_token_has_its_own_version(tmp_path: Path, kv: str) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(3)
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=8)))
        await bench.until_sampled(into, 3)
        await bench.publish(1)
        await bench.fake.allow(float("inf"))
        await bench.until(ended)
        assert into.token_ids == list(range(102, 110))
        assert into.spans == [Span(2, 5, 1, 0, "engine-0"), Span(5, 10, 1, 1, "engine-0")]
        recomputes = kv == "recompute"
        assert bench.fake.calls.count(f"pause?mode=keep,clear_cache={str(recomputes).lower()}") == 1 + recomputes
        assert (into.recomputed, into.prefill_version) == ((True, (1, 1)) if recomputes else (False, (1, 0)))
        assert len(bench.fake.requests) == 1

    run(tmp_path, body, InterruptPolicy("in_flight", kv))


def test_an_update_between_two_tokens_of_one_chunk(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        await bench.fake.allow(2)
        bench.fake.failures = ["merge 4"]
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=8)))
        await bench.until(bench.fake.until(lambda: bench.fake.num_sampled == 2))  # and waits for two more before it sends any
        await bench.publish(1)
        await bench.fake.allow(float("inf"))
        await bench.until(ended)
        assert into.spans == [Span(2, 4, 1, 0, "engine-0"), Span(4, 10, 1, 1, "engine-0")]
        assert len(bench.fake.requests) == 1

    run(tmp_path, body)


def test_a_stream_that_begins_under_newer_weights_is_asked_for_again(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        await bench.fake.allow(0)
        into, ended, _ = bench.open(request())
        await bench.until(bench.fake.until(lambda: bench.fake.active.total() == 1))
        await bench.publish(1)
        await bench.fake.allow(float("inf"))
        await bench.until(ended)
        assert into.spans == [Span(2, 6, 1, 1, "engine-0")] and into.prefill_version == (1, 1)
        assert [r["cache_salt"] for r in bench.fake.requests] == [LABELS.of((1, 0)), LABELS.of((1, 1))]

    run(tmp_path, body)


def test_what_breaks_off_after_an_update_is_read_anew_by_the_new_weights(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(2)
        await bench.publish(0)
        into, ended, _ = bench.open(request())
        await bench.until_sampled(into, 2)
        await bench.publish(1)
        bench.fake.cut()
        await bench.fake.allow(float("inf"))
        await bench.until(ended)
        assert into.token_ids == [102, 103, 104, 105]
        assert into.spans == [Span(2, 4, 1, 0, "engine-0"), Span(4, 6, 1, 1, "engine-0")]
        assert into.recomputed and into.prefill_version == (1, 1)
        assert [r["cache_salt"] for r in bench.fake.requests] == [LABELS.of((1, 0)), LABELS.of((1, 1))]

    run(tmp_path, body)


@pytest.mark.parametrize("interrupt", ["abort_resume", "abort_retry"])
def test_aborted_sequences_end_with_interrupt_and_their_tokens(tmp_path: Path, interrupt: str) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(3)
        await bench.publish(0)
        into, ended, _ = bench.open(request(sampling=Sampling(max_new_tokens=8)))
        await bench.until_sampled(into, 3)
        bench.controller.publish(manifest(1))
        await bench.until(ended)
        assert into.stop_reason is StopReason.INTERRUPT and into.token_ids == [102, 103, 104] and into.state is None
        await bench.until(bench.controller.until_confirmed(1))
        await bench.fake.allow(float("inf"))
        again = request(
            token_ids=np.array([1, 2, *into.token_ids], np.int32), num_sampled=3, oldest_version=0, sampling=Sampling(max_new_tokens=5)
        )
        into.stop_reason = None
        handle = bench.engine.submit(again)
        await bench.until(bench.router.open(handle, into))
        assert into.token_ids == list(range(102, 110))
        assert into.spans == [Span(2, 5, 1, 0, "engine-0"), Span(5, 10, 1, 1, "engine-0")]
        assert into.recomputed and into.prefill_version == (1, 1)
        assert bench.fake.requests[-1]["cache_salt"] == LABELS.of((1, 1))

    run(tmp_path, body, InterruptPolicy(interrupt, "recompute"))


def test_interrupt_after_spares_the_young(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(2)
        await bench.publish(5)
        old, old_ended, _ = bench.open(request(0, oldest_version=3, num_sampled=1, sampling=Sampling(max_new_tokens=6)))
        young, young_ended, _ = bench.open(request(1, sampling=Sampling(max_new_tokens=6)))
        await bench.until_sampled(old, 2)
        await bench.until_sampled(young, 2)
        bench.controller.publish(manifest(6))
        await bench.until(old_ended)
        assert old.stop_reason is StopReason.INTERRUPT
        await bench.fake.allow(float("inf"))
        await bench.until(young_ended)
        assert young.stop_reason is StopReason.LENGTH and [s.version for s in young.spans] == [5, 6]

    run(tmp_path, body, InterruptPolicy("abort_resume", "recompute", 1))


def test_drain_lets_what_runs_end_and_starts_nothing_before_the_new_weights(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(2)
        await bench.publish(0)
        first, first_ended, _ = bench.open(request(0))
        await bench.until_sampled(first, 2)
        bench.controller.publish(manifest(1))
        while not bench.engine._offered:  # the loop has seen the offer
            bench.engine.wake.set()
            await asyncio.sleep(0)
        second, second_ended, _ = bench.open(request(1))
        await bench.fake.allow(float("inf"))
        await bench.until(first_ended)
        await bench.until(second_ended)
        assert [s.version for s in first.spans] == [0] and [s.version for s in second.spans] == [1]

    run(tmp_path, body, InterruptPolicy("drain"))


def test_a_request_waits_for_its_version(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        into, ended, _ = bench.open(request(min_version=1))
        await asyncio.sleep(0.05)
        assert not bench.fake.requests
        await bench.publish(1)
        await bench.until(ended)
        assert [s.version for s in into.spans] == [1]

    run(tmp_path, body)


def test_no_more_sequences_are_on_the_server_than_it_runs(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        opened = [bench.open(request(i)) for i in range(7)]
        for into, ended, _ in opened:
            await bench.until(ended)
            assert into.token_ids == [102, 103, 104, 105]
        assert bench.fake.most_active <= 2 and len(bench.fake.requests) == 7

    run(tmp_path, body, slots=2)


@pytest.mark.parametrize("failures", [["cut 2"], ["503"], ["event 2"], ["finish abort"], ["cut 1", "cut 0", "500"]])
def test_a_stream_that_breaks_off_goes_on_from_its_last_token(tmp_path: Path, failures: list[str]) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.failures = list(failures)
        into, ended, _ = bench.open(request())
        await bench.until(ended)
        assert into.token_ids == [102, 103, 104, 105] and into.stop_reason is StopReason.LENGTH
        assert len(bench.fake.requests) == len(failures) + 1
        last = bench.fake.requests[-1]
        assert len(last["token_ids"]) - 2 + last["sampling_params"]["max_tokens"] == 4

    run(tmp_path, body)


def test_a_request_that_the_server_refuses_ends_the_engine_in_its_words(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.failures = ["400"]
        _, ended, _ = bench.open(request())
        with pytest.raises(Refused, match="out of order"):
            await bench.until(ended)
        assert len(bench.fake.requests) == 1

    run(tmp_path, body)


def test_a_server_that_stays_in_trouble_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CAUSE_S", 0.05)

    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.failures = ["503"] * 4
        _, ended, _ = bench.open(request())
        with pytest.raises(Transient, match="out of order"):
            await bench.until(ended)

    run(tmp_path, body)


def test_the_servers_death_is_the_cause_not_the_broken_streams(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.failures = ["503"] * 4
        _, ended, _ = bench.open(request())
        asyncio.get_running_loop().call_later(0.05, bench.dead.set_exception, ServerDied("the vLLM server was killed by signal 9."))
        with pytest.raises(ServerDied, match="killed by signal 9"):
            await bench.until(ended)

    run(tmp_path, body)


def test_a_lost_controller_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CAUSE_S", 0.05)

    async def body(bench: Bench) -> None:
        async def lost(slot: int, report: EngineReport) -> None:
            raise PeerLost("the controller is gone")

        bench.controller.confirm_weights = lost  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match="the controller is gone"):
            await bench.publish(0)

    run(tmp_path, body)


def test_weights_that_the_server_refuses(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.refusal = "model.layers.3.self_attn.qkv_proj has 9 numbers, and 6 were sent"
        with pytest.raises(WeightSyncError, match=r"refuses weights 1\.1: worker 0: model\.layers\.3"):
            await bench.publish(1)
        assert bench.fake.label == LABELS.of((1, 0)) and bench.fake.calls[-1] == "resume", "it goes on with what it had"

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        (
            [{"error": "no memory", "broken": True}],
            NotWhole,
            r"neither weights 1\.1 nor those before whole \(no memory\).*stays paused",
        ),
        ([{}, {"error": "cannot be opened"}], NotWhole, r"others refuse them \(worker 1: cannot be opened\)"),
        ([{}, {"label": LABELS.of((1, 0))}], WeightSyncError, r"does not report on weights 1\.1"),
        ([{}, {"checksum": "others"}], WeightSyncError, "received different bytes"),
        ({"/update_weights": 500}, PeerLost, "update_weights fails"),
        ({"/collective_rpc": 500}, PeerLost, "collective_rpc fails"),
        ({"/finish_weight_update": 500}, PeerLost, "finish_weight_update fails"),
    ],
    ids=["half copied", "one worker refuses", "one does not tell", "other bytes", "no answer", "no report", "under the old label"],
)
def test_a_server_that_may_hold_a_mixture_stays_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Any, error: type[Exception], words: str
) -> None:
    """Or one version under another's label. What runs on it gets no token more, and goes on elsewhere."""
    monkeypatch.setattr(loop, "CAUSE_S", 0.05)

    async def body(bench: Bench) -> None:
        await bench.fake.allow(2)
        await bench.publish(0)
        into, _, _ = bench.open(request())
        await bench.until_sampled(into, 2)
        if isinstance(trouble, dict):
            bench.fake.control_failures = trouble
        else:
            bench.fake.workers = trouble
        with pytest.raises(error, match=words):
            await bench.publish(1)
        assert bench.fake.paused and "resume" not in bench.fake.calls[bench.fake.calls.index("pause?mode=keep,clear_cache=false") :]
        assert [report.version for report in bench.controller.reports] == [0]

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("kind", "anew"), [("NotWhole", True), ("Transient", True), ("StartedAnew", True), ("WeightSyncError", False), ("Refused", False)]
)
def test_a_server_that_holds_a_mixture_or_nothing_of_ours_is_replaced(kind: str, anew: bool) -> None:
    failure = Failure(kind=kind, message="half copied", traceback="")
    decision = decide([Evidence("engine-0", 0.0, failure=failure, restarts_left=1)], 100.0)
    assert bool(decision.anew) == anew and bool(decision.culprit) == (not anew)


def test_an_engine_that_is_asked_to_leave_amid_an_update_ends_it_first(tmp_path: Path) -> None:
    """The server may be somebody else's, and would stay paused."""

    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.may_load.clear()
        bench.controller.publish(manifest(1))
        await bench.fake.until(lambda: bench.fake.paused and bench.fake.calls[-1] == "update_weights")
        bench.loop.cancel()
        await asyncio.sleep(0)
        assert bench.fake.paused and not bench.loop.done()
        bench.fake.may_load.set()
        with pytest.raises(asyncio.CancelledError):
            await bench.loop
        assert not bench.fake.paused and bench.fake.label == LABELS.of((1, 1))

    run(tmp_path, body)


def test_an_update_that_has_not_begun_leaves_the_server_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CAUSE_S", 0.05)

    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.control_failures = {"/start_weight_update": 500}
        with pytest.raises(PeerLost, match="start_weight_update fails"):
            await bench.publish(1)
        assert bench.fake.calls[-1] == "resume" and not bench.fake.paused

    run(tmp_path, body)


def test_the_hash_that_is_confirmed_is_the_servers_own(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        bench.fake.checksum = "other bytes"  # the controller compares
        await bench.publish(0)
        assert bench.controller.reports[0].checksum == "other bytes"

    run(tmp_path, body)


def test_weights_that_do_not_compute_what_the_trainers_do(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        with pytest.raises(WeightSyncError, match=r"probe of weights 1\.1"):
            await bench.publish(1, probe=(LOGPROB - 3.0,) * (NUM_TOKENS - 1))
        assert [r.version for r in bench.controller.reports] == [0], "what fails the probe is not confirmed"

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("label", "tell", "error", "words"),
    [
        ("default", True, StartedAnew, 'labelled "default", which no run gave it: it has been started anew'),
        ("another-run:engine-0:1.0", True, WeightSyncError, "taken by engine-0 of run another-run"),
        ("a-run:engine-1:1.0", True, WeightSyncError, "taken by engine-1 of run a-run"),
        (LABELS.of((1, 7)), True, WeightSyncError, r"weights 1\.7, but was given 1\.0"),
        (LABELS.base, True, WeightSyncError, "not those that it was given"),
        (LABELS.of((1, 0)), False, WeightSyncError, "plugin is not loaded"),
    ],
    ids=["no label", "of another run", "of another engine", "not given yet", "a base", "no labels"],
)
def test_tokens_of_unknown_weights_are_not_taken(tmp_path: Path, label: str, tell: bool, error: type[Exception], words: str) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.label, bench.fake.tell_labels = label, tell
        into, ended, _ = bench.open(request())
        with pytest.raises(error, match=words):
            await bench.until(ended)
        assert into.token_ids == []

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("label", "error"), [("another-run:engine-0:1.0", WeightSyncError), ("default", StartedAnew)], ids=["taken", "started anew"]
)
def test_a_server_that_is_not_ours_any_more_is_given_nothing(tmp_path: Path, label: str, error: type[Exception]) -> None:
    """Also where no token has come meanwhile that would have told."""

    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.label = label
        bench.fake.calls.clear()
        with pytest.raises(error):
            await bench.publish(1)
        assert bench.fake.calls == [] and bench.fake.label == label

    run(tmp_path, body)


@pytest.mark.parametrize("logprob", ["-9999.0", "nan", "0.5"])
def test_a_logprob_that_is_none_ends_the_engine(tmp_path: Path, logprob: str) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.failures = [f"logprob {logprob}"]
        _, ended, _ = bench.open(request())
        with pytest.raises(RunFailed, match="the logprob"):
            await bench.until(ended)

    run(tmp_path, body)


def test_rounding_above_zero_becomes_zero(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.fake.failures = ["logprob 5e-7"]
        into, ended, _ = bench.open(request())
        await bench.until(ended)
        assert into.logprobs == [0.0] * 4

    run(tmp_path, body)


def test_stop_tokens_and_stop_strings_end_at_their_token(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        by_token, ended, _ = bench.open(request(0, stop_token_ids=(104,)))
        await bench.until(ended)
        assert by_token.token_ids == [102, 103, 104] and by_token.stop_reason is StopReason.STOP
        by_string, ended, _ = bench.open(request(1, sampling=Sampling(max_new_tokens=4, stop_strings=("2><10",))))
        await bench.until(ended)
        assert by_string.token_ids == [102, 103] and by_string.stop_reason is StopReason.STOP

    run(tmp_path, body)


def test_a_cancelled_request_leaves_the_server(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(1)
        await bench.publish(0)
        into, _, handle = bench.open(request(0))
        await bench.until_sampled(into, 1)
        bench.engine.cancel(handle)
        bench.engine.cancel(handle)
        assert bench.engine.handle(request(0).key) is None and bench.engine.num_running == 0
        await bench.fake.allow(float("inf"))  # it sees the end of the connection at its next token
        await bench.until(bench.fake.until(lambda: bench.fake.active.total() == 0))

    run(tmp_path, body)


def test_the_same_key_gives_the_same_handle(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        assert bench.engine.submit(request()) == bench.engine.submit(request())

    run(tmp_path, body)


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": np.array([1, 2000], np.int32)}, {"token_ids": np.ones(64, np.int32)}, {"sampling": Sampling(max_new_tokens=0)}],
)
def test_what_cannot_be_served_is_refused_here(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def body(bench: Bench) -> None:
        with pytest.raises(ValueError):
            bench.engine.submit(request(**changes))

    run(tmp_path, body)


def test_a_pin_holds_new_weights_back_and_evaluations_run_on_what_is_pinned(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        with pytest.raises(ValueError, match="no weights to pin"):
            bench.engine.pin()
        await bench.publish(0)
        with pytest.raises(ValueError, match="no version is pinned"):
            bench.engine.submit(request(purpose=Purpose.EVAL))
        assert bench.engine.pin() == (1, 0, "hash-0")
        with pytest.raises(ValueError, match="one evaluation at a time"):
            bench.engine.pin()
        bench.controller.publish(manifest(1))
        into, ended, _ = bench.open(request(purpose=Purpose.EVAL, sampling=Sampling(temperature=0.0, max_new_tokens=4)))
        await bench.until(ended)
        assert [s.version for s in into.spans] == [0] and bench.fake.label == LABELS.of((1, 0))
        assert bench.engine.unpin() == 0.0
        await bench.until(bench.controller.until_confirmed(1))

    run(tmp_path, body, InterruptPolicy("drain"))


def test_unpin_ends_evaluations_that_still_run(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.fake.allow(1)
        await bench.publish(0)
        bench.engine.pin()
        into, ended, _ = bench.open(request(purpose=Purpose.EVAL))
        await bench.until_sampled(into, 1)
        bench.engine.unpin()
        await bench.until(ended)
        assert into.stop_reason is StopReason.ABORT

    run(tmp_path, body)


def test_evaluations_go_first(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        await bench.publish(0)
        bench.engine.pin()
        opened = [bench.open(request(i, purpose=p)) for i, p in enumerate((Purpose.TRAIN, Purpose.TRAIN, Purpose.EVAL))]
        for _, ended, _ in opened:
            await bench.until(ended)
        ends = [handle for frame in bench.frames for handle, _ in frame.finished]
        assert ends.index(opened[2][2]) < ends.index(opened[1][2])

    run(tmp_path, body, slots=1)


def test_the_person_is_told_once_what_the_probe_can_tell(tmp_path: Path) -> None:
    async def body(bench: Bench) -> None:
        for version in range(12):
            probe = tuple(LOGPROB - 0.001 * version - 0.01 * (i % 2) for i in range(NUM_TOKENS - 1))
            bench.fake.prompt_logprobs = [LOGPROB - 0.001 * version] * (NUM_TOKENS - 1)
            await bench.publish(version, probe=probe)
        assert len(bench.controller.notes) == 1
        assert "it would notice 10 missed ones like it" in bench.controller.notes[0]

    run(tmp_path, body)
