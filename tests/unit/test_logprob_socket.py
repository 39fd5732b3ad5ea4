"""The logprob stage over a socket: calls are answered in order, its death and its errors reach everyone, a call that is late is named."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from rollout_fakes import finished_group

from slipstream.config.settings import BufferSettings, Config, TrainerSettings
from slipstream.errors import DeadlineExceeded, PeerLost
from slipstream.launch import logprob_socket
from slipstream.launch.framing import private_directory
from slipstream.launch.logprob_socket import connect, listen, run_logprobs
from slipstream.types import Group

DEADLINE_S = 20.0
CONFIG = Config(trainer=TrainerSettings(groups_per_step=2, step_timeout_s=30.0), buffer=BufferSettings(max_staleness=2))


def group(number: int) -> Group:
    return msgspec.structs.replace(finished_group(["abc", "d"]), group_id=number)


class FakeStage:
    """Marks every rollout with the group's number; `before` may fail."""

    def __init__(self, before: Callable[[int], None] = lambda number: None):
        self.before, self.asked = before, []

    async def annotate(self, group: Group) -> Group:
        self.asked.append(group.group_id)
        self.before(group.group_id)
        arrays = {"reference_logprobs": np.full(3, -group.group_id, dtype=np.float32)}
        return msgspec.structs.replace(group, rollouts=tuple(msgspec.structs.replace(r, arrays=arrays) for r in group.rollouts))


class Page:
    """What the role says it does, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        self.said.append(f"{phase} {owed} {deadline_s:g}")

    def idle(self) -> None:
        self.said.append("idle")


class Wired:
    """A stage that is served, and a client of it."""

    def __init__(self, stage: FakeStage, config: Config = CONFIG):
        self.stage, self.config, self.page = stage, config, Page()

    async def __aenter__(self) -> Wired:
        self._directory = private_directory()
        self.folder = self._directory.__enter__()
        listener = listen(self.folder)
        connecting = asyncio.create_task(connect(self.folder, self.config))  # nobody serves yet: it waits
        await asyncio.sleep(0)
        self.role = asyncio.create_task(run_logprobs(self.stage, listener, self.config, self.page))
        self.client = await connecting
        return self

    async def __aexit__(self, *_: object) -> None:
        self.role.cancel()
        await asyncio.gather(self.role, return_exceptions=True)
        await self.client.close()
        self._directory.__exit__(None, None, None)


def run(coroutine) -> None:
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    asyncio.run(bounded())


def test_groups_come_back_with_their_arrays_in_the_order_they_were_sent():
    async def main():
        async with Wired(FakeStage()) as w:
            answers = await asyncio.gather(*(w.client.annotate(group(n)) for n in range(1, 6)))
            assert w.stage.asked == [1, 2, 3, 4, 5]
            for number, answer in enumerate(answers, start=1):
                assert answer.group_id == number and answer.rollouts[0].completion == "abc"
                assert answer.rollouts[1].arrays["reference_logprobs"].tolist() == [-number] * 3
            assert w.page.said == ["idle", *(said for n in range(1, 6) for said in (f"logprobs group {n} 30", "idle"))]

    run(main())


def test_an_error_of_the_stage_ends_its_role_with_that_error_and_is_an_echo_at_the_worker():
    def fails(number: int) -> None:
        if number == 2:
            raise RuntimeError("out of memory")

    async def main():
        async with Wired(FakeStage(fails)) as w:
            await w.client.annotate(group(1))
            with pytest.raises(PeerLost, match="logprobs failed; its own error says why"):
                await w.client.annotate(group(2))
            with pytest.raises(RuntimeError, match="out of memory"):
                await w.role

    run(main())


def test_death_of_the_role_reaches_everyone_who_waits():
    async def main():
        async with Wired(FakeStage(lambda number: w.client.link.abort("test") if number == 1 else None)) as w:
            answers = await asyncio.gather(*(w.client.annotate(group(n)) for n in range(1, 4)), return_exceptions=True)
            assert [type(answer) for answer in answers] == [PeerLost] * 3
            assert all("logprobs was lost" in str(answer) for answer in answers)

    run(main())


def test_a_call_that_takes_too_long_names_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(logprob_socket, "pass_deadline_s", lambda config: 0.1)

    async def main():
        async with Wired(FakeStage()) as w:
            w.client.link.pause_reading()
            with pytest.raises(DeadlineExceeded, match="logprobs to answer annotate"):
                await w.client.annotate(group(1))

    run(main())


def test_a_call_may_wait_for_all_groups_in_flight():
    assert logprob_socket._methods(CONFIG)["annotate"].deadline_s == 3 * 30.0  # (S + 1) P groups, a step of P may take 30 s


def test_a_second_worker_and_a_stage_that_nobody_listens_for_are_refused(tmp_path):
    async def main():
        async with Wired(FakeStage()) as w:
            with pytest.raises(PeerLost, match="the role rollout is taken"):
                await connect(w.folder, CONFIG)
        with pytest.raises(PeerLost, match="logprobs does not listen"):
            await connect(str(tmp_path), CONFIG)

    run(main())


def test_the_listening_socket_lies_in_the_runs_folder(tmp_path):
    with listen(str(tmp_path)) as listener:
        assert listener.family is socket.AF_UNIX and [path.name for path in tmp_path.iterdir()] == ["logprobs.sock"]
