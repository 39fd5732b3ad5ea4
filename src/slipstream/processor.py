"""What the kernel says of the processor: who made it, and its vector units. No torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

AMD = "AuthenticAMD"
CPU_INFO = Path("/proc/cpuinfo")

_VECTOR_FLAGS = ("avx2", "avx512f", "amx_bf16", "asimd", "sve")


def vendor() -> str:
    """E.g. "GenuineIntel"; "" where nobody says."""
    return _fields().get("vendor_id", "")


def vector_units() -> list[str]:
    flags = (_fields().get("flags") or _fields().get("Features") or "").split()
    return [flag for flag in _VECTOR_FLAGS if flag in flags]


@cache
def _fields() -> dict[str, str]:
    """Of the first processor in /proc/cpuinfo; none where there is no such file."""
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
