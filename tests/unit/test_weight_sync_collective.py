"""Weights through torch.distributed: real gloo groups, between threads here and with processes that are killed, stopped or sharded."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_weight_sync_packing import Toy, engine

from slipstream.errors import DeadlineExceeded, PeerLost, RunFailed, WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import decode, encode
from slipstream.weight_sync.collective import CollectivePublisher, CollectiveWeights
from slipstream.weight_sync.packing import checksum
from slipstream.weight_sync.pair_group import IN_FLIGHT, PairGroup, buckets
from slipstream.weight_sync.slots import SlotBroker

BUCKET = 128  # bytes: several for the smallest model
DEADLINE_S = 60.0
SHORT_S = 1.0  # where it is to pass


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with contextlib.ExitStack() as held:
        yield Ends(str(tmp_path), held)


class Ends:
    """Makes the two sides, which are closed at the end; nothing of them is left then."""

    def __init__(self, folder: str, held: contextlib.ExitStack):
        threads = threading.active_count()
        self.folder, self._held = folder, held
        held.callback(lambda: self._check(threads))

    def _check(self, threads: int) -> None:
        assert threading.active_count() == threads, threading.enumerate()

    def publisher(self, source: Any, dtype: torch.dtype | None = None, **more: Any) -> CollectivePublisher:
        out = CollectivePublisher(source, self.folder, 4, dtype, **{"bucket_bytes": BUCKET, "deadline_s": DEADLINE_S, **more})
        self._held.callback(out.close)
        return out

    def weights(self, model: Any, engine_id: str = "engine-0", **more: Any) -> CollectiveWeights:
        out = CollectiveWeights(model, self.folder, engine_id, **{"bucket_bytes": BUCKET, "deadline_s": DEADLINE_S, **more})
        self._held.callback(out.close)
        return out


def offer(manifest: Manifest, slot: int = 0) -> WeightsOffer:
    return WeightsOffer(slot=slot, manifest=decode(encode(manifest), Manifest))


# ---- what travels


@pytest.mark.parametrize(("num_bytes", "sizes"), [(0, []), (1, [1]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])])
def test_buckets_are_the_block(num_bytes: int, sizes: list[int]) -> None:
    block = np.arange(num_bytes, dtype=np.uint8)
    parts = list(buckets(block, BUCKET))
    assert [len(part) for part in parts] == sizes and all(np.shares_memory(part, block) for part in parts)
    assert b"".join(part.tobytes() for part in parts) == block.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(ends: Ends, dtype: torch.dtype) -> None:
    trainer, model = Toy(seed=0), engine(seed=1, dtype=dtype)
    kept = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    manifest = ends.publisher(trainer, dtype).pack(2, incarnation=1, version=4)
    assert manifest.total_bytes > IN_FLIGHT * BUCKET, "it travels in too few buckets to show anything"
    assert ends.weights(model)(offer(manifest, 2)) == manifest.checksum == checksum(trainer, dtype)
    for name, tensor in trainer.state_dict().items():
        expected = tensor if name in ("router_bias", "count") else tensor.to(dtype)
        assert torch.equal(model.state_dict()[name], expected), name
    assert model.head is model.embed, "the tie was broken"
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == kept, "a tensor was replaced"


def test_perturb_and_revert_give_the_same_bytes(ends: Ends) -> None:
    trainer, model = Toy(), engine()
    weights, publisher, start = ends.weights(model), ends.publisher(trainer), trainer.router_bias[0].item()
    seen = []
    for version, value in enumerate((start, start + 1, start)):
        trainer.router_bias[0] = value
        seen.append(weights(offer(publisher.pack(version, 1, version), version)))
        assert all(torch.equal(tensor, trainer.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert seen[0] == seen[2] != seen[1]


def test_fetching_touches_nothing_and_a_later_offer_replaces_what_was_fetched(ends: Ends) -> None:
    trainer, model = Toy(), engine()
    weights, publisher, before = ends.weights(model), ends.publisher(trainer), checksum(model)
    weights.fetch(offer(publisher.pack(0, 1, 0)))
    assert checksum(model) == before
    trainer.count += 1
    second = offer(publisher.pack(1, 1, 1), 1)
    assert weights(second) == second.manifest.checksum == checksum(model)


# ---- who waits for whom


class Gate:
    """Holds an engine up amid a transfer: its second bucket waits for `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, weights: CollectiveWeights):
        self.reached, self.open = threading.Event(), threading.Event()
        receive = weights._receive

        def slowly(line: Any, group: PairGroup, block: np.ndarray, hasher: Any) -> None:
            class Slow:
                def update(self, data: memoryview) -> None:
                    gate.reached.set()
                    assert gate.open.wait(DEADLINE_S)
                    hasher.update(data)

            receive(line, group, block, Slow())  # type: ignore[arg-type]

        gate = self
        monkeypatch.setattr(weights, "_receive", slowly)


def beside(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """The call in a thread, and what it gave or raised."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(call())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def test_a_slow_engine_delays_only_itself_and_newer_versions_supersede_what_it_has_not_begun(ends: Ends, monkeypatch) -> None:
    trainer, broker = Toy(), SlotBroker(4)
    publisher, models = ends.publisher(trainer), {name: engine() for name in ("slow", "fast")}
    slow, fast = (ends.weights(model, name) for name, model in models.items())
    gate = Gate(monkeypatch, slow)

    def publish(version: int) -> None:
        trainer.count.fill_(version)
        slot = broker.begin_write()
        broker.publish(slot, publisher.pack(slot, 1, version))

    def lease(name: str, version: int) -> WeightsOffer:
        leased = broker.lease(name, 1, version)
        assert leased is not None
        return leased

    publish(0)
    held = lease("slow", -1)
    thread, answer = beside(lambda: slow(held))
    assert gate.reached.wait(DEADLINE_S)
    for version in range(1, 6):
        publish(version)
        if version != 3:  # superseded before the other engine asks
            leased = lease("fast", version - 1)
            assert fast(leased) == leased.manifest.checksum and models["fast"].count.item() == version
            broker.give_back("fast", leased.slot)
    gate.open.set()
    thread.join(DEADLINE_S)
    assert answer == [held.manifest.checksum] and models["slow"].count.item() == 0, "what was leased was not sent whole"
    broker.give_back("slow", held.slot)
    newest = lease("slow", 0)
    assert slow(newest) == newest.manifest.checksum and models["slow"].count.item() == 5


# ---- what is refused, and who is gone


def test_weights_whose_lease_has_ended_are_not_sent(ends: Ends) -> None:
    """The engine was given up: its slot is another version's."""
    publisher, weights = ends.publisher(Toy()), ends.weights(model := engine())
    first, before = offer(publisher.pack(0, 1, 0)), checksum(model)
    second = offer(publisher.pack(0, 1, 1))
    with pytest.raises(PeerLost, match=r"weights 1\.0 have not arrived: the trainer says: weights 1\.0 are not in slot 0 any more"):
        weights(first)
    assert checksum(model) == before
    assert weights(second) == second.manifest.checksum, "no new group was made"


def test_a_lease_that_ends_amid_the_sending_ends_that(ends: Ends, monkeypatch) -> None:
    publisher, weights = ends.publisher(Toy()), ends.weights(model := engine())
    first, before = offer(publisher.pack(0, 1, 0)), checksum(model)
    sent = publisher._while_held

    def repacked(ask: Any, block: np.ndarray) -> Iterator[np.ndarray]:
        for number, part in enumerate(sent(ask, block)):
            yield part
            if number == 0:
                publisher.pack(0, 1, 1)

    monkeypatch.setattr(publisher, "_while_held", repacked)
    with pytest.raises(PeerLost, match=r"the trainer says: weights 1\.0 are not in slot 0 any more"):
        weights(first)
    assert checksum(model) == before


def test_a_byte_that_changes_on_its_way_is_refused_and_the_old_weights_stay(ends: Ends, monkeypatch) -> None:
    publisher, weights = ends.publisher(Toy()), ends.weights(model := engine())
    manifest, before = publisher.pack(0, 1, 0), checksum(model)
    publisher._slots[0].map(writable=True)[BUCKET + 3] ^= 1
    with pytest.raises(WeightSyncError, match=rf"weights 1\.0: what arrived hashes to \w+, the trainer packed {manifest.checksum}"):
        weights.fetch(offer(manifest))
    assert checksum(model) == before
    publisher._slots[0].map(writable=True)[BUCKET + 3] ^= 1
    assert weights(offer(manifest)) == manifest.checksum


def test_a_byte_that_changes_on_its_way_once_is_sent_again(ends: Ends, monkeypatch) -> None:
    publisher, weights = ends.publisher(Toy()), ends.weights(engine())
    manifest, sent, times = publisher.pack(0, 1, 0), publisher._while_held, []

    def damaged(ask: Any, block: np.ndarray) -> Iterator[np.ndarray]:
        times.append(ask)
        for number, part in enumerate(sent(ask, block)):
            yield part ^ 1 if number == 1 and len(times) == 1 else part

    monkeypatch.setattr(publisher, "_while_held", damaged)
    assert weights(offer(manifest)) == manifest.checksum
    assert len(times) == 2


def test_a_trainer_that_can_hear_no_new_engine_ends_the_run_with_the_cause(ends: Ends) -> None:
    publisher, weights = ends.publisher(Toy()), ends.weights(engine())
    manifest = publisher.pack(0, 1, 0)
    publisher._listener.shutdown(socket.SHUT_RDWR)
    publisher._accepting.join(DEADLINE_S)
    with pytest.raises(PeerLost, match="Connection refused"):
        weights(offer(manifest))
    with pytest.raises(RunFailed, match=r"engines cannot connect to the trainer any more \(.*--resume"):
        publisher.pack(1, 1, 1)


def test_a_model_that_the_manifest_does_not_fit_asks_for_nothing(ends: Ends) -> None:
    weights = ends.weights(engine(width=6))
    manifest = ends.publisher(Toy()).pack(0, 1, 0)
    with pytest.raises(WeightSyncError, match=r"embed: shape is \(7, 6\) here and \(7, 5\) at the trainer"):
        weights.fetch(offer(manifest))
    assert weights._connection is None


def test_without_a_trainer_there_is_a_word_for_it(ends: Ends) -> None:
    publisher = ends.publisher(Toy())
    manifest, weights = publisher.pack(0, 1, 0), ends.weights(engine())
    weights.fetch(offer(manifest))
    publisher.close()
    with pytest.raises(PeerLost, match=r"weights 1\.0 have not arrived: the trainer "):
        weights.fetch(offer(manifest))
    with pytest.raises(PeerLost, match=r"weights 1\.0 have not arrived: the trainer cannot be reached: Connection refused"):
        weights.fetch(offer(manifest))


def test_a_trainer_that_sends_nothing_ends_in_the_deadline(ends: Ends, monkeypatch) -> None:
    publisher, stuck = ends.publisher(Toy()), threading.Event()
    weights, manifest = ends.weights(model := engine(), deadline_s=SHORT_S), publisher.pack(0, 1, 0)
    before, sent = checksum(model), publisher._while_held
    monkeypatch.setattr(publisher, "_while_held", lambda ask, block: iter([stuck.wait(DEADLINE_S)][1:]))
    with pytest.raises(DeadlineExceeded, match=r"weights 1\.0 have not arrived: waited 1 s for the trainer to move a bucket of weights"):
        weights(offer(manifest))
    stuck.set()
    monkeypatch.setattr(publisher, "_while_held", sent)
    assert checksum(model) == before
    again = ends.weights(model)
    assert again(offer(manifest)) == manifest.checksum


def test_a_member_that_does_not_come_ends_in_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="waited 1 s for engine-0 to come into the group that carries weights"):
        PairGroup(0, str(tmp_path / "store"), torch.device("cpu"), "engine-0", SHORT_S)


ENGINE = """
import sys, torch
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import decode
from slipstream.weight_sync.collective import CollectiveWeights
manifest = decode(bytes.fromhex(sys.stdin.readline()), Manifest)
weights = CollectiveWeights({"a": torch.zeros(3_000_000)}, sys.argv[1], "engine-0", bucket_bytes=1 << 20, deadline_s=60.0)
receive = weights._receive
class Halting:
    def update(self, data):
        print("a bucket", flush=True)
        sys.stdin.readline()
weights._receive = lambda line, group, block, hasher: receive(line, group, block, Halting())
weights.fetch(WeightsOffer(slot=0, manifest=manifest))
"""


def test_an_engine_killed_amid_a_transfer_holds_up_nobody_and_is_named(ends: Ends, capfd) -> None:
    publisher = ends.publisher({"a": torch.ones(3_000_000)}, bucket_bytes=1 << 20)
    manifest, command = publisher.pack(0, 1, 0), [sys.executable, "-c", ENGINE, ends.folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(encode(manifest).hex() + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "a bucket\n"
        (sending,) = publisher._engines
        for version in (1, 2):
            publisher.pack(version, 1, version)
        assert sending.is_alive(), "the trainer waited for it"
        child.kill()
        sending.join(DEADLINE_S)
    assert "weights to engine-0: engine-0 was lost while this side waited for it to move a bucket" in capfd.readouterr().err
    model = {"a": torch.zeros(3_000_000)}
    assert ends.weights(model, bucket_bytes=1 << 20)(offer(manifest)) == manifest.checksum, "its successor gets no group"


def test_an_engine_that_takes_nothing_ends_in_the_deadline_of_the_trainers_thread_and_may_ask_again(ends: Ends, monkeypatch, capfd) -> None:
    model = {"a": torch.zeros(3_000_000)}
    publisher = ends.publisher({"a": torch.ones(3_000_000)}, bucket_bytes=1 << 20, deadline_s=SHORT_S)
    manifest, weights = publisher.pack(0, 1, 0), ends.weights(model, bucket_bytes=1 << 20)
    gate = Gate(monkeypatch, weights)
    thread, answer = beside(lambda: weights(offer(manifest)))
    assert gate.reached.wait(DEADLINE_S)
    (sending,) = publisher._engines
    sending.join(DEADLINE_S)
    word = "waited 1 s for engine-0 to move a bucket of weights"
    assert f"weights to engine-0: {word}" in capfd.readouterr().err
    gate.open.set()
    thread.join(DEADLINE_S)
    assert answer == [manifest.checksum] and model["a"].all(), "no new group was made"
    assert f"weights 1.0: the trainer says: {word}; asked for again" in capfd.readouterr().err
