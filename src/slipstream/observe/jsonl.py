"""JSON lines on disk: one object a line, flushed as it is written, readable after a crash in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


def _plain(value: Any) -> Any:
    """What JSON has no form for: numpy and torch scalars are numbers, everything else is what it prints as."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


_encode = msgspec.json.Encoder(enc_hook=_plain).encode  # strict: NaN and infinity become null


class JsonLines:
    """Appends objects to one file. A last line that a crash cut short is closed first, so that it spoils no other line."""

    def __init__(self, path: Path):
        self.path = path
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._file = path.open("ab")
        if torn:
            self._file.write(b"\n")

    def write(self, line: Any) -> None:
        """Append one object: a dictionary, or a dataclass as one."""
        self._file.write(_encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the file, in order; a line cut short by a crash is skipped; no file is no lines."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
