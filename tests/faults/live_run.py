"""A real run in real processes, seen from outside: its roles, what they say they do, what they left behind."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import tomli_w

from slipstream.controller.ledger import LedgerReader
from slipstream.launch.local import ROLES
from slipstream.launch.page import Page, RoleState
from slipstream.observe.jsonl import read_jsonl
from slipstream.types import PrefixChunk
from slipstream.weight_sync.memory import MemoryFile

T = TypeVar("T")

DEADLINE_S = 120.0  # until a run is where a test wants it; the machine may be busy
END_S = 20.0  # from the fault to the end of every process
MARK = "SLIPSTREAM_TEST_RUN"
GROUP_SIZE = 4

REWARDS = """
def spread(completion):
    return (sum(map(ord, completion)) % 17) / 16.0
"""


def run_file(folder: Path) -> Path:
    """A tiny local run that goes on until it is ended: flat sampling, so that rollouts are long, and a checkpoint every other step."""
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "run.toml"
    settings = {
        "launch": "local",
        "run": {"folder": str(folder / "run"), "stop_grace_s": 0.0},
        "model": {"name": "builtin:tiny"},
        "data": {"train": "builtin:sort_digits"},
        "reward": [{"function": "rewards.py:spread"}],
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": 40, "temperature": 8.0},
        "engine": {"slots": 16, "max_context": 64},
        "trainer": {"steps": 1000, "groups_per_step": 4, "learning_rate": 1e-4},
        "checkpoint": {"every": 2, "keep": 3},
        "ledger": {"keep": "all"},
    }
    path.write_text(tomli_w.dumps(settings))
    return path


class LiveRun:
    """`slipstream train` as a process: the first on a run file is fresh, later ones resume. A context manager, which nothing survives."""

    def __init__(self, file: Path, *overrides: str):
        self.folder = file.parent / "run"
        resume = ["--resume", str(self.folder)] if (self.folder / "ledger.sqlite").exists() else []
        self.incarnation = self.query("SELECT coalesce(max(incarnation), 0) FROM incarnations") + 1 if resume else 1
        self._output = file.parent / f"output-{self.incarnation}"
        self._mark = uuid.uuid4().hex
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.cli.main", "train", str(file), *resume, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark},
            )
        self._page: Page | None = None
        self._known: set[tuple[int, str]] = set()  # (pid, start time) of descendants seen so far

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    # ---- what is there

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def processes(self) -> list[int]:
        """Every living process of this run: those with its mark in their environment, and all descendants ever noticed."""
        marked = {int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and self._is_marked(int(entry))}
        known = {pid for pid, started in self._known if _started(pid) == started}
        return sorted(marked | known)

    def _is_marked(self, pid: int) -> bool:
        try:
            return f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes() and _started(pid) is not None
        except OSError:
            return False

    def _notice(self) -> None:
        """Remember what descends from the launching process now; a reward's process has an environment of its own."""
        todo = [self.process.pid]
        while todo:
            pid = todo.pop()
            if (started := _started(pid)) is not None:
                self._known.add((pid, started))
                todo += _children(pid)

    def role(self, name: str) -> int:
        """The pid of a role."""
        for pid in self.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[-3:-1] == [b"slipstream.launch.role", name.encode()]:
                return pid
        raise AssertionError(f"no process of role {name}; {self.output}")

    def steps(self) -> int:
        """Steps that this incarnation has made and told of."""
        return sum(line.get("incarnation") == self.incarnation and "loss" in line for line in read_jsonl(self.folder / "metrics.jsonl"))

    def state(self, role: str) -> RoleState:
        """What the role says on the progress page."""
        if self._page is None:
            links = Path(f"/proc/{self.process.pid}/fd").iterdir()
            page = next(link for link in links if "memfd:slipstream-page" in os.readlink(link))
            self._page = Page(MemoryFile(os.open(page, os.O_RDWR)), ROLES)
        return self._page.states()[role]

    def query(self, sql: str) -> int:
        return query(self.folder, sql)

    def recorded(self) -> dict[int, tuple[PrefixChunk, ...]]:
        """The recorded rollouts, ended or not, of each running group that has any. No rollout of these runs starts anew."""
        running = "SELECT DISTINCT group_id FROM prefixes WHERE group_id NOT IN (SELECT group_id FROM groups)"
        with closing(sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
            groups = [group for (group,) in db.execute(running)]
        with LedgerReader.open(self.folder / "ledger.sqlite") as reader:
            return {group: reader.prefixes(group, lambda sample: 0) for group in groups}

    # ---- waiting and faults

    def until(self, condition: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
        """What the condition gives once it is true; the run must be alive until then."""
        deadline = time.monotonic() + deadline_s
        while not (value := condition()):
            assert self.process.poll() is None, f"the run ended by itself ({self.process.returncode}):\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"not reached in {deadline_s:g} s:\n{self.output[-4000:]}"
            time.sleep(0.002)  # files and other processes tell nobody when they change
        self._notice()
        return value

    def freeze(self, role: str, moment: Callable[[], bool], lag_s: float = 0.0) -> int:
        """Stop the role's process (SIGSTOP) at a moment that still holds once it is stopped; its pid.

        `lag_s`: by how much what the moment looks at may be late.
        """
        pid = self.role(role)
        while True:
            self.until(moment)
            os.kill(pid, signal.SIGSTOP)
            self.until(lambda: _stat(pid)[0] == "T")
            time.sleep(lag_s)
            if moment():
                return pid
            os.kill(pid, signal.SIGCONT)

    def ended(self) -> int:
        """Wait for the end of the run and of all its processes; the exit code. Both must come within seconds."""
        code = self.process.wait(END_S)
        deadline = time.monotonic() + END_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in left]}"
            time.sleep(0.01)
        return code

    def message(self) -> str:
        """The error that the person sees."""
        found = re.search(r"^slipstream train: (.*)", self.output, re.MULTILINE | re.DOTALL)
        assert found, self.output
        return found[1]


def query(run_folder: Path, sql: str) -> int:
    """One number from the ledger."""
    with closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        return db.execute(sql).fetchone()[0]


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _started(pid: int) -> str | None:
    """When the process started, which names it together with its pid; None for one that is gone or a zombie."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for t in os.listdir(f"/proc/{pid}/task") for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except OSError:
        return []
