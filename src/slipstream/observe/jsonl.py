"""JSON lines on disk: one object a line, flushed as it is written, readable after a crash in the middle of a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The value as strict JSON can hold it: numpy scalars become numbers, NaN and infinity become None, tuples become lists."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return int(value)
    item = getattr(value, "item", None)  # numpy and torch scalars
    return plain(item()) if callable(item) else str(value)


class JsonLines:
    """Appends objects to one file. A last line that a crash cut short is closed first, so that it spoils no other line."""

    def __init__(self, path: Path):
        self.path = path
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(plain(line), ensure_ascii=False, allow_nan=False) + "\n")
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
