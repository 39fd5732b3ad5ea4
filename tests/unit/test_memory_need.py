"""The estimate of what a run needs."""

from __future__ import annotations

import pytest

from slipstream import processor
from slipstream.config.arithmetic import adapter_places
from slipstream.config.settings import (
    Config,
    DataSettings,
    EngineSettings,
    LoraSettings,
    LossSettings,
    ModelSettings,
    RolloutSettings,
    TrainerSettings,
    WeightSyncSettings,
)
from slipstream.errors import MemoryNeedError, ModelError
from slipstream.models import memory
from slipstream.models.memory import ModelSize, check_memory, local_folder, memory_need, read_model_size
from slipstream.models.tiny import TinyRecipe, make_model, make_tokenizer

SIZE = ModelSize(
    num_parameters=1_000_000,
    num_linear=500_000,
    hidden_size=100,
    intermediate_size=400,
    num_layers=2,
    kv_width=50,
    vocab_size=1000,
    context_tokens=64,
)
PACKED = 4 * (500_000 + 1000 * 100)  # linear layers and head, a second time


@pytest.fixture
def folder(tmp_path):
    model = make_model(TinyRecipe(hidden_size=16, num_layers=3, num_heads=2), make_tokenizer())
    model.save_pretrained(tmp_path)
    return tmp_path


def test_the_size_is_read_from_the_files(folder):
    size = read_model_size(folder)
    model = make_model(TinyRecipe(hidden_size=16, num_layers=3, num_heads=2), make_tokenizer())
    assert size.num_parameters == sum(p.numel() for p in model.parameters())  # the tied head is stored once
    assert (size.hidden_size, size.intermediate_size, size.num_layers, size.kv_width) == (16, 64, 3, 16)
    assert (size.vocab_size, size.context_tokens) == (262, 512)


def test_parts_of_a_float32_run():
    config = Config(
        launch="inline",
        data=DataSettings(eval="builtin:sort_digits:eval"),
        engine=EngineSettings(slots=8),
        rollout=RolloutSettings(group_size=2, max_new_tokens=10),
        trainer=TrainerSettings(groups_per_step=3),
    )
    parts = memory_need(config, SIZE, prompt_tokens=30).parts
    kv = 2 * 8 * 64 * 2 * 50 * 4  # keys and values, slots, context, layers, width, bytes
    assert parts["engine"] == 2 * (4_000_000 + PACKED + 2 * kv)  # live and pinned; keys and values in blocks, and in one piece
    assert parts["weight sync"] == 3 * 4_000_000
    tokens = 3 * (30 + 2 * 10)
    activations = tokens * 2 * (10 * 100 + 4 * 50 + 4 * 400) * 4
    assert parts["trainer"] == 16 * 1_000_000 + int(1.25 * (activations + 3 * tokens * 1000 * 4))


@pytest.mark.parametrize(("saved", "sequences"), [({}, 64), ({"saved_states": 3}, 3), ({"saved_mib": 0}, 0)])
def test_saved_states_count_where_interrupts_make_them(saved, sequences):
    """At most so many sequences at full context, and no more than saved_mib."""
    plain = Config(engine=EngineSettings(slots=8, **saved))
    saving = plain.model_copy(update={"rollout": RolloutSettings(interrupt="abort_resume")})
    more = memory_need(saving, SIZE).parts["engine"] - memory_need(plain, SIZE).parts["engine"]
    assert more == sequences * 2 * 64 * 2 * 50 * 4
    remaking = plain.model_copy(update={"rollout": RolloutSettings(interrupt="abort_resume", kv="recompute")})
    assert memory_need(remaking, SIZE).parts["engine"] == memory_need(plain, SIZE).parts["engine"]


def test_a_server_holds_no_pinned_copy_and_has_processes_of_its_own():
    plain = Config(data=DataSettings(eval=None), engine=EngineSettings(slots=8, type="vllm"))
    assert memory_need(plain, SIZE).parts["engine"] == 2 * 4_000_000 + (8 + 1) * 2 * 64 * 2 * 50 * 4 + (3 << 30)
    adapters = plain.model_copy(update={"lora": LoraSettings(rank=4), "weight_sync": WeightSyncSettings(payload="adapter")})
    sent = memory_need(adapters, SIZE).parts["weight sync"] // 3
    more = memory_need(adapters, SIZE).parts["engine"] - memory_need(plain, SIZE).parts["engine"]
    assert more == 2 * 4_000_000 + 2 * adapter_places(adapters) * sent, "its base comes from a model and a block of the driver's"
    attached = Config(engine=EngineSettings(type="vllm", urls=["http://somewhere"]))
    assert memory_need(attached, SIZE).parts["engine"] == 0


def test_weights_are_packed_up_to_a_bound(monkeypatch):
    config = Config(data=DataSettings(eval=None), engine=EngineSettings(slots=8))
    packed = memory_need(config, SIZE).parts["engine"]
    monkeypatch.setattr(memory, "_PACKED_BYTES", PACKED - 1)
    assert packed - memory_need(config, SIZE).parts["engine"] == PACKED


def test_in_bfloat16_weights_are_packed_on_amd_alone(monkeypatch):
    config = Config(model=ModelSettings(dtype="bfloat16"), data=DataSettings(eval=None), engine=EngineSettings(slots=8))
    monkeypatch.setattr(processor, "vendor", lambda: "GenuineIntel")
    plain = memory_need(config, SIZE).parts["engine"]
    monkeypatch.setattr(processor, "vendor", lambda: processor.AMD)
    assert memory_need(config, SIZE).parts["engine"] - plain == PACKED // 2


def test_bfloat16_adds_masters_and_halves_the_rest(monkeypatch):
    monkeypatch.setattr(processor, "vendor", lambda: "GenuineIntel")
    config = Config(model=ModelSettings(dtype="bfloat16"), data=DataSettings(eval=None), engine=EngineSettings(slots=8))
    parts = memory_need(config, SIZE).parts
    assert parts["weight sync"] == 3 * 2_000_000
    assert parts["engine"] == 2_000_000 + 2 * (2 * 8 * 64 * 2 * 50 * 2)
    assert parts["trainer"] > (2 + 4 + 8 + 4) * 1_000_000


def test_replicas_count_with_their_processes_and_slots_and_one_of_them_holds_the_pinned_copy():
    def need(replicas, **more):
        return memory_need(Config(engine=EngineSettings(slots=8, replicas=replicas), **more), SIZE).parts

    evaluated = {"data": DataSettings(eval="builtin:sort_digits:eval")}
    one, three = need(1), need(3)
    assert three["engine"] == 3 * one["engine"] and need(3, **evaluated)["engine"] == 4 * one["engine"]
    assert three["weight sync"] == 5 * 4_000_000 and three["processes"] == 5 * one["processes"] // 3


@pytest.mark.parametrize(("lag", "slots"), [(None, 3), (0, 3), (4, 7)])
def test_weight_slots_are_those_that_the_broker_hands_out(lag, slots):
    settings = {"launch": "inline", "buffer": {"max_staleness": lag or 0}, "weight_sync": {"lag": lag}}
    assert memory_need(Config.model_validate(settings), SIZE).parts["weight sync"] == slots * 4_000_000


def test_engines_that_receive_messages_hold_a_block_each():
    settings = {"engine": {"replicas": 2}, "weight_sync": {"transport": "collective"}}
    assert memory_need(Config.model_validate(settings), SIZE).parts["weight sync"] == (4 + 2) * 4_000_000


@pytest.mark.parametrize(
    ("sync", "blocks"),
    [
        ({}, 4),
        ({"transport": "files"}, 0),
        ({"transport": "collective"}, 4 + 2 + 2),
        ({"payload": "delta"}, 4 + 2 + (4 + 1) / 4),
        ({"payload": "delta", "transport": "files"}, 1 + 2 + (1 + 1) / 4),
    ],
)
def test_drivers_of_servers_hold_a_copy_of_what_those_cannot_read(sync, blocks):
    for engine in ({"replicas": 2}, {"replicas": 2, "urls": ["http://a", "http://b"]}):
        settings = {"engine": {"type": "vllm", **engine}, "weight_sync": sync}
        assert memory_need(Config.model_validate(settings), SIZE).parts["weight sync"] == blocks * 4_000_000


def test_weights_that_travel_as_files_lie_on_the_disk(folder):
    config = Config.model_validate({"weight_sync": {"transport": "files"}, "model": {"dtype": "bfloat16"}})
    assert memory_need(config, SIZE).parts["weight sync"] == 0
    assert memory.weight_file_bytes(config, folder) == 3 * 2 * read_model_size(folder).num_parameters


def test_gradient_checkpointing_needs_less():
    def trainer(on: bool) -> int:
        settings = TrainerSettings(gradient_checkpointing=on)
        return memory_need(Config(trainer=settings), ModelSize(1000, 512, 2048, 24, 512, 1000, 4096)).parts["trainer"]

    assert trainer(True) < trainer(False) / 5


def test_a_gpu_takes_its_parts_off_main_memory():
    here = memory_need(Config(model=ModelSettings(device="cpu")), SIZE)
    there = memory_need(Config(model=ModelSettings(device="cuda:0")), SIZE)
    assert here.parts["engine"] - there.parts["engine"] == PACKED, "no GPU packs weights"
    assert here.parts | {"engine": 0} == there.parts | {"engine": 0}
    assert here.host_bytes == here.total_bytes
    assert there.host_bytes == there.parts["weight sync"] + there.parts["processes"]


def test_too_little_memory_is_refused_before_loading(folder, monkeypatch):
    config = Config(model=ModelSettings(name=str(folder), device="cpu"), launch="inline")
    need = check_memory(config)
    assert need is not None
    monkeypatch.setattr(memory, "available_bytes", lambda: need.host_bytes)
    assert check_memory(config) is not None
    monkeypatch.setattr(memory, "available_bytes", lambda: need.host_bytes - 1)
    with pytest.raises(MemoryNeedError, match=r"needs about .* GiB: trainer .*, engine .* GiB available\)\. Lower engine\.slots"):
        check_memory(config)


def test_unknown_memory_refuses_nothing(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    need = check_memory(Config(model=ModelSettings(name=str(folder))))
    assert need is not None
    assert "available" not in str(need)


def test_a_model_that_is_not_here_yet_has_no_estimate(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    for name in ("builtin:tiny", "pypi:package==1.0", "absent.gguf", "nobody/absent"):
        assert local_folder(ModelSettings(name=name)) is None
        assert check_memory(Config(model=ModelSettings(name=name))) is None


def test_made_models_are_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    for name in ("tiny-0123", "gguf-small.Q4-abcd", "pypi-package-1.0"):
        (tmp_path / name).mkdir()
    (tmp_path / "pypi-package-1.0" / "small.Q4.gguf").touch()
    assert local_folder(ModelSettings(name="builtin:tiny")) == tmp_path / "tiny-0123"
    assert local_folder(ModelSettings(name="somewhere/small.Q4.gguf")) == tmp_path / "gguf-small.Q4-abcd"
    assert local_folder(ModelSettings(name="pypi:package==1.0")) == tmp_path / "gguf-small.Q4-abcd"


def test_damaged_files_are_named(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"):
        read_model_size(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_model_size(folder)


FROZEN = ModelSize(
    num_parameters=5_000_000, hidden_size=10, intermediate_size=40, num_layers=1, kv_width=5, vocab_size=1000, context_tokens=64
)


def test_frozen_models_are_counted_where_they_are_held():
    rollout, big = RolloutSettings(group_size=2, max_new_tokens=10), ModelSettings(name="big")

    def parts(**loss) -> dict[str, int]:
        config = Config(loss=LossSettings(**loss), rollout=rollout, data=DataSettings(eval=None))
        return memory_need(config, SIZE, 30, {config.model: SIZE, big: FROZEN}).parts

    none, reference = parts(), parts(kl_coefficient=0.1)
    tokens = 30 + 2 * 10
    forward = tokens * (10 * 100 + 4 * 50 + 4 * 400) * 4 + 3 * tokens * 1000 * 4
    assert "frozen models" not in none
    assert reference["frozen models"] == 4_000_000 + forward
    assert reference["processes"] * 3 == none["processes"] * 4  # the stage has a process of its own
    teacher = parts(teacher="big")["frozen models"]
    assert teacher == 20_000_000 + tokens * (10 * 10 + 4 * 5 + 4 * 40) * 4 + 3 * tokens * 1000 * 4
    assert parts(teacher="big", teacher_kl="full")["processes"] == none["processes"]  # the trainer holds it
    assert parts(teacher="big", kl_coefficient=0.1)["frozen models"] == teacher + reference["frozen models"]
    assert parts(teacher="builtin:tiny", kl_coefficient=0.1)["frozen models"] == reference["frozen models"]  # one model for both
    assert parts(teacher="builtin:tiny", teacher_kl="full", kl_coefficient=0.1)["frozen models"] == 2 * reference["frozen models"]


def test_a_teacher_that_is_not_here_yet_leaves_the_need_unknown(folder, tmp_path):
    loss = LossSettings(teacher=str(tmp_path / "absent"))
    assert check_memory(Config(model=ModelSettings(name=str(folder)), loss=loss)) is None
    need = check_memory(Config(model=ModelSettings(name=str(folder)), loss=LossSettings(teacher=str(folder))))
    assert need is not None and "frozen models" in need.parts
