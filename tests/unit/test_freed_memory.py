"""Large blocks that are freed and taken again cost no page faults once a process keeps its memory."""

import json
import subprocess
import sys

import pytest

CODE = """
import json, resource, sys
import torch
from slipstream.trainer.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(32 << 20).add_(1)  # 128 MB, 32 768 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
as_it_is = min(faults() for _ in range(3))
if not keep_freed_memory():
    sys.exit(3)
print(json.dumps([as_it_is, min(faults() for _ in range(8))]))  # small objects may settle in the block at first
"""


def test_a_block_taken_again_is_already_there():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    if done.returncode == 3:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    as_it_is, kept = json.loads(done.stdout)
    assert kept < 1000
    if sys.platform == "linux":
        assert as_it_is > 1000  # with huge pages 64 would do; without the call there is something to win
