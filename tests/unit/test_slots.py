"""The slot broker: a leased slot is never written, the newest is never overwritten, a writer never waits."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest
from slipstream.weight_sync.slots import SlotBroker, slots_for


def manifest(version: int, incarnation: int = 1) -> Manifest:
    return Manifest(incarnation=incarnation, version=version, checksum=f"{incarnation}.{version}", total_bytes=64, entries=())


class Shadow:
    """A broker beside the memory it guards: what each slot's bytes are, and what each engine believes it reads."""

    def __init__(self, num_engines: int, broker_class: type[SlotBroker] = SlotBroker):
        self.broker = broker_class(slots_for(num_engines))
        self.bytes: list[int | None] = [None] * self.broker.num_slots  # version in the slot; None = torn
        self.reading: dict[str, tuple[int, int]] = {}  # engine -> (slot, version)
        self.holds = {f"e{i}": -1 for i in range(num_engines)}
        self.version = 0

    def actions(self) -> list[tuple[str, str]]:
        out = [("begin", ""), ("publish", "")]
        for engine in self.holds:
            out += [("lease", engine), ("give_back", engine), ("crash", engine)]
        return out

    def apply(self, action: str, engine: str) -> None:
        broker = self.broker
        if action == "begin":
            slot = broker.begin_write()
            self.bytes[slot] = None
        elif action == "publish":
            if broker._writing is None:
                return
            slot = broker._writing
            broker.publish(slot, manifest(self.version))
            self.bytes[slot] = self.version
            self.version += 1
        elif action == "lease":
            offer = broker.lease(engine, 1, self.holds[engine])
            if offer is None:
                assert self.holds[engine] == self.version - 1, "the engine is behind and was offered nothing"
                self.reading.pop(engine, None)
            else:
                assert offer.manifest.version > self.holds[engine]
                if engine not in self.reading:
                    assert offer.manifest.version == self.version - 1, "a lease is of the newest"
                self.reading[engine] = (offer.slot, offer.manifest.version)
        elif action == "give_back" and engine in self.reading:
            slot, version = self.reading.pop(engine)
            assert broker.give_back(engine, slot).version == version
            self.holds[engine] = version
        elif action == "crash":
            broker.drop_engine(engine)
            self.reading.pop(engine, None)
            self.holds[engine] = -1
        self.check()

    def check(self) -> None:
        for engine, (slot, version) in self.reading.items():
            assert self.bytes[slot] == version, f"{engine} reads slot {slot} while it is written"
        newest = self.broker.newest
        assert (newest is None) == (self.version == 0)
        if newest is not None:
            assert newest.version == self.version - 1
            assert newest.version in self.bytes, "the newest complete weights were overwritten"

    def state(self) -> tuple:
        """What the future depends on: versions relative to the newest, all far ones alike, so that there are finitely many."""

        def age(version: int | None) -> int | None:
            return None if version is None else -9 if version < 0 else max(version - self.version, -4)

        b = self.broker
        return (
            (b._writing, b._newest, tuple(sorted(b._leases.items()))),
            tuple(age(v) for v in self.bytes),
            tuple(sorted((e, s, age(v)) for e, (s, v) in self.reading.items())),
            tuple(age(v) for v in self.holds.values()),
        )


def explore(num_engines: int, broker_class: type[SlotBroker] = SlotBroker) -> int:
    """Reach every state by every order of events; the number of states."""
    seen: set[tuple] = set()
    frontier = [Shadow(num_engines, broker_class)]
    while frontier:
        reached = []
        for shadow in frontier:
            for action in shadow.actions():
                after = copy.deepcopy(shadow)
                after.apply(*action)
                if after.state() not in seen:
                    seen.add(after.state())
                    reached.append(after)
        frontier = reached
    return len(seen)


def test_every_order_of_events_with_one_engine():
    assert explore(1) > 50


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_any_order_of_events_with_several_engines(data, num_engines):
    shadow = Shadow(num_engines)
    for _ in range(60):
        shadow.apply(*data.draw(st.sampled_from(shadow.actions())))


class WritesLeased(SlotBroker):
    """Planted bug: a superseded slot is written although an engine still reads it."""

    def begin_write(self) -> int:
        if self._writing is None:
            self._writing = next(s for s in range(self.num_slots) if s != self._newest)
        return self._writing


class WritesNewest(SlotBroker):
    """Planted bug: the newest slot is written when nobody leases it."""

    def begin_write(self) -> int:
        if self._writing is None:
            self._writing = next(s for s in range(self.num_slots) if s not in self._leases.values())
        return self._writing


@pytest.mark.parametrize("bug", [WritesLeased, WritesNewest])
def test_the_search_catches_a_planted_bug(bug):
    with pytest.raises(AssertionError):
        explore(1, broker_class=bug)


def test_two_slots_are_refused():
    with pytest.raises(ValueError, match="at least 3"):
        SlotBroker(2)


def test_newer_supersedes_what_nobody_leased():
    broker = SlotBroker()
    for version in range(10):
        broker.publish(broker.begin_write(), manifest(version))
    offer = broker.lease("e0", -1, -1)
    assert offer is not None and offer.manifest.version == 9


def test_restarted_writer_gets_the_same_slot():
    broker = SlotBroker()
    assert broker.begin_write() == broker.begin_write()


def test_same_number_from_another_incarnation_is_offered():
    broker = SlotBroker()
    broker.publish(broker.begin_write(), manifest(5, incarnation=2))
    offer = broker.lease("e0", incarnation=1, version=57)
    assert offer is not None and offer.manifest.incarnation == 2
    broker.give_back("e0", offer.slot)
    assert broker.lease("e0", incarnation=2, version=5) is None


def test_lost_answer_is_given_again_and_lost_confirmation_frees_the_lease():
    broker = SlotBroker()
    broker.publish(broker.begin_write(), manifest(0))
    first = broker.lease("e0", -1, -1)
    broker.publish(broker.begin_write(), manifest(1))
    again = broker.lease("e0", -1, -1)
    assert first is not None and again is not None and again.slot == first.slot and again.manifest.version == 0
    newer = broker.lease("e0", 1, 0)
    assert newer is not None and newer.manifest.version == 1


def test_publish_is_idempotent_and_checks_slot_and_order():
    broker = SlotBroker()
    slot = broker.begin_write()
    broker.publish(slot, manifest(3))
    broker.publish(slot, manifest(3))
    with pytest.raises(WeightSyncError, match="slot None is the one being written"):
        broker.publish(slot, manifest(4))
    with pytest.raises(WeightSyncError, match=r"1\.3 were published after 1\.3"):
        broker.publish(broker.begin_write(), manifest(3))


def test_what_is_not_leased_cannot_be_given_back():
    broker = SlotBroker()
    broker.publish(broker.begin_write(), manifest(0))
    with pytest.raises(WeightSyncError, match="holds no slot"):
        broker.give_back("e0", 0)


def test_more_engines_than_slots_is_said():
    broker = SlotBroker(3)
    broker.publish(broker.begin_write(), manifest(0))
    assert broker.lease("e0", -1, -1)
    with pytest.raises(WeightSyncError, match="serve 1 engines"):
        broker.lease("e1", -1, -1)
