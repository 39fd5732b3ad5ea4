"""The peers' own virtual environment, in benchmarks/out/peers-venv: made on first use, minutes, and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parent / "out" / "peers-venv"
REQUIREMENTS = HERE / "requirements.txt"
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INSTALL_S = 1800.0


def peer_python() -> Path:
    """The interpreter of the peers' environment, which is made first where it is absent or was made for other requirements."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {FOLDER} (some minutes, once)", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True, timeout=INSTALL_S)
    _install_torch(python)
    _pip(python, TORCH, "-r", str(REQUIREMENTS)).check_returncode()
    stamp.write_text(wanted)
    return python


def _install_torch(python: Path) -> None:
    """As `make torch` does: the CPU build from the indexes that pip knows, else from PyTorch's own, else whatever PyPI has."""
    cpu = f"{TORCH}+cpu"
    for arguments in ((cpu,), (cpu, "--extra-index-url", TORCH_CPU_INDEX), (TORCH,)):
        result = _pip(python, *arguments)
        if result.returncode == 0:
            return
    result.check_returncode()


def _pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "-qq", *arguments], timeout=INSTALL_S)


if __name__ == "__main__":
    print(peer_python())
