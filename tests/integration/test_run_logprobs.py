"""Whole runs with frozen models: the divergence starts at 0, exact runs stay exact, a process of its own reads, a teacher alone teaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_harness import Held, Tables, run, run_file, step_lines, tables, told
from test_run_exact import Stopped, kill_at_step

from slipstream import train
from slipstream.config.load import load_config, load_tables
from slipstream.config.settings import ModelSettings
from slipstream.launch.assemble import build_logprobs
from slipstream.models.loading import load_model
from slipstream.trainer.kl import ESTIMATORS
from slipstream.types import Group, Rollout

REFERENCE, TEACHER = "reference_logprobs", "teacher_logprobs"


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with as much noise as weight, in a folder: worse at everything, and with the same tokens."""
    folder = tmp_path_factory.mktemp("noisy")
    model, tokenizer, _ = load_model(ModelSettings(device="cpu"))
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * parameter.std())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sampled(rollout: Rollout) -> np.ndarray:
    return rollout.model_versions() >= 0


def arrays(groups: Sequence[Group]) -> dict[int, list[dict[str, bytes]]]:
    return {g.group_id: [{name: a.tobytes() for name, a in r.arrays.items()} for r in g.rollouts] for g in groups}


# ---- inline


def test_the_divergence_from_the_start_model_is_zero_at_first_and_then_grows(tmp_path: Path) -> None:
    run(tables(tmp_path / "run", loss={"kl_coefficient": 0.05}, trainer={"steps": 5}, rollout={"temperature": 1.5}))
    story, lines = told(tmp_path / "run"), step_lines(tmp_path / "run")
    fresh = [r for g in story.account.batches[0] for r in story.groups[g].rollouts]
    assert all(s.version == 0 for r in fresh for s in r.spans)
    policy = torch.from_numpy(np.concatenate([r.logprobs[sampled(r)] for r in fresh]))
    reference = torch.from_numpy(np.concatenate([r.arrays[REFERENCE][sampled(r)] for r in fresh]))
    for name in ("k1", "k2", "k3"):
        assert abs(float(ESTIMATORS[name](policy, reference).mean())) < 1e-5, name
    divergence = [line["reference_kl"] for line in lines]
    assert abs(divergence[0]) < 1e-5 and min(divergence[2:]) > 1e-4


@pytest.mark.parametrize(("where", "estimator"), [("loss", "k2"), ("reward", "k1")])
def test_a_pull_to_the_reference_keeps_the_model_near_it(where: str, estimator: str, tmp_path: Path) -> None:
    def last(name: str, coefficient: float) -> float:
        loss = {"kl_coefficient": coefficient, "kl_in": where, "kl_estimator": estimator}
        run(tables(tmp_path / name, loss=loss, trainer={"steps": 8}, buffer={"max_staleness": 0}))
        return float(np.mean([line["reference_kl"] for line in step_lines(tmp_path / name)[-3:]]))

    assert last("strong", 2.0) < 0.6 * last("weak", 1e-6)


STEPS = 7


def deterministic(folder: Path, teacher: str) -> Tables:
    return tables(
        folder,
        run={"deterministic": True},
        trainer={"steps": STEPS},
        checkpoint={"every": 3},
        engine={"slots": 6},
        loss={"kl_coefficient": 0.1, "teacher": teacher},
    )


def test_a_deterministic_run_with_frozen_models_is_the_same_killed_ended_and_resumed(noisy: str, tmp_path: Path) -> None:
    file = run_file(tmp_path / "first", deterministic(tmp_path / "first" / "run", noisy))
    train(load_config([file]))
    first = told(tmp_path / "first" / "run")
    assert all(set(r.arrays) == {REFERENCE, TEACHER} for g in first.groups.values() for r in g.rollouts)

    def fails(line: dict[str, Any]) -> None:
        if line["step"] == 4:
            raise Stopped

    resumed = tmp_path / "resumed"
    file = run_file(resumed, deterministic(resumed / "run", noisy))
    kill_at_step(file, resumed / "run", 1)
    with pytest.raises(Stopped):
        train(load_config([file]), resume=resumed / "run", on_step=fails)
    train(load_config([file]), resume=resumed / "run")
    again = told(resumed / "run")
    assert (again.versions, again.batches) == (first.versions, first.batches)
    assert arrays(list(again.groups.values())) == arrays(list(first.groups.values()))


# ---- a process per role


def test_a_process_of_its_own_reads_what_the_trainer_trains(noisy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    settings = tables(tmp_path / "run", launch="local", trainer={"steps": 3}, loss={"kl_coefficient": 0.1, "teacher": noisy})
    before = Held.now(temporary)
    assert run(settings).metrics["steps"] == 3  # the reward is a function of this process, and so is the rollout worker
    after = Held.now(temporary)
    assert after.descriptors == before.descriptors and after.children == () and after.temporary == before.temporary
    stage = build_logprobs(load_tables(settings, reward_given=True).config)
    assert stage is not None
    for group in told(tmp_path / "run").groups.values():
        for recorded, again in zip(group.rollouts, _annotated(stage, group).rollouts, strict=True):
            for name in (REFERENCE, TEACHER):
                assert np.abs(recorded.arrays[name] - again.arrays[name]).max() < 1e-5
                assert (recorded.arrays[name][sampled(recorded)] < 0).any() and (recorded.arrays[name][~sampled(recorded)] == 0).all()
    assert (tmp_path / "run" / "log" / "logprobs.log").exists()


def _annotated(stage: Any, group: Group) -> Group:
    try:
        stage.annotate(group).send(None)  # it never waits
    except StopIteration as answer:
        return answer.value
    raise AssertionError("the stage waited")


# ---- distillation


@pytest.mark.parametrize("how", ["sampled", "full"])
def test_a_student_learns_from_its_teacher_alone(how: str, noisy: str, tmp_path: Path) -> None:
    """No reward, one rollout a prompt: the reverse KL to the teacher falls to a small part within 20 steps."""
    settings = tables(
        tmp_path / "run",
        model={"name": noisy},
        loss={"teacher": "builtin:tiny", "teacher_kl": how},
        rollout={"group_size": 1},
        trainer={"steps": 20, "groups_per_step": 32, "learning_rate": 5e-4},
        engine={"slots": 32},
    )
    notes: list[str] = []
    train(load_tables(settings), stream=_Lines(notes))
    lines = step_lines(tmp_path / "run")
    divergence = [line["teacher_kl"] for line in lines]
    assert divergence[0] > 0.8 and np.mean(divergence[-4:]) < 0.2 * divergence[0], divergence
    assert {line["reward_mean"] for line in lines} == {0.0}
    assert not any("nothing to learn" in note for note in notes)
    rollouts = [r for g in told(tmp_path / "run").groups.values() for r in g.rollouts]
    assert all(set(r.arrays) == ({TEACHER} if how == "sampled" else set()) for r in rollouts)


class _Lines:
    """A stream that keeps what is written to it."""

    def __init__(self, into: list[str]):
        self._into = into

    def write(self, text: str) -> int:
        self._into.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def test_rewards_of_weight_zero_are_measured_and_not_learned_from(noisy: str, tmp_path: Path) -> None:
    settings = tables(
        tmp_path / "run",
        loss={"teacher": noisy},
        trainer={"steps": 2},
        data={"eval": "builtin:sort_digits:eval"},
        evaluation={"limit": 24},
    )
    settings["reward"] = [{"function": "exact", "weight": 0.0}]
    result = train(load_tables(settings))
    lines = step_lines(tmp_path / "run")
    assert all(line["reward_mean"] == 0.0 and "reward/exact" in line for line in lines)
    assert result.metrics["eval_reward_first"] > 0, "the tiny model answers some prompts"
