"""Roles as processes of this machine: how one is started, what it does first, and how its end is seen.

    launching process ──spawn──► python -m slipstream.launch.role NAME        log/NAME.log, its own process group, threads per role
            │  lifeline pipe ────► a thread in the child waits for its end: the parent is gone, however it died
            │  inherited descriptors: progress page, weight slots
            └◄── exit status, at once

A child learns what it is from one environment variable that holds a `ChildSpec` as JSON: settings and paths, never pickled objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from slipstream.launch.page import Page, SharedProgress
from slipstream.models.one_base import OneBase
from slipstream.protocols import Progress
from slipstream.weight_sync.memory import MemoryFile

ASKED_TO_LEAVE = "asked to leave"  # by SIGTERM: the message of a cancellation
_SPEC_VARIABLE = "SLIPSTREAM_ROLE"
STACKS_SIGNAL = signal.SIGUSR1  # dumps every thread's stack into the role's log


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a role process is told."""

    role: str
    roles: tuple[str, ...]  # of the run, in the page's order
    run_folder: str
    threads: int
    socket_folder: str  # private directory with the run's sockets; a child whose parent died removes it
    lifeline: int  # descriptor: its end of file is the parent's end
    page: int  # descriptor of the progress page
    slots: tuple[int, ...] = ()  # descriptors of the weight slots
    listener: int | None = None  # descriptor of a listening socket that the role is to serve
    options: dict[str, str] = {}  # what else the role's own code wants to know
    others: tuple[ChildSpec, ...] = ()  # the same role in further runs, which the same process plays: experiments

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that the child inherits."""
        listener = () if self.listener is None else (self.listener,)
        others = [descriptor for other in self.others for descriptor in other.descriptors]
        return tuple(dict.fromkeys((self.lifeline, self.page, *self.slots, *listener, *others)))


@dataclass(slots=True)
class RoleProcess:
    """A running role as its parent sees it."""

    role: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Minus the signal's number where one killed it; None while it runs."""
        return self.process.returncode

    def signal_group(self, number: int) -> None:
        """Send a signal to the role and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            os.killpg(self.pid, number)

    def signal(self, number: int) -> None:
        """Send a signal to the role alone."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def log_bytes(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def last_lines(self, count: int = 20) -> str:
        """The end of its log."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 200 * count))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-count:])


class Lifeline:
    """The pipe whose end tells the children that their parent is gone. The parent never writes to it; the kernel closes it."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()  # neither is inherited unless handed on

    def close(self) -> None:
        for descriptor in (self.read_end, self._write_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)


async def spawn(spec: ChildSpec, log: Path, command: list[str] | None = None) -> RoleProcess:
    """Start the role; standard output and error go to its log. `command` replaces `python -m slipstream.launch.role NAME`."""
    command = command or [sys.executable, "-P", "-m", "slipstream.launch.role", spec.role]
    with _open_log(log) as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(spec),
            pass_fds=spec.descriptors,
            start_new_session=True,  # its own process group, and Ctrl-C in the terminal reaches the launching process alone
        )
    return RoleProcess(spec.role, process, log)


def _open_log(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return open(log, "ab")


def child_environment(spec: ChildSpec) -> dict[str, str]:
    """The parent's environment with the role's threads and what the role is.

    Thread pools must not spin while they wait: two roles on two cores would take each other's core.
    """
    threads = str(spec.threads)
    return {
        **os.environ,
        **dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), threads
        ),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # the child imports what the parent would
        _SPEC_VARIABLE: msgspec.json.encode(spec).decode(),
    }


# ---- in the child --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """What a role process works with in one run."""

    spec: ChildSpec
    progress: Progress
    slots: list[MemoryFile]
    base: OneBase | None = None  # where there are others: the model that they have in common
    others: list[Child] = field(default_factory=list)  # the same in further runs


def child_setup() -> Child:
    """First of all in a role process, before slow imports: watch the lifeline, make stacks dumpable, open what was inherited.

    Raises KeyError where the process was not started by `spawn`.
    """
    spec = msgspec.json.decode(os.environ.pop(_SPEC_VARIABLE), type=ChildSpec)  # popped: its own children are not this role
    for descriptor in spec.descriptors:
        os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(spec,), name="lifeline", daemon=True).start()
    progress = Page(MemoryFile(spec.page), spec.roles).role(spec.role)
    if not spec.others:
        return Child(spec, progress, _slots(spec))
    shared, base = SharedProgress(progress), OneBase()
    first, *others = [Child(each, shared.part(each.options["experiment"]), _slots(each), base) for each in (spec, *spec.others)]
    first.others = others
    return first


def end_in_good_order() -> None:
    """From now on SIGTERM cancels the running task in place of ending the process: for a role that holds something which outlives it. Once:
    what it puts in order is not cut short by another one."""
    task = asyncio.current_task()
    assert task is not None, "in a role's task"
    calls = iter([lambda: task.cancel(ASKED_TO_LEAVE)])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: next(calls, lambda: None)())


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around a role's imports: torch and transformers make some million objects and next to no garbage.

    Without the garbage collector they come in a fifth less time (5.4 s, 4.3 s); and since it passes over all of them from then on, the
    process ends in 0.3 s in place of 1.3 s. For processes of our own alone: a caller's objects are not ours to set aside for good.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _slots(spec: ChildSpec) -> list[MemoryFile]:
    return [MemoryFile(descriptor) for descriptor in spec.slots]


def _end_with_parent(spec: ChildSpec) -> None:
    """Wait for the parent's end, then end this process and everything it started. Runs beside any blocking call of the main thread."""
    while os.read(spec.lifeline, 1):
        pass
    print(f"{spec.role}: the launching process is gone; leaving", file=sys.stderr, flush=True)
    for each in (spec, *spec.others):
        shutil.rmtree(each.socket_folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
