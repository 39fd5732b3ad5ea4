"""Memory files: shared between processes, grown once, gone with the last process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import MemoryNeedError
from slipstream.weight_sync.memory import MemoryFile

READER = """
import sys
from slipstream.weight_sync.memory import MemoryFile
block = MemoryFile(int(sys.argv[1])).map()
print(len(block), int(block.sum()), block.flags.writeable)
"""


@pytest.fixture(params=["memfd", "unlinked file"])
def memory(request, tmp_path):
    if request.param == "memfd" and not hasattr(os, "memfd_create"):
        pytest.skip("no memfds on this system")
    file = MemoryFile.create("test", directory=None if request.param == "memfd" else str(tmp_path))
    yield file
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_child_sees_what_the_parent_wrote(memory):
    assert memory.nbytes == 0 and len(memory.map()) == 0
    memory.resize(1000)
    memory.map(writable=True)[:] = 3
    args = [sys.executable, "-c", READER, str(memory.fileno())]
    done = subprocess.run(args, pass_fds=[memory.fileno()], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["1000", "3000", "False"]


def test_a_descriptor_is_inherited_only_on_purpose(memory):
    assert not os.get_inheritable(memory.fileno())


def test_grows_and_never_shrinks(memory):
    memory.resize(100)
    before = memory.map(writable=True)
    before[:] = 7
    memory.resize(50)
    assert memory.nbytes == 100
    memory.resize(5000)
    after = memory.map()
    assert len(after) == 5000 and after[:100].sum() == 700
    before[0] = 9
    assert after[0] == 9, "mappings from before and after show the same memory"


def test_mapped_once(memory):
    memory.resize(64)
    assert memory.map() is memory.map()


def test_a_reader_cannot_write(memory):
    memory.resize(64)
    with pytest.raises(ValueError, match="read-only"):
        memory.map()[0] = 1


def test_a_mapping_outlives_the_descriptor(memory):
    memory.resize(64)
    block = memory.map(writable=True)
    memory.close()
    block[:] = 5
    assert np.all(block == 5)


def test_too_much_is_said_before_it_is_reserved(memory, monkeypatch):
    monkeypatch.setattr("slipstream.weight_sync.memory.available_bytes", lambda: 2**20)
    with pytest.raises(MemoryNeedError, match=r"2 MiB of shared memory.*1 MiB are available"):
        memory.resize(2**21)
    assert memory.nbytes == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_nothing_has_a_name():
    before = set(os.listdir("/dev/shm"))
    file = MemoryFile.create("test")
    file.resize(4096)
    assert set(os.listdir("/dev/shm")) - before == set()
    file.close()
