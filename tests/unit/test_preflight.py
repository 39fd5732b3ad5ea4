"""`slipstream validate`: what would stop a run is found before it, all at once, and is all that is printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.cli import preflight as module
from slipstream.cli.main import main
from slipstream.cli.preflight import Findings, check_run_folder, measure_prompts
from slipstream.config import Config, load_config
from slipstream.controller import run_folder
from slipstream.errors import ConfigError, DataError, ModelError, RunFolderError
from slipstream.weight_sync import weight_directory

RUN_FILE = """
[run]
folder = "out"
[model]
device = "cpu"
[data]
limit = 20
[engine]
max_context = 64
[rollout]
max_new_tokens = 6
[[reward]]
function = "exact"
"""


def read_last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def run_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_every_problem_at_once_and_no_settings_before_them(run_file, capsys):
    (run_file.parent / "train.jsonl").write_text("".join(f'{{"prompt": "{n} + 1 ="}}\n' for n in range(5)))
    changes = ["--data.train", "train.jsonl", "--engine.device", "cuda:99", "--engine.max_context", "4000"]
    assert main(["validate", str(run_file), *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for text in ("3 problems", "engine.device: device 'cuda:99'", "512 positions", "reward.0: 'exact' compares with the column 'answer'"):
        assert text in captured.err
    assert "valid" not in captured.err.replace("validate", "")


def test_problems_that_are_no_settings_are_exit_code_1_and_json_lists_them(run_file, capsys):
    assert main(["validate", str(run_file), "--trainer.device", "cuda:99", "--engine.max_context", "4000", "--json"]) == 1
    answer = read_last_json(capsys)
    assert answer["exit_code"] == 1 and len(answer["problems"]) == 2 and all(problem in answer["error"] for problem in answer["problems"])
    assert "valid" not in answer


def test_what_can_start_says_so(run_file, capsys):
    assert main(["validate", str(run_file), "--json"]) == 0
    answer = read_last_json(capsys)
    assert answer["valid"] and answer["context_tokens"] == 64 and 0 < answer["longest_prompt_tokens"] < 58
    assert list(run_file.parent.iterdir()) == [run_file]  # nothing is made


def test_weights_that_travel_as_files_must_fit_where_they_are_to_lie(run_file, monkeypatch, capsys):
    command = ["validate", str(run_file), "--weight_sync.transport", "files", "--weight_sync.directory", "not/made/yet"]
    assert main([*command, "--json"]) == 0
    needed = read_last_json(capsys)["weight_file_bytes"]
    assert main(command) == 0
    assert f"weights in flight take {needed / 2**30:.2f} GiB of disk" in " ".join(capsys.readouterr().out.split())
    usage = shutil.disk_usage(run_file.parent)
    monkeypatch.setattr(weight_directory.shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    monkeypatch.setattr(run_folder, "MIN_FREE_BYTES", 0)
    assert main(command) == 1
    assert f"weights in flight take {needed / 2**20:,.0f} MiB in {run_file.parent}, where" in capsys.readouterr().err
    assert list(run_file.parent.iterdir()) == [run_file]


def test_the_loss_is_expanded_and_ones_own_is_tried(run_file, tmp_path, capsys):
    assert main(["validate", str(run_file), "--loss.preset", "dapo", "--loss.correction", "['tis']"]) == 0
    out = capsys.readouterr().out
    assert "loss dapo: ppo_clip(clip_low = 0.2, clip_high = 0.28)" in out and "correction truncate(level = token, high = 2)" in out
    (tmp_path / "losses.py").write_text("def good(t):\n    return -t.advantage * t.logprob\n\n\ndef sums(t):\n    return t.logprob.sum()\n")
    assert main(["validate", str(run_file), "--loss.policy", "losses.py:good", "--json"]) == 0
    assert read_last_json(capsys)["loss"]["policy"] == f"{tmp_path}/losses.py:good"
    assert main(["validate", str(run_file), "--loss.policy", "losses.py:sums"]) == 2
    assert "one value per token (5,), not shape ()" in capsys.readouterr().err


def test_a_model_that_cannot_run_is_told_from_its_configuration(run_file, tmp_path, capsys):
    from slipstream.models.tiny import tiny_folder

    shutil.copytree(tiny_folder(), tmp_path / "chunked")
    config = json.loads((tmp_path / "chunked" / "config.json").read_text())
    (tmp_path / "chunked" / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 8}))
    assert main(["validate", str(run_file), "--model.name", "./chunked"]) == 1
    assert "chunked attention" in capsys.readouterr().err


def test_routing_of_a_dense_model_cannot_be_kept(run_file, capsys):
    assert main(["validate", str(run_file), "--rollout.keep_routing", "true"]) == 1
    assert "keep_routing = true, but LlamaForCausalLM has no experts" in capsys.readouterr().err
    assert main(["validate", str(run_file), "--rollout.keep_routing", "false"]) == 0


def test_frozen_models_are_named_measured_and_must_have_the_same_tokens(run_file, tmp_path, capsys):
    from slipstream.models.tiny import tiny_folder

    shutil.copytree(tiny_folder(), tmp_path / "teacher")
    loss = ["--loss.kl_coefficient", "0.1", "--loss.teacher", "./teacher"]
    assert main(["validate", str(run_file), *loss, "--json"]) == 0
    answer = read_last_json(capsys)
    assert answer["frozen_models"] == [
        "loss.reference: the start model, 0.1 x k3 in the loss, read by the logprob stage, a process of its own",
        f"loss.teacher: {tmp_path}/teacher, 1 x sampled KL, read by the logprob stage, a process of its own",
    ]
    assert answer["memory_bytes"]["frozen models"] > 2 * (tmp_path / "teacher" / "model.safetensors").stat().st_size
    assert main(["validate", str(run_file), "--loss.teacher", "./teacher", "--loss.teacher_kl", "full", "--launch", "inline"]) == 0
    assert "loss.teacher: " in (out := capsys.readouterr().out) and "held by the trainer, which compares every logit" in out
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    assert main(["validate", str(run_file), *loss]) == 1
    assert "loss.teacher = " in (error := capsys.readouterr().err) and "has 32 positions, but a rollout may have 64 tokens" in error


def test_tools_load_and_stand_in_the_measured_prompts(run_file, capsys):
    (run_file.parent / "tools.py").write_text('def add(a: int, b: int) -> int:\n    """Add two numbers."""\n    return a + b\n')
    tools = ["--rollout.environment", "tools", "--rollout.max_turns", "2", "--engine.max_context", "512"]
    assert main(["validate", str(run_file), "--engine.max_context", "512", "--json"]) == 0
    plain = read_last_json(capsys)["longest_prompt_tokens"]
    assert main(["validate", str(run_file), *tools, "--rollout.tools", '["tools.py:add"]', "--json"]) == 0
    assert read_last_json(capsys)["longest_prompt_tokens"] > plain + len("Add two numbers.")
    assert main(["validate", str(run_file), *tools, "--rollout.tools", '["tools.py:subtract"]']) == 2
    assert "has no function 'subtract'; it has: add" in capsys.readouterr().err


def test_the_place_of_the_run_folder_is_tried(tmp_path, monkeypatch):
    def config(folder: Path) -> Config:
        return Config.model_validate({"run": {"folder": str(folder)}})

    check_run_folder(config(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / run_folder.LEDGER).touch()
    with pytest.raises(RunFolderError, match="already holds a run; resume it with --resume"):
        check_run_folder(config(tmp_path / "old"))
    check_run_folder(config(tmp_path / "old"), resumes=True)
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="a part of the path is a file"):
        check_run_folder(config(tmp_path / "file" / "run"))
    monkeypatch.setattr(run_folder, "file_system", lambda path: "nfs4")
    with pytest.raises(RunFolderError, match=r"network file system \(nfs4\)"):
        check_run_folder(config(tmp_path / "run"))


class Lengths:
    """Renders a prompt to as many tokens as it has characters; up to 5 fit."""

    def prompt(self, messages, max_new_tokens, tools):
        text = messages[0]["content"]
        if text == "no template":
            raise ModelError("the chat template raises")
        if len(text) > 5:
            raise DataError(f"prompt of {len(text)} tokens")
        return np.zeros(len(text), np.int32)


def measured(*prompts: str | None) -> tuple[int, Findings]:
    found, data = Findings(), SimpleNamespace(train=[{"prompt": prompt} for prompt in prompts], eval=[])
    return measure_prompts(Config(), data, Lengths(), (), found), found  # type: ignore[arg-type]


def test_prompts_that_would_be_skipped_are_noted_and_all_of_them_are_a_problem():
    longest, found = measured("abc", "abcdef", None, "no template", "abcd")
    assert longest == 4 and found.problems == []
    assert (
        len(found.notes) == 1 and "data.train: 3 of 5 prompts cannot be used" in found.notes[0] and "row 2: prompt of 6" in found.notes[0]
    )
    with pytest.raises(DataError, match=r"data\.train: no prompt fits or can be rendered, e\.g\. row 1: prompt of 6 tokens"):
        measured("abcdef", "abcdefg")


def test_a_check_that_fails_leaves_the_others_to_go_on():
    found = Findings()
    with found.collect("here: "):
        raise ConfigError(["one", "two"])
    with found.collect("there: "):
        raise ModelError("three")
    assert [str(problem) for problem in found.problems][1] == "there: three"
    assert found.problems[0].problems == ["here: one", "here: two"]  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), found.collect():
        raise ZeroDivisionError  # a bug of ours is none of these


def test_a_run_folder_given_to_validate_is_not_taken_for_a_new_run(run_file, monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(module, "preflight", lambda loaded, resumes: seen.append(resumes) or Findings(problems=[DataError("stop here")]))
    (tmp_path / "run").mkdir()
    shutil.copy(run_file, tmp_path / "run" / "config.toml")
    assert main(["validate", str(tmp_path / "run")]) == main(["validate", str(run_file)]) == 1
    assert seen == [True, False] and "stop here" in capsys.readouterr().err
    assert load_config([tmp_path / "run"]).config.reward
