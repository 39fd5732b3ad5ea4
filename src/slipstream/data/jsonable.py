"""Values from any source as plain JSON values, so that a row can be recorded, sent and hashed."""

from __future__ import annotations

import base64
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from slipstream.errors import DataError

_LARGEST_INT = 2**64 - 1  # what a record can hold
_SMALLEST_INT = -(2**63)


def jsonable(value: Any, where: str) -> Any:
    """The same value in dicts with text keys, lists, text, numbers, booleans and None.

    Tuples, sets and arrays become lists, dates ISO text, decimals and whole numbers beyond 64 bits their digits, bytes base64 text, and
    anything else its `str`. A surrogate that is no character raises DataError: no tokenizer could read it.
    """
    match value:
        case None | bool() | float():
            return value
        case str():
            return _text(value, where)
        case int():
            return int(value) if _SMALLEST_INT <= value <= _LARGEST_INT else str(value)
        case dict():
            return {_text(str(key), where): jsonable(item, where) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item, where) for item in value]
        case set() | frozenset():
            return [jsonable(item, where) for item in sorted(value, key=repr)]
        case np.ndarray():
            return jsonable(value.tolist(), where)
        case np.generic():
            return jsonable(value.item(), where)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes() | bytearray():
            return base64.b64encode(value).decode("ascii")
        case Decimal():
            return str(value)
    return str(value)


def _text(value: str, where: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: text that is not valid Unicode ({error.reason} at character {error.start})") from error
    return value
