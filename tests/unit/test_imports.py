"""The torch-free parts import without torch, and the layers keep their order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = ("types", "errors", "protocols", "config", "controller", "scoring", "data", "observe", "system_memory")
HEAVY = ("torch", "transformers", "vllm", "ray", "datasets", "pyarrow", "reasoning_gym", "pandas")


def modules_under(name: str) -> list[str]:
    """A module or package of ours and everything inside it, except entry points, which run on import."""
    folder = ROOT / "src" / "slipstream" / name
    if not folder.is_dir():
        return [f"slipstream.{name}"]
    files = [f for f in sorted(folder.rglob("*.py")) if f.name != "__main__.py"]
    return [".".join(("slipstream", *f.relative_to(folder.parent).with_suffix("").parts)).removesuffix(".__init__") for f in files]


def heavy_after_importing(modules: list[str]) -> str:
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_slipstream_brings_no_torch() -> None:
    assert heavy_after_importing(["slipstream"]) == ""


def test_torch_free_parts_bring_no_heavy_package() -> None:
    assert heavy_after_importing([module for part in TORCH_FREE for module in modules_under(part)]) == ""


def test_the_check_sees_torch() -> None:
    assert "torch" in heavy_after_importing(["slipstream.models.layout", "torch"])


def test_import_contracts() -> None:
    pytest.importorskip("importlinter")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
