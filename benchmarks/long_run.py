"""A run of very many steps with free roles (`free_roles.py`), and what it left behind: `python long_run.py '{"resume_at": [1000, 10000]}'`.

The real controller and the real ledger with the settings that ship (`ledger.keep`, a checkpoint every 50 steps, two kept); virtual time,
so it goes as fast as the controller does. Every hundred steps: CPU time, resident memory, size of the ledger. Where `resume_at` says the
run ends, its tables are counted, and it is opened again with more steps, as `--resume` does, with the time that took.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from free_roles import Groups, open_run, serve_weights, settings, train

from slipstream.controller.ledger import DATA_TABLES

EVERY = 100  # steps between two looks
TIMEOUT_S = 900.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class LongRun:
    resume_at: list[int]  # steps, ascending; the last one is the run's end
    in_flight: int = 32
    group_size: int = 4
    tokens: int = 128
    folder: str = "."


@dataclass(slots=True)
class Look:
    """How things stood after so many steps."""

    step: int
    cpu_s: float
    resident_bytes: int
    ledger_bytes: int  # the file, and its write-ahead log


@dataclass(slots=True)
class Resume:
    step: int
    num_events: int
    seconds: float  # CPU, to open the folder with everything the ledger knows


@dataclass(slots=True)
class Left:
    looks: list[Look] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    tables: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)  # step -> table -> rows, bytes of payload


async def go(spec: LongRun) -> Left:
    left = Left()
    with tempfile.TemporaryDirectory(prefix="slipstream-benchmark-", dir=spec.folder) as place:
        folder = Path(place) / "run"
        for until in spec.resume_at:
            await _stretch(spec, folder, until, left)
    return left


async def _stretch(spec: LongRun, folder: Path, until: int, left: Left) -> None:
    """Open the folder, new or as the stretch before left it, and train up to step `until`."""
    config = settings(spec.in_flight, spec.group_size, spec.tokens, until)
    began, start = time.process_time(), left.looks[-1].step if left.looks else 0

    def look(step: int) -> None:
        if step % EVERY == 0:
            left.looks.append(_look(folder, step))

    controller = open_run(folder, config, look)
    if start:
        left.resumes.append(Resume(start, controller.core.ledger.last_seq, time.process_time() - began))
    async with asyncio.TaskGroup() as tasks:
        engine = tasks.create_task(serve_weights(controller))
        tasks.create_task(train(controller, config, controller.start_step, controller.folder.checkpoints))
        await Groups(controller, config, spec.tokens).run()
        engine.cancel()
    controller.close()
    left.tables[until] = _tables(folder / "ledger.sqlite")


def _look(folder: Path, step: int) -> Look:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    sizes = sum(path.stat().st_size for path in folder.glob("ledger.sqlite*") if not path.name.endswith("-shm"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return Look(step, cpu_s, resident, sizes)


def _tables(path: Path) -> dict[str, tuple[int, int]]:
    """Rows of each table, and the bytes of what they hold."""
    held = {table: "checksum" if table in ("versions", "checkpoints") else "payload" for table in ("events", *DATA_TABLES)}
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        query = "SELECT count(*), coalesce(sum(length({})), 0) FROM {}"
        return {table: db.execute(query.format(column, table)).fetchone() for table, column in held.items()}


def measure(spec: LongRun) -> Left:
    """Run it in a fresh process. Raises RuntimeError with what the process said where it fails."""
    done = subprocess.run([sys.executable, __file__, json.dumps(asdict(spec))], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{spec} failed:\n{done.stderr[-4000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    tables = {int(step): counts for step, counts in said["tables"].items()}
    return Left([Look(**look) for look in said["looks"]], [Resume(**resume) for resume in said["resumes"]], tables)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(go(LongRun(**json.loads(sys.argv[1])))))))
