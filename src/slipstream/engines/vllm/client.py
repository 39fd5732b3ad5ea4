"""HTTP to one vLLM server: control calls, and token streams. Every call has a deadline; only transient failures are tried again.

    what comes back                         what it is                        tried again
    connection refused, reset, cut off      Transient                         yes, while the budget lasts
    5xx                                     Failed, a Transient               yes (the connection is vLLM's to close after a 500)
    4xx                                     Refused: our own mistake          never
    404 of a name that it served before     StartedAnew                       never: attaching anew mends it
    nothing, past the deadline              DeadlineExceeded                  never: a server that hangs hangs again

Tried again are reads and generations, from their last token; a control call that changes something is made once. The budget is one for
all calls to the server: each try costs a token, each success gives a tenth of one back, so that a server in trouble is not buried.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from slipstream.engines.vllm.labels import StartedAnew
from slipstream.errors import DeadlineExceeded, PeerLost, RunFailed

CONTROL_S = 60.0
TOKEN_S = 300.0  # from a request, or a token, to the next token: longer than any weight update
BACKOFF_S = (0.1, 0.5, 2.0)  # before the second, third and fourth try
MAX_LINE_BYTES = 8 << 20
# A connection per call: vLLM closes a kept one after 5 idle seconds and after a 500, as likely as not under the next call.
_PER_CALL: dict[str, Any] = {"limit": 0, "force_close": True}


class Refused(RunFailed):
    """The server refuses a request (4xx): it is wrong, and would be refused again."""


class Transient(PeerLost):
    """The server could not answer; it may the next time."""


class Failed(Transient):
    """It answered that it failed (5xx)."""


class RetryBudget:
    """How many tries there may be beyond the first ones.

    >>> budget = RetryBudget(2)
    >>> budget.take(), budget.take(), budget.take()
    (True, True, False)
    """

    def __init__(self, limit: int = 64):
        self._limit = self._left = float(limit)

    def take(self) -> bool:
        """Whether there may be another try; it is paid for then."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def succeeded(self) -> None:
        self._left = min(self._limit, self._left + 0.1)


class Client:
    """One server, at `unix:/path/of/socket` or `http://host:port`; `key` goes with every request. Made inside a running loop."""

    def __init__(self, address: str, *, key: str | None = None, backoff_s: tuple[float, ...] = BACKOFF_S, token_s: float = TOKEN_S):
        self.address = address
        self._base, socket = ("http://vllm", address[5:]) if address.startswith("unix:") else (address.rstrip("/"), None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, **_PER_CALL) if socket else aiohttp.TCPConnector(**_PER_CALL),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self.budget = RetryBudget()
        self.max_line_bytes = MAX_LINE_BYTES  # of a stream: a chunk of its answer
        self._backoff_s, self._token_s = backoff_s, token_s

    async def get(self, path: str, deadline_s: float = CONTROL_S) -> Any:
        """The JSON there; tried again."""
        return await self.retrying(lambda: self._call("GET", path, None, {}, deadline_s))

    async def post(self, path: str, body: Any = None, deadline_s: float = CONTROL_S, **query: str) -> Any:
        """Make a call, once; its answer, from JSON where it is that."""
        return await self._call("POST", path, body, query, deadline_s)

    async def retrying(self, call: Any) -> Any:
        """What `call()` gives; made again after each Transient failure while tries and budget last."""
        for pause_s in (*self._backoff_s, None):
            try:
                answer = await call()
            except Transient:
                if pause_s is None or not self.budget.take():
                    raise
                await asyncio.sleep(pause_s)
            else:
                self.budget.succeeded()
                return answer
        raise AssertionError("the last try raises or returns")

    async def until_healthy(self, interval_s: float) -> None:
        """Wait until it says that it is well; the caller has the deadline. Refused for a server that wants another key."""
        while True:
            try:
                await self._call("GET", "/health", None, {}, CONTROL_S)
                return
            except (Transient, DeadlineExceeded):
                await asyncio.sleep(interval_s)  # its start tells nobody

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of `POST /inference/v1/generate`, one per token, to the last. Transient where the stream breaks off."""
        path, ended = "/inference/v1/generate", False
        try:
            posted = self._session.post(self._base + path, json=body, timeout=self._per_token(), read_bufsize=self.max_line_bytes)
            async with posted as response:
                if response.status != 200:
                    raise _error("POST", path, response.status, await response.text())
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line[6:].strip() == b"[DONE]":
                        ended = True
                        break
                    yield _chunk(path, line[6:])
        except PeerLost:  # which is an OSError, too
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.address} sent no token for {self._token_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if not ended:
            raise Transient(f"{self.address} ended the stream of {path} before its last chunk")

    async def close(self) -> None:
        await self._session.close()

    async def _call(self, method: str, path: str, body: Any, query: Mapping[str, str], deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                async with self._session.request(method, self._base + path, json=body, params=query) as response:
                    text = await response.text()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.address} did not answer {method} {path} within {deadline_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        if response.status != 200:
            raise _error(method, path, response.status, text)
        return json.loads(text) if response.content_type == "application/json" else text

    def _per_token(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_connect=CONTROL_S, sock_read=self._token_s)

    def _lost(self, path: str, error: BaseException) -> Transient:
        return Transient(f"{self.address} could not be asked for {path}: {error or type(error).__name__}")


def _error(method: str, path: str, status: int, text: str) -> Refused | Failed | StartedAnew:
    said = _message(text)
    if status in (401, 403):
        return Refused(f"{method} {path}: the server wants another key ({status}): set SLIPSTREAM_VLLM_KEY to that of the server")
    if status == 404 and said.startswith("The model "):  # vLLM's words for a name that it does not serve
        return StartedAnew(f"{method} {path}: the server holds nothing of that name: it has been started anew. It says: {said}")
    if status == 404:
        return Refused(
            f"{method} {path}: the server has no such route; start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/vllm.md). "
            f"It says: {said}"
        )
    if 400 <= status < 500:
        return Refused(f"{method} {path}: the server refuses the request ({status}): {said}")
    return Failed(f"{method} {path}: the server failed ({status}): {said}")


def _chunk(path: str, data: bytes) -> dict[str, Any]:
    """One event of a stream. An error may come as an event, too, since the status has long been sent."""
    chunk = json.loads(data)
    if (error := chunk.get("error")) is not None:
        code = error.get("code") if isinstance(error, dict) else None
        raise _error("POST", path, code if isinstance(code, int) else 500, data.decode(errors="replace"))
    return chunk


def _message(text: str) -> str:
    """What an error's body says, in one line."""
    try:
        value = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:500]
    error = value.get("error", value) if isinstance(value, dict) else value
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:500]
