"""Role processes: a death and a hang are named with their cause, and no process is left behind, however the run ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.errors import ModelError, RoleFailed, RoleHung
from slipstream.launch.page import Overdue, Page
from slipstream.launch.processes import ChildSpec, Lifeline, child_environment
from slipstream.launch.supervisor import FORGIVEN_S, LEAVE_S, SETTLE_S, Evidence, Supervisor, decide
from slipstream.launch.wire import Failure
from slipstream.weight_sync.memory import MemoryFile

ROLES = ("rollout", "engine", "trainer")
DEADLINE_S = 30.0

SETUP = """
import os, signal, subprocess, sys, threading, time
from slipstream.launch.processes import child_setup
child = child_setup()
child.progress.idle()
def ready():
    os.write(int(child.spec.options["ready"]), child.spec.role[:1].encode())
"""
WAITS = "ready(); threading.Event().wait()"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(1000)"
WITH_GRANDCHILD = "subprocess.Popen(['sleep', '1000'], close_fds=False); " + STUBBORN


class Run:
    """A supervisor over real small processes. `holders` is a pipe that every process of the run holds open: its end is their end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.memory = MemoryFile.create("page")
        self.page = Page(self.memory, ROLES)
        self.supervisor = Supervisor(self.page)
        self.lifeline = Lifeline()
        self.ready_read, self.ready_write = os.pipe()

    def spec(self, role: str) -> ChildSpec:
        return ChildSpec(
            role=role,
            roles=ROLES,
            run_folder=str(self.folder),
            threads=1,
            socket_folder=str(self.folder / "sockets"),
            lifeline=self.lifeline.read_end,
            page=self.memory.fileno(),
            slots=(self.ready_write,),  # any descriptor is handed on as a slot
            options={"ready": str(self.ready_write)},
        )

    async def start(self, role: str, body: str, *, wait: bool = True):
        command = [sys.executable, "-c", SETUP + textwrap.dedent(body)]
        process = await self.supervisor.start(self.spec(role), self.folder / "log" / f"{role}.log", command)
        if wait:
            assert await asyncio.to_thread(os.read, self.ready_read, 1) == role[:1].encode()
        return process


@asynccontextmanager
async def running(folder: Path, deadline_s: float = DEADLINE_S):
    run = Run(folder)
    try:
        async with asyncio.timeout(deadline_s):
            yield run
    finally:
        await run.supervisor.stop(grace_s=0.0)
        run.lifeline.close()
        os.close(run.ready_write)
        os.close(run.ready_read)
        run.memory.close()


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


# ---- death ---------------------------------------------------------------------------------------------------------------------


def test_kill_9_is_named_at_once(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            await run.start("trainer", WAITS)
            process = await run.start("engine", "print('loading'); print('about to run'); " + WAITS)
            began = time.monotonic()
            process.signal(signal.SIGKILL)
            with pytest.raises(RoleFailed) as caught:
                await run.supervisor.watch()
            assert time.monotonic() - began < 2.0
            text = str(caught.value)
            assert caught.value.role == "engine"
            assert f"engine (pid {process.pid}) was killed by SIGKILL" in text and "memory" in text
            assert "loading\nabout to run" in text and str(tmp_path / "log" / "engine.log") in text

    asyncio.run(main())


def test_a_crash_without_a_report_shows_its_traceback(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            await run.start("trainer", "raise ArithmeticError('no such number')", wait=False)
            with pytest.raises(RoleFailed, match=r"trainer \(pid \d+\) ended with exit code 1[\s\S]*ArithmeticError: no such number"):
                await run.supervisor.watch()

    asyncio.run(main())


def test_a_roles_own_error_is_shown(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            await run.start("trainer", WAITS)
            run.supervisor.report("trainer", Failure("WeightSyncError", "slot 1 is torn", "Traceback ..."))
            with pytest.raises(RoleFailed, match=r"trainer \(pid \d+\) failed: WeightSyncError: slot 1 is torn"):
                await run.supervisor.watch()

    asyncio.run(main())


def test_what_a_person_must_change_is_raised_as_such(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            await run.start("engine", WAITS)
            run.supervisor.report("engine", Failure("ModelError", "model folder x has no weights", "Traceback ..."))
            with pytest.raises(ModelError, match=r"^model folder x has no weights$"):
                await run.supervisor.watch()

    asyncio.run(main())


def test_the_killed_role_is_the_cause_and_not_those_who_lost_it(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            await run.start("rollout", WAITS)
            engine = await run.start("engine", WAITS)
            watching = asyncio.create_task(run.supervisor.watch())
            run.supervisor.report("rollout", Failure("PeerLost", "the engine was lost", ""))
            await asyncio.sleep(0)
            engine.signal(signal.SIGSEGV)
            with pytest.raises(RoleFailed, match=r"engine .* was killed by SIGSEGV"):
                await watching

    asyncio.run(main())


def evidence(role: str, since: float, **what) -> Evidence:
    return Evidence(role, since, **what)


OWN = Failure("MemoryError", "no more", "")
LOST = Failure("PeerLost", "the engine was lost", "")
WRONG_BYTES = Failure("WeightSyncError", "it holds other bytes than were published", "")
NO_MODEL = Failure("ModelError", "no such model", "")


@pytest.mark.parametrize(
    ("found", "after_s", "cause"),
    [
        ([], 100.0, None),
        ([evidence("engine", 0.0, exit_code=-9)], 0.0, "engine"),
        ([evidence("rollout", 0.0, failure=LOST, exit_code=1)], 0.1, None),
        ([evidence("rollout", 0.0, failure=LOST, exit_code=1)], SETTLE_S, "rollout"),
        ([evidence("rollout", 0.0, failure=LOST), evidence("engine", 0.2, exit_code=-9)], 0.2, "engine"),
        ([evidence("rollout", 0.0, failure=LOST), evidence("trainer", 0.1, failure=OWN)], 0.5, "trainer"),
        ([evidence("trainer", 0.0, exit_code=1)], 0.1, None),
        ([evidence("trainer", 0.0, exit_code=1, failure=OWN)], 0.5, "trainer"),
        ([evidence("rollout", 0.0, failure=OWN), evidence("engine", 0.1, exit_code=-9)], 0.1, "engine"),
        ([evidence("rollout", 0.0, failure=OWN), evidence("engine", 0.1, failure=OWN)], 1.0, "rollout"),
        ([evidence("trainer", 0.0, exit_code=0)], LEAVE_S - 1, None),
        ([evidence("trainer", 0.0, exit_code=0)], LEAVE_S, "trainer"),
        ([evidence("trainer", 0.0, exit_code=0), evidence("engine", 3.0, exit_code=-9)], 3.0, "engine"),
        ([evidence("trainer", 0.0, exit_code=-9), evidence("engine", 0.0, exit_code=-9, restarts_left=3)], 0.0, "trainer"),
        ([evidence("engine", 0.0, exit_code=-9, restarts_left=3), evidence("trainer", 1.0, exit_code=-9)], 1.0, "trainer"),
        ([evidence("engine", 0.0, failure=WRONG_BYTES, restarts_left=3)], 0.5, "engine"),
        ([evidence("engine", 0.0, failure=NO_MODEL, exit_code=1, restarts_left=3)], 0.5, "engine"),
    ],
)
def test_root_cause(found, after_s, cause):
    decision = decide(found, after_s)
    assert (decision.culprit and decision.culprit.role) == cause
    assert cause is None or not decision.anew


@pytest.mark.parametrize(
    "what", [{"exit_code": -9}, {"exit_code": 1}, {"failure": OWN}, {"failure": LOST}, {"late": Overdue("e", "tick", "", 1.0)}]
)
def test_an_engine_that_failed_is_started_anew_at_once_while_it_may_be(what):
    found = [evidence("engine-0", 0.0, restarts_left=1, **what), evidence("engine-1", 0.0, restarts_left=2, **what)]
    decision = decide(found, 0.0)
    assert decision.culprit is None and [e.role for e in decision.anew] == ["engine-0", "engine-1"]
    found.append(evidence("rollout", 0.0, failure=LOST))  # may be an echo: waits for its cause, and no engine waits for it
    assert [e.role for e in decide(found, 0.1).anew] == ["engine-0", "engine-1"]
    found[0].restarts_left = 0
    assert decide(found[:2], 10.0).culprit is found[0]


def test_a_failed_engine_is_ended_and_started_anew_until_it_has_failed_too_often(tmp_path):
    """First it hangs, then it dies in all ways; the last way is the run's error."""
    bodies = iter(["os._exit(3)", "os.kill(os.getpid(), 9)", "print('out of luck'); sys.stdout.flush(); sys.exit(4)"])
    told, gone = [], []

    async def main():
        async with running(tmp_path, 4 * DEADLINE_S) as run:
            supervisor = run.supervisor
            supervisor.max_restarts = lambda role: 3 if role == "engine" else 0
            supervisor.gone = gone.append

            async def anew(role, error):
                assert supervisor.processes[role].exit_code is not None
                told.append(str(error))
                await run.start(role, next(bodies), wait=False)

            supervisor.start_anew = anew
            first = await run.start("engine", "child.progress.working('tick', 0.2); ready(); time.sleep(1000)")
            with pytest.raises(RoleFailed, match="ended with exit code 4") as caught:
                await supervisor.watch()
            assert "out of luck" in str(caught.value)
            assert first.exit_code == -signal.SIGKILL and f"engine (pid {first.pid}) hangs: phase 'tick'" in told[0]
            assert "exit code 3" in told[1] and "killed by SIGKILL" in told[2] and gone == ["engine"] * 4

    asyncio.run(main())


def test_restarts_are_counted_afresh_after_a_long_life():
    now = [FORGIVEN_S - 1]
    memory = MemoryFile.create("page")
    supervisor = Supervisor(Page(memory, ROLES), clock=lambda: now[0], max_restarts=lambda role: 2)
    supervisor._started["engine"], supervisor._restarts["engine"] = 0.0, 2
    assert supervisor._against("engine").restarts_left == 0
    supervisor._evidence.clear()
    now[0] = FORGIVEN_S
    assert supervisor._against("engine").restarts_left == 2
    memory.close()


# ---- ended on purpose ------------------------------------------------------------------------------------------------------------


def test_a_role_that_is_ended_on_purpose_may_put_in_order_what_outlives_it(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            body = f"""
            import asyncio, pathlib
            from slipstream.launch.processes import end_in_good_order
            async def work():
                end_in_good_order()
                try:
                    ready()
                    await asyncio.sleep(1000)
                finally:
                    ready()
                    await asyncio.sleep(0.2)
                    pathlib.Path({str(tmp_path / "left")!r}).touch()
            asyncio.run(work())
            """
            process = await run.start("engine", body)
            process.signal(signal.SIGTERM)
            assert await asyncio.to_thread(os.read, run.ready_read, 1) == b"e", "it is on its way out"
            await run.supervisor.end("engine")  # asks again
            assert (tmp_path / "left").exists() and process.exit_code == 1, "it was killed first"

    asyncio.run(main())


def test_a_role_that_does_not_leave_when_it_is_ended_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.launch.supervisor.GRACE_S", 0.2)

    async def main():
        async with running(tmp_path) as run:
            process = await run.start("engine", STUBBORN)
            await run.supervisor.end("engine")
            assert process.exit_code == -signal.SIGKILL

    asyncio.run(main())


# ---- hang ----------------------------------------------------------------------------------------------------------------------


def test_a_hang_is_named_with_stacks_and_the_role_is_killed(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            body = """
            def endless_step():
                time.sleep(1000)
            child.progress.working("step", 0.2, owed="batch 12")
            ready()
            endless_step()
            """
            process = await run.start("trainer", body)
            with pytest.raises(RoleHung) as caught:
                await run.supervisor.watch()
            text = str(caught.value)
            assert f"trainer (pid {process.pid}) hangs: phase 'step'" in text and "it owes batch 12" in text
            assert "in endless_step" in text
            await run.supervisor.stop()
            assert process.exit_code == -signal.SIGKILL

    asyncio.run(main())


def test_a_stopped_role_is_found_too(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            process = await run.start("engine", "child.progress.working('tick', 0.2); ready(); time.sleep(1000)")
            process.signal(signal.SIGSTOP)
            with pytest.raises(RoleHung, match="phase 'tick'"):
                await run.supervisor.watch()

    asyncio.run(main())


def test_an_idle_role_is_left_alone(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            await run.start("engine", WAITS)
            watching = asyncio.create_task(run.supervisor.watch())
            done, _ = await asyncio.wait({watching}, timeout=1.2)
            assert not done
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(main())


# ---- no orphan -----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_stop_leaves_nobody_not_even_grandchildren_that_ignore_sigterm(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            process = await run.start("rollout", WITH_GRANDCHILD)
            await run.start("engine", WAITS)
            (grandchild,) = children_of(process.pid)
            pids = [p.pid for p in run.supervisor.processes.values()] + [grandchild]
            assert all(alive(pid) for pid in pids)
            await run.supervisor.stop(grace_s=0.2)
            assert gone(pids, 1.0)

    asyncio.run(main())


def test_a_stop_that_is_cut_short_still_kills(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            process = await run.start("rollout", STUBBORN)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.supervisor.stop(grace_s=DEADLINE_S), 0.1)
            assert await asyncio.wait_for(process.process.wait(), DEADLINE_S) == -signal.SIGKILL

    asyncio.run(main())


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_what_a_dead_role_left_behind_is_ended(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            process = await run.start("rollout", WITH_GRANDCHILD)
            (grandchild,) = children_of(process.pid)
            process.signal(signal.SIGKILL)
            with pytest.raises(RoleFailed):
                await run.supervisor.watch()
            assert gone([grandchild], 1.0)

    asyncio.run(main())


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_processes import Run, WITH_GRANDCHILD, STUBBORN
async def main():
    run = Run(Path({folder!r}))
    os.makedirs({folder!r} + "/sockets")
    await run.start("rollout", WITH_GRANDCHILD)
    await run.start("trainer", STUBBORN)
    print(*[p.pid for p in run.supervisor.processes.values()], flush=True)
    await run.supervisor.watch()
asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_kill_9_of_the_launching_process_ends_its_roles_within_a_second(tmp_path):
    code = LAUNCHER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        assert select.select([launcher.stdout], [], [], DEADLINE_S)[0], "the launcher did not start its roles"
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        pids += [grandchild for pid in pids for grandchild in children_of(pid)]
        assert len(pids) == 3 and all(alive(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.communicate(timeout=DEADLINE_S)
    assert gone(pids, 1.0)
    assert not (tmp_path / "sockets").exists(), "the socket folder of a dead run is removed"
    assert "the launching process is gone" in (tmp_path / "log" / "trainer.log").read_text()


def gone(pids: list[int], deadline_s: float) -> bool:
    """Whether all have ended within the deadline; the kernel is asked, since they are not (all) our children."""
    end = time.monotonic() + deadline_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# ---- surroundings --------------------------------------------------------------------------------------------------------------


def test_a_role_gets_its_threads_its_log_and_no_more_than_it_needs(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            body = """
            print(*(os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_BLOCKTIME", "TOKENIZERS_PARALLELISM")))
            print("spec in the environment:", "SLIPSTREAM_ROLE" in os.environ)
            given = (child.spec.lifeline, child.spec.page, *child.spec.slots)
            print("inheritable:", [descriptor for descriptor in given if os.get_inheritable(descriptor)])
            print("own group:", os.getpgrp() == os.getpid(), "torch:", "torch" in sys.modules)
            ready()
            """
            process = await run.start("engine", body)
            await process.process.wait()
            assert process.last_lines().splitlines() == [
                "1 1 0 false",
                "spec in the environment: False",
                "inheritable: []",
                "own group: True torch: False",
            ]

    asyncio.run(main())


def test_the_child_imports_what_the_parent_would(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    run = Run(tmp_path)
    assert str(tmp_path) in child_environment(run.spec("engine"))["PYTHONPATH"].split(os.pathsep)
    run.lifeline.close()


def test_the_log_is_appended_to(tmp_path):
    async def main():
        async with running(tmp_path) as run:
            for word in ("first", "second"):
                process = await run.start("engine", f"print({word!r}); ready()")
                await process.process.wait()
            assert process.last_lines().splitlines() == ["first", "second"]

    asyncio.run(main())
