"""What a rollout costs beside the model: admission, hand-off, buffer and ledger; with and without processes between the roles.

    python benchmarks/overhead.py [--short] [--json PATH] [--folder DIR]

Every run has the real controller, the real ledger on disk with the settings that ship (each finished group, batch and step durable before
the call returns, the tokens of running rollouts within a second), the run's files, and roles that do no work (`free_roles.py`). Rollouts
have 512 tokens in the mean, evenly from 256 to 767, in groups of 8; as many are in flight as S = 1 admits: (S+1) P groups. Each run is a
process of its own.

    control   groups are admitted, their tokens recorded 64 at a time, and handed back whole; nobody looks at single tokens. Each chunk
              is recorded at its own turn of a virtual clock of 50 turns a second, as a real engine spreads them: only what falls due in
              the same one of its seconds, or with a finished group, shares a commit
    worker    the same groups through the real rollout worker, its engine client and one frame per tick, with one token per live rollout

The cost is CPU time, user and system, of all processes, without what the stand-ins took themselves (printed). It holds everything from
the first draw to the finished step: also batches, versions, metric lines, commits, sockets. Not in it: tokenizer (printed apart), rewards,
environments, models. Wall-clock is printed beside it; it is mostly the disk's, because a commit waits for the disk.

The bound is what it takes to put the same bytes into the same SQLite file and no more: per group one row of b1 bytes and its chunks in
nine rows, encoded ahead, with 64 groups to a commit:      floor = time to insert and commit / rollouts. Beside a figure stands the floor
with the CPU time of as many commits of one small row as there were:                   bound = floor + commits per rollout x one commit.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from bench import Report, Table, spread, start
from free_roles import Groups, settings
from measured_runs import Cost, Spec, measure

from slipstream.controller.ledger import SCHEMA
from slipstream.controller.run_folder import file_system
from slipstream.types import Assignment, Draw, encode

GROUP_SIZE = 8
TOKENS = 512
LEVELS = (16, 96, 1_008, 10_000)  # rollouts in flight: (S+1) P G = 16 P
ONE_PROCESS_US, LOCAL_US, FLAT = 100.0, 300.0, 1.2
WAYS = {"control": "groups", "worker": "worker"}
JUDGED = ("control",)  # by the targets: three rounds in the short form, too
ROUNDS = 3


def measured_steps(in_flight: int, short: bool) -> int:
    """Steps to measure: some thousand rollouts where few are in flight, two whole batches where many are."""
    per_step = in_flight // 2
    return max(2, -(-(200 if short else 2_000) // per_step))


def run_all(short: bool, folder: str) -> dict[tuple[str, str, int], list[Cost]]:
    """(way, launch, in flight) -> the costs of each round."""
    costs: dict[tuple[str, str, int], list[Cost]] = {}
    for turn in range(ROUNDS):
        for way, worker in WAYS.items():
            if short and turn and way not in JUDGED:
                continue
            for launch in ("one", "local"):
                for level in LEVELS:
                    if short and (level == 96 or (level == 10_000 and (way, launch) != ("control", "one"))):
                        continue
                    spec = Spec(level, measured_steps(level, short), worker, launch, GROUP_SIZE, TOKENS, folder)
                    costs.setdefault((way, launch, level), []).append(measure(spec))
    return costs


# ---- bounds --------------------------------------------------------------------------------------------------------------------------


def disk_commit_us(folder: str, commits: int = 200) -> tuple[float, float]:
    """(CPU, wall) of a transaction with one small row, durable."""
    with _ledger_file(folder) as db:
        cpu, wall = time.thread_time(), time.perf_counter()
        for number in range(commits):
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO events VALUES (?, 1, 0.0, 'x', ?)", (number, b"x" * 64))
            db.execute("COMMIT")
        return (time.thread_time() - cpu) / commits * 1e6, (time.perf_counter() - wall) / commits * 1e6


def floor_us(folder: str, groups: int = 256) -> tuple[float, int]:
    """(CPU time per rollout to write the bytes of a rollout and no more, bytes per rollout)."""
    config = settings(2 * GROUP_SIZE, GROUP_SIZE, TOKENS, 1)
    sampling = Groups(None, config, TOKENS)  # pyright: ignore[reportArgumentType]  # makes records, calls nobody
    draw = Draw(number=0, row=0, epoch=0, dataset="rows")
    task = Assignment(group_id=0, attempt=0, draw=draw, row={"prompt": "What is 1 + 1?", "answer": "2"}, min_version=0)
    sampling.take(task)
    chunks, whole = [], b""
    while not whole:
        due, finished = sampling.turn()
        chunks.append(encode(due))
        whole = encode(finished[0]) if finished else b""
    insert = "INSERT INTO {} (group_id, attempt, {}incarnation, seq, payload) VALUES (?, 0, {}1, 0, ?)"
    with _ledger_file(folder) as db:
        began = time.thread_time()
        for number in range(groups):
            if number % 64 == 0:
                db.execute("BEGIN IMMEDIATE")
            rows = [(number, at, payload) for at, payload in enumerate(chunks)]
            db.executemany(insert.format("prefixes", "sample, start, ", "0, ?, "), rows)
            db.execute(insert.format("groups", "purpose, origin, ", "'train', 'pulled', "), (number, whole))
            if number % 64 == 63:
                db.execute("COMMIT")
        spent = time.thread_time() - began
    return spent / (groups * GROUP_SIZE) * 1e6, (sum(map(len, chunks)) + len(whole)) // GROUP_SIZE


class _ledger_file:
    """An empty ledger with the writer's settings, for as long as it is looked at."""

    def __init__(self, folder: str):
        self._place = tempfile.TemporaryDirectory(prefix="slipstream-benchmark-", dir=folder)

    def __enter__(self) -> sqlite3.Connection:
        self._db = sqlite3.connect(Path(self._place.name) / "ledger.sqlite", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(SCHEMA)
        return self._db

    def __exit__(self, *_: object) -> None:
        self._db.close()
        self._place.cleanup()


def tokenizer_us() -> float:
    """What decoding one completion costs with the tokenizer of `builtin:tiny`."""
    from slipstream.models.tiny import make_tokenizer

    tokenizer, ids = make_tokenizer(), np.random.default_rng(0).integers(3, 60, TOKENS).tolist()
    tokenizer.decode(ids, skip_special_tokens=True)
    began = time.thread_time()
    for _ in range(50):
        tokenizer.decode(ids, skip_special_tokens=True)
    return (time.thread_time() - began) / 50 * 1e6


# ---- the report ----------------------------------------------------------------------------------------------------------------------


def rows_of(table: Table, costs: dict[tuple[str, str, int], list[Cost]], way: str, launch: str, bounds: dict[str, float]) -> None:
    """One row per level that was measured."""
    roles = ("controller",) if launch == "one" else ("controller", "trainer", "rollout", "engine")
    for level in LEVELS:
        found = costs.get((way, launch, level))
        if not found:
            continue
        middle = sorted(found, key=lambda cost: cost.cost_us)[len(found) // 2]
        parts = [f"{middle.per_rollout_us(middle.cpu_s[role]):.0f}" for role in roles] if launch == "local" else []
        bound = bounds["floor_us"] + middle.num_commits / middle.num_rollouts * bounds["commit_cpu_us"]
        table.rows.append(
            (
                f"{level:,}",
                spread([cost.cost_us for cost in found]),
                f"{bound:.0f}",
                *parts,
                f"{middle.per_rollout_us(middle.stand_in_s):.0f}",
                f"{middle.num_commits / middle.num_rollouts:.3f}",
                f"{middle.per_rollout_us(middle.commit_cpu_s):.0f}",
                f"{middle.wall_us:.0f}",
                f"{middle.per_rollout_us(middle.commit_wall_s):.0f}",
            )
        )


def cost_tables(report: Report, costs: dict[tuple[str, str, int], list[Cost]], bounds: dict[str, float]) -> None:
    ends = ("stand-ins, taken off", "commits", "CPU in commits", "wall", "of it in commits")
    roles = ("controller", "trainer", "worker", "engine")
    titles = {
        ("control", "one"): "Admission, hand-off, buffer and ledger in one process, µs per rollout",
        ("control", "local"): "The same through the local launcher's sockets, µs per rollout",
        ("worker", "one"): "With the real rollout worker and every single token, in one process, µs per rollout",
        ("worker", "local"): "The same through the local launcher's sockets, µs per rollout",
    }
    for (way, launch), title in titles.items():
        columns = ("in flight", "cost", "bound", *(roles if launch == "local" else ()), *ends)
        rows_of(report.table(title, columns), costs, way, launch, bounds)


def memory_table(report: Report, costs: dict[tuple[str, str, int], list[Cost]]) -> None:
    table = report.table("Memory, KB per rollout in flight", ("roles", *(f"{level:,}" for level in LEVELS[2:])))
    table.note = (
        "Resident memory at the end of the measured steps, less that before the first group, over the rollouts in flight. "
        f"The data of a finished rollout alone are {(TOKENS + 64) * 9 / 1e3:.1f} KB."
    )
    for name, way, launch, roles in (
        ("controller", "control", "local", ("controller",)),
        ("rollout worker", "worker", "local", ("rollout",)),
        ("all in one process", "worker", "one", ("controller",)),
    ):
        cells = []
        for level in LEVELS[2:]:
            found = costs.get((way, launch, level))
            grown = [sum(c.resident_bytes[r] - c.empty_bytes[r] for r in roles) / level / 1e3 for c in found or ()]
            cells.append(f"{statistics.median(grown):.1f}" if grown else "-")
        table.rows.append((name, *cells))


def targets(report: Report, costs: dict[tuple[str, str, int], list[Cost]]) -> None:
    for launch, what, wanted in (("one", "one process", ONE_PROCESS_US), ("local", "local launcher", LOCAL_US)):
        found = {level: [cost.cost_us for cost in c] for level in LEVELS if (c := costs.get(("control", launch, level)))}
        for level, rounds in found.items():
            report.at_most(f"cost per rollout, {what}, {level:,} in flight", rounds, wanted, " µs")
        rounds = zip(*found.values(), strict=True)
        report.at_most(f"{what}: highest cost over lowest", [max(levels) / min(levels) for levels in rounds], FLAT)


def bounds_table(report: Report, folder: str) -> dict[str, float]:
    floor, num_bytes = floor_us(folder)
    cpu, wall = disk_commit_us(folder)
    table = report.table("What bounds it", ("", "µs"))
    table.rows += [
        (f"the same {num_bytes:,} bytes per rollout put into SQLite and nothing else, CPU", f"{floor:.1f}"),
        ("one commit of one small row, CPU", f"{cpu:.0f}"),
        ("the same, wall", f"{wall:.0f}"),
        ("decoding 512 tokens with builtin:tiny's tokenizer (not in any figure here)", f"{tokenizer_us():.0f}"),
    ]
    table.note = (
        f"The ledger lies on {file_system(Path(folder).resolve())}. With few rollouts in flight few of them share a commit, a call, a turn "
        "of the event loop, and the fixed cost of a step, which then has a single group."
    )
    bounds = {"floor_us": floor, "bytes_per_rollout": num_bytes, "commit_cpu_us": cpu, "commit_wall_us": wall}
    report.data["bounds"] = bounds
    return bounds


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the run folders are made: their disk is measured too")

    report, options = start("overhead", __doc__.splitlines()[0], more)
    bounds = bounds_table(report, options.folder)
    costs = run_all(options.short, options.folder)
    cost_tables(report, costs, bounds)
    memory_table(report, costs)
    targets(report, costs)
    report.data["costs"] = {f"{way} {launch} {level}": [asdict(c) for c in found] for (way, launch, level), found in costs.items()}
    report.finish(options.json)


if __name__ == "__main__":
    main()
