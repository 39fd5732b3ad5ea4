"""Data sources: from `data.train` / `data.eval` to rows. A row is a plain JSON-able dict; every column of the source stays on it.

| source | example |
|---|---|
| JSONL, JSON list, parquet | `train.jsonl`, `rows.json`, `train.parquet` |
| folder of such files, or one written by `save_to_disk` | `gsm8k`, `gsm8k:test`, `gsm8k:main:train` |
| Hugging Face data set (package `datasets`) | `openai/gsm8k:main:train` |
| reasoning-gym task (package `reasoning-gym`) | `reasoning_gym:chain_sum`, with `[data.options]` |
| built in | `builtin:sort_digits` |
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from slipstream.config.paths import DATA_SUFFIXES, resolve_path, split_source
from slipstream.config.settings import DataSettings
from slipstream.data.builtin import builtin_names, builtin_rows
from slipstream.data.files import read_file, read_folder
from slipstream.data.jsonable import jsonable
from slipstream.errors import DataError

Row = dict[str, Any]

PYTHON_ROWS = "python:rows"  # what a run that was given its rows in Python records as its source

HELP = "give a .jsonl or .parquet file, a folder, id:config:split, reasoning_gym:NAME, or builtin:NAME"


def load_rows(source: str, settings: DataSettings, base_folder: Path, *, part: str = "train") -> list[Row]:
    """The rows of a source, with `data.columns` applied, and `data.limit` if they are for training.

    `part` ("train" or "eval") picks the part of a source that has several and names none. Raises DataError: a source that is not there
    or cannot be read, a package that is missing, an absent column, no rows at all.
    """
    return prepare_rows(_read(source, settings, base_folder, part), settings, source, part=part)


def prepare_rows(rows: Sequence[Mapping[str, Any]], settings: DataSettings, source: str, *, part: str = "train") -> list[Row]:
    """Rows as a source gave them, limited, made plain JSON values, and with the names of `data.columns` added."""
    if not rows:
        raise DataError(f"{source}: no rows in it")
    if part == "train" and settings.limit is not None:
        rows = rows[: settings.limit]
    return [_prepare(row, settings, f"{source}, row {number}") for number, row in enumerate(rows, start=1)]


def _prepare(row: Mapping[str, Any], settings: DataSettings, where: str) -> Row:
    return map_columns(jsonable(dict(row), where), settings.columns, where)


def fingerprint(rows: list[Row]) -> str:
    """xxh3-128 (hex) of the rows in canonical JSON, in order: what a draw and a resume know the data by."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(canonical(row).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def map_columns(row: Row, columns: dict[str, str], where: str) -> Row:
    """The row with the new names of `data.columns` added: {new: existing}. The existing columns stay."""
    if not columns:
        return row
    for existing in columns.values():
        if existing not in row:
            raise DataError(absent_column(existing, row, where, "data.columns"))
    return row | {new: row[existing] for new, existing in columns.items()}


def absent_column(column: str, row: Row, where: str, wanted_by: str) -> str:
    """The message for a column that is not there."""
    near = difflib.get_close_matches(column, row, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{where}: no column {column!r}, which {wanted_by} needs; the columns are {', '.join(row) or '(none)'}{hint}"


def _read(source: str, settings: DataSettings, base_folder: Path, part: str) -> list[Row]:
    if source == PYTHON_ROWS:
        raise DataError("this run was given its rows in Python; give them again with data=...: slipstream.train(..., data=rows)")
    scheme, colon, name = source.partition(":")
    if scheme == "builtin" and colon:
        held_out = f"{name}:eval"
        return builtin_rows(held_out if part == "eval" and held_out in builtin_names() else name)
    if scheme == "reasoning_gym" and colon:
        return _reasoning_gym(name, settings.options)
    head, tail = split_source(source)
    path = resolve_path(head, base_folder)
    if path.is_dir():
        return read_folder(path, [p for p in tail.split(":") if p], part)
    if path.is_file():
        if tail:
            raise DataError(f"{source}: {path} is a file, which has no parts; drop {tail!r}")
        return read_file(path)
    if head.endswith(DATA_SUFFIXES) or head.startswith((".", "/", "~")):
        raise DataError(f"{source}: there is no file or folder {path}; {HELP}")
    return _hub(source, settings, part, path)


def _reasoning_gym(name: str, options: dict[str, Any]) -> list[Row]:
    """The questions of a reasoning-gym task: question, answer, metadata, and the question again as `prompt`."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"reasoning_gym:{name} needs the package reasoning-gym ({error}); pip install 'slipstream[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        raise DataError(f"reasoning_gym:{name}: no such task" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    try:
        dataset = reasoning_gym.create_dataset(name, **({"seed": 0} | options))
        return [{"prompt": item["question"], **item} for item in dataset]
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning_gym:{name}: data.options {options} do not fit: {error}") from error


def _hub(source: str, settings: DataSettings, part: str, path: Path) -> list[Row]:
    """`id`, `id:split` or `id:config:split` through the package `datasets`."""
    name, *rest = source.split(":")
    if len(rest) > 2 or not name:
        raise DataError(f"{source}: not a data source; {HELP}")
    config, split = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0] if rest else part)
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"{source}: there is no file or folder {path}, and reading it as a Hugging Face data set needs the package datasets; "
            f"pip install 'slipstream[datasets]', or {HELP}"
        ) from error
    try:
        found = datasets.load_dataset(name, config, split=split, **settings.options)
    except Exception as error:  # the library raises its own, the hub's and the network's errors
        raise DataError(f"{source}: datasets.load_dataset({name!r}, {config!r}, split={split!r}) failed: {error}") from error
    return [dict(row) for row in found]
