"""Which engine takes which request: a pure state machine, kept by the pool (`pool.py`).

A request goes, among the engines that hold its `min_version`,

    1. to the one that holds the state it goes on from: that state is half of its work already done;
    2. else to one with a free slot: first to where its rollout or a sibling of its group ran last, which has its prompt's keys and values,
       then to the one with the fewest requests;
    3. else into the queue of one, home first again, as long as that queue is short;
    4. else it waits here, for a slot, a version or another engine.

An engine that is behind never keeps a request waiting that another could start, except that an engine which is alone takes everything:
nobody else could start it, and it starts it at the very tick at which the version comes. Requests with tokens already, whose tokens age
while they wait, go before those without.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from slipstream.types import GenerateRequest

MAX_HOMES = 4096  # groups whose home is remembered; one that is forgotten has its prompt prefilled once more
_NEWEST = -1  # in place of a sample: where a request of the group went last


@dataclass(slots=True)
class Load:
    """What is known of an engine."""

    version: int
    running: int = 0  # requests that it was given and that have not ended


class Dispatcher:
    """Engines by number. `slots`: sequences that one runs at a time; `ahead`: requests that may wait in its queue besides."""

    def __init__(self, slots: int, ahead: int):
        self._slots, self._limit = slots, slots + ahead
        self.engines: dict[int, Load] = {}
        self._homes: OrderedDict[int, dict[int, int]] = OrderedDict()  # group -> sample -> engine; oldest group first

    def join(self, engine: int, version: int) -> None:
        self.engines[engine] = Load(version)

    def confirmed(self, engine: int, version: int) -> None:
        self.engines[engine].version = version

    def leave(self, engine: int) -> None:
        """The engine takes nothing more, and what it was given has ended."""
        self.engines.pop(engine, None)

    def ended(self, engine: int) -> None:
        """A request that the engine was given has ended; nothing where the engine has left."""
        if engine in self.engines:
            self.engines[engine].running -= 1

    @property
    def full(self) -> bool:
        """Whether no engine takes another request, except over a state that it holds."""
        return all(load.running >= self._limit for load in self.engines.values())

    def take(self, request: GenerateRequest, holder: int | None = None) -> int | None:
        """Give the request to an engine, and remember where; None: it has to wait. `holder`: the engine that holds its state."""
        engine = self.choose(request, holder)
        if engine is not None:
            self.engines[engine].running += 1
            homes = self._homes.setdefault(request.group_id, {})
            homes[request.sample] = homes[_NEWEST] = engine
            self._homes.move_to_end(request.group_id)
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)
        return engine

    def choose(self, request: GenerateRequest, holder: int | None = None) -> int | None:
        """The engine that this request would go to now."""
        alone = len(self.engines) == 1
        able = {engine: load.running for engine, load in self.engines.items() if alone or load.version >= request.min_version}
        if holder in able:
            return holder
        homes = self._homes.get(request.group_id, {})
        home = homes.get(request.sample, homes.get(_NEWEST))
        open_ = [engine for engine, running in able.items() if running < self._limit]
        return min(open_, key=lambda e: (able[e] >= self._slots, e != home, able[e], e), default=None)
