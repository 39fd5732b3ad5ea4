"""The built-in rewards: pure functions of a completion and an answer column."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


def exact(completion: str, row: dict[str, Any], column: str = "answer", strip: str = "", ignore_case: bool = False) -> float:
    """1.0 if the stripped completion equals the row's answer; `strip`: characters also taken from its end, e.g. "." """
    said, wanted = completion.strip(), str(row_column(row, column, "exact")).strip()
    if strip:
        said = said.rstrip(strip).strip()
    return float(said.casefold() == wanted.casefold() if ignore_case else said == wanted)


def number(completion: str, row: dict[str, Any], column: str = "answer") -> float:
    """1.0 if the last number in the completion equals the last number in the row's answer (so GSM8K answers work as they come)."""
    wanted = last_number(str(row_column(row, column, "number")))
    if wanted is None:
        raise ValueError(f"column {column!r} holds no number: {row[column]!r}")
    return float(last_number(completion) == wanted)


def regex(completion: str, row: dict[str, Any], pattern: str, column: str | None = None, ignore_case: bool = False) -> float:
    """1.0 if `pattern` is found; with `column`, if what its first group (or all of it) captured last equals that column."""
    found = list(re.finditer(pattern, completion, re.DOTALL | (re.IGNORECASE if ignore_case else 0)))
    if column is None or not found:
        return float(bool(found))
    said = found[-1].group(1 if found[-1].re.groups else 0) or ""
    return float(said.strip() == str(row_column(row, column, "regex")).strip())


BUILTIN_REWARDS = {"exact": exact, "number": number, "regex": regex}


def row_column(row: dict[str, Any], column: str, name: str) -> Any:
    """The column's value; a KeyError-like error that lists the columns present."""
    if column not in row:
        raise ValueError(f"reward {name!r} needs the column {column!r}; the row has {', '.join(sorted(row)) or 'no columns'}")
    return row[column]


def last_number(text: str) -> Decimal | None:
    """The last decimal number in a text: "so 1,234.50 apples." -> 1234.50"""
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    try:
        return Decimal(matches[-1].replace(",", ""))
    except InvalidOperation:
        return None
