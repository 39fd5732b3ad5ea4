"""The embedded engine: continuous batching over an unmodified transformers model, one token per running sequence per tick.

A tick is one stream's admission, prefill and decode pass, all under one set of weights; weights change only between ticks. So no
forward pass sees a mixture, and one version number per frame is the truth.
"""

from __future__ import annotations

import copy
import time
from functools import partial

from transformers import PreTrainedModel

from slipstream.engines.embedded.sequence import Sequence
from slipstream.engines.embedded.stream import MIN_ROWS, Admitted, Stream
from slipstream.engines.embedded.versions import Version
from slipstream.engines.interrupts import CONTINUE, InterruptPolicy
from slipstream.engines.requests import Decode, check_request
from slipstream.errors import ModelError
from slipstream.models.attention import attach
from slipstream.models.lora import Adapter
from slipstream.models.routing import Routers
from slipstream.models.support import context_limit, num_embeddings
from slipstream.types import Frame, GenerateRequest, Purpose, RequestKey, StopReason
from slipstream.weight_sync.packing import Source

PINNED_EVERY = 4  # while training sequences run, at most every 4th tick is a pinned one


class EmbeddedEngine:
    """Generates tokens for many requests at once. Single-threaded: one loop calls it, between its own waits.

    `decode` turns token ids into text, for stop strings. `slots` sequences run at a time on the live weights, and as many on a
    pinned copy. Decode passes are padded to `min_rows` rows (at least 4); `probe.py` finds the number at which a row's result does
    not depend on its neighbours. `seed` is mixed with that of each request. `policy` says what new weights do to running sequences;
    `saved_states` and `saved_bytes` bound the states that it and `save` keep. With the model's `routers`, its routing of the tokens of
    training requests is reported when they end. With an `adapter` in the model, versions are versions of the adapter: the base stays, and a
    pinned copy shares it.

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
        policy: InterruptPolicy = CONTINUE,
        saved_states: int = 64,
        saved_bytes: int = 1 << 30,
        routers: Routers | None = None,
        adapter: Adapter | None = None,
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
        self._frozen = () if adapter is None else adapter.frozen  # no version changes these
        self._new_stream = partial(
            Stream, slots=slots, max_context=max_context, min_rows=min_rows, prefill_budget=prefill_budget, frozen=self._frozen
        )
        self._live = self._new_stream(model, saved_states=saved_states, saved_bytes=saved_bytes, routers=routers)
        self._policy = policy
        self._adapter = adapter
        self._pinned: _Pinned | None = None
        self._sequences: dict[int, tuple[Stream, Sequence]] = {}
        self._handles: dict[RequestKey, int] = {}
        self._ended: dict[int, StopReason] = {}  # between two ticks, by the engine itself; told by the next frame
        self._saved: dict[int, int] = {}  # states of those, where they were kept
        self._next_handle = 0
        self._tick = 0

    # ---- requests ----------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> int:
        """Queue a request; its handle, by which frames name it. A key that is queued or running already gives the same handle.

        The request adds at most `sampling.max_new_tokens` tokens to `token_ids`, fewer where `max_context` ends it. With `state` it
        starts over the keys and values of that state, as far as its tokens are the same; where the state is gone they are made by
        prefill. ValueError says what is wrong with a request that cannot be served.
        """
        if request.key in self._handles:
            return self._handles[request.key]
        check_request(request, self.max_context, self._num_embeddings)
        self._check_state(request)
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

    def _check_state(self, request: GenerateRequest) -> None:
        state = self._live.cache.states.get(request.state)
        if state is None:
            return
        where = f"group {request.group_id} sample {request.sample}"
        if request.purpose is Purpose.EVAL:
            raise ValueError(f"{where}: state {request.state} is of the live weights; an evaluation runs on a pinned copy")
        if not state.num_common(request.token_ids.tolist()):
            raise ValueError(f"{where}: its tokens and those of state {request.state} differ from the first one on; a fork shares a prefix")

    def cancel(self, handle: int) -> None:
        """Take the request out at once, and the states saved from it; no frame names it again. A handle that has ended is ignored."""
        self._live.cache.states.free(self._saved.pop(handle, None))
        self._ended.pop(handle, None)
        if handle in self._sequences:
            stream, sequence = self._sequences[handle]
            stream.remove(sequence)
            self._forget(sequence)
            self._live.cache.states.free_of(sequence.request.key)

    def handle(self, key: RequestKey) -> int | None:
        """Of the request of this key that waits or runs."""
        return self._handles.get(key)

    def save(self, handle: int) -> int | None:
        """Keep the keys and values that a running request has now, for forks; it goes on. The state's id; None where it does not run.

        The state stays until `free`, until its request is cancelled, or until it gives way to newer ones; it outlives the request's own
        end. With `kv = "recompute"` it also goes when the weights change.
        """
        stream, sequence = self._sequences.get(handle, (None, None))
        if stream is not self._live or sequence is None or sequence.slot is None:
            return None
        return self._live.save(sequence)

    def free(self, state: int) -> None:
        """Let go of a saved state; nothing where it is gone already. Forks that run over it keep what they share."""
        self._live.cache.states.free(state)

    def free_all_states(self) -> None:
        """Let go of all of them: nobody is left who knows their ids."""
        self._live.cache.states.free_all()

    def has_work(self) -> bool:
        """Whether a tick now would do anything: False while all requests wait for newer weights."""
        pinned = self._pinned
        return bool(self._ended) or self._live.has_work(self.version[1]) or (pinned is not None and pinned.has_work())

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
        # Who was interrupted may come back before anybody else takes the slots: the frame that tells of it admits nobody.
        interrupted = StopReason.INTERRUPT in self._ended.values()
        admitted = Admitted() if interrupted else stream.admit(version)
        decoded = stream.decode()
        for handle, _ in decoded.finished:
            self._forget(self._sequences[handle][1])
        ended, self._ended = tuple(self._ended.items()), {}
        saved, self._saved = tuple(self._saved.items()), {}
        return Frame(
            tick=self._tick,
            engine_id=self.engine_id,
            incarnation=version[0],
            version=version[1],
            handles=decoded.handles,
            token_ids=decoded.token_ids,
            logprobs=decoded.logprobs,
            finished=decoded.finished + ended,
            prefilled=tuple((handle, *made_by) for handle, made_by in admitted.prefilled),
            num_prefill_tokens=admitted.num_prefill_tokens,
            saved=saved,
            recomputed=admitted.recomputed,
            routing=decoded.routing,
            kept=decoded.kept,
        )

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.handle]
        del self._handles[sequence.request.key]

    # ---- weights -----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> PreTrainedModel:
        """The live model."""
        return self._live.model

    @property
    def weights(self) -> Source:
        """The tensors that a version is made of; they may be overwritten between two ticks, followed by `set_version`."""
        return self.model if self._adapter is None else self._adapter.sent

    def may_adopt(self) -> bool:
        """New weights are in hand: whether they may be adopted now. Called before every tick until they are.

        Always, except that with `interrupt = "drain"` the sequences that run end first, and none that waits starts until then.
        """
        self._live.draining = self._policy.drains
        return not (self._live.draining and self._live.running)

    def set_version(self, incarnation: int, version: int, checksum: str) -> None:
        """The live model's tensors now hold this version. Sequences that run go on, end or are made anew as the policy says."""
        if self._pinned is not None and self._pinned.stream.model is self.model:
            raise ValueError("the live weights are pinned without a copy; unpin before they change")
        self.version = (incarnation, version)
        self.checksum = checksum
        for sequence in self._live.running:
            assert sequence.oldest is not None, "it has run"
            if self._policy.aborts(sequence.oldest, version):
                self._interrupt(sequence)
        self._live.swapped(self.version, keep_prompts=self._policy.keeps_old_keys, recompute=self._policy.recomputes)

    def _interrupt(self, sequence: Sequence) -> None:
        if self._policy.saves:
            self._saved[sequence.handle] = self._live.save(sequence, once=True)
        self._live.remove(sequence)
        self._forget(sequence)
        self._ended[sequence.handle] = StopReason.INTERRUPT

    def pin(self, *, share: bool = False) -> tuple[int, int, str]:
        """Copy the live weights for EVAL requests; (incarnation, version, checksum) of the copy. ValueError if one is pinned already.

        `share` uses the live weights themselves, for callers who promise that they do not change until `unpin` (it is checked).
        """
        if self._pinned is not None:
            raise ValueError(f"version {self._pinned.version[1]} is pinned already; one evaluation at a time")
        if self.version[1] < 0:
            raise ValueError("the engine has no weights to pin yet")
        model = self.model if share else copy.deepcopy(self.model, {id(p): p for p in self._frozen}).requires_grad_(False)
        self._pinned = _Pinned(self._new_stream(model), self.version)
        return (*self.version, self.checksum)

    def unpin(self) -> float:
        """Free the copy; requests still on it end with ABORT. The seconds spent on pinned ticks; 0.0 when nothing is pinned."""
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return 0.0
        for stream, sequence in list(self._sequences.values()):
            if stream is pinned.stream:
                self._ended[sequence.handle] = StopReason.ABORT
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
