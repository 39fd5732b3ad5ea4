"""A process group of two, trainer and one engine, that moves a block of bytes from the first to the second, bucket by bucket.

    block   [ bucket 0 | bucket 1 | bucket 2 | .. ]      two are on their way at a time: while one is hashed, the next arrives

In main memory (gloo) buckets are sent out of the block and received into it. Where both sides' weights lie on GPUs of their own (NCCL) each
passes through one of two buffers of its size on the device. The group is its own object over a store of its own: the trainer's default
group, which it may need for itself, is never touched. A group that has failed once is of no use any more and is made anew.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

from slipstream.errors import DeadlineExceeded, PeerLost

CPU = torch.device("cpu")
IN_FLIGHT = 2  # buckets: double-buffered
_HERE = "127.0.0.1"  # both are processes of this machine


def buckets(block: np.ndarray, bucket_bytes: int) -> Iterator[np.ndarray]:
    """The block, uint8[n], in pieces of `bucket_bytes`; the last one may be smaller. Both sides cut alike."""
    for at in range(0, len(block), bucket_bytes):
        yield block[at : at + bucket_bytes]


class PairGroup:
    """`store` is a file that nobody has used yet, the same for both; `deadline_s` holds for the other side to come, and for each bucket.

    Errors name `peer`. Raises DeadlineExceeded where it does not come, or does not take or give a bucket; PeerLost where it is gone.
    """

    def __init__(self, rank: int, store: str, device: torch.device, peer: str, deadline_s: float):
        self._other, self._device, self._peer, self._deadline_s = 1 - rank, device, peer, deadline_s
        self._buffers: list[Tensor] = []  # on the device
        make = _nccl if device.type == "cuda" else _gloo
        with self._failures("to come into the group that carries weights"):
            self._group = make(FileStore(store, 2), rank, timedelta(seconds=deadline_s))

    def send(self, parts: Iterable[np.ndarray]) -> None:
        """Send each, uint8[n]; all have left when this returns. What `parts` raises ends it."""

        def start(tag: int, tensor: Tensor, part: np.ndarray) -> Any:
            if tensor.device != CPU:
                tensor.copy_(torch.from_numpy(part))
            return self._group.send([tensor], self._other, tag)

        self._move(parts, start, lambda tensor, part: None)

    def receive(self, parts: Iterable[np.ndarray], arrived: Callable[[np.ndarray], None]) -> None:
        """Fill each, uint8[n], as they were sent; `arrived` gets them one by one, while the next is on its way."""

        def finish(tensor: Tensor, part: np.ndarray) -> None:
            if tensor.device != CPU:
                torch.from_numpy(part).copy_(tensor)
            arrived(part)

        self._move(parts, lambda tag, tensor, part: self._group.recv([tensor], self._other, tag), finish)

    def _move(
        self,
        parts: Iterable[np.ndarray],
        start: Callable[[int, Tensor, np.ndarray], Any],
        finish: Callable[[Tensor, np.ndarray], None],
    ) -> None:
        under_way: deque[tuple[Any, Tensor, np.ndarray]] = deque()

        def finish_first() -> None:
            work, tensor, part = under_way.popleft()
            with self._failures("to move a bucket of weights"):
                work.wait(timedelta(seconds=self._deadline_s))
            finish(tensor, part)

        for number, part in enumerate(parts):
            if len(under_way) == IN_FLIGHT:
                finish_first()
            tensor = self._place(number, part)
            with self._failures("to move a bucket of weights"):
                under_way.append((start(number, tensor, part), tensor, part))
        while under_way:
            finish_first()

    def _place(self, number: int, part: np.ndarray) -> Tensor:
        """Where the part is while it travels, uint8[n]: its own memory, or a buffer on the device."""
        if self._device == CPU:
            return torch.from_numpy(part)
        while len(self._buffers) < IN_FLIGHT:  # the first part is as large as any
            self._buffers.append(torch.empty(len(part), dtype=torch.uint8, device=self._device))
        return self._buffers[number % IN_FLIGHT][: len(part)]

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """torch's errors, which are RuntimeErrors all, in our vocabulary."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if time.monotonic() - began >= self._deadline_s:
                raise DeadlineExceeded(f"waited {self._deadline_s:.0f} s for {self._peer} {what}") from error
            raise PeerLost(f"{self._peer} was lost while this side waited for it {what}: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Nothing moves any more; the other side sees it."""
        self._group.shutdown()


def _gloo(store: Store, rank: int, deadline: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HERE)]
    options._timeout = deadline
    options._threads = 1  # they serve collectives of many, of which there are none
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, deadline: timedelta) -> Any:
    """`wait` then blocks until the bytes have moved, and raises after the deadline, instead of ending the process."""
    before = os.environ.get(blocking := "TORCH_NCCL_BLOCKING_WAIT")
    os.environ[blocking] = "1"  # read while the group is made
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    finally:
        if before is None:
            del os.environ[blocking]
        else:
            os.environ[blocking] = before
