"""The command line without a model: arguments, messages, exit codes, and the verbs that only read or write files."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.cli import main as cli
from slipstream.cli.arguments import packaged_recipe, split_overrides
from slipstream.cli.export import refuse_occupied
from slipstream.cli.target import find_target, sampling_of
from slipstream.cli.train import NEWEST, where_to_resume
from slipstream.cli.weights import checkpoint_folder, kept_checkpoints
from slipstream.config import Config
from slipstream.config.load import load_config
from slipstream.config.save import save_config
from slipstream.controller import events as ev
from slipstream.controller.ledger import Ledger
from slipstream.errors import CheckpointError, ConfigError, DataError, ResumeError, SlipstreamError
from slipstream.observe.samples import SamplesFile
from slipstream.types import Draw, Group, Rollout, StopReason

RUN_FILE = '[run]\nname = "task"\n[[reward]]\nfunction = "exact"\n'


def make_run_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    save_config(Config.model_validate({"run": {"name": "task"}, "reward": [{"function": "exact"}]}), path / "config.toml")
    return path


# ---- arguments ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "own", "overrides"),
    [
        (["run.toml", "--trainer.steps", "5"], ["run.toml"], ["--trainer.steps", "5"]),
        (["--trainer.learning-rate=1e-3", "run.toml"], ["run.toml"], ["--trainer.learning-rate=1e-3"]),
        (["--run.deterministic", "run.toml", "over.toml"], ["run.toml", "over.toml"], ["--run.deterministic"]),
        (["--run.deterministic", "true", "run.toml"], ["run.toml"], ["--run.deterministic", "true"]),
        (["--no-run.deterministic", "run.toml"], ["run.toml"], ["--no-run.deterministic"]),
        (["run.toml", "--launch", "inline", "--json"], ["run.toml", "--json"], ["--launch", "inline"]),
        (["run.toml", "--evaluation.temperature", "-1"], ["run.toml"], ["--evaluation.temperature", "-1"]),
        (["run.toml", "--reward.0.weight", "2"], ["run.toml"], ["--reward.0.weight", "2"]),
        (["run.toml", "--resume", "runs/x"], ["run.toml", "--resume", "runs/x"], []),
        (["generate", "--prompt", "3.5 + 1"], ["generate", "--prompt", "3.5 + 1"], []),
    ],
)
def test_settings_are_told_from_the_verb_own_arguments(arguments, own, overrides):
    assert split_overrides(arguments) == (own, overrides)


@pytest.mark.parametrize(
    ("paths", "resume", "expected"),
    [
        (["run.toml"], None, (["run.toml"], None)),
        (["run.toml"], NEWEST, (["run.toml"], NEWEST)),
        (["run.toml"], "runs/x", (["run.toml"], "runs/x")),
        ([], "runs/x", (["runs/x"], "runs/x")),  # the settings it was started with
        ([], "run.toml", (["run.toml"], NEWEST)),  # `train --resume run.toml`
        (["over.toml"], "run.toml", (["run.toml", "over.toml"], NEWEST)),
    ],
)
def test_where_to_resume(paths, resume, expected):
    files, folder = where_to_resume([Path(p) for p in paths], resume)
    assert ([str(f) for f in files], folder) == expected


def test_resume_takes_the_newest_run_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run in"):
        where_to_resume([], NEWEST)
    for age, name in enumerate(("new", "old")):
        folder = make_run_folder(tmp_path / "runs" / name)
        os.utime(folder / "config.toml", (1000 - age, 1000 - age))
    assert where_to_resume([], NEWEST) == ([Path("runs/new")], "runs/new")
    assert where_to_resume([Path("runs/old")], NEWEST) == ([Path("runs/old")], "runs/old")


def test_recipes_are_found_in_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert packaged_recipe(Path("other/quickstart.toml")) == Path("other/quickstart.toml")
    assert packaged_recipe(Path("recipes/absent.toml")) == Path("recipes/absent.toml")
    Path("recipes").mkdir()
    Path("recipes/quickstart.toml").write_text("")
    assert packaged_recipe(Path("recipes/quickstart.toml")) == Path("recipes/quickstart.toml")  # one's own comes first


# ---- messages and exit codes -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    try:
        return cli.main(list(arguments))
    except SystemExit as stop:  # argparse
        return int(stop.code or 0)


@pytest.mark.parametrize("verb", [None, *cli.VERBS])
def test_help_is_readable_and_has_an_example(verb, capsys):
    assert run(*([verb] if verb else []), "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 140
    assert f"slipstream {verb or 'init'}" in text.partition("options:")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: VERB"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "no run file"),
        (["train", "absent.toml"], "absent.toml: there is no such file"),
        (["train", "run.toml", "--steps", "5"], "--steps: did you mean --trainer.steps?"),
        (["train", "run.toml", "--trainer.stesp", "5"], "did you mean trainer.steps?"),
        (["train", "run.toml", "--trainer.steps", "many"], "allowed is a whole number >= 1"),
        (["train", "run.toml", "--rewind", "5"], "--rewind goes with --resume"),
        (["samples", "run.toml"], "needs a run folder"),
        (["samples", ".", "--trainer.steps", "5"], "samples takes no settings"),
        (["inspect", "."], "is not a run folder"),
        (["export", ".", "model"], "is not a run folder"),
        (["eval", "run.toml", "--untrained"], "--untrained is about a run folder"),
        (["eval", "run.toml", "--samples", "4"], "4 samples at temperature 0"),
        (["generate", "run.toml", "--prompt", "x", "--top-p", "1.5", "--top-k", "-1"], "--top-k -1: 0 (off) or more"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_one_message(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN_FILE)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (ResumeError("model.name was a, is b"), 2),
        (DataError("no rows"), 1),
        (ZeroDivisionError("division by zero"), 1),
        (KeyboardInterrupt(), 130),
        (ExceptionGroup("tasks", [ValueError("symptom"), ExceptionGroup("inner", [DataError("the cause")])]), 1),
        (BrokenPipeError("of something else than stdout"), 1),
    ],
)
def test_exit_codes(error, code, monkeypatch, capsys):
    monkeypatch.setattr(cli.VERBS["inspect"], "run", lambda args: (_ for _ in ()).throw(error))
    assert run("inspect", "x") == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if isinstance(error, ExceptionGroup):
        assert "the cause" in err
    if isinstance(error, ZeroDivisionError):
        assert "ZeroDivisionError: division by zero" in err and "--traceback" in err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_traceback_on_request(how, monkeypatch, capsys):
    monkeypatch.setattr(cli.VERBS["inspect"], "run", lambda args: (_ for _ in ()).throw(DataError("no rows")))
    if how == "environment":
        monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")
    assert run("inspect", "x", *(["--traceback"] if how == "option" else [])) == 1
    assert "Traceback" in capsys.readouterr().err


def test_failure_with_json_is_an_object_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("train", "absent.toml", "--json") == 2
    captured = capsys.readouterr()
    answer = json.loads(captured.out.splitlines()[-1])
    assert answer["exit_code"] == 2 and "absent.toml" in answer["error"] and "absent.toml" in captured.err


def test_importing_the_command_line_brings_no_torch():
    code = "import slipstream.cli.main, sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_every_verb_has_what_main_needs():
    for verb in cli.VERBS.values():
        module = importlib.import_module(verb.__name__)
        assert {"HELP", "EPILOG", "TAKES_SETTINGS", "add_arguments", "run"} <= set(vars(module))


# ---- init --------------------------------------------------------------------------------------------------------------------


def test_init_writes_what_loads(tmp_path, capsys):
    assert run("init", str(tmp_path / "task")) == 0
    assert f"slipstream train {tmp_path}/task/run.toml" in capsys.readouterr().out
    config = load_config([tmp_path / "task" / "run.toml"]).config
    assert config.reward[0].function == f"{tmp_path}/task/rewards.py:score"
    assert "@" not in (tmp_path / "task" / "README.md").read_text()


def test_init_overwrites_nothing(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("mine")
    assert run("init", str(tmp_path)) == 2
    assert "already has rewards.py" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rewards.py"] and (tmp_path / "rewards.py").read_text() == "mine"


# ---- samples and inspect -----------------------------------------------------------------------------------------------------


def make_group(group_id: int, reward: float) -> Group:
    rollout = Rollout(
        group_id=group_id,
        sample=0,
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        loss_mask=np.ones(1, bool),
        reward=reward,
        completion=f"answer {group_id}\x07",
        stop_reason=StopReason.LENGTH,
    )
    draw = Draw(number=group_id, row=0, epoch=0, dataset="")
    return Group(group_id=group_id, draw=draw, row={}, prompt=[{"role": "user", "content": f"prompt {group_id}"}], rollouts=(rollout,))


def test_samples_by_step_best_and_worst(tmp_path, capsys):
    folder = make_run_folder(tmp_path / "run")
    file = SamplesFile(folder, 1)
    for step, reward in enumerate((0.5, 1.0, 0.0)):
        file.write_step(step, 1, (make_group(step, reward),))
    assert run("samples", str(folder)) == 0
    out = capsys.readouterr().out
    assert "prompt 2" in out and "prompt 1" not in out  # the newest step
    assert r"answer 2\x07" in out and "cut at the token limit" in out  # no control characters reach the terminal
    assert run("samples", str(folder), "--best", "-n", "1") == 0 and "prompt 1" in capsys.readouterr().out
    assert run("samples", str(folder), "--worst", "-n", "1") == 0 and "prompt 2" in capsys.readouterr().out
    assert run("samples", str(folder), "--step", "0") == 0 and "prompt 0" in capsys.readouterr().out
    assert run("samples", str(folder), "--step", "9") == 2 and "steps 0 to 2" in capsys.readouterr().err
    assert run("samples", str(folder), "--evaluation") == 2


def test_a_reader_that_leaves_is_no_failure(tmp_path):
    folder = make_run_folder(tmp_path / "run")
    SamplesFile(folder, 1).write_step(0, 1, (make_group(0, 0.5),))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slipstream.cli.main", "samples", str(folder)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_reads_the_ledger(tmp_path, capsys):
    folder = make_run_folder(tmp_path / "run")
    ledger = Ledger.open(folder / "ledger.sqlite")
    started = ev.RunStarted(
        run_id="r", incarnation=1, kind="fresh", max_staleness=1, groups_per_step=1, window=1, group_size=1, seed=0, data_fingerprint="d"
    )
    for event in (started, ev.Admitted(group_id=0, row=0, epoch=0, position=0, min_version=0, bound=1)):
        ledger.append(event, 1)
    ledger.commit()
    assert run("inspect", str(folder), "--json") == 0  # while the writer is open
    captured = capsys.readouterr()
    numbers = json.loads(captured.out.splitlines()[-1])
    assert numbers["groups"]["drawn"] == numbers["groups"]["running"] == 1 and numbers["groups"]["lost"] == 0
    assert numbers["problem"] is None and "each is accounted for" in captured.err


# ---- weights and sampling ----------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_where_one_is_absent(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        checkpoint_folder(tmp_path, None)
    for name in ("step-5", "step-10", ".tmp-15-1", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert kept_checkpoints(tmp_path) == [5, 10]
    assert checkpoint_folder(tmp_path, None).name == "step-10" and checkpoint_folder(tmp_path, 5).name == "step-5"
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; kept are: 5, 10"):
        checkpoint_folder(tmp_path, 7)


def test_export_refuses_an_occupied_place(tmp_path):
    refuse_occupied(tmp_path / "absent")
    refuse_occupied(tmp_path)  # an empty folder
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="not an empty folder"):
            refuse_occupied(place)


def target_args(**changes):
    values = {"run": [], "overrides": [], "model": None, "version": None, "untrained": False}
    values |= {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": None}
    return argparse.Namespace(**(values | changes))


def test_target_of_a_run_folder_is_its_newest_checkpoint(tmp_path, capsys):
    folder = make_run_folder(tmp_path / "run")
    assert find_target(target_args(run=[folder])).checkpoint is None
    assert "has no checkpoint yet" in capsys.readouterr().err
    (folder / "checkpoints" / "step-5").mkdir(parents=True)
    target = find_target(target_args(run=[folder]))
    assert target.checkpoint == folder / "checkpoints" / "step-5" and target.label == "builtin:tiny after 5 steps"
    assert find_target(target_args(run=[folder], untrained=True)).checkpoint is None
    other = find_target(target_args(run=[folder], model="some/model"))
    assert other.checkpoint is None and other.loaded.config.model.name == "some/model"


def test_a_run_trained_with_a_python_function_exports_and_generates(tmp_path, monkeypatch):
    """Its config.toml has no reward; only what scores needs one."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-5").mkdir(parents=True)
    save_config(Config(), folder / "config.toml")
    exported = []
    monkeypatch.setattr("slipstream.cli.export.export", lambda settings, checkpoint, target: exported.append(checkpoint.name) or 0)
    assert run("export", str(folder), str(tmp_path / "model")) == 0 and exported == ["step-5"]
    asked = []

    async def answers(target, prompts, num_samples, sampling):
        asked.append((target.checkpoint.name, *prompts))
        return []

    monkeypatch.setattr("slipstream.cli.generate.answers", answers)
    assert run("generate", str(folder), "--prompt", "sort 4132") == 0 and asked == [("step-5", "sort 4132")]
    assert run("eval", str(folder)) == 2


def test_sampling_names_every_problem(tmp_path):
    folder = make_run_folder(tmp_path / "run")
    loaded = load_config([folder])
    assert sampling_of(target_args(top_k=5), loaded, 0.7).temperature == 0.7
    with pytest.raises(SlipstreamError) as caught:
        sampling_of(target_args(temperature=-1.0, top_k=-1, top_p=0.0, min_p=1.0, max_new_tokens=0), loaded, 0.0)
    assert len(caught.value.problems) == 5  # type: ignore[attr-defined]
