"""Rows from files and folders: JSONL, JSON, parquet, and Arrow files as `datasets.save_to_disk` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.config.paths import DATA_SUFFIXES
from slipstream.errors import DataError

Row = dict[str, Any]

# Names that folders use for their parts; "eval" finds the first of its names that is there.
PART_NAMES = {"train": ("train",), "eval": ("eval", "validation", "valid", "dev", "test")}
_METADATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


def read_file(path: Path) -> list[Row]:
    """The rows of one file; raises DataError that names the line or row that is wrong."""
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        if path.suffix == ".arrow":
            return _arrow(path)
        if path.suffix == ".json":
            return _json(path)
        if path.suffix in (".jsonl", ".ndjson"):
            return _jsonl(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    raise DataError(f"{path}: files of type {path.suffix or '(no suffix)'} are not read; use {', '.join(DATA_SUFFIXES)}")


def read_folder(folder: Path, parts: list[str], part: str) -> list[Row]:
    """The rows of a data set folder.

    `parts` are the names after the folder in the source: a split (`test`), or a configuration, which is a folder inside, and a split.
    Without a split the one for `part` ("train" | "eval") is read, or every file if the folder has no splits.
    """
    shown = ":".join([str(folder), *parts])
    names = list(parts)
    while names and (folder / names[0]).is_dir():
        folder = folder / names.pop(0)
    if len(names) > 1:
        raise DataError(f"{shown}: there is no folder {folder / names[0]}; inside are {_listing(folder)}")
    if names:
        files = _files_of(folder, names[0])
        if not files:
            raise DataError(f"{shown}: no files of split {names[0]!r}; inside are {_listing(folder)}")
        return _read_all(files)
    candidates = [name for name in PART_NAMES[part] if _files_of(folder, name)]
    return _read_all(_files_of(folder, candidates[0]) if candidates else _unsplit(folder, shown, part))


def _unsplit(folder: Path, shown: str, part: str) -> list[Path]:
    """Every file of a folder in which the part is not marked; refused where others are, since they would be mixed."""
    files = _data_files(folder)
    if not files:
        raise DataError(f"{shown}: no {', '.join(DATA_SUFFIXES)} or .arrow files in it; inside are {_listing(folder)}")
    others = [name for names in PART_NAMES.values() for name in names if _files_of(folder, name)]
    if others:
        raise DataError(f"{shown}: no split for {part} is marked in it, but {', '.join(others)} is; name one, e.g. {shown}:{others[0]}")
    if any(file.parent.name != folder.name and file.parent != folder and file.parent.name != "data" for file in files):
        raise DataError(f"{shown}: holds several configurations; name one: {_listing(folder)}")
    return files


def _files_of(folder: Path, split: str) -> list[Path]:
    """`train.jsonl`, `train-00000-of-00002.parquet`, `data/train-*.parquet`, or every file of a folder `train`."""
    if (folder / split).is_dir():
        return _data_files(folder / split)
    return [f for f in _data_files(folder) if f.parent in (folder, folder / "data") and _is_split(f.stem, split)]


def _is_split(stem: str, split: str) -> bool:
    return stem == split or (stem.startswith(split) and not stem[len(split)].isalnum())


def _data_files(folder: Path) -> list[Path]:
    """The data files of a folder; those of `save_to_disk` in the order that its state.json gives."""
    state = folder / "state.json"
    if state.is_file():
        try:
            return [folder / entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{state}: not as save_to_disk writes it: {error!r}") from error
    suffixes = (*DATA_SUFFIXES, ".arrow")
    found = (p for p in folder.rglob("*") if p.suffix in suffixes and p.name not in _METADATA and p.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _listing(folder: Path) -> str:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir() if not p.name.startswith("."))
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "no files"


def _read_all(files: list[Path]) -> list[Row]:
    return [row for file in files for row in read_file(file)]


def _jsonl(path: Path) -> list[Row]:
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_object(line, f"{path}, line {number}"))
    return rows


def _object(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}: {_short(line)}") from error
    if not isinstance(row, dict):
        raise DataError(f'{where}: a row is an object such as {{"prompt": "...", "answer": "..."}}, not {_short(line)}')
    return row


def _json(path: Path) -> list[Row]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}; one object a line is a .jsonl file") from error
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise DataError(f"{path}: a .json file must hold one list of objects; one object a line is a .jsonl file")
    return data


def _parquet(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: parquet files need the package pyarrow; pip install 'slipstream[parquet]', or convert to JSONL"
        ) from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _arrow(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise DataError(f"{path}: Arrow files need the package pyarrow; pip install 'slipstream[parquet]', or convert to JSONL") from error
    try:
        with pyarrow.memory_map(str(path)) as file:
            return pyarrow.ipc.open_stream(file).read_all().to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Arrow stream: {error}") from error


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 80 else text[:77] + "..."
