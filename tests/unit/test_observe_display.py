"""What people see of a run: the panel, the plain lines, the report."""

import doctest
import io
import re

import pytest
from rich.console import Console

from slipstream.config import Config
from slipstream.controller import events as ev
from slipstream.controller.state import LiveGroup, RunState
from slipstream.observe import grid
from slipstream.observe import state as words
from slipstream.observe.account import account, print_account
from slipstream.observe.display import LiveDisplay, PlainDisplay, open_display, panel, step_text
from slipstream.observe.report import print_report
from slipstream.observe.samples import SamplesFile
from slipstream.observe.summary import summarize
from slipstream.types import EvalItem, EvalResult

LINE = {
    "step": 41,
    "version": 42,
    "incarnation": 1,
    "reward_mean": 0.8125,
    "staleness_mean": 0.613,
    "staleness_p99": 1,
    "staleness_max": 1,
    "staleness_bound": 2,
    "several_versions_fraction": 0.34,
    "trainer_idle_fraction": 0.123,
    "rollout_idle_fraction": 0.045,
    "generated_tokens_per_s": 2341.3,
    "trained_tokens_per_s": 987.1,
    "buffer_groups": 3,
    "slots_taken": 6,
    "slots": 8,
    "weight_sync_s": 0.0123,
    "entropy": 0.51234,
}


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def make_state(clock=None):
    return words.DisplayState.of(Config.model_validate({"trainer": {"steps": 100}}), "runs/run-1", clock or Clock())


def rendered(renderable, width):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_panel_shows_what_is_promised():
    clock = Clock()
    state = make_state(clock)
    state.on_step(LINE | {"version": 40})
    clock.time = 10.0
    state.on_step(LINE)
    state.on_evaluation({"version": 0, "eval_reward": 0.25})
    state.on_evaluation({"version": 25, "eval_reward": 0.61})
    text = rendered(panel(state, 120), 120)
    for expected in ("42/100", "0.812", "0.250 → 0.610", "mean 0.61", "p99 1", "max 1 (limit 1, bound 2)", "trainer 12 %", "rollout 4 %"):
        assert expected in text
    for expected in ("generated 2 341", "trained 987", "buffer 3 groups", "6/8", "weight sync 12 ms", "entropy 0.512"):
        assert expected in text
    assert "0:10 elapsed, about 4:50 left" in text  # 2 steps in 10 s, 58 to go


@pytest.mark.parametrize("width", [60, 80, 120])
def test_panel_fits_the_terminal(width):
    state = make_state()
    state.on_step(LINE)
    state.answer = ("a long prompt " * 20, "a long answer\n" * 20, 0.5)
    assert max(len(line) for line in rendered(panel(state, width), width).splitlines()) <= width


def test_panel_before_the_first_step_has_dashes_not_zeros():
    text = rendered(panel(make_state(), 100), 100)
    assert "mean –" in text and "0/100" in text and "left" not in text


def test_plain_display_prints_one_line_a_step():
    stream = io.StringIO()
    state = make_state()
    display = PlainDisplay(state, stream)
    for version in (1, 2, 3):
        state.on_step(LINE | {"version": version})
        display.step()
    assert [line.split(" | ")[0] for line in stream.getvalue().splitlines()] == ["step 1/100", "step 2/100", "step 3/100"]


def test_a_skipped_update_is_said():
    state = make_state()
    state.on_step(LINE | {"skipped": "non-finite gradient"})
    assert "update skipped: non-finite gradient" in step_text(state)


def test_waste_is_shown_by_cause_where_there_is_any():
    state = make_state()
    state.on_step(LINE)
    assert "wasted" not in step_text(state) and "waste" not in rendered(panel(state, 100), 100)
    state.on_step(LINE | {"wasted_tokens/not selected": 1200, "wasted_tokens/stale": 16})
    assert "wasted tokens: 1 200 not selected, 16 stale" in step_text(state)
    assert "tokens 1 200 not selected, 16 stale" in rendered(panel(state, 100), 100)


def test_display_is_live_only_on_a_terminal(monkeypatch):
    assert isinstance(open_display(make_state(), io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert isinstance(open_display(make_state(), terminal), LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(make_state(), terminal), PlainDisplay)


def test_live_display_draws_and_leaves_the_last_picture():
    terminal = io.StringIO()
    state = make_state()
    display = LiveDisplay(state, Console(file=terminal, force_terminal=True, width=100))
    display.start()
    try:
        display.note("resumed at step 3")
        state.on_step(LINE)
    finally:
        display.close()
    assert "resumed at step 3" in terminal.getvalue()
    assert "42/100" in terminal.getvalue()[terminal.getvalue().rindex("╭") :]


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "–"), (0.12345, "0.123"), (2341.3, "2 341"), (-0.5, "-0.500"), (1234567.0, "1 234 567")]
)
def test_number(value, expected):
    assert words.number(value) == expected


def test_small_words():
    assert words.duration(3725) == "1:02:05" and words.duration(59.6) == "1:00" and words.duration(None) == "–"
    assert words.percent(0.125) == "12 %" and words.milliseconds(0.0123) == "12 ms"
    assert words.one_line("a\n  b\n", 20) == "a ⏎ b" and words.one_line("abcdef", 4) == "abc…"
    assert words.sparkline([0, 1, 2]) == "▁▅█" or words.sparkline([0, 1, 2]) == "▁▄█"
    assert words.sparkline([0.5, 0.5]) == "▁▁" and words.sparkline([]) == ""


def finished_run():
    """The ledger's state of a run of 10 steps with 2 groups each, of which one was filtered and one is running."""
    state = RunState(run_id="r", incarnation=1, max_staleness=1, groups_per_step=2, window=1, group_size=4, next_draw=22, step=10)
    totals = state.totals
    totals.trained_groups, totals.trained_samples, totals.trained_tokens, totals.filtered = 20, 80, 700, 1
    totals.generated_tokens, totals.several_versions = 800, 9
    totals.staleness.update({0: 500, 1: 200})
    totals.wasted_tokens["zero variance"] = 40
    totals.active_s, totals.rollout_idle_s, totals.trainer_active_s, totals.trainer_wait_s = 20.0, 1.0, 16.0, 4.0
    state.live[21] = LiveGroup(21, row=0, epoch=0, position=21, bound=1, min_version=9)
    state.evaluations.results = [
        ev.EvaluationFinished(number=n, due=v, incarnation=1, version=v, checksum="", reward=r) for n, v, r in ((0, 0, 0.2), (1, 10, 0.8))
    ]
    state.evaluations.engine_s = 2.0
    return state


def test_summary_numbers():
    config = Config.model_validate({"trainer": {"steps": 10, "groups_per_step": 2}, "buffer": {"window": 1}})
    s = summarize(finished_run(), config, "runs/x", 30.0)
    promised = (
        "run_folder steps model_version eval_reward_first eval_reward_last trained_samples trained_samples_per_s generated_tokens_per_s "
        "trainer_idle_fraction rollout_idle_fraction evaluation_fraction staleness_mean staleness_max staleness_bound "
        "rollouts_with_several_versions wall_s"
    ).split()
    assert set(promised) <= s.keys()
    assert (s["eval_reward_first"], s["eval_reward_last"], s["trained_samples"], s["wall_s"]) == (0.2, 0.8, 80, 30.0)
    assert s["trained_samples_per_s"] == 4.0 and s["generated_tokens_per_s"] == 40.0
    assert s["trainer_idle_fraction"] == 0.25 and s["rollout_idle_fraction"] == 0.05 and s["evaluation_fraction"] == 0.1
    assert s["staleness_mean"] == pytest.approx(2 / 7) and s["staleness_max"] == 1 and s["staleness_bound"] == 1
    assert s["rollouts_with_several_versions"] == 9
    wide = {"trainer": {"groups_per_step": 2}, "buffer": {"window": 3}}
    limits = [
        summarize(finished_run(), Config.model_validate(wide | {"buffer": {"window": 3, "on_stale": how}}), "runs/x", 1.0)
        for how in ("mask_tokens", "keep")
    ]
    assert [numbers["staleness_limit"] for numbers in limits] == [1, 2]


def test_summary_of_a_run_without_a_step_has_none_not_zero():
    s = summarize(RunState(max_staleness=1), Config(), "runs/x", 1.0)
    for key in ("eval_reward_first", "trained_samples_per_s", "trainer_idle_fraction", "staleness_mean", "staleness_max"):
        assert s[key] is None


def test_account_explains_every_group():
    numbers = account(finished_run())
    assert numbers["groups"] == {
        "drawn": 22,
        "trained": 20,
        "filtered": 1,
        "dropped": {},
        "batched": 0,
        "finished": 0,
        "running": 1,
        "lost": 0,
    }
    console = Console(file=io.StringIO(), width=120)
    print_account(numbers, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert (
        "trained   20\nfiltered   1\nrunning    1\ndrawn     22  each is accounted for" in text
        and "rollouts with several versions: 9 of 80 trained" in text
    )
    assert "wasted: zero variance" in text and "█" in text


def test_account_sets_what_was_dropped_for_its_age_beside_what_was_trained():
    state = finished_run()
    state.totals.stale, state.totals.trained = ev.Tally(4, 40, 2, 0.5), ev.Tally(80, 480, 80, 40.0)
    state.totals.wasted_tokens["stale"] = 0  # of a batch that a resume took out again
    console = Console(file=io.StringIO(), width=120)
    print_account(account(state), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "dropped  trained\n" in text and "wasted: stale" not in text
    assert re.search(r"mean length in tokens +10\.00 +6\.00\nmean reward +0\.25 +0\.50", text)


def test_the_limit_that_is_shown_follows_a_lowered_one():
    config = Config.model_validate({"buffer": {"max_staleness": 3, "window": 9}, "trainer": {"groups_per_step": 2}})
    state = words.DisplayState.of(config, "runs/x")
    state.on_step(LINE | {"max_staleness": 2, "staleness_bound": 6})
    assert "(limit 2, bound 6)" in step_text(state)


def test_account_tells_a_lost_group():
    state = finished_run()
    state.next_draw += 1
    numbers = account(state)
    assert numbers["groups"]["lost"] == 1
    console = Console(file=io.StringIO(), width=120)
    print_account(numbers, console)
    assert "1 ARE NOT ACCOUNTED FOR" in console.file.getvalue()  # type: ignore[attr-defined]


def test_report_shows_the_same_prompts_before_and_after(tmp_path):
    file = SamplesFile(tmp_path, 1, describe_item=lambda row: f"sort {row}")
    for version, completion, reward in ((0, "4132", 0.0), (10, "1234", 1.0)):
        items = tuple(EvalItem(row=i, rewards=(reward,), completions=(completion,), num_tokens=(4,)) for i in range(5))
        file.write_evaluation(EvalResult(number=0, incarnation=1, version=version, checksum="", items=items, duration_s=1.0))
    stream = io.StringIO()
    config = Config.model_validate({"trainer": {"steps": 20, "groups_per_step": 2}})
    print_report(summarize(finished_run(), config, str(tmp_path), 30.0), stream)
    text = stream.getvalue()
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert "(bound 1); rollouts with several versions: 9" in text
    assert text.count("4132") == 2 and text.count("1234") == 2 and "sort 1" in text
    assert "0.200 → 0.800" in text and "40 generated, 5 % of them wasted, 35 trained" in text
    assert "stopped after 10 of 20 steps" in text and f"slipstream train --resume {tmp_path}" in text


def test_the_example_of_a_grid():
    result = doctest.testmod(grid)
    assert result.attempted == 1 and result.failed == 0
