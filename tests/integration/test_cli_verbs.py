"""The verbs on a real run: one tiny inline run through the command line, then everything a person does with its folder."""

import json
from pathlib import Path

import pytest

from slipstream.cli.main import main

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """The folder that `init` writes, with the settings of a run of seconds."""
    folder = tmp_path_factory.mktemp("cli") / "task"
    assert main(["init", str(folder)]) == 0
    (folder / "small.toml").write_text(
        'launch = "inline"\n[rollout]\ngroup_size = 4\nmax_new_tokens = 6\n[engine]\nslots = 16\nmax_context = 64\n'
        f"[trainer]\nsteps = {STEPS}\ngroups_per_step = 2\n[evaluation]\nevery = 2\nlimit = 4\n[checkpoint]\nevery = 2\nkeep = 2\n"
    )
    return folder


@pytest.fixture(scope="module")
def run_folder(task) -> Path:
    folder = task / "run"
    assert main(["train", str(task / "run.toml"), str(task / "small.toml"), "--run.folder", str(folder)]) == 0
    return folder


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_train_json_is_the_last_line_and_nothing_else_on_stdout(task, capfd):
    arguments = ["train", str(task / "run.toml"), str(task / "small.toml"), "--trainer.steps", "2", "--json"]
    assert main([*arguments, "--run.folder", str(task / "json_run")]) == 0
    captured = capfd.readouterr()
    assert len(captured.out.splitlines()) == 1 and "step 2/2" in captured.err
    summary = last_json(captured.out)
    assert summary["steps"] == summary["model_version"] == 2 and summary["trained_samples"] == 16
    assert summary["eval_reward_first"] is not None and summary["eval_reward_last"] is not None
    assert summary["staleness_max"] <= summary["staleness_bound"] and summary["wall_s"] > 0


def test_a_finished_run_is_extended_by_resume(task, capfd):
    folder = str(task / "json_run")
    assert main(["train", "--resume", folder, "--trainer.steps", "3", "--json"]) == 0
    assert last_json(capfd.readouterr().out)["steps"] == 3
    assert main(["train", "--resume", folder, "--rollout.group_size", "8"]) == 2
    message = capfd.readouterr().err
    assert "rollout.group_size" in message and "4" in message and "8" in message  # both values


def test_validate(task, capfd):
    limit = ["--threshold.0.metric", "kl_k3", "--threshold.0.above", "0.5", "--threshold.0.steps", "3"]
    assert main(["validate", str(task / "run.toml"), str(task / "small.toml"), *limit, "--json"]) == 0
    captured = capfd.readouterr()
    assert "threshold: the run ends when kl_k3 is above 0.5 for 3 steps in a row" in captured.err
    assert "2 groups x 4 rollouts = 8 samples per optimizer step, at most 4 groups in flight, worst staleness" in captured.err
    answer = last_json(captured.out)
    assert answer["valid"] and answer["arithmetic"]["samples_per_step"] == 8 and answer["longest_prompt_tokens"] < 64
    assert answer["settings"]["rollout"]["group_size"] == 4 and sum(answer["memory_bytes"].values()) > 0


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (["--data.train", "absent.jsonl"], 1, "absent.jsonl"),
        (["--engine.max_context", "16"], 1, "no prompt fits"),
        (["--model.name", "absent/folder/here"], 1, "absent/folder/here"),
        (["--reward.0.function", "nowhere.module:score"], 2, "nowhere.module"),
    ],
)
def test_validate_finds_what_would_stop_the_run(task, capfd, change, code, message):
    assert main(["validate", str(task / "run.toml"), str(task / "small.toml"), *change]) == code
    assert message in capfd.readouterr().err


def test_rollout_shows_scored_samples(task, capfd):
    assert main(["rollout", str(task / "run.toml"), str(task / "small.toml"), "--groups", "2", "--samples", "3"]) == 0
    out = capfd.readouterr().out
    assert out.count("completion") >= 6 and "mean reward" in out and "score " in out and "tokens" in out and "stopped by itself" in out


def test_eval_of_untrained_and_trained(run_folder, capfd):
    arguments = ["eval", str(run_folder), "--limit", "6", "--samples", "3", "--temperature", "1", "--json"]
    assert main(arguments) == 0
    trained = last_json(capfd.readouterr().out)
    assert trained["items"] == 4 and trained["samples"] == 3 and trained["failed"] == 0  # evaluation.limit of the run
    assert f"after {STEPS} steps" in trained["model"]
    assert trained["reward_low"] <= trained["reward_mean"] <= trained["reward_high"] and set(trained["pass_at_k"]) == {"1", "2", "3"}
    assert main([*arguments, "--untrained"]) == 0
    assert "untrained" in last_json(capfd.readouterr().out)["model"]


def test_eval_agrees_with_the_evaluation_in_training(run_folder, capfd):
    """Greedy, the same weights and items: the same reward as the run itself reported for its last version."""
    from slipstream.observe.metrics import read_metrics

    assert main(["eval", str(run_folder), "--json"]) == 0
    inside = read_metrics(run_folder).evaluations[-1]
    assert inside["version"] == STEPS
    assert last_json(capfd.readouterr().out)["reward_mean"] == pytest.approx(inside["eval_reward"], abs=1e-9)


def test_eval_of_other_data_and_none(task, run_folder, capfd, tmp_path):
    data = tmp_path / "test.jsonl"
    data.write_text('{"prompt": "sort 21", "answer": "12"}\n{"prompt": "sort 4321", "answer": "1234"}\n')
    assert main(["eval", str(run_folder), "--data", str(data), "--json"]) == 0
    assert last_json(capfd.readouterr().out)["items"] == 2
    assert main(["eval", str(task / "run.toml"), "--data.eval", "none"]) == 1
    assert "no evaluation data" in capfd.readouterr().err


def test_exported_folder_gives_the_same_greedy_tokens(run_folder, tmp_path, capfd):
    """The folder loads with transformers alone, and answers token for token what the engine answers from the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "model"
    assert main(["export", str(run_folder), str(target)]) == 0
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert model.config._attn_implementation != "slipstream"
    prompts = ["sort 4132", "sort 9981", "sort 0707", "sort 5"]
    expected = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        expected.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    capfd.readouterr()
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    for source in ([str(run_folder)], [str(run_folder), "--model", str(target)]):
        assert main(["generate", *source, *arguments]) == 0
        assert capfd.readouterr().out.splitlines() == expected
    assert main(["export", str(run_folder), str(target)]) == 2 and "not an empty folder" in capfd.readouterr().err
    assert main(["export", str(run_folder), str(tmp_path / "other"), "--version", "3"]) == 1
    assert "kept are: 2, 4" in capfd.readouterr().err and not (tmp_path / "other").exists()


def test_exported_weights_are_the_checkpoint_bit_for_bit(run_folder, tmp_path):
    from safetensors.torch import load_file

    from slipstream.cli.weights import checkpoint_folder
    from slipstream.trainer.checkpoint import read_tensors

    assert main(["export", str(run_folder), str(tmp_path / "model"), "--version", "2"]) == 0
    exported = load_file(tmp_path / "model" / "model.safetensors")
    kept = read_tensors(checkpoint_folder(run_folder, 2) / "model")
    assert exported and all((tensor == kept[name]).all() for name, tensor in exported.items())


def test_a_damaged_checkpoint_is_not_exported(run_folder, tmp_path, capfd):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    file = next((copy / "checkpoints" / f"step-{STEPS}" / "model").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["export", str(copy), str(tmp_path / "model")]) == 1
    assert str(file) in capfd.readouterr().err and not (tmp_path / "model").exists()


def test_sampling_that_cuts_the_vocabulary_is_taken_by_generate(run_folder, capfd):
    arguments = [
        "generate",
        str(run_folder),
        "--prompt",
        "sort 4132",
        "--temperature",
        "1",
        "--samples",
        "3",
        "--top-p",
        "0.9",
        "--top-k",
        "5",
    ]
    assert main(arguments) == 0
    assert len(capfd.readouterr().out.splitlines()) == 3


def test_samples_and_inspect(run_folder, capfd):
    assert main(["samples", str(run_folder)]) == 0
    assert "sort " in capfd.readouterr().out
    assert main(["samples", str(run_folder), "--evaluation"]) == 0
    assert f"version {STEPS}" in capfd.readouterr().out
    assert main(["inspect", str(run_folder), "--json"]) == 0
    numbers = last_json(capfd.readouterr().out)
    assert numbers["groups"]["trained"] == STEPS * 2 and numbers["groups"]["lost"] == 0 and numbers["problem"] is None
    assert sum(numbers["staleness_tokens"].values()) == numbers["tokens"]["trained"]
