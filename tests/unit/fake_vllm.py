"""A vLLM server as far as slipstream talks to one: its routes over a Unix socket, with tokens 100, 101, ... and failures on order.

What it streams has the fields of vLLM 0.32.0's `GenerateTokensStreamResponse` (vllm/entrypoints/scale_out/token_in_token_out/protocol.py),
filled as `serve_tokens_stream_generator` of serving.py beside it does; `tests/servers/test_vllm_protocol.py` holds them against those.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

LOGPROB = -0.5
NUM_EXPERTS, NUM_LAYERS, TOP_K = 6, 3, 2  # of a model with experts


def routed(num_tokens: int) -> np.ndarray:
    """uint8 [tokens, layers, k]: where the fake routes a sequence's tokens, as `RoutedExpertsCapturer` has it for up to 256 experts."""
    token, layer, choice = np.ogrid[:num_tokens, :NUM_LAYERS, :TOP_K]
    return ((token + 2 * layer + choice) % NUM_EXPERTS).astype(np.uint8)


class FakeVllm:
    """Sequence i of a request's prompt of n tokens gets the tokens 100 + n, 100 + n + 1, ...: what follows a prefix is a function of it."""

    def __init__(self) -> None:
        self.label = "default"  # of the weights
        self.may_load = asyncio.Event()  # cleared: an update stands still while it loads
        self.may_load.set()
        self.loaded = ""  # label of the weights that /update_weights left, not yet finished
        self.paused = False
        self.calls: list[str] = []  # control routes, in order, with their query
        self.requests: list[dict[str, Any]] = []  # bodies of generations
        self.active: Counter[str] = Counter()  # label of the weights a generation started with -> how many run
        self.most_active = 0
        self.failures: list[str] = []  # what the next generations do instead: see `_generate`
        self.refusal = ""  # the next update is refused with this
        self.workers: list[dict[str, Any]] = [{}]  # what each says of an update that differs from what all say
        self.control_failures: dict[str, int] = {}  # route -> status of its next answer
        self.tell_labels = True
        self.vllm_version = "0.32.0"
        self.max_model_len = 128
        self.prompt_logprobs: list[float] = []  # of the probe's tokens after the first
        self.about: dict[str, Any] | None = None  # what the plugin tells; None: there is no plugin
        self.has_experts = False  # it tells the routing (--enable-return-routed-experts)
        self.tells_masks = False  # --return-sampling-mask
        self.kept = [7, 9]  # token ids that truncated sampling leaves beside the sampled one
        self.kept_at: dict[int, list[int]] = {}  # sampled token -> others that were kept with it, where they are not those
        self.heeds_aborts = True
        self.checksum: str | None = None  # that the report names; by default what was asked for
        self.key: str | None = None  # that every route asks for
        self._reports: list[dict[str, Any] | None] = [None]
        self.adapters: dict[str, Path] = {}  # name -> folder
        self.most_adapters = 0
        self.unused: list[str] = []  # layers that the adapters have and the server does not use
        self.logprobs: dict[str, float] = {}  # model or adapter -> of all its tokens
        self._moved = asyncio.Condition()  # tokens were allowed, the server was paused or resumed
        self._allowed: float = float("inf")  # tokens that each sequence may still sample
        self.num_sampled = 0  # tokens, of all sequences
        self._transports: set[asyncio.BaseTransport] = set()  # of generations that run
        self._epoch = 0
        self._aborted: set[str] = set()  # request ids
        self._runner: web.AppRunner | None = None

    async def start(self, socket: Path | None) -> str:
        """Its address; None: a port of the loopback address."""
        app = web.Application(middlewares=[self._require_key])
        for route in (
            "pause",
            "resume",
            "start_weight_update",
            "update_weights",
            "collective_rpc",
            "finish_weight_update",
            "abort_requests",
        ):
            app.router.add_post(f"/{route}", self._control)
        for route in ("load_lora_adapter", "unload_lora_adapter"):
            app.router.add_post(f"/v1/{route}", self._control)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/health", self._health)
        for route in ("/version", "/v1/models", "/weight_info", "/is_paused"):
            app.router.add_get(route, self._about)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        if socket is None:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            return f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await web.UnixSite(self._runner, str(socket)).start()
        return f"unix:{socket}"

    @web.middleware
    async def _require_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _json({"error": "a key is required"}, 401)
        return await handler(request)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def allow(self, count: float) -> None:
        """Let every sequence sample so many tokens from now on; with 0 they stand still."""
        async with self._moved:
            self._allowed, self._epoch = count, self._epoch + 1
            self._moved.notify_all()

    def cut(self) -> None:
        """Break the connections of all generations."""
        for transport in self._transports:
            transport.abort()  # type: ignore[attr-defined]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that happens here: a generation begins or ends, a token is sampled."""
        async with self._moved:
            await self._moved.wait_for(reached)

    async def _happened(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # ---- control

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.control_failures.pop("/health", 200))

    async def _about(self, request: web.Request) -> web.Response:
        if (status := self.control_failures.pop(request.path, 200)) != 200:
            return _json({"error": {"message": f"{request.path} fails"}}, status)
        models = [{"id": "theirs", "max_model_len": self.max_model_len}, *({"id": name} for name in self.adapters)]
        return _json({"version": self.vllm_version, "data": models, "weight_version": self.label})

    async def _control(self, request: web.Request) -> web.Response:
        query = ",".join(f"{k}={v}" for k, v in request.query.items())
        route = request.path.rpartition("/")[2]
        self.calls.append(route + (f"?{query}" if query else ""))
        if (status := self.control_failures.pop(request.path, 200)) != 200:
            return _json({"error": {"message": f"{request.path} fails"}}, status)
        body = await request.json() if request.can_read_body else None
        return await getattr(self, "_" + route)(body)

    async def _pause(self, body: Any) -> web.Response:
        await self._set_paused(True)
        return _json({"status": "paused"})

    async def _resume(self, body: Any) -> web.Response:
        await self._set_paused(False)
        return _json({"status": "resumed"})

    async def _set_paused(self, paused: bool) -> None:
        async with self._moved:
            self.paused = paused
            self._moved.notify_all()

    async def _start_weight_update(self, body: Any) -> web.Response:
        return _json({})

    async def _update_weights(self, body: Any) -> web.Response:
        info = body["update_info"]
        await self._happened()
        await self.may_load.wait()
        error, self.refusal = self.refusal, ""
        report = {"label": info["label"], "checksum": self.checksum or info["checksum"], "error": error, "broken": False, "seconds": 0.1}
        self._reports = [report | worker for worker in self.workers]
        if any(report["error"] for report in self._reports if report):
            return _json({"error": {"message": "Call to update_weights failed"}}, 500)
        self.loaded = info["label"]
        return _json({"message": "Weights updated"})

    async def _collective_rpc(self, body: Any) -> web.Response:
        if body["method"] == "slipstream_about":
            if self.about is None:
                return _json({"error": {"message": "'CPUWorker' object has no attribute 'slipstream_about'"}}, 500)
            return _json({"results": [self.about]})
        if body["method"] == "slipstream_newest_adapter":
            return _json({"results": [{"used": 3, "unused": self.unused}]})
        return _json({"results": self._reports})

    async def _finish_weight_update(self, body: Any) -> web.Response:
        self.label = body["weight_version"]
        return _json({})

    async def _load_lora_adapter(self, body: Any) -> web.Response:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if self.refusal or name in self.adapters:
            said, self.refusal = self.refusal or f"The lora adapter '{name}' has already been loaded.", ""
            return _json({"error": {"message": said}}, 400)
        assert (folder / "adapter_config.json").exists(), "whole before it is named"
        self.adapters[name] = folder
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora_adapter(self, body: Any) -> web.Response:
        del self.adapters[body["lora_name"]]
        return web.Response(text="Success")

    async def _abort_requests(self, body: Any) -> web.Response:
        async with self._moved:
            self._aborted.update(body["request_ids"])
            self._moved.notify_all()
        return _json({})

    def _is_aborted(self, name: str) -> bool:
        return self.heeds_aborts and name in self._aborted

    # ---- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """`failures`: a status ("503", "400"), "cut N" (the connection after N tokens), "event N" (an error in the stream after N tokens),
        "finish REASON" (after one token), "logprob X", "merge N" (N tokens to a chunk), "routing TEXT" (in place of the routed experts)."""
        body = await request.json()
        if len(salt := body.get("cache_salt", "")) > 128 or set(salt) & set("@/\\\0"):
            return _json({"error": {"message": f"Parameter 'cache_salt' must not be {salt!r}", "code": 400}}, 400)
        if not body.get("stream"):
            return self._score(body)
        self.requests.append(body)
        if body.get("model", "policy") not in ("policy", *self.adapters):
            return _json({"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}, 404)
        failure, _, argument = (self.failures.pop(0) if self.failures else "").partition(" ")
        if self.tells_masks and (body["sampling_params"].get("top_k", 0) <= 0 or body["sampling_params"]["temperature"] <= 0):
            return _json({"error": {"message": "sampling distribution replay requires temperature > 0, top_k > 0", "code": 400}}, 400)
        if failure.isdigit():
            return _json({"error": {"message": "out of order", "code": int(failure)}}, int(failure))
        started = self.label
        assert request.transport is not None
        self._transports.add(request.transport)
        self.active[started] += 1
        self.most_active = max(self.most_active, self.active.total())
        await self._happened()
        try:
            return await self._stream(request, body, failure, argument)
        finally:
            self.active[started] -= 1
            self._transports.discard(request.transport)  # type: ignore[arg-type]
            await self._happened()

    async def _stream(self, request: web.Request, body: dict[str, Any], failure: str, argument: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sampling, spans, taken, epoch = body["sampling_params"], [], 0, self._epoch
        merged, chunk_tokens, prompt = (int(argument) if failure == "merge" else 1), [], len(body["token_ids"])
        for index in range(sampling["max_tokens"]):
            if failure == "cut" and index == int(argument):
                assert request.transport is not None
                request.transport.abort()
                return response
            if failure == "event" and index == int(argument):
                await _event(response, {"error": {"message": "engine trouble", "code": 500}})
                break
            name = f"generate-tokens-{body.get('request_id')}"
            epoch, taken = await self._may_sample(epoch, taken, name)
            if self._is_aborted(name):  # a last chunk without tokens
                await _event(response, self._chunk(body, [], "abort", spans, LOGPROB, routed(prompt + index - 1)))
                break
            self.num_sampled += 1
            await self._happened()
            label = self.label
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": index, "end": index})
            spans[-1]["end"] = index + 1
            token = 100 + prompt + index
            reason = "stop" if token in sampling["stop_token_ids"] else "length" if index + 1 == sampling["max_tokens"] else None
            reason = argument if failure == "finish" else reason
            logprob = float(argument) if failure == "logprob" else self.logprobs.get(body.get("model", ""), LOGPROB)
            chunk_tokens.append(token)
            if len(chunk_tokens) < merged and not reason:
                continue
            chunk = self._chunk(body, chunk_tokens, reason, spans, logprob, routed(prompt + index))
            if failure == "routing" and reason:
                chunk["choices"][0]["routed_experts"] = argument or None
            await _event(response, chunk)
            chunk_tokens = []
            if reason:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(
        self, body: dict[str, Any], tokens: list[int], reason: str | None, spans: list[dict[str, Any]], logprob: float, experts: np.ndarray
    ) -> dict[str, Any]:
        entries = [
            {"token_id": t, "logprob": logprob, "rank": 1, "top_logprobs": self._top_logprobs(t, logprob, body["sampling_params"])}
            for t in tokens
        ]
        choice = {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": tokens[-1] if reason == "stop" else None,
            "token_ids": tokens,
            "routed_experts": _npy(experts) if self.has_experts and reason else None,
            "sampling_mask": [sorted([t, *self.kept]) for t in tokens] if self.tells_masks and tokens else None,
            "weight_versions": spans if self.tell_labels else None,
            "logprobs": {"content": entries},
        }
        return {"request_id": f"generate-tokens-{body.get('request_id')}", "usage": None, "output_mode": "tokens", "choices": [choice]}

    def _top_logprobs(self, token: int, logprob: float, sampling: dict[str, Any]) -> list[dict[str, Any]]:
        """The sampled token first, then the likeliest ones; what was cut off has -9999, in place of -inf."""
        kept = self.kept_at.get(token, self.kept)
        likeliest = [token, *kept, *(other for other in range(20, 1000) if other not in (token, *kept))]
        left = 1 + len(kept) if sampling.get("top_k", 0) else len(likeliest)
        listed = likeliest[: max(sampling.get("logprobs", 0), 1)]
        return [{"token_id": t, "logprob": logprob if at < left else -9999.0, "rank": at + 1} for at, t in enumerate(listed)]

    async def _may_sample(self, epoch: int, taken: int, name: str) -> tuple[int, int]:
        """Wait until a sequence that took `taken` tokens in `epoch` may sample one more, or is aborted."""

        def may() -> bool:
            return not self.paused and (taken < self._allowed or self._epoch > epoch) and self._allowed > 0

        async with self._moved:
            await self._moved.wait_for(lambda: self._is_aborted(name) or may())
            return (self._epoch, 1) if self._epoch > epoch else (epoch, taken + 1)

    def _score(self, body: dict[str, Any]) -> web.Response:
        tokens = body["token_ids"][1:]
        values = self.prompt_logprobs or [self.logprobs.get(body.get("model", ""), LOGPROB)] * len(tokens)
        entries = [{str(token): {"logprob": value}} for token, value in zip(tokens, values, strict=True)]
        return _json({"prompt_logprobs": [None, *entries]})


def _npy(array: np.ndarray) -> str:
    """As `numpy2base64` of vllm/utils/serial_utils.py."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


async def _event(response: web.StreamResponse, value: Any) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def _json(value: Any, status: int = 200) -> Any:
    return web.json_response(value, status=status)
