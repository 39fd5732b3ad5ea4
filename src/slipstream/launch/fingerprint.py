"""What decides the bits of a run besides its settings and data. Torch-free: read from package metadata and the kernel."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import slipstream
from slipstream import processor
from slipstream.config.settings import Config


def numerics(config: Config) -> dict[str, str]:
    """The numerics fingerprint: equal fingerprints, settings and recorded batches give equal weights, bit for bit."""
    libraries = ["peft"] if config.lora.on else []
    libraries += ["bitsandbytes"] if config.model.quantize else []
    return {
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "machine": platform.machine(),
        "processor": processor.vendor(),
        "vector_units": " ".join(processor.vector_units()),
        "cpu_capability": os.environ.get("ATEN_CPU_CAPABILITY", "default"),
        "engine_threads": str(config.engine.threads),
        "trainer_threads": str(config.trainer.threads),
        "dtype": config.model.dtype,
        "attention": "slipstream",
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def code_version() -> str:
    return slipstream.__version__
