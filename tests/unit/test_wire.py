"""The wire: the controller's calls over a socket are the same calls, the same answers, the same errors; a dead peer is named at once."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest

from slipstream import errors
from slipstream.errors import DeadlineExceeded, PeerLost, RoleFailed, SlipstreamError, WeightSyncError
from slipstream.launch import framing, wire
from slipstream.launch.framing import private_directory
from slipstream.protocols import ControllerAPI, Manifest, ManifestEntry, WeightsOffer
from slipstream.types import Assignment, Draw, EngineReport, Group, PrefixChunk, Rollout, Span, Work, encode, seal

DEADLINE_S = 20.0


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


class FakeController:
    """Long polls wait for `answer`; everything else is recorded."""

    def __init__(self):
        self.calls: list = []
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self.called = asyncio.Event()
        self.cancelled: list[str] = []

    async def _wait(self, name: str):
        self.called.set()
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def admit(self, room: int) -> Work:
        self.calls.append(("admit", room))
        return await self._wait("admit")

    async def get_batch(self, step: int):
        return await self._wait("get_batch")

    async def next_weights(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer:
        self.calls.append(("next_weights", engine_id, incarnation, version))
        return await self._wait("next_weights")

    async def progress(self, chunks):
        self.calls.append(("progress", chunks))

    async def finish_group(self, group):
        self.calls.append(("finish_group", group))

    async def begin_write(self) -> int:
        return 2

    async def publish(self, slot, manifest):
        self.calls.append(("publish", slot, manifest))

    async def confirm_weights(self, slot, report):
        raise WeightSyncError(f"slot {slot}: {report.checksum} is not what was published")

    async def checkpoint_context(self):
        return ("run", 3, 77)

    async def finish_step(self, report):
        raise RoleFailed("trainer", "it said so")

    async def finish_evaluation(self, result):
        raise KeyError("a bug")

    async def commit_checkpoint(self, temporary, manifest):
        await asyncio.Event().wait()


class Wired:
    """A fake controller, its server, and clients by role."""

    def __init__(self):
        self.failures: list = []

    async def __aenter__(self):
        self._directory = private_directory()
        self.directory = self._directory.__enter__()
        self.path = os.path.join(self.directory, "controller")
        self.api = FakeController()

        self.server = await wire.serve(self.api, self.path, on_failed=lambda *what: self.failures.append(what))
        self.client = await wire.connect(self.path, "rollout")
        return self

    async def lost(self, role: str) -> str:
        """Wait until the controller's side has seen this role go; what it says of that."""
        (link,) = [session.link for session in self.server._sessions if session.peer and session.peer.role == role]
        await link.wait_closed()
        return str(link.lost)

    async def __aexit__(self, *_):
        await self.client.close()
        await self.server.close()
        self._directory.__exit__(None, None, None)


def group(num_tokens: int = 5) -> Group:
    rollout = Rollout(
        group_id=7,
        sample=0,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=-np.ones(num_tokens, np.float32),
        loss_mask=np.ones(num_tokens, bool),
        spans=(Span(0, num_tokens, 1, 4, "e0"),),
    )
    return Group(group_id=7, draw=Draw(number=7, row=1, epoch=0, dataset="d"), row={"text": "x"}, rollouts=(rollout,))


def test_the_private_directory_is_private_short_and_removed():
    with private_directory() as path:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        assert len(path) < 60
        open(os.path.join(path, "x"), "w").close()
    assert not os.path.exists(path)


def test_every_method_of_the_protocol_is_there():
    names = {name for name in vars(ControllerAPI) if not name.startswith("_")}
    assert names == set(wire.METHODS)
    assert all(vars(wire.RemoteController)[name].__name__ == name for name in names)
    assert names >= wire.LONG_POLLS | set(wire.DEADLINES_S) | wire.KEPT_ANSWERS


def test_arguments_and_results_travel():
    async def main():
        async with Wired() as w:
            assert await w.client.begin_write() == 2
            assert await w.client.checkpoint_context() == ("run", 3, 77)
            await w.client.finish_group(group())
            chunk = PrefixChunk(
                group_id=1,
                sample=2,
                attempt=0,
                prompt_length=3,
                start=0,
                token_ids=np.array([5], np.int32),
                logprobs=np.zeros(1, np.float32),
                spans=(),
            )
            await w.client.progress([seal(chunk), seal(chunk)])
            entry = ManifestEntry(name="a", dtype="float32", shape=(2, 3), offset=0, nbytes=24)
            manifest = Manifest(incarnation=1, version=2, checksum="c", total_bytes=64, entries=(entry,))
            await w.client.publish(slot=2, manifest=manifest)
            (_, got), (_, chunks), (_, slot, sent) = w.api.calls
            np.testing.assert_array_equal(got.rollouts[0].token_ids, np.arange(5))
            assert got.rollouts[0].spans == (Span(0, 5, 1, 4, "e0"),) and got.row == {"text": "x"}
            assert len(chunks) == 2 and (chunks[1].num_tokens, chunks[1].oldest_version, chunks[1].ended) == (1, -1, False)
            assert chunks[1].data == encode(chunk), "untouched, for the ledger"
            assert slot == 2 and sent.entries[0].shape == (2, 3)

    run(main())


def test_large_bodies_travel_whole():
    async def main():
        async with Wired() as w:
            await w.client.finish_group(group(2_000_000))
            np.testing.assert_array_equal(w.api.calls[0][1].rollouts[0].token_ids, np.arange(2_000_000))

    run(main())


def test_long_polls_hold_up_nothing():
    async def main():
        async with Wired() as w:
            admit = asyncio.create_task(w.client.admit(4))
            batch = asyncio.create_task(w.client.get_batch(0))
            await w.api.called.wait()
            assert await w.client.begin_write() == 2
            assert not admit.done()
            w.api.answer.set_result(None)
            assert await batch is None
            admit.cancel()

    run(main())


def test_errors_keep_their_class_and_message():
    async def main():
        async with Wired() as w:
            report = EngineReport(engine_id="e0", incarnation=1, version=1, checksum="bad")
            with pytest.raises(WeightSyncError, match="slot 1: bad is not what was published"):
                await w.client.confirm_weights(1, report)
            with pytest.raises(RoleFailed, match="it said so") as caught:
                await w.client.finish_step(_report())
            assert caught.value.role == "trainer"
            assert await w.client.begin_write() == 2, "the connection goes on after an error"

    run(main())


@pytest.mark.parametrize("name", [n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, SlipstreamError)])
def test_every_error_of_the_vocabulary_can_travel(name):
    kind = getattr(errors, name)
    error = kind("trainer", "what happened") if kind is RoleFailed else kind("what happened")
    back = wire._raised(wire._error(1, error))
    assert type(back) is kind and str(back) == "what happened"


def test_a_bug_in_the_controller_travels_with_its_traceback():
    async def main():
        async with Wired() as w:
            with pytest.raises(RoleFailed, match=r"KeyError: 'a bug'[\s\S]*in finish_evaluation") as caught:
                await w.client.finish_evaluation(_evaluation())
            assert caught.value.role == "controller"

    run(main())


def test_death_of_the_controller_ends_every_pending_call():
    async def main():
        async with Wired() as w:
            calls = [
                asyncio.create_task(w.client.admit(1)),
                asyncio.create_task(w.client.get_batch(3)),
                asyncio.create_task(w.client.next_weights("e", 1, 0)),
            ]
            await w.api.called.wait()
            for session in list(w.server._sessions):
                session.link.abort("test")
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, PeerLost) and "the controller was lost" in str(result)
            with pytest.raises(PeerLost, match="the controller"):
                await w.client.begin_write()

    run(main())


PEER = """
import asyncio, os, sys
from slipstream.launch import wire
async def main():
    controller = await wire.connect(sys.argv[1], "engine")
    await controller.next_weights("e0", 1, 0)
asyncio.run(main())
"""


def test_kill_9_of_a_role_is_seen_and_its_long_polls_end():
    async def main():
        async with Wired() as w:
            child = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", PEER, w.path]
            )
            await w.api.called.wait()
            child.kill()
            assert f"engine (pid {child.pid}) was lost" in await w.lost("engine")
            child.wait(DEADLINE_S)
            await asyncio.sleep(0)
            assert w.api.cancelled == ["next_weights"]
            assert set(w.server.peers) == {"rollout"}

    run(main())


def test_a_role_reports_its_own_error():
    async def main():
        async with Wired() as w:
            try:
                raise MemoryError("no more")
            except MemoryError as error:
                w.client.failed(error)
            gone = asyncio.create_task(w.lost("rollout"))
            await asyncio.sleep(0)
            await w.client.close()
            await gone
            ((role, failure),) = w.failures
            assert (role, failure.kind, failure.message) == ("rollout", "MemoryError", "no more")
            assert "test_wire.py" in failure.traceback

    run(main())


def test_a_taken_role_is_refused():
    async def main():
        async with Wired() as w:
            with pytest.raises(PeerLost, match=f"the role rollout is taken by process {os.getpid()}"):
                await wire.connect(w.path, "rollout")
            assert await w.client.begin_write() == 2

    run(main())


def test_nobody_listens():
    async def main():
        with private_directory() as directory, pytest.raises(PeerLost, match="does not listen at"):
            await wire.connect(os.path.join(directory, "nothing"), "rollout")

    run(main())


def test_a_quick_call_has_a_deadline(monkeypatch):
    async def main():
        monkeypatch.setitem(wire.METHODS, "commit_checkpoint", wire.METHODS["commit_checkpoint"]._replace(deadline_s=1.0))
        async with Wired() as w:
            with pytest.raises(DeadlineExceeded, match="waited 1 s for the controller to answer commit_checkpoint"):
                await w.client.commit_checkpoint("tmp", _checkpoint())
            assert await w.client.begin_write() == 2, "the others go on, and the late answer is nobody's"

    run(main())


def test_time_in_which_the_callers_own_loop_was_blocked_does_not_count():
    """The answer comes, in the loop's order of events, after three seconds' worth of timers have gone off at once."""

    async def main():
        loop = asyncio.get_running_loop()
        skew = 0.0
        real = loop.time
        loop.time = lambda: real() + skew  # type: ignore[method-assign]
        future = loop.create_future()
        waiting = asyncio.create_task(wire.within(future, 3.0, "the test"))
        await asyncio.sleep(0)
        skew = 600.0  # a step of ten minutes
        loop.call_later(0.2, future.set_result, "answer")
        assert await waiting == "answer"

    asyncio.run(main())


def test_cancelling_a_call_ends_it_at_the_controller():
    async def main():
        async with Wired() as w:
            task = asyncio.create_task(w.client.admit(1))
            await w.api.called.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await w.client.begin_write() == 2
            assert w.api.cancelled == ["admit"]
            w.api.answer.set_result(Work(stop=True))
            assert (await w.client.admit(2)).stop
            assert w.api.calls == [("admit", 1), ("admit", 2)]

    run(main())


@pytest.mark.parametrize("read_already", [False, True])
def test_an_answer_that_crosses_the_cancellation_is_not_lost(read_already):
    """The controller has admitted a group when the worker calls its question off: the next question is answered with that group."""

    async def main():
        async with Wired() as w:
            task = asyncio.create_task(w.client.admit(1))
            await w.api.called.wait()
            work = Work(
                assignments=(Assignment(group_id=9, attempt=0, draw=Draw(number=9, row=0, epoch=0, dataset="d"), row={}, min_version=0),)
            )
            w.api.answer.set_result(work)
            if not read_already:
                w.client.link.pause_reading()
            session = next(iter(w.server._sessions))
            await asyncio.wait({t for _, t in session._tasks.values()})  # decided and sent, and read here or not
            if read_already:
                while w.client._pending:  # noqa: ASYNC110  # the very pass of the loop in which it is read
                    await asyncio.sleep(0)
            assert not task.done() and bool(w.client._pending) is not read_already
            task.cancel()
            w.client.link.resume_reading()
            with pytest.raises(asyncio.CancelledError):
                await task
            got = await w.client.admit(5)
            assert [a.group_id for a in got.assignments] == [9]
            assert w.api.calls == [("admit", 1)]

    run(main())


def test_a_frame_beyond_the_limit_ends_the_connection_and_not_the_server():
    async def main():
        async with Wired() as w:
            reader, writer = await asyncio.open_unix_connection(w.path)
            writer.write(struct.pack("<II", 10, framing.MAX_BODY_BYTES + 1))
            assert await reader.read() == b""
            writer.close()
            with pytest.raises(SlipstreamError, match="are allowed"):
                w.client.link.send_now(b"x" * (framing.MAX_HEADER_BYTES + 1))
            assert await w.client.begin_write() == 2

    run(main())


@pytest.mark.parametrize("noise", [b"\xff" * 64, struct.pack("<II", 3, 0) + b"abc", struct.pack("<II", 0, 0)])
def test_noise_ends_the_connection_and_not_the_server(noise):
    async def main():
        async with Wired() as w:
            reader, writer = await asyncio.open_unix_connection(w.path)
            writer.write(noise)
            assert await reader.read() == b""
            writer.close()
            assert await w.client.begin_write() == 2

    run(main())


def test_a_call_before_hello_is_refused():
    async def main():
        async with Wired() as w:
            reader, writer = await asyncio.open_unix_connection(w.path)
            header = wire._header_encoder.encode(wire._Call(1, "begin_write"))
            writer.write(struct.pack("<II", len(header), 0) + header)
            assert await reader.read() == b""
            writer.close()

    run(main())


def test_frames_survive_any_split():
    async def main():
        got = []
        link = framing.Link("peer", lambda h, b: got.append((h, b)), lambda e: None)
        frames = [(b"h" * i, b"b" * (i * 7)) for i in range(1, 20)]
        stream = b"".join(struct.pack("<II", len(h), len(b)) + h + b for h, b in frames)
        for size in (1, 2, 3, 7, 64, len(stream)):
            got.clear()
            for at in range(0, len(stream), size):
                link.data_received(stream[at : at + size])
            assert got == frames

    run(main())


def test_a_sender_waits_for_a_peer_that_does_not_read():
    """Unsent bytes stay bounded: `send` waits until the peer has read, and wakes with PeerLost when it dies."""

    async def main():
        with private_directory() as directory:
            path = os.path.join(directory, "s")
            accepted = loop_future()

            async def on_connect(reader, writer):
                writer.transport.pause_reading()
                accepted.set_result(writer)

            server = await asyncio.start_unix_server(on_connect, path)
            link = framing.Link("the reader", lambda h, b: None, lambda e: None)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, path)
            writer = await accepted

            sent = 0

            async def flood():
                nonlocal sent
                while True:
                    await link.send(b"h", bytes(2**16))
                    sent += 1

            task = asyncio.create_task(flood())
            done, _ = await asyncio.wait({task}, timeout=0.3)
            assert not done
            stuck = sent
            assert stuck * 2**16 < 8 * 2**20
            await asyncio.wait({task}, timeout=0.1)
            assert sent == stuck, "nothing more is taken while the peer does not read"
            writer.transport.abort()
            with pytest.raises(PeerLost, match="the reader was lost"):
                await task
            server.close()

    run(main())


def test_many_calls_at_once_are_all_answered():
    async def main():
        async with Wired() as w:
            answers = await asyncio.gather(*(w.client.begin_write() for _ in range(3 * wire.MAX_IN_FLIGHT)))
            assert answers == [2] * (3 * wire.MAX_IN_FLIGHT)

    run(main())


def test_closing_the_server_ends_long_polls_with_its_name():
    async def main():
        async with Wired() as w:
            task = asyncio.create_task(w.client.get_batch(1))
            await w.api.called.wait()
            await w.server.close()
            with pytest.raises(PeerLost, match="the controller"):
                await task

    run(main())


def test_imports_without_torch():
    code = "import sys, slipstream.launch.wire, slipstream.launch.page, slipstream.weight_sync.slots; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def loop_future() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


def _report():
    from slipstream.types import StepReport

    return StepReport(step=0, version=1, checksum="c")


def _evaluation():
    from slipstream.types import EvalResult

    return EvalResult(number=0, incarnation=1, version=0, checksum="c", items=(), duration_s=0.0)


def _checkpoint():
    from slipstream.protocols import CheckpointManifest

    return CheckpointManifest(run_id="r", incarnation=1, step=1, ledger_seq=1, weights_checksum="c", files={})
