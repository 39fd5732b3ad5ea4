"""The ledger: one SQLite file per run, a write-ahead log of events with the data that belongs to them.

    events       what happened, in order; the run's state is their fold
    incarnations index of the RunStarted events: which stretch of the log is alive
    groups       the records of finished groups, as the bytes that travel on the wire
    prefixes     chunks of running rollouts, in the bytes they came in: those of one group and event in one row, under the key of its first
    batches, evaluations, versions, checkpoints

An event and its data are committed together: `append` and `put` collect in one transaction, `commit` makes it durable (WAL,
synchronous=FULL). A crash loses at most what was not committed, and always a suffix. Every data row carries the sequence number of its
event, so "the ledger as of event n" is a query. Only the controller writes, under the run folder's lock; readers take short transactions.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from slipstream.controller import events as ev
from slipstream.errors import LedgerError, RunFolderError
from slipstream.types import EvalResult, Group, PrefixChunk, SealedChunk, decode, encode, merge_chunks

APPLICATION_ID = 0x736C7374  # "slst"
SCHEMA_VERSION = 1
JOURNAL_LIMIT_BYTES = 64 << 20
PRUNE_GROUPS = 64  # per transaction: one big delete would grow the WAL by all it deletes

SCHEMA = """
CREATE TABLE events (seq INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL,
    payload BLOB NOT NULL);
CREATE TABLE incarnations (incarnation INTEGER PRIMARY KEY, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    from_step INTEGER NOT NULL, from_seq INTEGER NOT NULL);
CREATE TABLE groups (group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, policy TEXT NOT NULL DEFAULT 'main', purpose TEXT NOT NULL,
    origin TEXT NOT NULL, incarnation INTEGER NOT NULL, seq INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (group_id, attempt, policy));
CREATE TABLE prefixes (group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, sample INTEGER NOT NULL, start INTEGER NOT NULL,
    policy TEXT NOT NULL DEFAULT 'main', incarnation INTEGER NOT NULL, seq INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (group_id, attempt, sample, start, policy));
CREATE TABLE batches (step INTEGER NOT NULL, policy TEXT NOT NULL DEFAULT 'main', incarnation INTEGER NOT NULL, seq INTEGER NOT NULL,
    payload BLOB NOT NULL, PRIMARY KEY (step, policy));
CREATE TABLE evaluations (incarnation INTEGER NOT NULL, number INTEGER NOT NULL, policy TEXT NOT NULL DEFAULT 'main',
    version INTEGER NOT NULL, seq INTEGER NOT NULL, payload BLOB NOT NULL, PRIMARY KEY (incarnation, number, policy));
CREATE TABLE versions (incarnation INTEGER NOT NULL, version INTEGER NOT NULL, policy TEXT NOT NULL DEFAULT 'main',
    checksum TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (incarnation, version, policy));
CREATE TABLE checkpoints (step INTEGER NOT NULL, incarnation INTEGER NOT NULL, ledger_seq INTEGER NOT NULL, checksum TEXT NOT NULL,
    seq INTEGER NOT NULL, PRIMARY KEY (step, incarnation));
"""
_CHUNKS: Any = PrefixChunk | list[PrefixChunk]  # what a row of prefixes holds
_group_id = attrgetter("group_id")
_INSERT_PREFIXES = "INSERT INTO prefixes (group_id, attempt, sample, start, incarnation, seq, payload) VALUES (?, ?, ?, ?, ?, ?, ?)"
DATA_TABLES = ("groups", "prefixes", "batches", "evaluations", "versions", "checkpoints")


class LedgerReader:
    """Queries on a ledger. Each is one short transaction, so a reader never holds up the writer's log."""

    def __init__(self, connection: sqlite3.Connection, path: str):
        self._db, self.path = connection, path
        with self._errors():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            application = self._db.execute("PRAGMA application_id").fetchone()[0]
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise LedgerError(
                f"{path} is not a ledger this version can read (application {application:#x}, schema {version}, expected {SCHEMA_VERSION})"
            )

    @classmethod
    def open(cls, path: Path) -> LedgerReader:
        """Open an existing ledger for reading, also while a run writes it."""
        if not path.is_file():
            raise RunFolderError(f"there is no ledger {path}: is {path.parent} a run folder?")
        still = "" if os.access(path.parent, os.W_OK) else "&immutable=1"  # a reader of a WAL needs to write beside it
        with storage_errors(str(path)):
            return cls(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{still}", uri=True, isolation_level=None), str(path))

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- events

    @property
    def last_seq(self) -> int:
        return self._one("SELECT coalesce(max(seq), 0) FROM events")

    @property
    def last_incarnation(self) -> int:
        return self._one("SELECT coalesce(max(incarnation), 0) FROM incarnations")

    @property
    def last_start(self) -> ev.RunStarted:
        """The newest incarnation's first event."""
        seq = self._one("SELECT max(seq) FROM incarnations")
        event = ev.decode_event(self._one("SELECT payload FROM events WHERE seq = ?", seq))
        assert isinstance(event, ev.RunStarted)
        return event

    @property
    def last_rewind_seq(self) -> int:
        """The newest rewind that counts; 0 where there is none."""
        rewinds = [seq for (seq,) in self._rows("SELECT seq FROM incarnations WHERE kind = 'rewind'")]
        ranges = self.live_ranges()
        return max((seq for seq in rewinds if any(first <= seq <= last for first, last in ranges)), default=0)

    def live_ranges(self, until: int | None = None) -> list[tuple[int, int]]:
        """Ascending (first, last) sequence numbers of the events that count, `until` included at most.

        A deterministic resume goes on from the event that its checkpoint contains: everything between it and that resume is superseded.
        """
        ranges: list[tuple[int, int]] = []
        last = self.last_seq if until is None else until
        for seq, kind, from_seq in self._rows("SELECT seq, kind, from_seq FROM incarnations ORDER BY seq DESC"):
            if seq > last:
                continue
            if kind == "deterministic_resume":
                ranges.append((seq, last))
                last = from_seq
        return [*([(1, last)] if last >= 1 else []), *reversed(ranges)]

    def live_events(self, until: int | None = None) -> Iterator[tuple[int, int, float, ev.Event]]:
        """(seq, incarnation, time, event) of the events that count, in order."""
        for first, last in self.live_ranges(until):
            while first <= last:
                rows = self._rows(
                    "SELECT seq, incarnation, time, payload FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq LIMIT 4096", first, last
                )
                for seq, incarnation, stamp, payload in rows:
                    yield seq, incarnation, stamp, ev.decode_event(payload)
                if not rows:
                    return
                first = rows[-1][0] + 1

    # -- data

    def group(self, group_id: int, attempt: int) -> Group:
        payload = self._one("SELECT payload FROM groups WHERE group_id = ? AND attempt = ?", group_id, attempt)
        if payload is None:
            raise LedgerError(f"{self.path}: the data of group {group_id} (attempt {attempt}) is gone")
        return decode(payload, Group)

    def has_group(self, group_id: int) -> bool:
        return self._one("SELECT count(*) FROM groups WHERE group_id = ?", group_id) > 0

    def prefixes(self, group_id: int, attempt_of: Callable[[int], int]) -> tuple[PrefixChunk, ...]:
        """The recorded prefix of each sample that has one, merged. `attempt_of(sample)` is the attempt that runs; other chunks are dead."""
        samples: dict[int, list[PrefixChunk]] = {}
        for (payload,) in self._rows("SELECT payload FROM prefixes WHERE group_id = ?", group_id):
            row = decode(payload, _CHUNKS)
            for chunk in row if isinstance(row, list) else (row,):
                if chunk.attempt == attempt_of(chunk.sample):
                    samples.setdefault(chunk.sample, []).append(chunk)
        return tuple(merge_chunks(chunks) for _, chunks in sorted(samples.items()))

    def batch(self, step: int) -> ev.BatchRecorded | None:
        payload = self._one("SELECT payload FROM batches WHERE step = ?", step)
        event = None if payload is None else ev.decode_event(payload)
        assert event is None or isinstance(event, ev.BatchRecorded)
        return event

    def evaluations(self) -> list[EvalResult]:
        """All results, superseded ones included, in the order they came."""
        return [decode(p, EvalResult) for (p,) in self._rows("SELECT payload FROM evaluations ORDER BY seq")]

    def version_checksum(self, incarnation: int, version: int) -> str | None:
        return self._one("SELECT checksum FROM versions WHERE incarnation = ? AND version = ?", incarnation, version)

    def count(self, table: str) -> int:
        assert table in (*DATA_TABLES, "events", "incarnations")
        return self._one(f"SELECT count(*) FROM {table}")

    def _rows(self, sql: str, *values: object) -> list[tuple]:
        with self._errors():
            return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, *values: object) -> Any:
        rows = self._rows(sql, *values)
        return rows[0][0] if rows else None

    def _errors(self):
        return storage_errors(self.path)


class Ledger(LedgerReader):
    """The writer. One per run folder, under its lock."""

    def __init__(self, connection: sqlite3.Connection, path: str):
        super().__init__(connection, path)
        self._seq = super().last_seq

    @classmethod
    def open(cls, path: Path | str) -> Ledger:
        """Open the ledger, or create an empty one. ":memory:" is a ledger without a file, for tests."""
        with storage_errors(str(path)):
            db = sqlite3.connect(path, isolation_level=None)
            mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal" and str(path) != ":memory:":
                raise RunFolderError(f"{path}: SQLite cannot use its write-ahead log here (journal mode {mode}); use a local disk")
            db.execute("PRAGMA synchronous = FULL")
            db.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
            empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if empty and db.execute("PRAGMA user_version").fetchone()[0] == 0:
                db.executescript(
                    f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            return cls(db, str(path))

    @property
    def last_seq(self) -> int:
        """The newest event's sequence number, committed or not."""
        return self._seq

    def append(self, event: ev.Event, incarnation: int) -> int:
        """Add the event to the open transaction; its sequence number. Data put after it belongs to it."""
        self._begin()
        seq = self._seq + 1
        kind = type(event).__struct_config__.tag
        self._write("INSERT INTO events VALUES (?, ?, ?, ?, ?)", seq, incarnation, time.time(), kind, ev.encode_event(event))
        self._seq = seq
        self._index(event, incarnation)
        return seq

    def _index(self, event: ev.Event, incarnation: int) -> None:
        """The rows that make some events quick to find."""
        common = {"incarnation": incarnation, "seq": self._seq}
        match event:
            case ev.RunStarted():
                self._replace("incarnations", common | {"kind": event.kind, "from_step": event.from_step, "from_seq": event.from_seq})
            case ev.BatchRecorded():
                self._replace("batches", common | {"step": event.step, "policy": event.policy, "payload": ev.encode_event(event)})
            case ev.VersionPublished():
                self._replace("versions", common | {"version": event.version, "policy": event.policy, "checksum": event.checksum})
            case ev.CheckpointCommitted(point=point):
                row = {"step": point.step, "ledger_seq": point.ledger_seq, "checksum": event.weights_checksum}
                self._replace("checkpoints", common | row)

    def put(self, data: Group | Sequence[SealedChunk] | EvalResult, incarnation: int) -> None:
        """Add the data of the event just appended, as the bytes that travel on the wire. Chunks come in order of group."""
        common = {"incarnation": incarnation, "seq": self._seq}
        if isinstance(data, Group):
            key = {"group_id": data.group_id, "attempt": data.attempt, "purpose": data.purpose.value, "origin": data.origin}
            self._replace("groups", key | common | {"payload": encode(data)})
        elif isinstance(data, EvalResult):
            self._replace("evaluations", {"number": data.number, "version": data.version} | common | {"payload": encode(data)})
        else:
            rows = [
                (c.group_id, c.attempt, c.sample, c.start, incarnation, self._seq, _joined([c, *more]) if more else c.data)
                for c, *more in (chunks for _, chunks in groupby(data, key=_group_id))
            ]
            with self._errors():
                self._db.executemany(_INSERT_PREFIXES, rows)

    def commit(self) -> None:
        """Make everything since the last commit durable. Nothing to do is free."""
        if self._db.in_transaction:
            self._write("COMMIT")

    def abandon(self) -> None:
        """Throw away what was not committed, as a crash would."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._seq = super().last_seq

    def supersede(self, after_seq: int) -> None:
        """Delete the data of events after this one (they stay in the log, but no longer count)."""
        self._begin()
        for table in ("groups", "prefixes", "batches"):
            self._write(f"DELETE FROM {table} WHERE seq > ?", after_seq)

    def forget_batches(self, from_step: int) -> None:
        """A rewind: batches from this step on are no more."""
        self._begin()
        self._write("DELETE FROM batches WHERE step >= ?", from_step)

    def prune(self, below_group: int) -> int:
        """Delete the data of all groups below this id, in small transactions; how many rows went."""
        self.commit()
        deleted = 0
        for table in ("groups", "prefixes"):
            lowest = self._one(f"SELECT min(group_id) FROM {table}")
            while lowest is not None and lowest < below_group:
                upper = min(below_group, lowest + PRUNE_GROUPS)
                with self._errors():
                    deleted += self._db.execute(f"DELETE FROM {table} WHERE group_id < ?", (upper,)).rowcount
                lowest = self._one(f"SELECT min(group_id) FROM {table}")
        return deleted

    def close(self) -> None:
        self.commit()
        super().close()

    def _begin(self) -> None:
        if not self._db.in_transaction:
            self._write("BEGIN IMMEDIATE")

    def _replace(self, table: str, row: dict[str, Any]) -> None:
        self._write(f"INSERT OR REPLACE INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values())

    def _write(self, sql: str, *values: object) -> None:
        try:
            self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise translate(error, self.path) from error


def _joined(chunks: list[SealedChunk]) -> bytes:
    """The bytes of the list of the chunks that are sealed in these."""
    return encode([msgspec.Raw(chunk.data) for chunk in chunks])


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """SQLite's complaints in our vocabulary."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error


def translate(error: sqlite3.Error, path: str) -> RunFolderError | LedgerError:
    """What SQLite says, as what a person can do about it."""
    text = str(error)
    if not isinstance(error, sqlite3.OperationalError):
        if isinstance(error, sqlite3.IntegrityError):
            return LedgerError(f"{path} refuses a row: {text}")
        return LedgerError(f"{path} is damaged ({text}); restore it from a copy or start a new run")
    if "full" in text:
        return RunFolderError(f"{path}: the disk is full; free some space, then resume the run")
    if "readonly" in text or "read-only" in text or "unable to open" in text:
        return RunFolderError(f"{path} cannot be written ({text}); check the permissions of the run folder")
    if "locked" in text or "I/O" in text:
        return RunFolderError(f"{path}: {text}")
    return LedgerError(f"{path}: {text}")
