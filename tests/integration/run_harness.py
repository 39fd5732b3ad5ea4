"""Whole runs in this process with the tiniest settings, and what their ledgers say of them."""

from __future__ import annotations

import gc
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from slipstream import train
from slipstream.config.load import load_tables
from slipstream.controller import events as ev
from slipstream.controller.accounts import Account, check_accounts
from slipstream.controller.buffer import make_batch
from slipstream.controller.ledger import LedgerReader
from slipstream.observe.jsonl import read_jsonl
from slipstream.run import Result
from slipstream.types import Batch, Group, Rollout

Tables = dict[str, Any]


def spread(completion: str) -> float:
    """A reward that differs among the rollouts of a group, and is a function of the text alone."""
    return (sum(map(ord, completion)) % 17) / 16.0


def tables(folder: Path, **changes: Tables | str) -> Tables:
    """The tiniest inline run; `changes` go on top, table by table."""
    base: Tables = {
        "launch": "inline",
        "run": {"folder": str(folder), "stop_grace_s": 0.0},
        "model": {"name": "builtin:tiny"},
        "data": {"train": "builtin:sort_digits"},
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "engine": {"slots": 16, "max_context": 64},
        "trainer": {"steps": 4, "groups_per_step": 2, "learning_rate": 1e-3},
        "checkpoint": {"every": 100},
        "ledger": {"keep": "all"},
    }
    return merged(base, changes)


def merged(base: Tables, changes: Tables) -> Tables:
    """`changes` on top of `base`, table by table."""
    return base | {name: {**base.get(name, {}), **change} if isinstance(change, dict) else change for name, change in changes.items()}


def deterministic(folder: Path, **changes: Tables | str) -> Tables:
    """The tiniest run that is a function of its file, evaluations and a checkpoint included."""
    base = tables(
        folder,
        run={"deterministic": True},
        data={"eval": "builtin:sort_digits:eval"},
        evaluation={"limit": 4, "every": 2},
        checkpoint={"every": 3},
    )
    return merged(base, changes)


REWARDS = """
def spread(completion):
    return (sum(map(ord, completion)) % 17) / 16.0
"""


def run_file(folder: Path, settings: Tables) -> Path:
    """A run file in `folder` with `spread` as its reward, for runs in processes of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps({**settings, "reward": [{"function": "rewards.py:spread"}]}))
    return path


def run(settings: Tables, *, reward: Callable[..., Any] = spread, **more: Any) -> Result:
    return train(load_tables(settings, reward_given=True), reward=reward, **more)


@dataclass(frozen=True, slots=True)
class Told:
    """What a finished run's ledger holds. Incarnations and durations aside, equal runs give equal ones."""

    versions: dict[int, str]  # version -> checksum, of the surviving run
    batches: dict[int, tuple]  # step -> its groups, token by token
    evaluations: dict[int, tuple]  # due version -> (version, checksum, items)
    groups: dict[int, Group]  # trained ones, as recorded
    account: Account


def sampled_with(story: Told) -> dict[int, set[int]]:
    """Step -> the versions that sampled its batch's tokens."""
    return {
        step: {s.version for g in ids for r in story.groups[g].rollouts for s in r.spans} for step, ids in story.account.batches.items()
    }


def told(folder: Path) -> Told:
    """Read a run's ledger; its accounts must close."""
    with LedgerReader.open(folder / "ledger.sqlite") as reader:
        account = check_accounts(reader)
        events = [event for *_, event in reader.live_events()]
        attempts = {e.group_id: e.attempt for e in events if isinstance(e, ev.GroupFinished)}
        groups = {g: reader.group(g, attempts[g]) for ids in account.batches.values() for g in ids}
        items = {(r.incarnation, r.number): r.items for r in reader.evaluations()}
        evaluations = {
            e.due: (e.version, e.checksum, tuple((i.row, i.rewards, i.completions, i.num_tokens) for i in items[e.incarnation, e.number]))
            for e in events
            if isinstance(e, ev.EvaluationFinished)
        }
    versions = {e.version: e.checksum for e in events if isinstance(e, ev.VersionPublished)}
    batches = {step: tuple(_tokens(groups[g]) for g in ids) for step, ids in account.batches.items()}
    return Told(versions, batches, evaluations, groups, account)


def _tokens(group: Group) -> tuple:
    return (
        group.group_id,
        group.draw.row,
        tuple(
            (
                r.token_ids.tobytes(),
                r.logprobs.tobytes(),
                r.loss_mask.tobytes(),
                _spans(r),
                None if r.prefill_version is None else r.prefill_version[1],
                r.stop_reason,
                r.reward,
            )
            for r in group.rollouts
        ),
    )


def _spans(rollout: Rollout) -> tuple:
    """(start, end, version, engine), of one version on both sides of a resume as one."""
    out: list[tuple] = []
    for span in rollout.spans:
        goes_on = bool(out) and out[-1][1:] == (span.start, span.version, span.engine_id)
        start = out.pop()[0] if goes_on else span.start
        out.append((start, span.end, span.version, span.engine_id))
    return tuple(out)


def recorded_batches(folder: Path) -> dict[int, Batch]:
    """The batches of a run that kept all its groups, as the trainer got them."""
    story = told(folder)
    with LedgerReader.open(folder / "ledger.sqlite") as reader:
        bounds = {e.group_id: e.bound for *_, e in reader.live_events() if isinstance(e, ev.Admitted)}
        rules = {e.step: e.rule for *_, e in reader.live_events() if isinstance(e, ev.BatchRecorded)}
    return {
        step: make_batch(step, [story.groups[g] for g in ids], [bounds[g] for g in ids], rules[step])[0]
        for step, ids in story.account.batches.items()
    }


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """The metric lines of steps, all incarnations."""
    return [line for line in read_jsonl(folder / "metrics.jsonl") if "eval_reward" not in line and "step" in line]


def all_checksums(folder: Path) -> dict[tuple[int, int], str]:
    """(incarnation, version) -> checksum, superseded ones included."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return {(i, v): c for i, v, c in db.execute("SELECT incarnation, version, checksum FROM versions")}


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    descriptors: tuple[str, ...]
    threads: tuple[str, ...]
    children: tuple[str, ...]
    temporary: tuple[str, ...]
    shared: tuple[str, ...]

    @classmethod
    def now(cls, temporary: Path) -> Held:
        gc.collect()
        names = []
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            except FileNotFoundError:  # the one that listed the folder
                continue
        children = [Path(f"/proc/self/task/{t}/children").read_text() for t in os.listdir("/proc/self/task")]
        return cls(
            tuple(sorted(name.split(":[")[0] for name in names)),
            tuple(sorted(thread.name for thread in threading.enumerate())),
            tuple(pid for text in children for pid in text.split()),
            tuple(sorted(os.listdir(temporary))),
            tuple(sorted(name for name in os.listdir("/dev/shm") if "slipstream" in name)),
        )
