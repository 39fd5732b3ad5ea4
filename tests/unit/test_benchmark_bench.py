"""What all benchmarks share: verdicts beside their scatter, figures as text, the recorded command, and the page made of records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from bench import Report, Table, alternate, paired_ratio, paired_ratios, recorded_options, spread
from report import fill


def test_a_target_is_judged_by_the_median_and_says_where_the_rounds_disagree() -> None:
    report = Report("some", short=True)
    report.at_least("speed", [2.9, 3.2, 3.1], 3, "x")
    report.at_least("speed", [2.9, 2.7, 3.1], 3, "x")
    report.at_most("time", [1.0, 2.0, 1.5], 2, " s")
    report.at_most("time", 2.5, 2, " s")
    assert [target.verdict() for target in report.targets] == [
        "reached, within the scatter",
        "missed, within the scatter",
        "reached",
        "missed",
    ]
    assert [target.measured for target in report.targets] == ["3.1 [2.9, 3.2]x", "2.9 [2.7, 3.1]x", "1.5 [1, 2] s", "2.5 s"]


def test_ratios_are_those_of_each_round() -> None:
    assert paired_ratios([2, 6, 9], [1, 2, 9]) == [2, 3, 1]
    assert paired_ratio([2, 6, 9], [1, 2, 9]) == 2


def test_figures_have_three_digits_or_are_whole() -> None:
    assert spread([2783.4, 999.7, 12_345_678.0]) == "2,783 [1,000, 12,345,678]"
    assert spread([0.12345]) == "0.123"
    assert spread([999.4]) == "999"


def test_the_order_of_the_ways_turns() -> None:
    seen: list[str] = []
    alternate({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 2)
    assert "".join(seen) == "abba"


def test_the_recorded_command_is_what_was_asked_for_without_where_it_was_written() -> None:
    assert recorded_options(["--short", "--json", "x.json", "--cases", "long", "--json=y"]) == ["--short", "--cases", "long"]


def test_a_page_lists_what_was_missed_and_what_was_not_measured(tmp_path: Path) -> None:
    report = Report("first", short=True, options=["--short", "--rounds", "3"])
    report.tables.append(Table("Some figures", ("what", "figure"), [("a", "1")]))
    report.at_least("speed", [1.0, 2.5, 1.5], 2, "x")
    report.at_least("share", 0.9, 0.5)
    report.finish(tmp_path / "first.json")
    page = "<!-- figures: missed -->\n<!-- end -->\n<!-- figures: first -->\nold\n<!-- end -->\n<!-- figures: second -->\n<!-- end -->\n"
    summary, first, second = fill(page, tmp_path).split("<!-- end -->")[:3]
    assert "| first | speed | at least 2x | 1.5 [1, 2.5]x | missed, within the scatter |" in summary
    assert "share" not in summary and "Not measured yet: second." in summary
    assert "`python benchmarks/first.py --short --rounds 3`" in first and "old" not in first
    assert "Not measured yet." in second
    record = json.loads((tmp_path / "first.json").read_text())
    assert {"load_before", "load_after", "torch", "transformers"} <= record["machine"].keys()
    assert fill(fill(page, tmp_path), tmp_path) == fill(page, tmp_path)


def test_targets_of_another_machine_stand_beside_those_of_the_first(tmp_path: Path) -> None:
    for folder, speed, more in ((tmp_path, 2.5, {"one": 1.0}), (tmp_path / "other", 1.5, {"two": 2.0})):
        folder.mkdir(exist_ok=True)
        report = Report("first", short=True)
        report.at_least("speed", speed, 2, "x")
        for what, value in more.items():
            report.at_least(what, value, 1)
        report.finish(folder / "first.json")
    page = fill("<!-- figures: missed -->\n<!-- end -->\n<!-- figures: other -->\nold\n<!-- end -->\n", tmp_path)
    assert "| first | speed | at least 2x | 2.5x | 1.5x | **missed** |" in page and "| first | two | at least 1 | - | 2 | reached |" in page
    assert "old" not in page and "one" not in page and "Not measured yet" not in page
    assert fill(page, tmp_path) == page
