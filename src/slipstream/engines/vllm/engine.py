"""A vLLM server as an engine: requests in, its token streams out as frames. `loop.py` gives it weights and sends its frames.

    submit ──► waits: for its version, for one of `slots` places, for an update or a drain to end
                 └──► one HTTP stream (a task) ──► tokens with logprob and version ──► take_frames
                         ├─ breaks off: asked for again from its last token, within the client's budget
                         ├─ has ended here, at a stop string, but not there, and its routing is kept: told to end, for its last chunk
                         ├─ names too few tokens to see all that truncated sampling kept: asked for again from there, for more
                         └─ begins under newer weights than it was sent under: asked for again, so that what made its prompt is known

At most `slots` sequences are on the server, as many as it runs at a time, so none waits inside it. A stream's `cache_salt` is the version
that it is sent under: it shares a prefix only with streams of that version. It carries no seed: vLLM's CPU engine dies of one with a
chunked prefill.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from slipstream.engines.interrupts import CONTINUE, InterruptPolicy
from slipstream.engines.requests import Decode, StopStrings, check_request, make_stops
from slipstream.engines.vllm.arrays import CUT_OFF, NOTHING_TOLD, Tells, kept_sets, num_logprobs
from slipstream.engines.vllm.client import Transient
from slipstream.engines.vllm.labels import Labels, Version, name_of_version
from slipstream.engines.vllm.outbox import Outbox
from slipstream.errors import RunFailed, WeightSyncError
from slipstream.types import Frame, GenerateRequest, Purpose, RequestKey, Sampling, StopReason

LOGPROB_ROUNDING = 1e-6  # a logprob in (0, 1e-6] is rounding of log 1
Sampled = tuple[Version, int, float, bytes]  # (version, token, logprob, what truncated sampling kept)


class TokenSource(Protocol):
    """What the engine asks of a server's client (`client.Client`)."""

    def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]: ...

    async def retrying(self, call: Callable[[], Any]) -> Any: ...

    async def post(self, path: str, body: Any = None) -> Any: ...


class _AskAgain(Exception):
    """A stream is of no use beyond what was taken of it: an update came before its first token, or it names too few tokens."""


class _Request:
    """One request: waiting, or running as a task."""

    __slots__ = (
        "handle", "keeps_routing", "num_attempts", "num_logprobs", "oldest", "on", "reason", "request", "stops", "task", "tokens",
    )  # fmt: skip

    def __init__(self, handle: int, request: GenerateRequest, stops: StopStrings | None, keeps_routing: bool, num_logprobs: int):
        self.handle, self.request, self.stops = handle, request, stops
        self.keeps_routing, self.num_logprobs = keeps_routing, num_logprobs  # of each token: that the server is to name
        self.num_attempts = 0
        self.reason: StopReason | None = None  # why it has ended; its routing is still to come
        self.tokens: list[int] = []  # sampled by this server
        self.oldest = request.oldest_version  # of the sampled tokens
        self.on: Version | None = None  # what its stream was sent under
        self.task: asyncio.Task[None] | None = None

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    @property
    def num_routed(self) -> int:
        """Tokens that a forward pass has seen: all but the last."""
        return len(self.request.token_ids) + len(self.tokens) - 1


class VllmEngine:
    """What `launch.engine_socket.serve` wants of an engine. Lives in one event loop.

    `labels`: of the weights that it is given; `model`: the name it knows the model by. `vocab_size` bounds token ids; `decode` turns ids
    into text, for stop strings.
    `wake` is set whenever there is something to send or to do.
    """

    def __init__(
        self,
        server: TokenSource,
        *,
        labels: Labels,
        engine_id: str,
        model: str,
        slots: int,
        max_context: int,
        vocab_size: int,
        decode: Decode | None = None,
        policy: InterruptPolicy = CONTINUE,
        tells: Tells = NOTHING_TOLD,
    ):
        self.engine_id, self.slots, self.labels = engine_id, slots, labels
        self.version: Version = (0, -1)  # -1: no weights yet
        self.checksum = ""
        self.wake = asyncio.Event()
        self.failed: BaseException | None = None
        self._server, self._model, self._decode, self._tells = server, model, decode, tells
        self._max_context, self._vocab_size = max_context, vocab_size
        self.policy = policy
        self._incoming: tuple[Version, str] | None = None  # an update is under way
        self._steady = asyncio.Event()  # none is
        self._steady.set()
        self._pinned: tuple[Version, str] | None = None
        self._offered = False  # weights are in hand
        self._waiting: dict[int, _Request] = {}
        self._running: dict[int, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # also of cancelled requests, until they have let go
        self._handles: dict[RequestKey, int] = {}
        self._outbox = Outbox(engine_id)
        self._num_handles = 0

    # ---- requests (the `Engine` protocol) ----------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> int:
        """Queue a request; its handle. A key that waits or runs gives the same one. ValueError for what cannot be served."""
        if request.key in self._handles:
            return self._handles[request.key]
        check_request(request, self._max_context, self._vocab_size)
        self._check_pinned(request)
        handle, self._num_handles = self._num_handles, self._num_handles + 1
        self._handles[request.key] = handle
        keeps_routing = self._tells.routing is not None and request.purpose is Purpose.TRAIN
        named = 0 if self._tells.masks else num_logprobs(request.sampling.top_k, self._vocab_size)
        self._waiting[handle] = _Request(handle, request, make_stops(request, self._decode), keeps_routing, named)
        self._start_ready()
        return handle

    def cancel(self, handle: int) -> None:
        """Take the request out; the server is told by the end of its stream."""
        request = self._waiting.get(handle) or self._running.get(handle)
        if request is not None:
            self._take_out(request)
            self._start_ready()

    def handle(self, key: RequestKey) -> int | None:
        return self._handles.get(key)

    def save(self, handle: int) -> int | None:
        """None: a server keeps no state by name. A fork reads its prefix again, or finds it in the server's prefix cache."""
        return None

    def free(self, state: int) -> None: ...

    def free_all_states(self) -> None: ...

    def pin(self) -> tuple[int, int, str]:
        """Hold new weights back until `unpin`: a server has no second copy, so evaluation has the one there is.

        While an update is under way it is the incoming version: what is submitted now starts after it.
        """
        if self._pinned is not None:
            raise ValueError(f"version {self._pinned[0][1]} is pinned already; one evaluation at a time")
        version, checksum = self._incoming or (self.version, self.checksum)
        if version[1] < 0:
            raise ValueError("the engine has no weights to pin yet")
        self._pinned = (version, checksum)
        return (*version, checksum)

    def unpin(self) -> float:
        """Let new weights in again; evaluation requests still there end with ABORT. 0.0: passes are shared, none is evaluation's own."""
        self._pinned = None
        for request in [*self._waiting.values(), *self._running.values()]:
            if request.request.purpose is Purpose.EVAL:
                self._end(request, StopReason.ABORT)
        self._start_ready()
        self.wake.set()
        return 0.0

    def _check_pinned(self, request: GenerateRequest) -> None:
        if request.purpose is not Purpose.EVAL:
            return
        if self._pinned is None:
            raise ValueError("an evaluation request came while no version is pinned; call pin first")
        pinned = self._pinned[0][1]
        if request.min_version > pinned:
            raise ValueError(f"an evaluation request asks for version {request.min_version}, but version {pinned} is pinned")

    # ---- weights (asked by the loop) ---------------------------------------------------------------------------------------

    def may_adopt(self) -> bool:
        """New weights are in hand: whether they may go to the server now. Not while a version is pinned; with `drain` nothing starts any
        more, and not before what runs has ended."""
        self._offered = True
        return self._pinned is None and not (self.policy.drains and self._running)

    def begin_update(self, version: Version, checksum: str) -> None:
        """From now on nothing is sent to the server."""
        self._incoming = (version, checksum)
        self._steady.clear()

    def interrupt(self) -> None:
        """The server is paused, and what it sampled before has been read: take off it what the policy aborts."""
        assert self._incoming is not None, "an update is under way"
        version = self._incoming[0]
        for request in list(self._running.values()):
            if request.reason is not None:  # it has all its tokens
                continue
            oldest = self.version[1] if request.oldest is None else request.oldest
            if self.policy.aborts(oldest, version[1]):
                self._end(request, StopReason.INTERRUPT)

    def end_update(self) -> None:
        """The server holds the new version, and has gone on."""
        assert self._incoming is not None, "an update is under way"
        (self.version, self.checksum), self._incoming, self._offered = self._incoming, None, False
        if self.policy.recomputes:
            for request in self._running.values():
                if request.reason is None:
                    self._read_by(self.version, request)
        self._steady.set()
        self._start_ready()
        self.wake.set()

    # ---- what came of it ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    def take_frames(self) -> list[Frame]:
        """What was sampled and what ended since the last call, a frame per version. Raises the error of a request that the server refuses,
        or could not be asked for any more."""
        if self.failed is not None:
            raise self.failed
        return self._outbox.take(self.version)

    async def close(self) -> None:
        for request in [*self._waiting.values(), *self._running.values()]:
            self._take_out(request)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- from waiting to running -------------------------------------------------------------------------------------------

    def _start_ready(self) -> None:
        if self._incoming is not None or self.version[1] < 0:
            return
        draining = self._offered and self.policy.drains and self._pinned is None
        ready = [] if draining else [r for r in self._waiting.values() if r.request.min_version <= self.version[1]]
        # Evaluations first, since training waits for them; then what has tokens, since those age; then in order of submission.
        ready.sort(key=lambda r: (r.request.purpose is not Purpose.EVAL, r.oldest is None))
        for request in ready[: self.slots - len(self._running)]:
            del self._waiting[request.handle]
            self._running[request.handle] = request
            self._start(request)

    def _start(self, request: _Request) -> None:
        request.task = asyncio.create_task(self._run(request), name=f"vLLM request {request.handle}")
        self._tasks.add(request.task)
        request.task.add_done_callback(self._tasks.discard)

    async def _run(self, request: _Request) -> None:
        """One request to its end. An error that is not the network's ends the engine: the server is wrong, or we are."""
        try:
            while request.handle in self._running:
                try:
                    await self._server.retrying(lambda: self._attempt(request))
                except _AskAgain:
                    pass
        except Exception as error:
            self.failed = self.failed or error
            self.wake.set()

    async def _attempt(self, request: _Request) -> None:
        """Ask the server to go on from the request's tokens, and take what it sends."""
        if request.room <= 0:  # the stream broke off between the last token and its end
            request.reason = request.reason or StopReason.LENGTH
        if request.reason is not None:
            await self._route_anew(request)
            return
        await self._steady.wait()  # an update; it has its own deadline
        model, sent_under = self._asked(request)
        request.on, num_taken = sent_under, 0
        self._read_by(sent_under, request)
        body = self._body(request, model, sent_under)
        async with aclosing(self._server.stream(body)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    ended_there = choice.get("finish_reason") is not None
                    if request.reason is None:
                        num_taken += self._take(request, choice, num_taken, sent_under)
                        if request.reason is not None and request.keeps_routing and not ended_there:
                            await self._server.post("/abort_requests", {"request_ids": [f"generate-tokens-{body['request_id']}"]})
                    if request.reason is not None and (ended_there or not request.keeps_routing):
                        self._end(request, request.reason, choice.get("routed_experts"))
                        return
        raise Transient(f"the server ended the stream of request {request.handle} without saying why")

    def _take(self, request: _Request, choice: Mapping[str, Any], at: int, sent_under: Version) -> int:
        """Take a chunk's tokens, the first of which is the stream's token `at`; how many. Says why the generation has ended, if it has."""
        sampled = self._sampled(request, choice, at, sent_under)
        if at == 0 and sampled and sampled[0][0] != sent_under:
            raise _AskAgain
        request.reason = self._keep(request, sampled)
        if request.reason is None:
            if len(sampled) < len(choice.get("token_ids") or ()):
                self._ask_for_more(request)
            request.reason = _reason(choice.get("finish_reason"))
        return len(sampled)

    def _ask_for_more(self, request: _Request) -> None:
        """The next token may have been drawn from more tokens than the server named, so it is drawn anew.

        Whether they are too few depends on the distribution, not on what was drawn from it: no token is preferred.
        """
        limit = min(self._tells.max_logprobs, self._vocab_size)
        if request.num_logprobs >= limit:
            raise RunFailed(
                f"the server kept more than the {limit} tokens that it names (rollout.top_k = {request.request.sampling.top_k}; in "
                f"bfloat16 many are equally likely): start it with --max-logprobs {self._vocab_size}"
            )
        request.num_logprobs = min(2 * request.num_logprobs, limit)
        raise _AskAgain

    async def _route_anew(self, request: _Request) -> None:
        """The tokens are all here, but not their end: end it, if need be with the routing that another pass over them shows."""
        routed = None
        if request.keeps_routing:
            await self._steady.wait()  # an update; it has its own deadline
            async with aclosing(self._server.stream(self._body(request, *self._asked(request), again=True))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    routed = chunk["choices"][0].get("routed_experts")
        assert request.reason is not None
        self._end(request, request.reason, routed)

    def _body(self, request: _Request, model: str, version: Version, *, again: bool = False) -> dict[str, Any]:
        """The JSON of one generation from the request's tokens on; `again`: of a token in place of the last, for the routing before it."""
        asked, sampling = request.request, request.request.sampling
        tokens = [*asked.token_ids.tolist(), *request.tokens]
        request.num_attempts += 1
        body = {
            "model": model,
            "token_ids": tokens[:-1] if again else tokens,
            "cache_salt": self.labels.of(version),
            "stream": True,
            "sampling_params": {
                "max_tokens": 1 if again else request.room,
                **_distribution(sampling, self._tells),
                "logprobs": request.num_logprobs,
                "stop_token_ids": list(asked.stop_token_ids),
                "ignore_eos": True,  # the stop tokens name it
                "detokenize": False,
            },
        }
        return body | {"request_id": f"{self.engine_id}-{request.handle}-{request.num_attempts}"}

    def _asked(self, request: _Request) -> tuple[str, Version]:
        """The name that the server knows the weights by that the request is sent under, and their version."""
        return self._model, self.version

    def _made_by(self, label: str, sent_under: Version) -> Version:
        """The weights with this label on their tokens, in a stream that was sent under `sent_under`."""
        return self.labels.version_of(label)

    def _read_by(self, version: Version, request: _Request) -> None:
        """These weights make the keys and values of all the request's tokens."""
        self._outbox.prefilled(request.handle, version)
        if request.oldest is not None and request.oldest < version[1]:
            self._outbox.recomputed(request.handle)

    def _keep(self, request: _Request, sampled: list[Sampled]) -> StopReason | None:
        """Keep tokens, up to one that ends the generation; why it does: a stop token or string, or no room for more."""
        for version, token, logprob, kept in sampled:
            self._outbox.token(request.handle, token, logprob, version, kept)
            request.tokens.append(token)
            request.oldest = version[1] if request.oldest is None else min(request.oldest, version[1])
            self.wake.set()
            if token in request.request.stop_token_ids or (request.stops is not None and request.stops.ends_with(token)):
                return StopReason.STOP
            if request.room <= 0:
                return StopReason.LENGTH
        return None

    def _sampled(self, request: _Request, choice: Mapping[str, Any], at: int, sent_under: Version) -> list[Sampled]:
        """A chunk's tokens, the first of which is the stream's token `at`, up to one that was drawn from who knows what. vLLM puts several
        into one chunk where we are slow to read, so that an update may lie between them: each is of the version of its span."""
        tokens = choice.get("token_ids") or []
        if not tokens:
            return []
        spans = [(s["start"], s["end"], self._made_by(s["version"], sent_under)) for s in choice.get("weight_versions") or ()]
        cuts = request.request.sampling.truncates_vocabulary
        kept_by = kept_sets(choice, tokens, self._tells, self._vocab_size) if cuts else [b""] * len(tokens)
        sampled = []
        for index, (token, entry) in enumerate(zip(tokens, choice["logprobs"]["content"], strict=True), start=at):
            version = next((version for start, end, version in reversed(spans) if start <= index < end), None)
            if version is None:
                raise WeightSyncError(
                    "the server does not say which weights sampled its tokens: slipstream's plugin is not loaded there (docs/vllm.md)"
                )
            self._check_version(request, version, sent_under)
            if (kept := kept_by[index - at]) is None:
                break
            sampled.append((version, token, _logprob(request, token, entry), kept))
        return sampled

    def _check_version(self, request: _Request, version: Version, oldest: Version) -> None:
        """WeightSyncError for weights that the server did not have while the stream ran, and for an evaluation by others than pinned."""
        newest = self._incoming[0] if self._incoming else self.version
        if not oldest <= version <= newest:
            raise WeightSyncError(f"the server sampled with weights {name_of_version(version)}, but was given {name_of_version(newest)}")
        if request.request.purpose is Purpose.EVAL and self._pinned is not None and version != self._pinned[0]:
            raise WeightSyncError(f"an evaluation of version {name_of_version(self._pinned[0])} was sampled by {name_of_version(version)}")

    def _end(self, request: _Request, reason: StopReason, routed: str | None = None) -> None:
        """`routed`: how the server routed it, as it says; asked for only where its routing is kept."""
        if request.keeps_routing and reason in (StopReason.STOP, StopReason.LENGTH):
            assert self._tells.routing is not None
            self._outbox.routed(request.handle, self._tells.routing.read(routed, request.num_routed))
        self._outbox.finished(request.handle, reason)
        self._take_out(request)
        self._start_ready()
        self.wake.set()

    def _take_out(self, request: _Request) -> None:
        self._waiting.pop(request.handle, None)
        self._running.pop(request.handle, None)
        self._handles.pop(request.request.key, None)
        task, current = request.task, asyncio.current_task()
        if task is not None and task is not current:
            task.cancel()


# ---- pieces ------------------------------------------------------------------------------------------------------------------


def _distribution(sampling: Sampling, tells: Tells) -> dict[str, Any]:
    """What tokens are drawn from. A server that tells what was kept refuses to be greedy, but not to keep the likeliest token alone."""
    if sampling.temperature == 0.0 and tells.masks:
        return {"temperature": 1.0, "top_k": 1}
    cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p} if sampling.truncates_vocabulary else {}
    return {"temperature": sampling.temperature, **cuts}


def _reason(finish_reason: str | None) -> StopReason | None:
    """Why vLLM ended a generation. Transient where it did for a reason of its own: it is asked for again."""
    if finish_reason is None:
        return None
    if finish_reason == "length":
        return StopReason.LENGTH
    raise Transient(f'the server ended a generation with "{finish_reason}"')  # "stop": at a token that is not among ours


def _logprob(request: _Request, token: int, entry: Mapping[str, Any]) -> float:
    """The sampled token's logprob, checked."""
    value = float(entry["logprob"])
    if entry["token_id"] != token or not math.isfinite(value) or value <= CUT_OFF or value > LOGPROB_ROUNDING:
        r = request.request
        raise RunFailed(
            f"the server gave token {token} of group {r.group_id} sample {r.sample} the logprob {value} (of token {entry['token_id']}): "
            "its weights have diverged (lower trainer.learning_rate), or it does not run with --logprobs-mode processed_logprobs"
        )
    return min(value, 0.0)
