"""The ledger file: what is committed survives, what is not is gone whole, readers do not disturb, old data goes in small pieces."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from controller_fakes import rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.controller import events as ev
from slipstream.controller import ledger as ledger_module
from slipstream.controller.ledger import DATA_TABLES, Ledger, LedgerReader
from slipstream.errors import LedgerError, RunFolderError
from slipstream.types import Draw, EvalResult, Group, PrefixChunk, SealedChunk, Span, StopReason, decode, encode, merge_chunks, seal


def admitted(group_id: int) -> ev.Admitted:
    return ev.Admitted(group_id=group_id, row=0, epoch=0, position=group_id, min_version=0, bound=1)


def finished(group_id: int) -> ev.GroupFinished:
    return ev.GroupFinished(group_id=group_id, attempt=0, rewards=(0.0, 1.0), oldest_version=0, newest_version=0, num_tokens=4)


def group(group_id: int) -> Group:
    draw = Draw(number=group_id, row=0, epoch=0, dataset="d")
    return Group(group_id=group_id, draw=draw, row={"q": 1}, rollouts=tuple(rollout(group_id, i, 0, 1, float(i)) for i in (0, 1)))


def chunk(start: int, n: int, sample: int = 0, stop: StopReason | None = None) -> SealedChunk:
    chunk = PrefixChunk(
        group_id=0,
        sample=sample,
        attempt=0,
        prompt_length=5,
        start=start,
        token_ids=np.arange(start, start + n, dtype=np.int32),
        logprobs=np.full(n, -1.0, np.float32),
        spans=(Span(5 + start, 5 + start + n, 1, start, "e"),) if n else (),
        stop_reason=stop,
    )
    return seal(chunk)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def events_of(path) -> list:
    with LedgerReader.open(path) as reader:
        return [event for *_, event in reader.live_events()]


def test_events_and_their_data_are_committed_together_or_not_at_all(path):
    ledger = Ledger.open(path)
    ledger.append(admitted(0), 1)
    ledger.commit()
    ledger.append(finished(0), 1)
    ledger.put(group(0), 1)
    assert events_of(path) == [admitted(0)], "a reader does not see what is not committed"
    ledger.abandon()
    assert ledger.last_seq == 1 and not ledger.has_group(0)
    ledger.append(finished(0), 1)
    ledger.put(group(0), 1)
    ledger.commit()
    ledger.close()
    with Ledger.open(path) as again:
        assert again.last_seq == 2 and encode(again.group(0, 0)) == encode(group(0))
        with pytest.raises(LedgerError, match="the data of group 7"):
            again.group(7, 0)


def test_it_is_set_up_to_survive_a_power_cut(path):
    with Ledger.open(path) as ledger:
        pragma = lambda name: ledger._one(f"PRAGMA {name}")  # noqa: E731
        assert (pragma("journal_mode"), pragma("synchronous")) == ("wal", 2)
        assert pragma("journal_size_limit") == ledger_module.JOURNAL_LIMIT_BYTES


def test_the_first_schema_holds_what_later_work_needs(path):
    with Ledger.open(path) as ledger:
        columns = {table: {row[1] for row in ledger._rows(f"PRAGMA table_info({table})")} for table in DATA_TABLES}
    assert {"policy", "purpose", "origin", "incarnation", "seq"} <= columns["groups"]
    for table in ("prefixes", "batches", "versions", "evaluations"):
        assert {"policy", "incarnation", "seq"} <= columns[table]


def test_prefixes_of_a_sample_come_back_as_one(path):
    with Ledger.open(path) as ledger:
        ledger.append(admitted(0), 1)
        for c in (chunk(0, 3), chunk(3, 2), chunk(0, 1, sample=1), chunk(5, 0, stop=StopReason.STOP)):
            ledger.put([c], 1)
        ledger.commit()
        first, second = ledger.prefixes(0, lambda sample: 0)
        assert (first.sample, first.start, first.token_ids.tolist(), first.stop_reason) == (0, 0, [0, 1, 2, 3, 4], StopReason.STOP)
        assert [(s.start, s.end, s.version) for s in first.spans] == [(5, 8, 0), (8, 10, 3)]
        assert (second.sample, len(second.token_ids)) == (1, 1)
        assert ledger.prefixes(0, lambda sample: 1) == ()


def test_chunks_of_one_event_share_a_row_per_group(path):
    with Ledger.open(path) as ledger:
        ledger.append(admitted(0), 1)
        ledger.put([chunk(0, 3), chunk(0, 2, sample=1)], 1)
        ledger.append(admitted(1), 1)
        ledger.put([chunk(3, 1), chunk(2, 4, sample=1)], 1)
        ledger.commit()
        assert ledger.count("prefixes") == 2
        assert [(p.sample, p.token_ids.tolist()) for p in ledger.prefixes(0, lambda sample: 0)] == [
            (0, [0, 1, 2, 3]),
            (1, [0, 1, 2, 3, 4, 5]),
        ]
        with pytest.raises(LedgerError, match="refuses a row"):
            ledger.put([chunk(3, 1)], 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=3), st.booleans()), min_size=1, max_size=5))
def test_a_row_holds_the_very_bytes_of_its_chunks(drawn):
    """`drawn`: for each chunk its tokens, the versions of its spans, whether it ends its rollout."""
    chunks = [
        PrefixChunk(
            group_id=0,
            sample=sample,
            attempt=0,
            prompt_length=5,
            start=0,
            token_ids=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -0.5, np.float32),
            spans=tuple(Span(5 + at, 6 + at, 1, version, "e") for at, version in enumerate(versions)),
            stop_reason=StopReason.LENGTH if ended else None,
        )
        for sample, (tokens, versions, ended) in enumerate(drawn)
    ]
    sealed = [seal(each) for each in chunks]
    facts = [(s.sample, s.num_tokens, s.oldest_version, s.ended) for s in sealed]
    assert facts == [(i, tokens, min(versions, default=-1), ended) for i, (tokens, versions, ended) in enumerate(drawn)]
    assert decode(encode(sealed), list[SealedChunk]) == sealed
    with Ledger.open(":memory:") as ledger:
        ledger.append(admitted(0), 1)
        ledger.put(sealed, 1)
        (row,) = ledger._rows("SELECT payload FROM prefixes")
        assert row == (encode(chunks) if len(chunks) > 1 else encode(chunks[0]),)
        assert [encode(p) for p in ledger.prefixes(0, lambda sample: 0)] == [encode(merge_chunks([each])) for each in chunks]


def test_a_deterministic_resume_supersedes_what_came_after_its_checkpoint(path):
    def started(incarnation: int, kind: str, from_seq: int = 0) -> ev.RunStarted:
        return ev.RunStarted(
            run_id="r",
            incarnation=incarnation,
            kind=kind,
            from_seq=from_seq,
            max_staleness=0,
            groups_per_step=1,
            window=1,
            group_size=1,
            seed=0,
            data_fingerprint="d",
        )

    with Ledger.open(path) as ledger:
        ledger.append(started(1, "fresh"), 1)  # 1
        for g in range(3):
            ledger.append(admitted(g), 1)  # 2, 3, 4
            ledger.put(group(g), 1)
        ledger.supersede(3)
        ledger.append(started(2, "deterministic_resume", 3), 2)  # 5
        ledger.append(admitted(2), 2)  # 6
        ledger.append(started(3, "resume"), 3)  # 7
        ledger.append(admitted(3), 3)  # 8
        ledger.append(started(4, "deterministic_resume", 6), 4)  # 9
        ledger.commit()
        assert [seq for seq, *_ in ledger.live_events()] == [1, 2, 3, 5, 6, 9]
        assert [seq for seq, *_ in ledger.live_events(until=5)] == [1, 2, 3, 5]
        assert ledger.live_ranges() == [(1, 3), (5, 6), (9, 9)]
        assert [ledger.has_group(g) for g in range(3)] == [True, True, False]


def test_pruning_goes_in_small_transactions_and_the_log_does_not_grow(path, monkeypatch):
    monkeypatch.setattr(ledger_module, "PRUNE_GROUPS", 8)
    ledger = Ledger.open(path)
    for g in range(100):
        ledger.append(admitted(g), 1)
        ledger.put(group(g), 1)
    ledger.commit()
    statements: list[str] = []
    ledger._db.set_trace_callback(statements.append)
    assert ledger.prune(below_group=60) == 60
    assert sum(s.startswith("DELETE") for s in statements) == 8
    assert [g for g in range(100) if ledger.has_group(g)] == list(range(60, 100))
    ledger.close()


def test_evaluations_are_kept_by_incarnation(path):
    with Ledger.open(path) as ledger:
        ledger.append(admitted(0), 1)
        for incarnation in (1, 2):
            result = EvalResult(number=0, incarnation=incarnation, version=0, checksum="x", items=(), duration_s=1.0)
            ledger.put(result, incarnation)
        ledger.commit()
        assert [r.incarnation for r in ledger.evaluations()] == [1, 2]


def test_a_file_that_is_not_a_ledger_is_refused(path):
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger.open(path)
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE t (x)")
    with pytest.raises(LedgerError, match="is not a ledger this version can read"):
        LedgerReader.open(path)


def test_reading_a_folder_without_a_ledger_says_so(tmp_path):
    with pytest.raises(RunFolderError, match=r"is .* a run folder"):
        LedgerReader.open(tmp_path / "ledger.sqlite")


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_ledger import admitted, finished, group
from slipstream.controller.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
for g in range(10**6):
    ledger.append(admitted(g), 1)
    ledger.append(finished(g), 1)
    ledger.put(group(g), 1)
    ledger.commit()
    print(g, flush=True)
    ledger.append(admitted(g), 1)  # never committed in this form
    ledger.abandon()
"""


@pytest.mark.parametrize("after", [1, 17])
def test_what_was_committed_survives_kill_9(path, after):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        last = int(line)
        if last >= after:
            process.send_signal(signal.SIGKILL)
            break
    rest = process.stdout.read().split()
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the fault fired"
    said = int(rest[-1]) if rest else last
    with Ledger.open(path) as ledger:
        stored = [event.group_id for *_, event in ledger.live_events() if isinstance(event, ev.GroupFinished)]
        assert stored == list(range(len(stored))) and len(stored) >= said + 1
        assert all(ledger.has_group(g) for g in stored), "an event without its data"
