"""Frozen models: which ones a run holds, and that they speak of the same tokens as the model that learns."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from slipstream.config.frozen_models import only_teacher, stage_models, trainer_teacher
from slipstream.config.load import load_config
from slipstream.config.settings import Config, EngineSettings, LossSettings, ModelSettings, RewardSettings
from slipstream.errors import ModelError
from slipstream.launch.assemble import build_logprobs
from slipstream.logprobs import loading
from slipstream.logprobs.loading import check_frozen_model, load_frozen_model
from slipstream.logprobs.tokens import check_same_tokens
from slipstream.models.loading import load_model
from slipstream.models.tiny import tiny_folder


def config(**loss) -> Config:
    return Config(model=ModelSettings(device="cpu"), engine=EngineSettings(max_context=64), loss=LossSettings(**loss))


def names(made: Config) -> dict[str, str]:
    return {array: model.settings.name for array, model in stage_models(made).items()}


def test_no_frozen_model_unless_the_loss_asks_for_one():
    assert names(config()) == {} and trainer_teacher(config()) is None and build_logprobs(config()) is None


def test_the_reference_is_the_start_model_unless_another_is_named():
    assert names(config(kl_coefficient=0.1)) == {"reference_logprobs": "builtin:tiny"}
    assert names(config(kl_coefficient=0.1, reference="base")) == {"reference_logprobs": "base"}
    start = Config(model=ModelSettings(name="some/model", revision="abc"), loss=LossSettings(kl_coefficient=0.1))
    assert stage_models(start)["reference_logprobs"].settings == start.model  # its revision, too
    other = start.model_copy(update={"loss": LossSettings(kl_coefficient=0.1, reference="other/model")})
    assert stage_models(other)["reference_logprobs"].settings.revision is None


def test_a_teacher_is_read_by_the_stage_or_held_by_the_trainer():
    assert names(config(teacher="big")) == {"teacher_logprobs": "big"} and trainer_teacher(config(teacher="big")) is None
    full = config(teacher="big", teacher_kl="full")
    held = trainer_teacher(full)
    assert names(full) == {} and held is not None and held.settings.name == "big"


def test_only_a_teacher():
    distilled = config(teacher="big")
    assert only_teacher(distilled, reward_given=False) and not only_teacher(distilled, reward_given=True)
    measured = distilled.model_copy(update={"reward": [RewardSettings(function="exact", weight=0.0)]})
    assert only_teacher(measured, reward_given=False)
    trained = distilled.model_copy(update={"reward": [RewardSettings(function="exact")]})
    assert not only_teacher(trained, reward_given=False) and not only_teacher(config(), reward_given=False)


def test_files_are_relative_to_the_run_file(tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "run.toml").write_text('[loss]\nteacher = "teacher"\nreference = "./start"\nkl_coefficient = 0.1\n')
    loss = load_config([tmp_path / "run.toml"], reward_given=True).config.loss
    assert loss.teacher == str(tmp_path / "teacher") and loss.reference == str(tmp_path / "start")


# ---- the same tokens


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"a": 0, "c": 1, "b": 2}, ("token id 1: 'c' there, 'b' here",)),
        ({"a": 0, "b": 1}, ("2 tokens there, 3 here", "token id 2: none there, 'c' here")),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, ("token id 3: 'd' there, none here",)),
        ({"a": 0, "b": 1, "c": 2, "C": 2}, ("token id 2: 'C' and 'c' there, 'c' here",)),
    ],
)
def test_the_first_difference_of_two_vocabularies_is_named(theirs, words):
    with pytest.raises(ModelError) as raised:
        check_same_tokens("loss.teacher", "big", theirs, {"a": 0, "b": 1, "c": 2})
    for word in ("loss.teacher = 'big'", "same tokenizer", *words):
        assert word in str(raised.value)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be changed."""
    return Path(shutil.copytree(tiny_folder(), tmp_path / "other"))


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(made: Config, words: str) -> None:
    (frozen,) = stage_models(made).values()
    with pytest.raises(ModelError, match=words):
        check_frozen_model(frozen, made)


def test_another_tokenizer_is_refused_before_any_weight_is_read(other):
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "model.safetensors").write_bytes(b"")
    refused(config(teacher=str(other)), rf"loss\.teacher = '{re.escape(str(other))}': its tokenizer is not .* 'B' there, 'A' here")


def test_a_context_that_is_too_short_is_refused(other):
    change(other / "config.json", max_position_embeddings=32)
    refused(
        config(kl_coefficient=0.1, reference=str(other)),
        r"loss\.reference = .* has 32 positions, .* 64 tokens; set engine\.max_context = 32",
    )


def test_an_embedding_with_too_few_rows_is_refused(other):
    change(other / "config.json", vocab_size=200)
    refused(config(teacher=str(other)), r"loss\.teacher = .*token ids up to 261 .* only 200 rows")


def test_a_model_of_another_kind_is_refused(other):
    change(other / "config.json", attention_chunk_size=8)
    refused(config(teacher=str(other)), r"loss\.teacher = .*chunked attention")


def test_a_folder_that_is_not_there_is_named_with_its_key(tmp_path):
    refused(config(teacher=str(tmp_path / "absent")), r"loss\.teacher = '.*absent': there is no such folder")


def test_a_model_for_both_is_loaded_once_and_wants_no_gradient(monkeypatch, other):
    loaded = []
    monkeypatch.setattr(loading, "load_model", lambda settings, **device: (loaded.append(settings.name), load_model(settings, **device))[1])
    stage = build_logprobs(config(kl_coefficient=0.1, teacher="builtin:tiny"))
    assert stage is not None and stage.models["reference_logprobs"] is stage.models["teacher_logprobs"]
    assert not any(p.requires_grad for p in stage.models["reference_logprobs"].parameters())
    both = build_logprobs(config(kl_coefficient=0.1, teacher=str(other)))
    assert both is not None and both.models["reference_logprobs"] is not both.models["teacher_logprobs"]
    assert loaded == ["builtin:tiny", "builtin:tiny", str(other)]


def test_a_model_other_than_the_learning_one_is_proved(monkeypatch, other):
    proved = []
    monkeypatch.setattr(loading, "probe", lambda model, **_: proved.append(model))
    made = config(kl_coefficient=0.1, teacher=str(other))
    models = {key: load_frozen_model(model, made) for key, model in stage_models(made).items()}
    assert proved == [models["teacher_logprobs"]]
