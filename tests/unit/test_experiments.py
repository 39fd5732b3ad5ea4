"""`[[experiment]]` tables: what becomes of them, what is refused, where their runs lie, and how processes work for several runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from slipstream.cli.main import main
from slipstream.config.load import LoadedConfig, load_config, load_tables
from slipstream.config.save import to_toml
from slipstream.controller.run_folder import LEDGER, ExperimentsFolder
from slipstream.errors import ConfigError, RunFolderError
from slipstream.launch.assemble import build_engine, build_trainer
from slipstream.launch.context import RunContext
from slipstream.launch.page import Page, SharedProgress
from slipstream.launch.together import together
from slipstream.models.memory import ModelSize, memory_need, memory_together
from slipstream.models.one_base import OneBase
from slipstream.weight_sync.memory import MemoryFile

Tables = dict[str, Any]
BASE: Tables = {"launch": "inline", "lora": {"rank": 2}, "reward": [{"function": "exact"}], "trainer": {"steps": 5}}
SIZE = ModelSize(1_000_000, hidden_size=100, intermediate_size=400, num_layers=2, kv_width=50, vocab_size=1000, context_tokens=64)


def written(folder: Path, *experiments: Tables, **changes: Any) -> Path:
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps({**BASE, **changes, "experiment": list(experiments)}))
    return file


def problems(folder: Path, *experiments: Tables, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config([written(folder, *experiments, **changes)])
    return raised.value.problems


# ---- settings ----------------------------------------------------------------------------------------------------------------


def test_each_has_the_settings_of_the_file_and_its_own_over_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    tables = [
        {"name": "a", "run": {"seed": 3}, "trainer": {"learning_rate": 0.5}},
        {"name": "b", "reward": [{"function": "mine.py:score"}, {"function": "exact"}], "lora": {"rank": 8}},
    ]
    loaded = load_config([written(tmp_path, *tables)], ["--trainer.steps", "9", "--trainer.learning_rate", "0.1", "--run.name", "study"])
    a, b = (experiment.config for experiment in loaded.experiments)
    assert [experiment.name for experiment in loaded.experiments] == ["a", "b"]
    assert (a.run.seed, a.trainer.learning_rate, a.trainer.steps, a.run.name, a.lora.rank) == (3, 0.5, 9, "study-a", 2)
    assert (b.run.seed, b.trainer.learning_rate, b.run.name, b.lora.rank) == (0, 0.1, "study-b", 8)
    assert [reward.function for reward in b.reward] == [f"{tmp_path / 'mine.py'}:score", "exact"]
    again = tmp_path / "again.toml"
    again.write_text(to_toml(loaded.config, loaded.experiments))
    assert (load_config([again]).config, load_config([again]).experiments) == (loaded.config, loaded.experiments)


def test_what_is_wrong_in_one_names_it_and_what_is_wrong_in_all_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    said = problems(
        tmp_path,
        {"name": "a", "trainer": {"stepz": 3}},
        {"name": "b", "loss": {"kl_coefficient": -1.0}},
        {"name": "c"},
        buffer={"window": 0},
    )
    assert [line for line in said if line.startswith(f"{file}, experiment a: trainer.stepz = 3: unknown key; did you mean trainer.steps?")]
    assert [line for line in said if line.startswith(f"{file}, experiment b: loss.kl_coefficient")]
    assert len([line for line in said if "buffer.window" in line]) == 1 and len(said) == 3


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([{}], "name is missing"),
        ([{"name": "../a"}], "name = '../a': letters, digits"),
        ([{"name": "log"}], "name = 'log': this is the name of something else"),
        ([{"name": "a"}, {"name": "A"}], "name = 'A': another experiment has this name"),
        ([{"name": "a", "experiment": [{"name": "b"}]}], "experiment a: experiment = "),
        ([{"name": "a"}, {"name": "b", "model": {"dtype": "bfloat16"}}], "experiment b: model.dtype: must be the same"),
        ([{"name": "a"}, {"name": "b", "engine": {"slots": 8}}], "engine.slots: must be the same"),
        ([{"name": "a", "lora": {"rank": 0}}], "set lora.rank"),
        ([{"name": "a", "lora": {"dora": True}}], 'weight_sync.payload: "full"'),
        ([{"name": "a", "metrics": {"sinks": ["tensorboard", "wandb"]}}], 'metrics.sinks: "wandb" takes one run per process'),
        ([{"name": "a", "weight_sync": {"transport": "files"}}], 'weight_sync.transport: "files"'),
    ],
)
def test_what_experiments_cannot_have_is_refused(tables: list[Tables], words: str, tmp_path: Path) -> None:
    assert any(words in line for line in problems(tmp_path, *tables)), problems(tmp_path, *tables)


def test_two_engines_are_refused(tmp_path: Path) -> None:
    said = problems(tmp_path, {"name": "a"}, {"name": "b"}, launch="local", engine={"replicas": 2})
    assert said == [
        f"{tmp_path / 'run.toml'}: engine.replicas: 2, but experiments share one model, which stays as it is, in one engine; leave it out"
    ]


def test_a_table_in_the_place_of_a_list_of_them_is_told_how_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[experiment]\nname = 'a'\n")
    with pytest.raises(ConfigError, match=r"write \[\[experiment\]\] over each"):
        load_config([tmp_path / "run.toml"])


# ---- folders and verbs -------------------------------------------------------------------------------------------------------


def holding(folder: Path, loaded: LoadedConfig) -> ExperimentsFolder:
    """As after a start of all of them."""
    home = ExperimentsFolder.create("study", folder)
    home.save_config(loaded.config, loaded.experiments)
    for experiment in loaded.experiments:
        (home.path / experiment.name).mkdir()
        (home.path / experiment.name / LEDGER).touch()
    return home


def test_a_folder_of_experiments_is_opened_as_one_and_made_only_once(tmp_path: Path) -> None:
    loaded = load_tables({**BASE, "experiment": [{"name": "a"}, {"name": "b"}]})
    home = holding(tmp_path / "study", loaded)
    assert ExperimentsFolder.open(home.path).path == home.path
    assert home.run_folder("c") is None and home.run_folder("b") is not None
    with pytest.raises(RunFolderError, match="already holds a run; resume it with --resume"):
        ExperimentsFolder.create("study", home.path)
    with pytest.raises(RunFolderError, match="is the folder of one run"):
        ExperimentsFolder.open(home.path / "a")
    with pytest.raises(RunFolderError, match="holds no experiments"):
        ExperimentsFolder.open(tmp_path)


def test_verbs_about_one_run_ask_for_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home = holding(tmp_path / "study", load_tables({**BASE, "experiment": [{"name": "a"}, {"name": "b"}]}))
    for verb in ("inspect", "samples"):
        assert main([verb, str(home.path)]) == 2
        assert f"{home.path / 'a'}, {home.path / 'b'}" in capfd.readouterr().err
    assert main(["generate", str(home.path), "--prompt", "sort 1"]) == 2
    assert "has several runs (a, b)" in capfd.readouterr().err
    assert main(["train", "--resume", str(home.path), "--rewind", "1"]) == 2
    assert "give the folder of the experiment" in capfd.readouterr().err


def test_validate_tells_of_each_and_of_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def score(completion): return 1.0\n")
    file = written(tmp_path, {"name": "a"}, {"name": "b", "reward": [{"function": "mine.py:score"}]})
    assert main(["validate", str(file)]) == 0
    shown = capfd.readouterr().out
    assert "[[experiment]]" in shown and "\nexperiment b\n" in shown and "all of them: memory about" in shown
    written(tmp_path, {"name": "a"}, {"name": "b", "reward": [{"function": "mine.py:absent"}]})
    assert main(["validate", str(file)]) == 2
    assert "experiment b: reward.0: " in capfd.readouterr().err


# ---- one base, several adapters ----------------------------------------------------------------------------------------------


def test_engines_and_trainers_of_a_role_stand_on_the_same_tensors(tmp_path: Path) -> None:
    small: Tables = {"engine": {"max_context": 64, "slots": 4}, "rollout": {"max_new_tokens": 8}}
    loaded = load_tables({**BASE, **small, "experiment": [{"name": "a"}, {"name": "b", "run": {"seed": 1}}]})
    configs, engines, trainers = [each.config for each in loaded.experiments], OneBase(), OneBase()
    contexts = [RunContext(config, tmp_path, tmp_path, 1, 0, "run") for config in configs]
    for one, other in (
        [build_engine(config, load=engines) for config in configs],
        [build_trainer(context, [MemoryFile.create("replay")], trainers)[0] for context in contexts],
    ):
        mine, its = (dict(each.model.state_dict(keep_vars=True)) for each in (one, other))
        assert mine.keys() == its.keys() and one.model is not other.model
        shared = {name for name in mine if mine[name].data_ptr() == its[name].data_ptr()}
        assert {name for name in mine if ".lora_" in name} == mine.keys() - shared != set()
        buffers = [dict(each.model.named_buffers()) for each in (one, other)]
        assert buffers[0] and all(buffers[0][name] is buffers[1][name] for name in buffers[0])


def test_memory_counts_the_base_once_and_all_else_of_each() -> None:
    loaded = load_tables({**BASE, "experiment": [{"name": "a"}, {"name": "b", "trainer": {"max_tokens_per_micro_batch": 64}}]})
    configs = [experiment.config for experiment in loaded.experiments]
    alone, both = [memory_need(config, SIZE).parts for config in configs], memory_together(configs, SIZE).parts
    assert both["engine"] == 2 * alone[0]["engine"] - 4_400_000 and both["weight sync"] == 2 * alone[0]["weight sync"]
    assert alone[0]["trainer"] < both["trainer"] < alone[0]["trainer"] + alone[1]["trainer"] - 4_000_000
    assert both["processes"] == alone[0]["processes"] and memory_together(configs[:1], SIZE).parts == alone[0]


# ---- one process, several runs -----------------------------------------------------------------------------------------------


def test_a_shared_record_works_while_any_part_does_for_as_long_as_the_longest_may() -> None:
    memory = MemoryFile.create("page")
    page = Page(memory, ("trainer",))
    shared = SharedProgress(page.role("trainer"))
    a, b = shared.part("a"), shared.part("b")

    def state() -> tuple[str, str, bool]:
        now = page.states()["trainer"]
        return now.phase, now.owed, now.idle

    a.working("step", 1000.0, owed="batch 3")
    b.working("publish", 1.0, owed="weights 1.4")
    assert state() == ("publish of b", "weights 1.4", False)
    assert page.states()["trainer"].deadline - time.monotonic() > 900
    b.idle()
    assert state() == ("step of a", "batch 3", False)
    a.idle()
    assert state()[2]
    memory.close()


def test_the_first_error_of_several_ends_the_others_and_is_raised_as_it_is() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("first")

    with pytest.raises(LookupError, match="first"):
        asyncio.run(together([waits(), fails()]))
    assert ended == ["waits"]
