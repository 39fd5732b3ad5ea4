"""Holds the role processes of a run: sees at once that one died, within a second or so that one hangs, and leaves none behind.

    exit status (kernel) ─┐
    role's own report ────┼──► evidence per role ──► decide ──► go on | start these roles anew | end the run, because of this role
    progress page, judged ┘

`decide` is the only place where it is chosen what a failure means for the run.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from slipstream import errors
from slipstream.deadlines import START_S
from slipstream.errors import DeadlineExceeded, RoleFailed, RoleHung, SlipstreamError
from slipstream.launch.page import Judge, Overdue, Page
from slipstream.launch.processes import STACKS_SIGNAL, ChildSpec, RoleProcess, spawn
from slipstream.launch.wire import Failure

JUDGE_INTERVAL_S = 0.5
SETTLE_S = 2.0  # a role that only lost a peer waits this long for the peer's own cause
REPORT_SETTLE_S = 0.3  # a role's own error may be the echo of a death whose notice is a moment behind
LEAVE_S = 10.0  # a role that left in good order: the run must end within this time, or it left too early
STACKS_S = 1.0  # a hung role gets this long to write its stacks
GRACE_S = 5.0  # from SIGTERM to SIGKILL
KILL_DEADLINE_S = 5.0  # from SIGKILL to the exit status
FORGIVEN_S = 1800.0  # a role that lived so long before it failed has its restarts counted afresh
LOG_LINES = 20
PEER_LOST = "PeerLost"
FOR_PEOPLE = ("ConfigError", "DataError", "ModelError", "MemoryNeedError")  # say all by themselves: neither role nor log matter
LASTING = (*FOR_PEOPLE, "RunFailed", "WeightSyncError", "Refused")  # would come again: the fault is in settings, model, accounts, requests


@dataclass(slots=True)
class Evidence:
    """What is known against one role."""

    role: str
    since: float  # monotonic seconds of the first of it
    late: Overdue | None = None
    failure: Failure | None = None
    exit_code: int | None = None
    restarts_left: int = 0  # how often the role may still be started anew: engines that had been in service
    expendable: bool = False  # the run goes on without it: an engine that was added and has not come into service

    @property
    def mendable(self) -> bool:
        """Whether another start of the role may make it good."""
        return self.restarts_left > 0 and (self.failure is None or self.failure.kind not in LASTING)


@dataclass(frozen=True, slots=True)
class Decision:
    """What failures mean for the run. Neither: nothing yet."""

    culprit: Evidence | None = None  # the run ends because of this role
    anew: tuple[Evidence, ...] = ()  # these are started anew, and the run goes on
    without: tuple[Evidence, ...] = ()  # the run goes on without these


def decide(evidence: Sequence[Evidence], now: float) -> Decision:
    """An engine that died or hangs is started anew while it may be, unless its own error says that it would only fail again. One that was
    added and never served is given up.

    Any other dead or hung role ends the run. Which one is the cause: a hang before a death by signal before a role's own error before an
    exit without a word before roles that merely lost a peer; among equals the first. A weak cause waits a moment for a stronger one.
    Nobody dies of an engine's death, so what can be mended is no cause of the rest.
    """
    lasting = [e for e in evidence if not e.mendable and not e.expendable]
    if lasting:
        strongest = min(lasting, key=lambda e: (_strength(e)[0], e.since))
        if now - min(e.since for e in lasting) >= _strength(strongest)[1]:
            return Decision(strongest)
    without = tuple(e for e in evidence if e.expendable)
    return Decision(anew=tuple(e for e in evidence if e.mendable and not e.expendable), without=without)


def _strength(evidence: Evidence) -> tuple[int, float]:
    """(rank, 0 is strongest; seconds to wait for something stronger)."""
    if evidence.late is not None:
        return 0, 0.0
    if evidence.failure is not None:
        return (4, SETTLE_S) if evidence.failure.kind == PEER_LOST else (2, REPORT_SETTLE_S)
    if evidence.exit_code is not None and evidence.exit_code < 0:
        return 1, 0.0
    return (3, SETTLE_S) if evidence.exit_code else (5, LEAVE_S)


@dataclass
class Supervisor:
    """Starts, watches and ends the role processes of a run. `watch` runs beside the run; `stop` is called however the run ends.

    max_restarts: how often in a row a role may be started anew. expendable: whether the run goes on without it. gone: told of a role's end
    as soon as it is seen. start_anew: starts the process of a role that has ended (with `start`); told what had happened, as is given_up.
    """

    page: Page
    may_leave: Callable[[str], bool] = lambda role: False  # whether a role that exits with 0 had nothing left to do
    max_restarts: Callable[[str], int] = lambda role: 0
    expendable: Callable[[str], bool] = lambda role: False
    gone: Callable[[str], None] = lambda role: None
    start_anew: Callable[[str, SlipstreamError], Awaitable[None]] | None = None
    given_up: Callable[[str, SlipstreamError], None] = lambda role, error: None
    clock: Callable[[], float] = time.monotonic
    judge: Judge = field(default_factory=lambda: Judge(JUDGE_INTERVAL_S))
    processes: dict[str, RoleProcess] = field(default_factory=dict)
    _evidence: dict[str, Evidence] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _exits: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _started: dict[str, float] = field(default_factory=dict)  # role -> when its process was started
    _restarts: dict[str, int] = field(default_factory=dict)  # role -> how often in a row
    _leaving: set[str] = field(default_factory=set)  # roles that are being ended on purpose
    _stopping: bool = False

    async def start(self, spec: ChildSpec, log: Path, command: list[str] | None = None) -> RoleProcess:
        """Start a role's process and watch for its end."""
        self.page.role(spec.role).working("start", START_S)
        process = self.processes[spec.role] = await spawn(spec, log, command)
        self._started[spec.role] = self.clock()
        self._exits[spec.role] = asyncio.create_task(self._await_exit(process), name=f"supervisor: exit of {spec.role}")
        return process

    def report(self, role: str, failure: Failure) -> None:
        """A role says why it is about to end (see `wire.serve(on_failed=...)`)."""
        if role in self._leaving:
            return
        self._against(role).failure = failure
        self._news.set()

    async def watch(self) -> NoReturn:
        """Wait until a role has failed, for as long as the run lasts; raises RoleFailed or RoleHung with what is known of the cause."""
        while True:
            now = self.clock()
            states = {role: state for role, state in self.page.states().items() if self._runs(role)}
            for late in self.judge.judge(now, states):
                self._against(late.role).late = late
            decision = decide(list(self._evidence.values()), now)
            if decision.culprit is not None:
                raise await self._explain(decision.culprit)
            for evidence in decision.anew:
                await self._start_anew(evidence)
            for evidence in decision.without:
                self.given_up(evidence.role, await self._end_failed(evidence))
            await self._wait_for_news()

    async def _start_anew(self, evidence: Evidence) -> None:
        """End what is left of the role, and have it started once more."""
        assert self.start_anew is not None, "a role may be started anew and nobody can"
        error = await self._end_failed(evidence)
        self._restarts[evidence.role] = self._restarts.get(evidence.role, 0) + 1
        await self.start_anew(evidence.role, error)

    async def _end_failed(self, evidence: Evidence) -> SlipstreamError:
        """What happened to the role, whose process has ended then and against which nothing is held any more."""
        error = await self._explain(evidence)
        await self._kill(evidence.role)
        del self._evidence[evidence.role]  # with what its exit added
        return error

    async def end(self, role: str) -> None:
        """End this role on purpose, and what it started, as `stop` does; nothing is held against it."""
        self._leaving.add(role)
        self.processes[role].signal_group(signal.SIGTERM)
        await asyncio.wait({self._exits[role]}, timeout=GRACE_S)
        await self._kill(role)
        self._leaving.discard(role)
        self._evidence.pop(role, None)
        self._restarts.pop(role, None)

    async def _kill(self, role: str) -> None:
        """End the role and what it started, and wait until it has ended. DeadlineExceeded where the system does not end it."""
        process = self.processes[role]
        process.signal_group(signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_DEADLINE_S):
                await asyncio.shield(self._exits[role])
        except TimeoutError:
            raise DeadlineExceeded(
                f"{role} (pid {process.pid}) has not ended {KILL_DEADLINE_S:.0f} s after SIGKILL: it waits inside the system, often for a "
                "disk or a device"
            ) from None

    async def left(self, role: str) -> None:
        """Wait until this role's process has ended; how it ended is for `watch` to judge."""
        await self.processes[role].process.wait()

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """End every role and what it started: SIGTERM, after the grace time SIGKILL. No process of the run is left when this returns."""
        self._stopping = True
        for process in self.processes.values():
            if process.exit_code is None:
                process.signal_group(signal.SIGTERM)
        try:
            await self._await_exits(grace_s)
        finally:  # also where the wait is cut short
            for process in self.processes.values():
                if process.exit_code is None:
                    process.signal_group(signal.SIGKILL)
        await self._await_exits(KILL_DEADLINE_S)

    def _runs(self, role: str) -> bool:
        process = self.processes.get(role)
        return process is not None and process.exit_code is None

    def _against(self, role: str) -> Evidence:
        evidence = self._evidence.get(role)
        if evidence is None:
            now = self.clock()
            if now - self._started.get(role, now) >= FORGIVEN_S:
                self._restarts.pop(role, None)
            left = self.max_restarts(role) - self._restarts.get(role, 0)
            evidence = self._evidence[role] = Evidence(role, now, restarts_left=left, expendable=self.expendable(role))
        return evidence

    async def _await_exit(self, process: RoleProcess) -> None:
        code = await process.process.wait()
        process.signal_group(signal.SIGKILL)  # what the role started and left behind
        if self._stopping or process.role in self._leaving or (code == 0 and self.may_leave(process.role)):
            return
        self._against(process.role).exit_code = code
        self.gone(process.role)
        self._news.set()

    async def _await_exits(self, deadline_s: float) -> None:
        if self._exits:
            await asyncio.wait(self._exits.values(), timeout=deadline_s)

    async def _wait_for_news(self) -> None:
        """Until something happened, or until the next look at the page is due."""
        try:
            async with asyncio.timeout(JUDGE_INTERVAL_S):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    # ---- words -------------------------------------------------------------------------------------------------------------

    async def _explain(self, culprit: Evidence) -> SlipstreamError:
        """The error that the person sees."""
        process = self.processes.get(culprit.role)
        if culprit.late is not None and process is not None:
            return await self._hung(process, culprit.late)
        if culprit.failure is not None and culprit.failure.kind in FOR_PEOPLE:
            return getattr(errors, culprit.failure.kind)(culprit.failure.message)
        return RoleFailed(culprit.role, f"{_what_happened(culprit, process)}{_log_text(process)}")

    async def _hung(self, process: RoleProcess, late: Overdue) -> RoleHung:
        """Let the hung role write its stacks into its log, then kill it."""
        before = process.log_bytes
        process.signal(STACKS_SIGNAL)
        deadline = self.clock() + STACKS_S
        while process.exit_code is None and self.clock() < deadline:  # a file tells nobody that it grows, so it is looked at
            size = process.log_bytes
            await asyncio.sleep(0.1)
            if before < size == process.log_bytes:
                break
        process.signal_group(signal.SIGKILL)
        owed = f", it owes {late.owed}" if late.owed else ""
        return RoleHung(
            f"{process.role} (pid {process.pid}) hangs: phase {late.phase!r} is {late.overdue_s:.1f} s past its deadline{owed}. "
            f"It was killed; its stacks are at the end of its log.{_log_text(process, 2 * LOG_LINES)}"
        )


def _what_happened(culprit: Evidence, process: RoleProcess | None) -> str:
    name = culprit.role if process is None else f"{culprit.role} (pid {process.pid})"
    if culprit.failure is not None:
        return f"{name} failed: {culprit.failure.kind}: {culprit.failure.message}"
    code = culprit.exit_code
    if code is None or code == 0:
        return f"{name} left before the run was over"
    if code > 0:
        return f"{name} ended with exit code {code} and gave no reason"
    try:
        signal_name = signal.Signals(-code).name
    except ValueError:
        signal_name = f"signal {-code}"
    hint = " (if nobody did that by hand: often the system, when memory runs out)" if -code == signal.SIGKILL else ""
    return f"{name} was killed by {signal_name}{hint}"


def _log_text(process: RoleProcess | None, count: int = LOG_LINES) -> str:
    if process is None:
        return ""
    lines = process.last_lines(count)
    shown = f"\nLast lines of its log:\n{lines}" if lines else ""
    return f"{shown}\nThe whole log: {process.log}"
