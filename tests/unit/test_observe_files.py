"""metrics.jsonl and samples.jsonl: what is written is strict JSON, survives a crash, and reads back as the last account of the run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from slipstream.data.prompts import prompt_text
from slipstream.observe.jsonl import JsonLines, read_jsonl
from slipstream.observe.metrics import FILE_NAME, MetricsFile, read_metrics
from slipstream.observe.samples import SamplesFile, best, pick_rollouts, read_samples
from slipstream.types import Draw, EvalItem, EvalResult, Group, Rollout, Score, Span, StopReason


def step_line(version, incarnation=1, **values):
    return {"step": version - 1, "version": version, "incarnation": incarnation, **values}


def make_group(group_id, size=2, reward=0.5):
    rollouts = tuple(
        Rollout(
            group_id=group_id,
            sample=sample,
            token_ids=np.arange(4, dtype=np.int32),
            logprobs=np.zeros(4, dtype=np.float32),
            loss_mask=np.ones(4, dtype=bool),
            prompt_length=1,
            spans=(Span(1, 3, 1, 4, "engine"), Span(3, 4, 1, 5, "engine")),
            scores=(Score(name="exact", value=reward, parts={"length": 2.0}),),
            reward=reward,
            stop_reason=StopReason.STOP,
            completion=f"answer {group_id}/{sample}",
        )
        for sample in range(size)
    )
    draw = Draw(number=group_id, row=0, epoch=0, dataset="")
    return Group(group_id=group_id, draw=draw, row={}, prompt=[{"role": "user", "content": "Sort 21"}], rollouts=rollouts)


def evaluation(version, completions, incarnation=1):
    items = tuple(EvalItem(row=i, rewards=(1.0,), completions=(c,), num_tokens=(3,)) for i, c in enumerate(completions))
    return EvalResult(number=0, incarnation=incarnation, version=version, checksum="x", items=items, duration_s=0.5)


def test_values_are_strict_json(tmp_path):
    file = MetricsFile(tmp_path)
    file.write("step", step_line(1, loss=math.nan, ratio_max=math.inf, entropy=np.float32(0.5), skipped=None, note="text"))
    line = json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] is None and line["ratio_max"] is None
    assert line["non_finite"] == ["loss", "ratio_max"]  # so null is not mistaken for "not applicable"
    assert line["entropy"] == 0.5
    JsonLines(tmp_path / "values.jsonl").write(
        {"a": (np.int64(3), np.bool_(True), [np.float32(math.nan)]), 2: np.float64(1.5), "b": Path("x"), "c": StopReason.STOP, "d": "ü"}
    )
    text = (tmp_path / "values.jsonl").read_text(encoding="utf-8")
    assert json.loads(text) == {"a": [3, True, [None]], "2": 1.5, "b": "x", "c": "stop", "d": "ü"} and text.endswith("\n")


def test_each_line_is_on_disk_when_write_returns(tmp_path):
    file = MetricsFile(tmp_path)
    file.write("step", step_line(1))
    assert len(read_metrics(tmp_path).steps) == 1  # the writer is still open


def test_line_cut_short_by_a_crash_spoils_no_other(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b')
    lines = JsonLines(path)
    lines.write({"a": 3})
    assert [line["a"] for line in read_jsonl(path)] == [1, 3]


def test_readers_keep_the_last_incarnation(tmp_path):
    file = MetricsFile(tmp_path)
    for version in range(1, 6):
        file.write("step", step_line(version, reward_mean=0.1 * version))
    file.write("evaluation", {"version": 2, "incarnation": 1, "eval_reward": 0.2})
    file.write("evaluation", {"version": 5, "incarnation": 1, "eval_reward": 0.5})
    file.write("step", step_line(4, incarnation=2, reward_mean=0.9))  # resumed from the checkpoint of version 3
    metrics = read_metrics(tmp_path)
    assert metrics.series("reward_mean") == [(0, pytest.approx(0.1)), (1, pytest.approx(0.2)), (2, pytest.approx(0.3)), (3, 0.9)]
    assert [e["version"] for e in metrics.evaluations] == [2]  # version 5 was made by weights that are no more
    assert {(line["incarnation"], line["version"]) for line in metrics.superseded} == {(1, 4), (1, 5)}
    assert len(metrics.superseded) == 3


def test_evaluation_repeated_by_a_later_incarnation_replaces_the_first(tmp_path):
    file = MetricsFile(tmp_path)
    file.write("evaluation", {"version": 0, "incarnation": 1, "eval_reward": 0.2})
    file.write("evaluation", {"version": 0, "incarnation": 2, "eval_reward": 0.3})
    assert [e["eval_reward"] for e in read_metrics(tmp_path).evaluations] == [0.3]


def test_no_file_is_an_empty_run(tmp_path):
    assert read_metrics(tmp_path).steps == [] and read_samples(tmp_path) == []


def test_picked_rollouts_depend_on_the_step_alone_and_cover_groups():
    groups = tuple(make_group(i, size=4) for i in range(3))
    assert [(g.group_id, r.sample) for g, r in pick_rollouts(5, groups, 4)] == [(0, 1), (1, 1), (2, 1), (0, 2)]
    better = tuple(make_group(i, size=4, reward=0.0) for i in range(3))
    picked = [(g.group_id, r.sample) for g, r in pick_rollouts(5, better, 4)]
    assert picked == [(g.group_id, r.sample) for g, r in pick_rollouts(5, groups, 4)]
    assert len(pick_rollouts(0, groups, 100)) == 12 and pick_rollouts(0, (), 2) == []


def test_samples_round_trip(tmp_path):
    file = SamplesFile(tmp_path, 1, describe_item=lambda row: f"prompt {row}")
    file.write_step(7, 1, (make_group(3),))
    file.write_evaluation(evaluation(0, ["a", "b"]))
    (train,) = read_samples(tmp_path, kind="train")
    assert (train.step, train.group_id, train.prompt, train.completion) == (7, 3, "Sort 21", "answer 3/1")
    assert train.versions == (4, 5) and train.num_tokens == 3 and train.stop_reason == "stop"
    assert train.parts == {"exact": 0.5, "exact/length": 2.0}
    assert [(s.prompt, s.completion) for s in read_samples(tmp_path, kind="evaluation")] == [("prompt 0", "a"), ("prompt 1", "b")]


def test_samples_of_a_step_trained_twice_are_the_last_ones(tmp_path):
    file = SamplesFile(tmp_path, 1)
    file.write_step(7, 1, (make_group(3),))
    file.write_step(7, 2, (make_group(9),))
    assert [s.group_id for s in read_samples(tmp_path)] == [9]


def test_best_and_worst(tmp_path):
    file = SamplesFile(tmp_path, 3)
    file.write_step(0, 1, (make_group(0, reward=0.1), make_group(1, reward=0.9), make_group(2, reward=None)))
    samples = read_samples(tmp_path)
    assert [s.group_id for s in best(samples, 5)] == [1, 0]  # no reward is neither good nor bad
    assert [s.group_id for s in best(samples, 1, worst=True)] == [0]


def test_prompt_text():
    assert prompt_text([{"role": "user", "content": "2 + 2 ="}]) == "2 + 2 ="
    assert prompt_text([{"role": "system", "content": "Add."}, {"role": "user", "content": "2"}]) == "system: Add.\nuser: 2"
