"""The embedded engine: continuous batching over an unmodified transformers model, one token per running sequence per tick.

A tick is one stream's admission, prefill and decode pass, all under one set of weights; weights change only between ticks. So no
forward pass sees a mixture, and one version number per frame is the truth.
"""

from __future__ import annotations

import copy
import time
from functools import partial

from transformers import PreTrainedModel

from slipstream.engines.embedded.prompts import Version
from slipstream.engines.embedded.sequence import Decode, Sequence, check_request
from slipstream.engines.embedded.stream import MIN_ROWS, Stream
from slipstream.errors import ModelError
from slipstream.models.attention import attach
from slipstream.models.support import context_limit, num_embeddings
from slipstream.types import Frame, GenerateRequest, Purpose, StopReason

PINNED_EVERY = 4  # while training sequences run, at most every 4th tick is a pinned one


class EmbeddedEngine:
    """Generates tokens for many requests at once. Single-threaded: one loop calls it, between its own waits.

    `decode` turns token ids into text, for stop strings. `slots` sequences run at a time on the live weights, and as many on a
    pinned copy. Decode passes are padded to `min_rows` rows (at least 4); `probe.py` finds the number at which a row's result does
    not depend on its neighbours. `seed` is mixed with that of each request.

    Requests with purpose EVAL run on a copy of the weights made by `pin`, in ticks of their own and at low priority.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decode: Decode | None = None,
        *,
        engine_id: str = "engine-0",
        slots: int = 32,
        max_context: int = 4096,
        seed: int = 0,
        min_rows: int = MIN_ROWS,
        prefill_budget: int = 1024,
    ):
        limit = context_limit(model.config)
        if limit is not None and max_context > limit:
            raise ModelError(f"engine.max_context = {max_context} exceeds the {limit} tokens that {type(model).__name__} can take here")
        attach(model.eval())
        self.engine_id = engine_id
        self.slots = slots
        self.max_context = max_context
        self.version: Version = (0, -1)  # (incarnation, version); -1: no weights yet
        self.checksum = ""
        self._seed = seed
        self._decode = decode
        self._num_embeddings = num_embeddings(model)
        self._new_stream = partial(Stream, slots=slots, max_context=max_context, min_rows=min_rows, prefill_budget=prefill_budget)
        self._live = self._new_stream(model)
        self._pinned: _Pinned | None = None
        self._sequences: dict[int, tuple[Stream, Sequence]] = {}
        self._handles: dict[tuple, int] = {}
        self._aborted: list[tuple[int, StopReason]] = []  # told by the next frame
        self._next_handle = 0
        self._tick = 0

    # ---- requests ----------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> int:
        """Queue a request; its handle, by which frames name it. A key that is queued or running already gives the same handle.

        The request adds at most `sampling.max_new_tokens` tokens to `token_ids`, fewer where `max_context` ends it. ValueError
        says what is wrong with a request that cannot be served.
        """
        if request.key in self._handles:
            return self._handles[request.key]
        check_request(request, self.max_context, self._num_embeddings)
        stream = self._live
        if request.purpose is Purpose.EVAL:
            stream = self._pinned_stream(request)
        handle = self._next_handle
        sequence = Sequence(handle, request, engine_seed=self._seed, max_context=self.max_context, decode=self._decode)
        self._next_handle += 1
        self._sequences[handle] = (stream, sequence)
        self._handles[request.key] = handle
        stream.add(sequence)
        return handle

    def _pinned_stream(self, request: GenerateRequest) -> Stream:
        if self._pinned is None:
            raise ValueError("an evaluation request came while no version is pinned; call pin first")
        pinned = self._pinned.version[1]
        if request.min_version > pinned:
            raise ValueError(f"an evaluation request asks for version {request.min_version}, but version {pinned} is pinned")
        return self._pinned.stream

    def cancel(self, handle: int) -> None:
        """Take the request out at once; no frame names it again. A handle that has ended is ignored."""
        if handle in self._sequences:
            stream, sequence = self._sequences[handle]
            stream.remove(sequence)
            self._forget(sequence)

    def has_work(self) -> bool:
        """Whether a tick now would do anything: False while all requests wait for newer weights."""
        pinned = self._pinned
        return bool(self._aborted) or self._live.has_work(self.version[1]) or (pinned is not None and pinned.has_work())

    def tick(self) -> Frame:
        """Admit, prefill and decode on one stream; what came of it."""
        self._tick += 1
        pinned = self._pinned
        if pinned is None or not pinned.has_work():
            return self._run(self._live, self.version)
        if self._live.has_work(self.version[1]) and pinned.num_passed_over < PINNED_EVERY - 1:
            pinned.num_passed_over += 1
            return self._run(self._live, self.version)
        pinned.num_passed_over = 0
        began = time.perf_counter()
        frame = self._run(pinned.stream, pinned.version)
        pinned.seconds += time.perf_counter() - began
        return frame

    def _run(self, stream: Stream, version: Version) -> Frame:
        admitted = stream.admit(version)
        decoded = stream.decode()
        for handle, _ in decoded.finished:
            self._forget(self._sequences[handle][1])
        aborted, self._aborted = tuple(self._aborted), []
        return Frame(
            tick=self._tick,
            engine_id=self.engine_id,
            incarnation=version[0],
            version=version[1],
            handles=decoded.handles,
            token_ids=decoded.token_ids,
            logprobs=decoded.logprobs,
            finished=decoded.finished + aborted,
            prefilled=tuple((sequence.handle, *made_by) for sequence, made_by in admitted.started),
            num_prefill_tokens=admitted.num_prefill_tokens,
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.handle]
        del self._handles[sequence.request.key]

    # ---- weights -----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel:
        """The live model; its tensors may be overwritten between two ticks, followed by `set_version`."""
        return self._live.model

    def set_version(self, incarnation: int, version: int, checksum: str) -> None:
        """The live model's tensors now hold this version. Running sequences go on from here, with their keys and values kept."""
        if self._pinned is not None and self._pinned.stream.model is self.model:
            raise ValueError("the live weights are pinned without a copy; unpin before they change")
        self.version = (incarnation, version)
        self.checksum = checksum

    def pin(self, *, share: bool = False) -> tuple[int, int, str]:
        """Copy the live weights for EVAL requests; (incarnation, version, checksum) of the copy. ValueError if one is pinned already.

        `share` uses the live weights themselves, for callers who promise that they do not change until `unpin` (it is checked).
        """
        if self._pinned is not None:
            raise ValueError(f"version {self._pinned.version[1]} is pinned already; one evaluation at a time")
        if self.version[1] < 0:
            raise ValueError("the engine has no weights to pin yet")
        model = self.model if share else copy.deepcopy(self.model).requires_grad_(False)
        self._pinned = _Pinned(self._new_stream(model), self.version)
        return (*self.version, self.checksum)

    def unpin(self) -> float:
        """Free the copy; requests still on it end with ABORT. The seconds spent on pinned ticks; 0.0 when nothing is pinned."""
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return 0.0
        for stream, sequence in list(self._sequences.values()):
            if stream is pinned.stream:
                self._aborted.append((sequence.handle, StopReason.ABORT))
                self._forget(sequence)
        return pinned.seconds


class _Pinned:
    """A copy of a version, its stream, and what it has cost."""

    def __init__(self, stream: Stream, version: Version):
        self.stream = stream
        self.version = version
        self.seconds = 0.0
        self.num_passed_over = 0  # live ticks since the last pinned one; not a phase of `tick`, which a resumed run would not share

    def has_work(self) -> bool:
        return self.stream.has_work(self.version[1])
