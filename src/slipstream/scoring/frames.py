"""The messages between a process scorer and its child: length-prefixed msgpack records on a socket pair. No pickle."""

from __future__ import annotations

from typing import Any

from slipstream.types import Group, Record, Score

HEADER_BYTES = 4  # big-endian length of the record that follows
MAX_FRAME_BYTES = 256 * 2**20


class ChildSetup(Record, frozen=True, kw_only=True):
    """First message to a child: which function it serves."""

    function: str
    name: str
    weight: float
    options: dict[str, Any] = {}
    import_path: list[str] = []  # the parent's sys.path, so that the same names import


class ChildCall(Record, frozen=True, kw_only=True):
    group: Group


class ChildReply(Record, frozen=True, kw_only=True):
    """To the setup: no scores. To a call: one score per rollout, or the failure."""

    scores: list[Score] = []
    failure: str | None = None


def frame(record: bytes) -> bytes:
    """The bytes that carry an encoded record."""
    if len(record) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(record)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return len(record).to_bytes(HEADER_BYTES, "big") + record


def frame_length(header: bytes) -> int:
    """How many bytes follow; ValueError beyond the limit."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return length
