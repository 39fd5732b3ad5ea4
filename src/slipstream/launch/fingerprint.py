"""What decides the bits of a run besides its settings and data. Torch-free: read from package metadata and the kernel."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import slipstream
from slipstream.config.settings import Config

_VECTOR_FLAGS = ("avx2", "avx512f", "amx_bf16", "asimd", "sve")


def numerics(config: Config) -> dict[str, str]:
    """The numerics fingerprint: equal fingerprints, settings and recorded batches give equal weights, bit for bit."""
    libraries = ["peft"] if config.lora.on else []
    libraries += ["bitsandbytes"] if config.model.quantize else []
    return {
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "machine": platform.machine(),
        "vector_units": " ".join(_vector_units()),
        "cpu_capability": os.environ.get("ATEN_CPU_CAPABILITY", "default"),
        "engine_threads": str(config.engine.threads),
        "trainer_threads": str(config.trainer.threads),
        "dtype": config.model.dtype,
        "attention": "slipstream",
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def code_version() -> str:
    return slipstream.__version__


def _vector_units() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith(("flags", "Features"))), [])
    return [flag for flag in _VECTOR_FLAGS if flag in flags]
