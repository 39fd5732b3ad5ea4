"""Which adapters a server holds, and which of them are needed: a pure state machine. No torch.

    a free place ──put──► newest ──(a newer one is put)──► held ──evict──► a free place
                                                             as soon as a place is wanted and no stream and no pin needs it

A server's adapters are never overwritten: a running request would go on under other weights, and the prefix cache, which knows an adapter
by its name, would give keys and values of the old ones. So each version has a place of its own, and keeps it while it is needed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.engines.vllm.labels import Version


class Shelf:
    """`places`: adapters that the server may hold at a time, the one that it is being given included; at least two."""

    def __init__(self, places: int):
        if places < 2:
            raise ValueError(f"{places} places for adapters: the one in use and the next one need two")
        self.places = places
        self.held: list[Version] = []  # oldest first; the last one is the newest
        self._needed: Counter[Version] = Counter()
        self._released = asyncio.Event()

    @property
    def full(self) -> bool:
        return len(self.held) >= self.places

    def unneeded(self) -> Version | None:
        """The oldest that nothing needs; None where all are needed. The newest always is."""
        return next((version for version in self.held[:-1] if not self._needed[version]), None)

    def put(self, version: Version) -> None:
        """The server holds it now, and it is the newest."""
        assert not self.full and version not in self.held, f"there is no place for {version}"
        self.held.append(version)

    def evict(self, version: Version) -> None:
        """The server holds it no more."""
        assert version in self.held[:-1] and not self._needed[version], f"{version} is needed"
        self.held.remove(version)

    @contextmanager
    def needing(self, version: Version) -> Iterator[None]:
        """Within, the version keeps its place."""
        assert version in self.held, f"{version} is not held"
        self._needed[version] += 1
        try:
            yield
        finally:
            self._needed[version] -= 1
            self._released.set()

    async def a_release(self) -> None:
        """Wait until something is needed less. For who has just seen that nothing is unneeded."""
        self._released.clear()
        await self._released.wait()
