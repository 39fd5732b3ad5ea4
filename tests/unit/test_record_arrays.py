"""Arrays in records: what comes back, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from slipstream.types import decode, encode


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, np.int32), np.zeros((0, 4), np.float32), np.array(True)], ids=str
)
def test_an_array_comes_back(array):
    back = decode(encode(array), np.ndarray)
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (("|O", (1,), bytes(8)), "not allowed"),
        (("<i4", (1,) * 5, bytes(4)), "not allowed"),
        (("<i4", (-1,), bytes(4)), "4 bytes for"),
        (("<i4", (-1, -1), bytes(4)), "not allowed"),
        (("<i4", (2,), bytes(12)), "12 bytes"),
        (("<i4", (2,), bytes(4)), "4 bytes for"),
    ],
    ids=["objects", "five dimensions", "a negative length", "negative lengths", "bytes left over", "bytes missing"],
)
def test_what_is_no_array_is_refused(content, words):
    with pytest.raises((msgspec.ValidationError, ValueError, TypeError), match=words):
        decode(msgspec.msgpack.encode(content), np.ndarray)
