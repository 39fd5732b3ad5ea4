"""Transport `collective`: weights through torch.distributed, in a group of two for each engine, so that a slow one delays only itself.

    trainer                                          engine
       │ packs into a slot of its own memory            │ ticks
       │ publishes, goes on                             │ next_weights answers: a lease of slot 2
       │                                                │
       │ its thread for     ◄── hello, once; ask ────── │ a thread beside the ticks
       │ this engine        ─── they come, or why not ► │
       │                    ═══ bucket, bucket, .. ═══► │   into a block of its own, each hashed as it arrives
       │                                                │ whole, and hashed to what was published: the offer is here
       │                                                │ between two ticks: copy, hash of the own copy, confirm_weights

Engines ask, so the broker's rules hold as they are: what nobody has leased yet is superseded by a newer version, what is leased is not
written, and the trainer waits for nobody. Words go over a Unix socket (`line.py`), bytes through the group (`pair_group.py`). Whatever
fails ends both on both sides, with a word about the cause; the engine then makes new ones and asks again, once. What arrives damaged is
asked for again, once.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash

from slipstream.deadlines import WEIGHTS_S
from slipstream.errors import PeerLost, RunFailed, SlipstreamError, WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.weight_sync.delta import DeltaPublisher
from slipstream.weight_sync.ends import Publisher, Reader
from slipstream.weight_sync.line import Line, socket_in
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, WeightSet, name_of, named_tensors
from slipstream.weight_sync.pair_group import CPU, PairGroup, buckets
from slipstream.weight_sync.shared_memory import MemoryPublisher

_LAST_WORD_S = 5.0  # after the group has failed, how long the other side's reason is waited for
TRIES = 2  # to have an offer's bytes
TRAINER, ENGINE = 0, 1  # ranks


class _Hello(msgspec.Struct, frozen=True):
    engine_id: str
    store: str  # file through which the two ends of the group find each other
    device: str  # where the engine's weights lie


class _Ask(msgspec.Struct, frozen=True):
    """Bytes of the slot that the engine has leased: those of the whole weights, or some that lie behind them (`delta.py`)."""

    slot: int
    incarnation: int
    version: int
    start: int
    num_bytes: int


class _Answer(msgspec.Struct, frozen=True):
    """To hello: whether the group is one of GPUs. To ask: the bytes come. With an error: neither; it is the last word."""

    error: str = ""
    on_gpus: bool = False


class CollectivePublisher(Publisher):
    """The trainer's side: packs into slots of its own memory, and sends one to each engine that asks for it, a thread per engine.

    `folder` is a private directory; engines find this side in it. `num_slots` are the broker's; each takes memory once it is used.
    `packer` fills them: with whole weights, or with what changed besides.
    """

    def __init__(
        self,
        source: Source,
        folder: str,
        num_slots: int,
        dtype: torch.dtype | None = None,
        *,
        packer: type[MemoryPublisher | DeltaPublisher] = MemoryPublisher,
        bucket_bytes: int,
        deadline_s: float = WEIGHTS_S,
    ):
        self._slots = [MemoryFile.create(f"staging-{i}") for i in range(num_slots)]  # nobody else has their descriptors
        self._packer = packer(source, self._slots, dtype)
        self._device, self._bucket_bytes, self._deadline_s = _device(source), bucket_bytes, deadline_s
        self._whole: dict[int, Manifest] = {}  # slot -> what lies in it, whole
        self._engines: dict[threading.Thread, Line] = {}
        self._closed = False
        self._deaf: OSError | None = None  # why new engines cannot be heard
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_in(folder))
        self._listener.listen()
        self._accepting = _thread("weights: new engines", self._accept)
        self._accepting.start()

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write the current weights into this slot and hash them; they are sent once an engine has leased it. The caller owns the slot.

        Raises MemoryNeedError where the slot's memory cannot be had (first use of a slot), RunFailed where no engine can come any more.
        """
        if self._deaf is not None:
            raise RunFailed(f"weights: engines cannot connect to the trainer any more ({self._deaf}); --resume goes on") from self._deaf
        self._whole.pop(slot, None)
        manifest = self._whole[slot] = self._packer.pack(slot, incarnation, version)
        return manifest

    def close(self) -> None:
        """End every thread and connection, and let go of the memory."""
        self._closed = True
        with socket.socket(socket.AF_UNIX) as wake, contextlib.suppress(OSError):
            wake.connect(self._listener.getsockname())
        self._accepting.join(self._deadline_s)
        self._listener.close()
        for thread, line in list(self._engines.items()):
            line.end()
            thread.join(self._deadline_s)
        for slot in self._slots:
            slot.close()

    # ---- its threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # e.g. no descriptors are left
                self._deaf = error
                print(f"weights: engines cannot connect any more: {error}", file=sys.stderr, flush=True)  # log/trainer.log
                self._listener.close()  # who comes is refused at once
                return
            if self._closed:
                connection.close()
                return
            line = Line(connection, "an engine")
            thread = _thread("weights: an engine", self._serve, line)
            self._engines[thread] = line
            thread.start()

    def _serve(self, line: Line) -> None:
        """One engine, until it is gone. Whatever fails ends its connection; what that means for the run shows in the engine's own end."""
        try:
            self._send_to(line)
        except Exception as error:
            text = str(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {error}"
            print(f"weights to {line.peer}: {text}", file=sys.stderr, flush=True)  # log/trainer.log
            with contextlib.suppress(PeerLost):
                line.say(_Answer(error=text))
        finally:
            line.close()
            self._engines.pop(threading.current_thread(), None)

    def _send_to(self, line: Line) -> None:
        hello = line.hear(_Hello, self._deadline_s)
        if hello is None:
            return
        line.peer, theirs = hello.engine_id, torch.device(hello.device)
        on_gpus = self._device.type == theirs.type == "cuda" and self._device != theirs  # two ranks on one GPU are refused by NCCL
        line.say(_Answer(on_gpus=on_gpus))
        group = PairGroup(TRAINER, hello.store, self._device if on_gpus else CPU, line.peer, self._deadline_s)
        try:
            while ask := line.hear(_Ask, None):  # an engine that asks for nothing owes nothing
                self._check_held(ask)
                block = self._slots[ask.slot].map(writable=True)[ask.start : ask.start + ask.num_bytes]
                line.say(_Answer())
                group.send(self._while_held(ask, block))
        finally:
            group.close()

    def _check_held(self, ask: _Ask) -> None:
        """WeightSyncError where another version lies in the slot: the lease of an engine that was given up has ended."""
        manifest = self._whole.get(ask.slot)
        if manifest is None or (manifest.incarnation, manifest.version) != (ask.incarnation, ask.version):
            raise WeightSyncError(f"weights {ask.incarnation}.{ask.version} are not in slot {ask.slot} any more: their lease has ended")

    def _while_held(self, ask: _Ask, block: np.ndarray) -> Iterator[np.ndarray]:
        for part in buckets(block, self._bucket_bytes):
            self._check_held(ask)
            yield part


class CollectiveWeights(Reader):
    """The engine's side: `fetch` brings an offer's bytes into a block of its own, beside the ticks; the call applies them between two."""

    def __init__(self, model: Source, folder: str, engine_id: str, *, bucket_bytes: int, deadline_s: float = WEIGHTS_S):
        self._weights, self._device = WeightSet(model), _device(model)
        self._folder, self._engine_id = folder, engine_id
        self._bucket_bytes, self._deadline_s = bucket_bytes, deadline_s
        self._connection: tuple[Line, PairGroup] | None = None
        self._block = MemoryFile.create("received")
        self._arrived = ""  # checksum of the whole weights that the block holds, proved

    def fetch(self, offer: WeightsOffer) -> None:
        """Receive the offer's whole weights and prove them. The model is not touched.

        Raises WeightSyncError for a manifest that does not fit the model and for bytes that do not hash to its checksum, and what `receive`
        raises.
        """
        manifest = offer.manifest
        self._weights.check(manifest)
        for _ in range(TRIES):
            _, checksum = self.receive(offer, 0, manifest.total_bytes)
            if checksum == manifest.checksum:
                self._arrived = checksum
                return
        raise WeightSyncError(
            f"weights {name_of(manifest)}: what arrived hashes to {checksum}, the trainer packed {manifest.checksum}; "
            f"they were damaged on their way {TRIES} times, and the engine keeps those it has"
        )

    def receive(self, offer: WeightsOffer, start: int, num_bytes: int) -> tuple[np.ndarray, str]:
        """Bytes of the slot that is offered, uint8[num_bytes], and their hash. They lie in the block, until others are received.

        Raises DeadlineExceeded where they do not come in time, PeerLost where they will not come, with the trainer's own word where it
        gave one; each of them when it has come again, over a new connection.
        """
        manifest, self._arrived = offer.manifest, ""
        self._block.resize(num_bytes)
        block = self._block.map(writable=True)[:num_bytes]
        ask = _Ask(offer.slot, manifest.incarnation, manifest.version, start, num_bytes)
        for tries_left in reversed(range(TRIES)):
            hasher = xxhash.xxh3_128()
            try:
                line, group = self._connection or self._connect()
                line.say(ask)
                _answer(line, self._deadline_s)
                self._receive(line, group, block, hasher)
                return block, hasher.hexdigest()
            except SlipstreamError as error:
                self._disconnect()
                if not tries_left:
                    raise type(error)(f"weights {name_of(manifest)} have not arrived: {error}") from error
                print(f"weights {name_of(manifest)}: {error}; asked for again", file=sys.stderr, flush=True)  # log/engine-0.log
        raise AssertionError("the last try returns or raises")

    def __call__(self, offer: WeightsOffer) -> str:
        """The checksum of the engine's own copy; fetches first what is not here yet. Raises what `fetch` and `WeightSet.apply` raise."""
        if self._arrived != offer.manifest.checksum:
            self.fetch(offer)
        return self._weights.apply(self._block.map(), offer.manifest)

    def close(self) -> None:
        self._disconnect()
        self._block.close()

    def _connect(self) -> tuple[Line, PairGroup]:
        line = Line.to(self._folder, "the trainer")
        try:
            store = str(Path(self._folder) / f"{self._engine_id}-{secrets.token_hex(4)}")
            line.say(_Hello(self._engine_id, store, str(self._device)))
            device = self._device if _answer(line, self._deadline_s).on_gpus else CPU
            group = PairGroup(ENGINE, store, device, line.peer, self._deadline_s)
        except BaseException:
            line.close()
            raise
        self._connection = line, group
        return self._connection

    def _receive(self, line: Line, group: PairGroup, block: np.ndarray, hasher: xxhash.xxh3_128) -> None:
        try:
            group.receive(buckets(block, self._bucket_bytes), lambda part: hasher.update(part.data))
        except PeerLost:
            _answer(line, _LAST_WORD_S)  # raises what it says of the cause
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            line, group = self._connection
            self._connection = None
            group.close()
            line.close()


def _answer(line: Line, deadline_s: float) -> _Answer:
    """What the trainer says. PeerLost where that is an error, or nothing."""
    answer = line.hear(_Answer, deadline_s)
    if answer is None or answer.error:
        raise PeerLost(f"{line.peer} " + ("ended the connection" if answer is None else f"says: {answer.error}"))
    return answer


def _device(source: Source) -> torch.device:
    return next((tensor.device for tensor in named_tensors(source).values()), CPU)


def _thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    return threading.Thread(target=target, args=args, name=name, daemon=True)
