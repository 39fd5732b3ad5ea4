"""An engine for slipstream that has another server sample, one HTTP request per completion: `vs_trl_async` runs it for the embedded one.

    rollout worker ──► engine socket ──► HttpEngine ──► POST /v1/completions        at most `in_flight` at a time
    controller ──► next_weights ──► file, POST /_reload ──► confirm_weights         the checksum is that of the bytes in the file

A completion's tokens count as sampled by the weights that the server had when it was asked, the oldest that can have made any of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import xxhash

from slipstream.launch.assemble import ENGINE_ID
from slipstream.protocols import ControllerAPI, WeightsOffer
from slipstream.types import EngineReport, Frame, GenerateRequest, RequestKey, StopReason
from slipstream.weight_sync.memory import MemoryFile

REQUEST_S = 600.0  # TRL's deadline of one request, too


class Connections:
    """JSON over HTTP/1.1 to one server, with connections that are kept."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, value: Any) -> Any:
        """The answer. OSError, or TimeoutError after REQUEST_S; RuntimeError for a status other than 200."""
        async with asyncio.timeout(REQUEST_S):
            reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
            try:
                answer = await self._exchange(reader, writer, path, json.dumps(value).encode())
            except BaseException:
                writer.close()
                raise
        self._idle.append((reader, writer))
        return answer

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes) -> Any:
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        lengths = [int(h.partition(":")[2]) for h in headers if h.lower().startswith("content-length:")]
        answer = await reader.readexactly(lengths[0])
        if " 200 " not in status:
            raise RuntimeError(f"POST {path}: {status}")
        return json.loads(answer)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class HttpEngine:
    """What `launch.engine_socket.serve` wants of an engine, over a server. `run` keeps its weights current and tells what was sampled."""

    engine_id = ENGINE_ID

    def __init__(self, url: str, in_flight: int):
        self._server, self._free = Connections(url), asyncio.Semaphore(in_flight)
        self._version = (0, -1)  # (incarnation, version)
        self._adopted = asyncio.Condition()
        self._handles: dict[RequestKey, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._frames: asyncio.Queue[Frame | BaseException] = asyncio.Queue()
        self._num_handles = self._num_frames = 0

    # ---- requests

    def submit(self, request: GenerateRequest) -> int:
        if request.key in self._handles:
            return self._handles[request.key]
        handle = self._handles[request.key] = self._num_handles
        self._num_handles += 1
        self._tasks[handle] = asyncio.create_task(self._complete(handle, request), name=f"completion {handle}")
        return handle

    def cancel(self, handle: int) -> None:
        if (task := self._tasks.pop(handle, None)) is not None:
            task.cancel()

    def handle(self, key: RequestKey) -> int | None:
        return self._handles.get(key)

    def save(self, handle: int) -> int | None:
        return None

    def free(self, state: int) -> None: ...

    def free_all_states(self) -> None: ...

    def pin(self) -> tuple[int, int, str]:
        raise ValueError("this engine does not evaluate")

    def unpin(self) -> float:
        return 0.0

    async def _complete(self, handle: int, request: GenerateRequest) -> None:
        try:
            async with self._adopted:
                await self._adopted.wait_for(lambda: self._version[1] >= request.min_version)
            async with self._free:
                version = self._version
                answer = await self._server.post("/v1/completions", _asked(request))
            self._frames.put_nowait(self._frame(handle, request, version, answer["choices"][0]))
        except Exception as error:
            self._frames.put_nowait(error)
        finally:
            self._handles.pop(request.key, None)
            self._tasks.pop(handle, None)

    def _frame(self, handle: int, request: GenerateRequest, version: tuple[int, int], choice: dict[str, Any]) -> Frame:
        tokens = choice["token_ids"]
        stopped = bool(tokens) and tokens[-1] in request.stop_token_ids
        self._num_frames += 1
        return Frame(
            tick=self._num_frames,
            engine_id=self.engine_id,
            incarnation=version[0],
            version=version[1],
            handles=np.full(len(tokens), handle, np.int32),
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(choice["logprobs"]["token_logprobs"], np.float32),
            finished=((handle, StopReason.STOP if stopped else StopReason.LENGTH),),
            prefilled=((handle, *version),),
        )

    # ---- the loops

    async def run(self, controller: ControllerAPI, send: Callable[[Frame], Any], slots: list[MemoryFile], file: Path) -> None:
        """Until cancelled, or the first error: of the server, of the controller."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tell(send), name="frames")
                tasks.create_task(self._adopt(controller, slots, file), name="weights")
        finally:
            running = list(self._tasks.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._server.close()

    async def _tell(self, send: Callable[[Frame], Any]) -> None:
        while True:
            frame = await self._frames.get()
            if isinstance(frame, BaseException):
                raise frame
            await send(frame)

    async def _adopt(self, controller: ControllerAPI, slots: list[MemoryFile], file: Path) -> None:
        while True:
            offer = await controller.next_weights(self.engine_id, *self._version)
            checksum = _write(offer, slots, file)
            await self._server.post("/pause", {})
            await self._server.post("/_reload", {"path": str(file)})
            await self._server.post("/resume", {})
            incarnation, version = offer.manifest.incarnation, offer.manifest.version
            async with self._adopted:
                self._version = (incarnation, version)
                self._adopted.notify_all()
            report = EngineReport(engine_id=self.engine_id, incarnation=incarnation, version=version, checksum=checksum)
            await controller.confirm_weights(offer.slot, report)


def _asked(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "model": "tiny",
        "prompt": request.token_ids.tolist(),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": request.seed,
    }


def _write(offer: WeightsOffer, slots: list[MemoryFile], file: Path) -> str:
    """The offered bytes into the file that the server would load; their hash."""
    block = slots[offer.slot].map()[: offer.manifest.total_bytes].tobytes()
    file.write_bytes(block)
    return xxhash.xxh3_128_hexdigest(block)
