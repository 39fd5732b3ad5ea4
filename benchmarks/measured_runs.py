"""One run with free roles (`free_roles.py`) in processes of its own, and what it cost: `measure(Spec(...))`.

    one      everything in one process and event loop, by direct calls
    local    controller, engine, trainer and rollout worker in a process each, over the real sockets of the local launcher

    groups   a worker that takes groups, records their tokens and hands them back: admission, hand-off, buffer, ledger
    worker   the real rollout worker and its engine client, fed one frame per tick with one token per live rollout

The ledger lies on the disk of `Spec.folder`, with the settings that ship. Costs are those between two steps: first all groups of the
start must have left, since they run in lockstep, and near the end nothing new is admitted.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from free_roles import (
    CHUNK_TOKENS,
    ENGINE_ID,
    PROMPT_TOKENS,
    FreeEngine,
    FreeScorer,
    FreeTokenizer,
    Groups,
    NoWeights,
    open_run,
    serve_weights,
    settings,
    train,
)

from slipstream.config import Config
from slipstream.controller.controller import COMMIT_WITHIN_S, Controller
from slipstream.launch import engine_socket, wire
from slipstream.launch.framing import private_directory
from slipstream.launch.page import NullProgress
from slipstream.launch.role import controller_socket
from slipstream.protocols import ControllerAPI, EngineClient
from slipstream.rollout.worker import RolloutWorker
from slipstream.types import Frame, SealedChunk

WARM_STEPS = 2  # = the groups that were in flight at the start
LAST_STEPS = 2  # made of groups that were admitted before
TIMEOUT_S = 300.0
TOKENS_PER_S = 50.0  # of one rollout: what a turn of the virtual clock stands for, wherever a deadline of the controller's matters
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Spec:
    in_flight: int
    measured_steps: int
    worker: str = "groups"  # groups | worker
    launch: str = "one"  # one | local
    group_size: int = 8
    tokens: int = 512  # mean length of a rollout
    folder: str = "."  # on whose disk the run folder is made
    tables: dict[str, Any] = field(default_factory=dict)  # further settings

    @property
    def config(self) -> Config:
        steps = WARM_STEPS + self.measured_steps + LAST_STEPS
        return settings(self.in_flight, self.group_size, self.tokens, steps, **self.tables)


@dataclass(slots=True)
class Mark:
    """Where the counters stood when a step was made."""

    wall_s: float
    cpu_s: dict[str, float]  # role -> CPU time of its process
    resident_bytes: dict[str, int]
    num_commits: int
    commit_cpu_s: float
    commit_wall_s: float


@dataclass(slots=True)
class Cost:
    """Between two steps."""

    num_rollouts: int
    wall_s: float
    cpu_s: dict[str, float]
    stand_in_s: float  # CPU time of stand-ins, in this many rollouts' share of the whole run
    num_commits: int
    commit_cpu_s: float
    commit_wall_s: float
    empty_bytes: dict[str, int]  # resident, before anything was admitted
    resident_bytes: dict[str, int]  # at the end of the measured steps

    def per_rollout_us(self, seconds: float) -> float:
        return seconds / self.num_rollouts * 1e6

    @property
    def cost_us(self) -> float:
        """CPU time per rollout of all processes together, stand-ins aside."""
        return self.per_rollout_us(sum(self.cpu_s.values()) - self.stand_in_s)

    @property
    def wall_us(self) -> float:
        return self.per_rollout_us(self.wall_s)


def measure(spec: Spec) -> Cost:
    """Run it in a fresh process. Raises RuntimeError with what the process said where it fails."""
    command = [sys.executable, __file__, "run", json.dumps(asdict(spec))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError(f"{spec} failed:\n{done.stderr[-4000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


class Meter:
    """Reads the counters of all processes of the run."""

    def __init__(self) -> None:
        self.pids = {"controller": os.getpid()}
        self.marks: dict[int, Mark] = {}
        self.num_commits, self.commit_cpu_s, self.commit_wall_s = 0, 0.0, 0.0

    def watch_commits(self, controller: Controller) -> None:
        ledger = controller.core.ledger
        commit = ledger.commit

        def timed() -> None:
            cpu, wall = time.thread_time(), time.perf_counter()
            commit()
            self.commit_cpu_s += time.thread_time() - cpu
            self.commit_wall_s += time.perf_counter() - wall
            self.num_commits += 1

        ledger.commit = timed

    def pace(self, controller: Controller, spec: Spec) -> None:
        """Tokens are committed within COMMIT_WITHIN_S, and the virtual clock of `Groups` runs far ahead of the real one: what its second
        brings would share a commit with many more. So a commit is made after as many calls as fall due in one of its seconds. Any other
        commit, such as a finished group's, takes what there is with it, and the time begins anew."""
        progress, calls, seen = controller.progress, 0, 0
        per_second = calls_per_second(spec) * COMMIT_WITHIN_S

        async def paced(chunks: list[SealedChunk]) -> None:
            nonlocal calls, seen
            if self.num_commits != seen:
                calls, seen = 0, self.num_commits
            await progress(chunks)
            calls += 1
            if calls >= per_second:
                calls = 0
                await controller._commit_soon()

        controller.progress = paced

    def mark(self, step: int) -> None:
        self.marks[step] = Mark(
            time.perf_counter(),
            {role: _cpu_s(pid) for role, pid in self.pids.items()},
            {role: _resident_bytes(pid) for role, pid in self.pids.items()},
            self.num_commits,
            self.commit_cpu_s,
            self.commit_wall_s,
        )


def calls_per_second(spec: Spec) -> float:
    """How many calls bring tokens in a second of the virtual clock: a group has one at each boundary of a chunk and at each end of a
    rollout, and those of several groups at one turn are one."""
    per_group = 1.5 * spec.tokens / CHUNK_TOKENS + spec.group_size - 1  # the longest rollout has 1.5 times the mean
    per_turn = spec.in_flight / spec.group_size * per_group / (1.5 * spec.tokens)
    return TOKENS_PER_S * min(1.0, per_turn)


def _cpu_s(pid: int) -> float:
    """User and system time of the process so far. Of another one the sum over the threads it has: they are those it ever had, and the
    scheduler counts nanoseconds where /proc/PID/stat has steps of 10 ms."""
    if pid == os.getpid():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


# ---- the process that measures ---------------------------------------------------------------------------------------------------


async def run(spec: Spec) -> Cost:
    config, meter = spec.config, Meter()
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmark-", dir=spec.folder) as place:
        folder = Path(place) / "run"
        ends = {WARM_STEPS, WARM_STEPS + spec.measured_steps}  # only there: to read the counters of all processes costs as much as a step

        def on_step(step: int) -> None:
            if step in ends:
                meter.mark(step)

        controller = open_run(folder, config, on_step)
        meter.watch_commits(controller)
        if spec.worker == "groups":
            meter.pace(controller, spec)
        try:
            stand_in_s = await (_in_one_process if spec.launch == "one" else _in_processes)(spec, controller, meter)
        finally:
            controller.close()
        return _cost(spec, meter, stand_in_s)


def _cost(spec: Spec, meter: Meter, stand_in_s: float) -> Cost:
    """`stand_in_s`: of the whole run, of which the measured steps get their share."""
    config = spec.config
    first, last = meter.marks[WARM_STEPS], meter.marks[WARM_STEPS + spec.measured_steps]
    return Cost(
        num_rollouts=spec.measured_steps * config.trainer.groups_per_step * spec.group_size,
        wall_s=last.wall_s - first.wall_s,
        cpu_s={role: last.cpu_s[role] - first.cpu_s[role] for role in last.cpu_s},
        stand_in_s=stand_in_s * spec.measured_steps / config.trainer.steps,
        num_commits=last.num_commits - first.num_commits,
        commit_cpu_s=last.commit_cpu_s - first.commit_cpu_s,
        commit_wall_s=last.commit_wall_s - first.commit_wall_s,
        empty_bytes=meter.marks[-1].resident_bytes,
        resident_bytes=last.resident_bytes,
    )


async def _in_one_process(spec: Spec, controller: Controller, meter: Meter) -> float:
    async with asyncio.TaskGroup() as tasks:
        sampling, served, stand_in = _one_process_sampling(spec, controller)
        meter.mark(-1)
        tasks.create_task(train(controller, spec.config, 0, controller.folder.checkpoints), name="trainer")
        serving = tasks.create_task(served, name="engine")
        await sampling
        serving.cancel()
    return stand_in.seconds


def _one_process_sampling(spec: Spec, controller: Controller) -> tuple[Awaitable[None], Any, Any]:
    """(the worker, the engine beside it, whose `seconds` are the stand-in's)."""
    if spec.worker == "groups":
        groups = Groups(controller, spec.config, spec.tokens)
        return groups.run(), serve_weights(controller), groups
    from slipstream.engines.embedded.client import InProcessClient
    from slipstream.engines.embedded.loop import run_engine

    engine, wake = FreeEngine(spec.tokens), asyncio.Event()
    client = InProcessClient(engine, wake.set)

    async def feed(frame: Frame) -> None:
        client.feed(frame)

    return _worker(spec, controller, client).run(), run_engine(engine, controller, NoWeights(), feed, wake, NullProgress()), engine


def _worker(spec: Spec, controller: ControllerAPI, engine: EngineClient) -> RolloutWorker:
    room = PROMPT_TOKENS + spec.config.rollout.max_new_tokens
    return RolloutWorker(controller, engine, FreeTokenizer(), spec.config, [FreeScorer()], max_context=room)


async def _in_processes(spec: Spec, controller: Controller, meter: Meter) -> float:
    """A process per role on the sockets of `launch/local.py`. The engine gets no requests where groups are sampled elsewhere."""
    with private_directory() as folder:
        server = await wire.serve(controller, controller_socket(folder))
        children = {}
        try:
            for role in ("engine", "trainer", "rollout"):
                children[role] = await _spawn(role, folder, spec, str(controller.folder.checkpoints))
            meter.pids |= {role: child.pid for role, child in children.items()}
            meter.mark(-1)
            for child in children.values():
                child.stdin.write(b"go\n")
            said = [await asyncio.wait_for(children[role].communicate(), TIMEOUT_S) for role in ("rollout", "trainer")]
            children["engine"].terminate()
            said.append(await asyncio.wait_for(children["engine"].communicate(), TIMEOUT_S))
        finally:
            for child in children.values():
                if child.returncode is None:
                    child.kill()
            await server.close()
    return sum(float(out.split()[-1]) for out, _ in said if out.strip())


async def _spawn(role: str, folder: str, spec: Spec, checkpoints: str) -> asyncio.subprocess.Process:
    """Start a role; returns when it is connected and waits for its start signal."""
    command = [sys.executable, __file__, role, json.dumps(asdict(spec)), folder, checkpoints]
    child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    ready = await asyncio.wait_for(child.stdout.readline(), TIMEOUT_S)
    if ready.strip() != b"ready":
        raise RuntimeError(f"the {role} did not come up")
    return child


# ---- the processes of the roles ----------------------------------------------------------------------------------------------------


async def role(name: str, spec: Spec, folder: str, checkpoints: Path) -> None:
    """Work as this role until its work is done or it is terminated; says how many seconds its stand-in took."""
    controller = await wire.connect(controller_socket(folder), name)
    work = await _ROLES[name](spec, controller, folder, checkpoints)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    stand_in_s = await work()
    await controller.close()
    print(stand_in_s, flush=True)


async def _engine_role(spec: Spec, controller: ControllerAPI, folder: str, checkpoints: Path) -> Callable[[], Awaitable[float]]:
    import signal

    from slipstream.engines.embedded.loop import run_engine

    engine, wake = FreeEngine(spec.tokens), asyncio.Event()
    server = await engine_socket.serve(engine, engine_socket.socket_path(folder, ENGINE_ID), wake.set)

    async def work() -> float:
        run = asyncio.create_task(run_engine(engine, controller, NoWeights(), server.send_frame, wake, NullProgress()))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, run.cancel)
        await asyncio.gather(run, return_exceptions=True)
        return engine.seconds

    return work


async def _trainer_role(spec: Spec, controller: ControllerAPI, folder: str, checkpoints: Path) -> Callable[[], Awaitable[float]]:
    async def work() -> float:
        await train(controller, spec.config, 0, checkpoints)
        return 0.0

    return work


async def _rollout_role(spec: Spec, controller: ControllerAPI, folder: str, checkpoints: Path) -> Callable[[], Awaitable[float]]:
    async def work() -> float:
        if spec.worker == "groups":
            groups = Groups(controller, spec.config, spec.tokens)
            await groups.run()
            return groups.seconds
        (engine_id,) = await controller.next_engines({})
        engine = await engine_socket.connect(engine_socket.socket_path(folder, engine_id))
        await _worker(spec, controller, engine).run()
        await engine.close()
        return 0.0

    return work


_ROLES = {"engine": _engine_role, "trainer": _trainer_role, "rollout": _rollout_role}


def main(arguments: list[str]) -> None:
    name, given, *more = arguments
    spec = Spec(**json.loads(given))
    if name == "run":
        print(json.dumps(asdict(asyncio.run(run(spec)))))
    else:
        asyncio.run(role(name, spec, more[0], Path(more[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
