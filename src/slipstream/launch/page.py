"""The progress page: what each role is doing and until when it may take, seen from outside; and the judge that reads it.

A role's own working loop, and no other thread, writes its record: a heartbeat thread would go on beating beside a loop that is stuck.
`idle` says that the role owes nothing (it waits for others); `working` names the phase, the work owed and the deadline of the phase.
The page is one memory file that all roles of a run map; a record is written by one process at a time.

    role: page.role("trainer").working("step", deadline_s=1800, owed="batch 12")     supervisor: judge.judge(now, page.states())
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass

from slipstream.protocols import Progress
from slipstream.weight_sync.memory import MemoryFile

_RECORD_BYTES = 512
_HEAD = struct.Struct("<Qd")  # writes * 2 (odd while one is under way), deadline (monotonic seconds; infinity = idle)
_TEXT_BYTES = (_RECORD_BYTES - _HEAD.size) // 2 - 2  # of phase and of owed work, utf-8, each behind its length
_TEXT = struct.Struct(f"<H{_TEXT_BYTES}sH{_TEXT_BYTES}s")


class NullProgress:
    """For a role nobody watches (`inline`: a hang is seen by the person who sits before it)."""

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        pass

    def idle(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RoleState:
    """What a role's record says."""

    writes: int  # progress counter: how often the record was written; 0 = never
    deadline: float  # monotonic seconds; infinity = idle
    phase: str
    owed: str

    @property
    def idle(self) -> bool:
        return math.isinf(self.deadline)


_NEVER = RoleState(0, math.inf, "", "")


class Page:
    """The records of these roles, in this order, in a shared memory file."""

    def __init__(self, memory: MemoryFile, roles: tuple[str, ...]):
        self.roles = roles
        memory.resize(_RECORD_BYTES * len(roles))
        self._block = memory.map(writable=True)
        self._last: dict[str, RoleState] = dict.fromkeys(roles, _NEVER)

    def role(self, name: str) -> RoleProgress:
        """Where this role writes."""
        return RoleProgress(self._record(name))

    def states(self) -> dict[str, RoleState]:
        """What every role says now. A role that died amid a write keeps what it said before."""
        for name in self.roles:
            self._last[name] = _read(self._record(name)) or self._last[name]
        return dict(self._last)

    def _record(self, name: str) -> memoryview:
        at = self.roles.index(name) * _RECORD_BYTES
        return self._block.data[at : at + _RECORD_BYTES]


class RoleProgress:
    """One role's record, written by its working loop. A microsecond or two per call."""

    def __init__(self, record: memoryview):
        self._record = record

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        self._write(time.monotonic() + deadline_s, phase, owed)

    def idle(self) -> None:
        self._write(math.inf, "idle", "")

    def _write(self, deadline: float, phase: str, owed: str) -> None:
        writes = _HEAD.unpack_from(self._record)[0] & ~1
        phase_bytes, owed_bytes = phase.encode()[:_TEXT_BYTES], owed.encode()[:_TEXT_BYTES]
        _HEAD.pack_into(self._record, 0, writes + 1, deadline)
        _TEXT.pack_into(self._record, _HEAD.size, len(phase_bytes), phase_bytes, len(owed_bytes), owed_bytes)
        _HEAD.pack_into(self._record, 0, writes + 2, deadline)


class SharedProgress:
    """One record for the parts that a process plays in several runs, in turns: `part` gives each its own view of it.

    The record is `working` while any part is. It names the part that wrote last, and its deadline is the longest of those that the working
    parts have set, from now on: whichever of them holds the process, it may do so for as long as that. A part that waits while others go
    on is not found here; its waits have deadlines of their own.
    """

    def __init__(self, record: Progress):
        self._record = record
        self._working: dict[str, tuple[str, float, str]] = {}  # part -> what it said; the last one said it last

    def part(self, name: str) -> Progress:
        """Where the part of this name writes."""
        return _Part(self, name)

    def said(self, name: str, working: tuple[str, float, str] | None) -> None:
        """What the part of this name does now; None: it is idle."""
        self._working.pop(name, None)
        if working is not None:
            self._working[name] = working
        if not self._working:
            self._record.idle()
            return
        (last, (phase, _, owed)), longest_s = list(self._working.items())[-1], max(limit_s for _, limit_s, _ in self._working.values())
        self._record.working(f"{phase} of {last}", longest_s, owed)


class _Part:
    def __init__(self, shared: SharedProgress, name: str):
        self._shared, self._name = shared, name

    def working(self, phase: str, deadline_s: float, owed: str = "") -> None:
        self._shared.said(self._name, (phase, deadline_s, owed))

    def idle(self) -> None:
        self._shared.said(self._name, None)


def _read(record: memoryview) -> RoleState | None:
    """The record, or None where a write was under way each time it was looked at."""
    for _ in range(100):
        copy = bytes(record)
        writes, deadline = _HEAD.unpack_from(copy)
        if writes == 0:
            return _NEVER
        if writes % 2 == 0 and _HEAD.unpack_from(record)[0] == writes:
            phase_length, phase, owed_length, owed = _TEXT.unpack_from(copy, _HEAD.size)
            return RoleState(
                writes // 2, deadline, phase[:phase_length].decode(errors="replace"), owed[:owed_length].decode(errors="replace")
            )
    return None


@dataclass(frozen=True, slots=True)
class Overdue:
    """A role that owes work and ran past its phase's deadline."""

    role: str
    phase: str
    owed: str
    overdue_s: float


class Judge:
    """Decides who hangs. Pure: it is told the time and what the roles say.

    It is asked about every `interval_s`. If it is asked later than that, it overslept (the machine was suspended, the whole run stopped by
    SIGSTOP) and so, probably, did the roles: that time is added to the deadline of each phase that was running then.
    """

    def __init__(self, interval_s: float = 0.5, slack_s: float = 0.5):
        self._expected_s = interval_s + slack_s
        self._last: float | None = None
        self._forgiven: dict[str, tuple[int, float]] = {}  # role -> (writes then, seconds forgiven to that phase)

    def judge(self, now: float, states: dict[str, RoleState]) -> list[Overdue]:
        """Who is overdue at `now` (monotonic seconds), longest first."""
        overslept = 0.0 if self._last is None else max(0.0, now - self._last - self._expected_s)
        self._last = now
        late: list[Overdue] = []
        for role, state in states.items():
            writes, forgiven = self._forgiven.get(role, (state.writes, 0.0))
            forgiven = overslept + (forgiven if writes == state.writes else 0.0)
            self._forgiven[role] = (state.writes, forgiven)
            overdue = now - state.deadline - forgiven
            if overdue > 0:
                late.append(Overdue(role, state.phase, state.owed, overdue))
        return sorted(late, key=lambda each: -each.overdue_s)
