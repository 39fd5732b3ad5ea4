"""How much main memory this machine can still give, within the limits of the process's control groups; what this process need not keep.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Main memory that can be had now: what is free or can be freed, within the container's limit; None where nobody says."""
    values = [value for value in (_machine_bytes(), container_bytes()) if value is not None]
    return min(values, default=None)


def container_bytes(root: Path = CGROUPS, own: str | None = None) -> int | None:
    """What is left under the tightest limit of cgroup v2 from this process's group (`own`, "/a/b") up to `root`; None without a limit.

    Inside a container the root that is seen usually is the container's own group.
    """
    inside = root / (_own_group() if own is None else own).lstrip("/")
    groups = [group for group in (inside, *inside.parents) if group == root or root in group.parents]
    return min((left for group in groups if (left := _left_in(group)) is not None), default=None)


def give_back_freed_memory() -> None:
    """Hand the kernel what lies free between the blocks in use; does nothing where the C library is not glibc."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def _left_in(group: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())  # "max" without a limit: ValueError
        cached = 0
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                cached = int(line.split()[1])  # given back on demand
        return max(0, limit - int((group / "memory.current").read_text()) + cached)
    return None


def _own_group() -> str:
    """The path of this process's group below the root, as the kernel tells it; "" where it does not."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return line[3:].replace("..", "")  # a group outside of what this namespace sees is shown as /../...
    return ""


def _machine_bytes() -> int | None:
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            answer = subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, timeout=10, check=True)
            return int(answer.stdout)
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
