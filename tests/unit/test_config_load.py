"""Loading settings: merging, overrides, provenance, and problems that a person can act on."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from slipstream.config import Config, load_config, load_tables
from slipstream.config.keys import all_keys, find, nearest
from slipstream.errors import ConfigError

REWARD = ["--reward.0.function", "exact"]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(paths: list[Path], overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(paths, overrides)
    return caught.value.problems


def test_run_file_overlay_and_overrides_merge_in_that_order(tmp_path: Path) -> None:
    run = write(tmp_path, "run.toml", "[trainer]\nsteps = 1\ngroups_per_step = 2\nwarmup_steps = 3\n[[reward]]\nfunction = 'exact'\n")
    overlay = write(tmp_path, "overlay.toml", "[trainer]\ngroups_per_step = 20\nwarmup_steps = 30\n")
    loaded = load_config([run, overlay], ["--trainer.warmup_steps", "300"])
    trainer = loaded.config.trainer
    assert (trainer.steps, trainer.groups_per_step, trainer.warmup_steps) == (1, 20, 300)
    assert loaded.sources["trainer.steps"] == str(run)
    assert loaded.sources["trainer.groups_per_step"] == str(overlay)
    assert loaded.sources["trainer.warmup_steps"] == "command line"
    assert "trainer.learning_rate" not in loaded.sources
    assert loaded.base_folder == tmp_path


def test_overlay_replaces_lists_and_their_sources(tmp_path: Path) -> None:
    run = write(tmp_path, "run.toml", "[[reward]]\nfunction = 'exact'\nweight = 3\n[[reward]]\nfunction = 'number'\n")
    overlay = write(tmp_path, "overlay.toml", "[[reward]]\nfunction = 'number'\n")
    loaded = load_config([run, overlay])
    assert [(r.function, r.weight) for r in loaded.config.reward] == [("number", 1.0)]
    assert {k: v for k, v in loaded.sources.items() if k.startswith("reward")} == {"reward.0.function": str(overlay)}


def test_a_changed_type_replaces_the_table_and_an_equal_one_merges(tmp_path: Path) -> None:
    run = write(tmp_path, "run.toml", "[engine]\ntype = 'vllm'\nslots = 7\ngpu_memory = 0.5\n[[reward]]\nfunction = 'exact'\n")
    other = write(tmp_path, "other.toml", "[engine]\ntype = 'embedded'\nthreads = 2\n")
    engine = load_config([run, other]).config.engine
    assert (engine.type, engine.slots, engine.threads) == ("embedded", 32, 2)
    engine = load_config([run], ["--engine.threads", "2", "--engine.type", "embedded"]).config.engine  # in any order
    assert (engine.slots, engine.threads) == (32, 2)
    assert load_config([other, other], [*REWARD, "--engine.slots=5"]).config.engine.threads == 2


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--trainer.learning-rate", "1e-4"], "trainer.learning_rate", 1e-4),
        (["--trainer.learning_rate=.5"], "trainer.learning_rate", 0.5),
        (["--run.deterministic", "--launch", "inline"], "run.deterministic", True),
        (["--run.deterministic", "true", "--launch=inline"], "run.deterministic", True),
        (["--run.deterministic=True", "--launch=inline"], "run.deterministic", True),
        (["--no-buffer.filter-zero-variance"], "buffer.filter_zero_variance", False),
        (["--run.name", "7"], "run.name", "7"),
        (["--run.name", "2024-01-01"], "run.name", "2024-01-01"),
        (["--model.name", "org/model-1.5B"], "model.name", "org/model-1.5B"),
        (["--data.eval", "40"], "data.eval", 40),
        (["--data.eval", "builtin:sort_digits"], "data.eval", "builtin:sort_digits"),
        (["--data.limit", "3", "--data.limit", "none"], "data.limit", None),
        (["--rollout.stop", "['a', 'b']"], "rollout.stop", ["a", "b"]),
        (["--trainer.betas", "[0.8, 0.9]"], "trainer.betas", (0.8, 0.9)),
        (["--data.columns", "{prompt = 'question'}"], "data.columns", {"prompt": "question"}),
        (["--data.options.max-digits", "2", "--data.options.name", "x y"], "data.options", {"max-digits": 2, "name": "x y"}),
        (["--data.prompt_template", "Question: {question}\nAnswer:"], "data.prompt_template", "Question: {question}\nAnswer:"),
        (["--data.prompt_template", "[{role = 'user', content = '{q}'}]"], "data.prompt_template", [{"role": "user", "content": "{q}"}]),
        (["--trainer", "{steps = 9}"], "trainer.steps", 9),
    ],
)
def test_override_values(arguments: list[str], key: str, value: object) -> None:
    config = load_config([], [*REWARD, *arguments]).config
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value and type(config) is type(value)


def test_overrides_of_tables_in_a_list(tmp_path: Path) -> None:
    run = write(tmp_path, "run.toml", "[[reward]]\nfunction = 'exact'\n")
    options = ["--reward.0.weight", "-2", "--reward.1.function", "regex", "--reward.1.options.pattern", "a+"]
    first, second = load_config([run], options).config.reward
    assert (first.function, first.weight) == ("exact", -2.0)
    assert (second.function, second.options) == ("regex", {"pattern": "a+"})
    (problem,) = problems_of([run], ["--reward.3.weight", "1"])
    assert "reward.3.weight" in problem and "there are 1" in problem and "--reward.1" in problem


def test_every_problem_at_once_each_with_source_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    text = """
    steps = 4
    [trainer]
    stepz = 5
    groups_per_step = "many"
    learning_rate = inf
    [engine]
    type = "sglang"
    [data]
    eval = [1]
    [rollout]
    group_size = 1
    [[reward]]
    weight = 2
    """
    run = write(tmp_path, "run.toml", text)
    problems = problems_of([run], ["--buffer.max_stalenes", "2", "--buffer.on-stale=forget", "stray", "--trainer.steps"])
    wanted = [
        ("run.toml", "steps = 4", "unknown key", "trainer.steps"),
        ("run.toml", "trainer.stepz = 5", "unknown key", "trainer.steps"),
        ("run.toml", "trainer.groups_per_step", '"many"', "a whole number >= 1"),
        ("run.toml", "trainer.learning_rate = inf", "finite"),
        ("run.toml", "engine.type", '"sglang"', '"embedded"'),
        ("run.toml", "data.eval = [1]", "text or a whole number >= 1"),
        ("run.toml", "reward.0.function", "missing"),
        ("run.toml", "rollout.group_size = 1"),  # a cross-field check beside the wrong types
        ("command line", "buffer.max_stalenes", "did you mean buffer.max_staleness?"),
        ("command line", "buffer.on_stale", '"forget"', '"mask_tokens" | "down_weight" | "drop"'),
        ("command line", "stray"),
        ("command line", "--trainer.steps needs a value"),
    ]
    wanted[7] = ("run.toml", "rollout.group_size", "group_size = 1")
    for parts in wanted:
        assert any(all(part in problem for part in parts) for problem in problems), parts
    assert len(problems) == len(wanted), problems


def test_syntax_errors_name_file_and_line_and_stop_the_rest(tmp_path: Path) -> None:
    run = write(tmp_path, "run.toml", "[trainer]\nsteps = \n")
    (problem,) = problems_of([run], [])
    assert "run.toml" in problem and "line 2" in problem
    (problem,) = problems_of([tmp_path / "absent.toml"], [])
    assert "absent.toml" in problem and "no such file" in problem


def test_wrong_shapes_are_explained(tmp_path: Path) -> None:
    assert "[[reward]]" in problems_of([write(tmp_path, "a.toml", "[reward]\nfunction = 'exact'\n")], [])[0]
    assert "a table" in problems_of([write(tmp_path, "b.toml", "trainer = 5\n[[reward]]\nfunction = 'exact'\n")], [])[0]
    assert "allowed is a table" in problems_of([], ["--reward", "[1]"])[0]
    assert "true or false" in problems_of([], ["--run.deterministic=maybe", *REWARD])[0]
    assert "true/false" in problems_of([], ["--no-trainer.steps", *REWARD])[0]


def test_a_wrong_key_of_a_threshold_is_one_problem(tmp_path: Path) -> None:
    run = write(tmp_path, "run.toml", "[[reward]]\nfunction = 'exact'\n[[threshold]]\nmetric = 'kl_k3'\nabov = 1\n")
    (problem,) = problems_of([run], [])
    assert "threshold.0.abov = 1" in problem and "did you mean threshold.0.above?" in problem
    (problem,) = problems_of([], [*REWARD, "--threshold.0.metric", "kl_k3"])
    assert "threshold.0.above, threshold.0.below" in problem and "neither above nor below" in problem


def test_booleans_are_not_numbers_of_prompts() -> None:
    for value in ("true", "0", "-3"):
        (problem,) = problems_of([], [f"--data.eval={value}", *REWARD])
        assert f"data.eval = {value}" in problem and "a whole number >= 1" in problem


def test_files_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        write(folder, "rewards.py", "def score(completion): return 1.0\n")
        write(folder, "rows.jsonl", "")
    write(there, "chat.jinja", "{{ messages }}")
    text = """
    model.chat_template = "chat.jinja"
    data = {train = "rows.jsonl", eval = "org/set:main:test"}
    reward = [{function = "rewards.py:score"}, {function = "package.module:score"}]
    rollout = {environment = "tools", max_turns = 2, tools = ["rewards.py:score", "math:sqrt"]}
    weight_sync = {transport = "files", directory = "not/made/yet"}
    """
    run = write(there, "run.toml", text)
    monkeypatch.chdir(here)
    config = load_config([run]).config
    assert config.model.chat_template == str(there / "chat.jinja")
    assert (config.data.train, config.data.eval) == (str(there / "rows.jsonl"), "org/set:main:test")
    assert [r.function for r in config.reward] == [f"{there}/rewards.py:score", "package.module:score"]
    assert config.rollout.tools == [f"{there}/rewards.py:score", "math:sqrt"]
    assert config.weight_sync.directory == str(there / "not" / "made" / "yet")
    config = load_config([run], ["--data.train", "rows.jsonl", "--reward.0.function=rewards.py:score"]).config
    assert config.data.train == str(here / "rows.jsonl")
    assert config.reward[0].function == f"{here}/rewards.py:score"
    assert load_config([run]).resolve("x.jsonl") == there / "x.jsonl"


def test_a_run_folder_stands_for_its_settings_file(tmp_path: Path) -> None:
    write(tmp_path, "config.toml", "[trainer]\nsteps = 3\n[[reward]]\nfunction = 'exact'\n")
    assert load_config([tmp_path]).config.trainer.steps == 3


def test_every_key_can_be_found_and_is_its_own_nearest() -> None:
    for key in all_keys():
        path = key.path.replace(".N.", ".0.")
        place = find(tuple(path.split(".")))
        assert place is not None and place.field is key.field
        assert nearest(path) == path
    assert find(("trainer", "steps", "more")) is None
    assert find(("data", "options", "anything")) is not None


def test_settings_are_frozen_and_finite() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().trainer.steps = 5  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="finite"):
        Config.model_validate({"trainer": {"step_timeout_s": float("inf")}})


def test_tables_from_python_are_judged_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_tables({"trainer": {"betas": (0.5, 0.6)}, "data": {"train": "rows.jsonl"}}, reward_given=True)
    assert loaded.config.trainer.betas == (0.5, 0.6) and loaded.config.data.train == str(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError) as caught:
        load_tables({"trainer": {"step": 5}, "rollout": {"interrupt_after": 3}})
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "did you mean trainer.steps?" in text and "interrupt_after = 3" in text and "no reward" in text


def test_what_neither_trains_nor_scores_needs_no_reward(tmp_path: Path) -> None:
    write(tmp_path, "config.toml", "[rollout]\ngroup_size = 1\n")
    assert load_config([tmp_path], checked=False).config.rollout.group_size == 1
    assert len(problems_of([tmp_path], [])) == 2
    with pytest.raises(ConfigError, match="allowed is"):
        load_config([tmp_path], ["--trainer.steps=0"], checked=False)


@pytest.mark.parametrize("module", ["load", "losses", "save"])
def test_the_documented_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"slipstream.config.{module}"))
    assert result.attempted > 0 and result.failed == 0
