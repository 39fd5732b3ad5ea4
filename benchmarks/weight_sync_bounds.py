"""What a sync is held against: what moves or hashes as many bytes, alone, on this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from weight_sync_pair import Pair

from slipstream.config.settings import WeightSyncSettings
from slipstream.weight_sync.hashed_copy import CHUNK_BYTES, NoHash, hashed_copy
from slipstream.weight_sync.pair_group import buckets

BOUND = {  # the parts that a whole sync cannot do without
    "shared_memory": ("memcpy", "memcpy"),
    "files": ("write", "read"),
    "collective": ("memcpy", "loopback", "memcpy"),
}
BUCKET_BYTES = WeightSyncSettings().bucket_mib << 20
MOST_BYTES = 1 << 29  # of a buffer; weights that are larger count as so many times these


def bound_of(transport: str, payload: str) -> tuple[str, ...]:
    """The parts that a whole sync cannot do without: of what changed, that both sides hash all of their weights."""
    return ("hash", "hash") if payload == "delta" else BOUND[transport]


def measure_parts(transport: str, payload: str, pair: Pair, turn: int) -> dict[str, float]:
    """Seconds of each part, after a sync, while both roles rest."""
    if payload == "delta":
        return timed({"hash": lambda: xxhash.xxh3_128(pair.buffer().data).digest()}, turn)
    if transport == "files":
        return timed(file_ways(*pair.newest_and_spare(), pair.buffer()), turn)
    if transport == "collective":  # whose slots are the trainer's own
        most = min(pair.controller.num_bytes, MOST_BYTES)
        seconds = timed(collective_ways(pair.buffer(0, most), pair.buffer(1, most)), turn)
        return {name: s * pair.controller.num_bytes / most for name, s in seconds.items()}
    return timed(memory_ways(*pair.source_and_target()), turn)


def memory_ways(source: np.ndarray, target: np.ndarray) -> dict[str, Callable[[], Any]]:
    """What moves or reads uint8[n] on this machine, by name."""
    return {
        "memcpy": lambda: np.copyto(target, source),
        "copy alone": lambda: hashed_copy(target, source, NoHash()),
        "copy and hash": lambda: hashed_copy(target, source, xxhash.xxh3_128()),
        "hash": lambda: xxhash.xxh3_128(source.data).digest(),
    }


def file_ways(newest: Path, spare: Path, data: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Writing uint8[n] into a file and onto the disk, and reading as many bytes of one that was just written."""
    return {"write": lambda: write_file(spare, data), "read": lambda: read_file(newest, data)}


def collective_ways(source: np.ndarray, target: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Copying uint8[n], and sending as many bytes to oneself."""
    return {"memcpy": lambda: np.copyto(target, source), "loopback": lambda: through_loopback(source, target)}


def through_loopback(source: np.ndarray, target: np.ndarray) -> None:
    """From a thread that sends to this one, which receives, over a TCP connection of their own."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sending:
        receiving, _ = server.accept()
        with receiving:
            sender = threading.Thread(target=lambda: [sending.sendall(part.data) for part in buckets(source, BUCKET_BYTES)])
            sender.start()
            for part in buckets(target, BUCKET_BYTES):
                receiving.recv_into(part.data, flags=socket.MSG_WAITALL)
            sender.join()


def write_file(path: Path, data: np.ndarray) -> None:
    """As the publisher: the old file goes, the new one is on disk at the end."""
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        for at in range(0, len(data), CHUNK_BYTES):
            file.write(data[at : at + CHUNK_BYTES].data)
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, target: np.ndarray) -> None:
    with open(path, "rb") as file:
        for at in range(0, len(target), CHUNK_BYTES):
            file.readinto(target[at : at + CHUNK_BYTES].data)


def timed(ways: dict[str, Callable[[], Any]], turn: int) -> dict[str, float]:
    """Seconds of each, in an order that depends on the turn."""
    names = list(ways)
    first = turn % len(names)
    seconds = {}
    for name in names[first:] + names[:first]:
        began = time.perf_counter()
        ways[name]()
        seconds[name] = time.perf_counter() - began
    return seconds
