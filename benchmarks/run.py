"""`make bench`: every benchmark in its short form, one after the other, each in a process of its own.

    python benchmarks/run.py [NAME ...]        results go to benchmarks/out/NAME.json

Those against other libraries need an environment of their own with that library in it, and minutes more: BENCH_PEERS=1 adds them.
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
NAMES = ("overhead", "weight_sync", "train_step", "decode", "overlap", "tools", "scale", "lora")
PEERS = ("vs_trl_sync", "vs_trl_async")


def main() -> int:
    names = sys.argv[1:] or [*NAMES, *(PEERS if os.environ.get("BENCH_PEERS") == "1" else ())]
    began, failed = time.monotonic(), []
    for name in names:
        print(f"\n==== {name} ====\n", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--short", "--json", str(OUT / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
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
