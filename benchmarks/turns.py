"""Programs that take turns on one machine: each is a tree of processes that is stopped (SIGSTOP) except when it is its turn.

So programs that take long to start, and whose first step is not like the others, can be compared step by step, A B B A, without being
started anew for each pair; and one that overlaps its own parts is stopped and goes on in the middle of that. A program says on its standard
output when a step is done, in a line of JSON with the key "step"; a turn lasts from SIGCONT until that line has come and the tree is
stopped again. Linux only (/proc).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
END_S = 5.0  # from the end of a program to that of its children


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one turn."""

    wall_s: float
    cpu_s: float  # of all processes of the tree
    steps: list[dict[str, Any]]  # the lines, in order


class Program:
    """One of them. It runs from the start until its first turn ends; `close` ends it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None):
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._stderr = log.open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._stderr, env=env, start_new_session=True, text=True
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{name}: steps", daemon=True)
        self._reader.start()

    def turn(self, num_steps: int, deadline_s: float) -> Turn:
        """Go on for `num_steps` steps. RuntimeError where the program ends before, or takes longer than `deadline_s`."""
        cpu = _cpu_s(self._tree())
        began = time.perf_counter()
        self._signal(signal.SIGCONT)
        try:
            steps = [self._next(began + deadline_s) for _ in range(num_steps)]
        finally:
            self._signal(signal.SIGSTOP)
        wall_s = time.perf_counter() - began
        while not self._lines.empty():  # a further step that ended before the stop reached it belongs to this turn
            steps.append(self._next(began + deadline_s))
        return Turn(wall_s, _cpu_s(self._tree()) - cpu, steps)

    def collect(self, seconds: float) -> list[dict[str, Any]]:
        """The lines of the steps that end within so many seconds, for a program that is not stopped."""
        until, steps = time.perf_counter() + seconds, []
        while (left := until - time.perf_counter()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            steps.append(self._checked(line))
        return steps

    def check(self) -> None:
        """RuntimeError with the end of its log where the program has ended."""
        if self._process.poll() is not None:
            self._checked(None)

    def close(self) -> None:
        """End it without ceremony; its children have a moment to notice and to clean up."""
        tree = self._tree()
        _send(tree[:1], signal.SIGKILL)
        _send(tree[1:], signal.SIGCONT)
        self._process.wait(END_S)
        deadline = time.perf_counter() + END_S
        while any(_stat(pid) for pid in tree[1:]) and time.perf_counter() < deadline:
            time.sleep(0.05)
        _send(tree[1:], signal.SIGKILL)
        self._reader.join(END_S)
        self._stderr.close()

    def _next(self, deadline: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            raise RuntimeError(f"{self.name}: no further step in time; its log is {self.log}") from None
        return self._checked(line)

    def _checked(self, line: dict[str, Any] | None) -> dict[str, Any]:
        if line is None:
            self._lines.put(None)
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            raise RuntimeError("\n".join([f"{self.name} has ended before its last step; the end of {self.log}:", *tail]))
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # what a library prints
                if "step" in line:
                    self._lines.put(line)
        self._lines.put(None)

    def _tree(self) -> list[int]:
        return tree_of(self._process.pid) if self._process.poll() is None else []

    def _signal(self, number: int) -> None:
        _send(self._tree(), number)


def tree_of(pid: int) -> list[int]:
    """The process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for each in tree:
        tree += children.get(each, [])
    return tree


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (index 1: parent; 11, 12: user and system ticks); none where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(tree: Sequence[int]) -> float:
    fields = [stat for pid in tree if (stat := _stat(pid))]
    return sum(int(f[11]) + int(f[12]) for f in fields) / _TICKS_PER_S


def _send(tree: Sequence[int], number: int) -> None:
    for pid in tree:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
