"""The observer passes every event on, and nothing that goes wrong in it reaches the controller."""

import os
import subprocess
import sys

import pytest

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.observe import sinks
from slipstream.observe.metrics import MetricsFile, read_metrics
from slipstream.observe.observer import RunObserver, open_observer
from slipstream.observe.samples import SamplesFile, read_samples
from slipstream.observe.state import DisplayState
from slipstream.types import EvalItem, EvalResult

LINE = {"step": 0, "version": 1, "incarnation": 1, "reward_mean": 0.5}
RESULT = EvalResult(
    number=0,
    incarnation=1,
    version=0,
    checksum="c",
    items=(EvalItem(row=0, rewards=(1.0,), completions=("1",), num_tokens=(1,)),),
    duration_s=1.0,
    engine_s=0.5,
)


class Recorder:
    """A display and a sink that remembers what it was told, and fails where it is asked to."""

    name = "recorder"

    def __init__(self, failing=()):
        self.calls, self._failing = [], failing

    def _told(self, name, *args):
        self.calls.append((name, *args))
        if name in self._failing:
            raise OSError("no route to host")

    def start(self):
        self._told("start")

    def step(self):
        self._told("step")

    def evaluation(self):
        self._told("evaluation")

    def note(self, text):
        self._told("note", text)

    def log(self, kind, line):
        self._told("log", kind, line["version"])

    def close(self):
        self._told("close")


def make_observer(folder, display, sink):
    state = DisplayState.of(Config(), str(folder))
    return RunObserver(folder, state, (MetricsFile(folder), SamplesFile(folder, 2)), display, [sink])


def test_everything_is_told(tmp_path):
    display, sink = Recorder(), Recorder()
    observer = make_observer(tmp_path, display, sink)
    observer.evaluation({"version": 0, "step": 0, "incarnation": 1, "eval_reward": 0.2}, RESULT)
    observer.step(LINE, ())
    observer.note("hello")
    observer.close()
    assert [c[0] for c in display.calls] == ["start", "evaluation", "step", "note", "close"]
    assert sink.calls == [("log", "evaluation", 0), ("log", "step", 1), ("close",)]
    metrics = read_metrics(tmp_path)
    assert metrics.evaluations[0]["engine_s"] == 0.5 and metrics.steps[0]["reward_mean"] == 0.5
    assert len(read_samples(tmp_path, kind="evaluation")) == 1


def test_a_sink_that_fails_is_reported_once_and_stops_nothing(tmp_path):
    display, sink = Recorder(), Recorder(failing=("log",))
    observer = make_observer(tmp_path, display, sink)
    for version in (1, 2, 3):
        observer.step(LINE | {"version": version}, ())
    notes = [c[1] for c in display.calls if c[0] == "note"]
    assert len(notes) == 1 and "recorder: OSError: no route to host" in notes[0]
    assert len([c for c in sink.calls if c[0] == "log"]) == 3  # it may recover
    assert len(read_metrics(tmp_path).steps) == 3


def test_a_display_that_fails_stops_nothing(tmp_path, capsys):
    display, sink = Recorder(failing=("start", "step", "note", "close")), Recorder()
    observer = make_observer(tmp_path, display, sink)
    observer.step(LINE, ())
    observer.note("hello")
    observer.close()
    assert capsys.readouterr().err.count("display: OSError") == 1
    assert len(read_metrics(tmp_path).steps) == 1 and sink.calls[-1] == ("close",)


def test_files_that_cannot_be_written_are_reported(tmp_path):
    display = Recorder()
    observer = make_observer(tmp_path, display, Recorder())
    observer._metrics.close()
    observer.step(LINE, ())
    assert ["metrics.jsonl" in c[1] for c in display.calls if c[0] == "note"] == [True]


def test_a_resumed_run_goes_on_with_its_curve(tmp_path):
    observer = open_observer(tmp_path, Config())
    observer.evaluation({"version": 0, "step": 0, "incarnation": 1, "eval_reward": 0.2}, RESULT)
    observer.step(LINE, ())
    observer.close()
    state = open_observer(tmp_path, Config())._state
    assert list(state.rewards) == [0.5] and state.done == 1
    assert state.first_evaluation is not None and state.first_evaluation["eval_reward"] == 0.2


def test_a_sink_asked_for_and_missing_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb' is not installed; pip install 'slipstream\[wandb\]'"):
        open_observer(tmp_path, Config.model_validate({"metrics": {"sinks": ["wandb"]}}))


def test_numbers_leave_out_what_does_not_apply():
    assert sinks.numbers({"a": 1, "b": 0.5, "c": None, "d": "text", "e": True}) == {"a": 1.0, "b": 0.5}


def test_identity_is_that_of_the_folder(tmp_path):
    first, second = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert sinks.identity(first) == sinks.identity(first) != sinks.identity(second)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_sinks_take_a_step_that_is_trained_again(name, tmp_path):
    pytest.importorskip(name)
    script = (
        "import sys, pathlib; from slipstream.observe.sinks import open_sinks\n"
        f"sink = open_sinks(['{name}'], pathlib.Path({str(tmp_path)!r}), {{'run': {{'name': 'x'}}}})[0]\n"
        "for version in (1, 2, 3, 2): sink.log('step', {'version': version, 'reward_mean': 0.5, 'kl_k1': None})\n"
        "sink.log('evaluation', {'version': 3, 'eval_reward': 0.5}); sink.close()\n"
        "assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
