"""Trainer and engine at full speed over the same slots: no engine ever holds a mixture, and the trainer never waits."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import WeightSet
from slipstream.weight_sync.shared_memory import MemoryPublisher
from slipstream.weight_sync.slots import SlotBroker


class Weights(nn.Module):
    """All elements hold the version's number."""

    def __init__(self, num_elements: int = 20_000):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(num_elements))
        self.b = nn.Parameter(torch.zeros(num_elements, 3))

    def fill(self, version: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(version)


@pytest.fixture
def slots():
    files = [MemoryFile.create(f"slot-{i}") for i in range(3)]
    yield files
    for file in files:
        file.close()


@pytest.mark.timeout(60)
def test_no_mixture_while_both_run(slots):
    broker, lock, last = SlotBroker(), threading.Lock(), 300
    trainer, engine = Weights(), Weights()
    publisher, weights = MemoryPublisher(trainer, slots), WeightSet(engine)

    def train() -> None:
        for version in range(last + 1):
            trainer.fill(version)
            with lock:
                slot = broker.begin_write()
            manifest = publisher.pack(slot, 1, version)
            with lock:
                broker.publish(slot, manifest)

    thread = threading.Thread(target=train)
    thread.start()
    held, seen = -1, []
    while held < last and (thread.is_alive() or broker.newest is not None):
        with lock:
            offer = broker.lease("e0", 1, held)
        if offer is None:
            continue
        assert weights.apply(slots[offer.slot].map(), offer.manifest) == offer.manifest.checksum
        with lock:
            broker.give_back("e0", offer.slot)
        held = offer.manifest.version
        seen.append(held)
        assert all(bool((p == held).all()) for p in engine.parameters()), f"a mixture at version {held}"
    thread.join()
    assert held == last and len(seen) > 1 and seen == sorted(set(seen))


WRITER = """
import sys, torch
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.shared_memory import MemoryPublisher
tensors = {"a": torch.zeros(20_000), "b": torch.zeros(20_000, 3)}
publisher = MemoryPublisher(tensors, [MemoryFile(int(fd)) for fd in sys.argv[2:]])
version = 0
while True:
    version += 1
    for tensor in tensors.values():
        tensor.fill_(-version)
    publisher.pack(int(sys.argv[1]), 1, version)
    print(version, flush=True)
"""


def test_a_trainer_killed_amid_a_write_hurts_nobody(slots):
    broker = SlotBroker()
    trainer, engine = Weights(), Weights()
    publisher, weights = MemoryPublisher(trainer, slots), WeightSet(engine)
    trainer.fill(7)
    broker.publish(broker.begin_write(), publisher.pack(0, 1, 7))

    slot = broker.begin_write()
    descriptors = [file.fileno() for file in slots]
    args = [sys.executable, "-c", WRITER, str(slot), *map(str, descriptors)]
    with subprocess.Popen(args, pass_fds=descriptors, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        child.kill()
    assert slots[slot].map().any(), "the child has written"

    offer = broker.lease("e0", -1, -1)
    assert offer is not None
    weights.apply(slots[offer.slot].map(), offer.manifest)
    assert all(bool((p == 7).all()) for p in engine.parameters())
    assert broker.begin_write() == slot, "the restarted trainer writes over the torn slot"
    trainer.fill(8)
    broker.publish(slot, publisher.pack(slot, 1, 8))
    broker.give_back("e0", offer.slot)
    offer = broker.lease("e0", 1, 7)
    assert offer is not None and offer.slot == slot
    weights.apply(slots[slot].map(), offer.manifest)
    assert all(bool((p == 8).all()) for p in engine.parameters())
