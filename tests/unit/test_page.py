"""The progress page and the judge, with a fake clock."""

from __future__ import annotations

import math
import threading
import time

import pytest

from slipstream.launch.page import Judge, Page, RoleState
from slipstream.weight_sync.memory import MemoryFile

ROLES = ("rollout", "engine", "trainer")


@pytest.fixture
def memory():
    file = MemoryFile.create("page")
    yield file
    file.close()


def test_a_role_is_seen_through_another_mapping(memory):
    Page(memory, ROLES).role("engine").working("forward pass", 60.0, owed="32 sequences")
    state = Page(memory, ROLES).states()["engine"]
    assert (state.phase, state.owed, state.writes, state.idle) == ("forward pass", "32 sequences", 1, False)
    assert 59 < state.deadline - time.monotonic() <= 60


def test_roles_do_not_touch_each_other(memory):
    page = Page(memory, ROLES)
    page.role("rollout").working("scoring", 10)
    page.role("trainer").idle()
    states = page.states()
    assert states["engine"].writes == 0 and states["engine"].idle
    assert states["rollout"].phase == "scoring" and states["trainer"].idle


def test_long_text_is_cut_not_spilled(memory):
    page = Page(memory, ROLES)
    page.role("engine").working("e", 1, owed="o")
    page.role("rollout").working("ü" * 1000, 1, owed="x" * 1000)
    assert page.states()["engine"].phase == "e"
    assert set(page.states()["rollout"].owed) == {"x"}


def test_a_writer_that_died_amid_a_write_keeps_its_last_word(memory):
    page = Page(memory, ROLES)
    page.role("trainer").working("step", 5, owed="batch 3")
    before = page.states()["trainer"]
    memory.map(writable=True)[2 * 512] |= 1  # the counter is odd: a write is under way, for ever
    assert page.states()["trainer"] == before
    page.role("trainer").working("step", 5, owed="batch 4")
    assert page.states()["trainer"].owed == "batch 4"


def test_no_record_is_ever_seen_half_written(memory):
    page, stop = Page(memory, ROLES), threading.Event()
    role = page.role("engine")

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            role.working(str(n) * 20, 1.0, owed=str(n) * 20)

    role.working("1" * 20, 1.0, owed="1" * 20)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [Page(memory, ROLES).states()["engine"] for _ in range(2000)]
    finally:
        stop.set()
        writer.join()
    assert all(s.phase == s.owed for s in seen) and len({s.phase for s in seen}) > 1


def busy(deadline: float, writes: int = 1) -> dict[str, RoleState]:
    return {"trainer": RoleState(writes, deadline, "step", "batch 12"), "engine": RoleState(3, math.inf, "idle", "")}


def test_overdue_role_is_named_with_phase_and_owed_work():
    judge = Judge(interval_s=1.0)
    assert judge.judge(9.0, busy(10.0)) == []
    assert judge.judge(10.0, busy(10.0)) == []
    (late,) = judge.judge(10.4, busy(10.0))
    assert (late.role, late.phase, late.owed) == ("trainer", "step", "batch 12")
    assert late.overdue_s == pytest.approx(0.4)


def test_progress_in_time_is_never_judged():
    judge = Judge(interval_s=1.0)
    for second in range(1000):
        assert judge.judge(float(second), busy(second + 0.5, writes=second)) == []


def test_an_idle_role_is_never_judged():
    judge = Judge(interval_s=1.0)
    idle = {"engine": RoleState(1, math.inf, "idle", "")}
    assert all(judge.judge(float(t), idle) == [] for t in range(0, 10**6, 1000))


def test_overslept_time_is_forgiven():
    judge = Judge(interval_s=1.0, slack_s=0.5)
    assert judge.judge(5.0, busy(10.0)) == []
    assert judge.judge(3605.0, busy(10.0)) == [], "an hour of suspend is nobody's hang"
    for second in range(3606, 3609):
        assert judge.judge(float(second), busy(10.0)) == []
    (late,) = judge.judge(3609.0, busy(10.0))
    assert late.overdue_s == pytest.approx(3609 - 10 - (3600 - 1.5))


def test_forgiveness_ends_with_the_phase():
    judge = Judge(interval_s=1.0, slack_s=0.0)
    judge.judge(5.0, busy(10.0, writes=1))
    judge.judge(105.0, busy(10.0, writes=1))
    assert judge.judge(106.0, busy(107.0, writes=2)) == []
    assert judge.judge(107.0, busy(107.0, writes=2)) == []
    (late,) = judge.judge(108.0, busy(107.0, writes=2))
    assert late.overdue_s == pytest.approx(1.0)


def test_a_slow_judge_alone_hides_no_hang():
    """Judged every 10 s instead of every second: the rest is forgiven each time, yet a hang is still found."""
    judge = Judge(interval_s=1.0, slack_s=1.0)
    found = [t for t in range(0, 400, 10) if judge.judge(float(t), busy(10.0))]
    assert found and found[0] <= 60


def test_longest_overdue_first():
    states = {name: RoleState(1, deadline, name, "") for name, deadline in (("a", 5.0), ("b", 3.0), ("c", 4.0))}
    judge = Judge(interval_s=100.0)
    assert [late.role for late in judge.judge(10.0, states)] == ["b", "c", "a"]
