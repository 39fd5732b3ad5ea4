"""HTTP to a vLLM server: what is tried again, what never, what errors say, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_vllm import FakeVllm

from slipstream.engines.vllm.client import Client, Refused, RetryBudget, Transient
from slipstream.errors import DeadlineExceeded

BODY = {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 3, "stop_token_ids": []}}


@asynccontextmanager
async def server(tmp_path: Path) -> AsyncIterator[tuple[FakeVllm, Client]]:
    fake = FakeVllm()
    client = Client(await fake.start(tmp_path / "s"), backoff_s=(0.0, 0.0, 0.0))
    try:
        yield fake, client
    finally:
        await client.close()
        await fake.stop()


def run(tmp_path: Path, body: Callable[[FakeVllm, Client], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), server(tmp_path) as (fake, client):
            await body(fake, client)

    asyncio.run(main())


async def tokens_of(client: Client) -> list[int]:
    return [token async for chunk in client.stream(BODY) for token in chunk["choices"][0]["token_ids"]]


def test_a_stream_gives_its_chunks_to_the_last(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        assert await tokens_of(client) == [102, 103, 104]

    run(tmp_path, body)


@pytest.mark.parametrize("failure", ["cut 1", "503", "event 1"])
def test_a_stream_that_breaks_off_is_transient(tmp_path: Path, failure: str) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        fake.failures = [failure]
        with pytest.raises(Transient):
            await tokens_of(client)

    run(tmp_path, body)


def test_a_client_error_is_refused_in_the_servers_words_and_not_tried_again(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        fake.failures = ["400"]
        with pytest.raises(Refused, match=r"refuses the request \(400\): out of order"):
            await client.retrying(lambda: tokens_of(client))
        assert len(fake.requests) == 1

    run(tmp_path, body)


def test_transient_failures_are_tried_again_and_then_raised(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        fake.failures = ["503", "503", "503"]
        assert await client.retrying(lambda: tokens_of(client)) == [102, 103, 104]
        fake.failures = ["503"] * 4
        with pytest.raises(Transient, match="out of order"):
            await client.retrying(lambda: tokens_of(client))
        assert len(fake.requests) == 8

    run(tmp_path, body)


def test_the_budget_bounds_the_tries_of_all_calls_together(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        client.budget = RetryBudget(2)
        fake.failures = ["503"] * 20
        for _ in range(5):
            with pytest.raises(Transient):
                await client.retrying(lambda: tokens_of(client))
        assert len(fake.requests) == 5 + 2

    run(tmp_path, body)


def test_successes_refill_the_budget_to_its_limit() -> None:
    budget = RetryBudget(1)
    assert budget.take() and not budget.take()
    for _ in range(30):
        budget.succeeded()
    assert budget.take() and not budget.take()


def test_a_control_call_is_made_once(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        fake.control_failures = {"/update_weights": 500}
        with pytest.raises(Transient, match=r"POST /update_weights: the server failed \(500\): /update_weights fails"):
            await client.post("/update_weights", {})
        assert fake.calls == ["update_weights"]

    run(tmp_path, body)


def test_a_silent_server_ends_in_the_deadline(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        await fake.allow(1)
        impatient = Client(client.address, token_s=0.2)
        try:
            with pytest.raises(DeadlineExceeded, match="sent no token for"):
                await tokens_of(impatient)
        finally:
            await impatient.close()

    run(tmp_path, body)


def test_nobody_listens(tmp_path: Path) -> None:
    async def main() -> None:
        client = Client(f"unix:{tmp_path}/nobody", backoff_s=(0.0,))
        try:
            with pytest.raises(Transient, match="could not be asked for /weight_info"):
                await client.get("/weight_info")
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(("status", "words"), [(401, "SLIPSTREAM_VLLM_KEY"), (404, "VLLM_SERVER_DEV_MODE=1")])
def test_a_wrong_key_and_a_missing_route_say_what_to_do(tmp_path: Path, status: int, words: str) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        fake.control_failures = {"/weight_info": status}
        with pytest.raises(Refused, match=words):
            await client.get("/weight_info")

    run(tmp_path, body)


def test_the_key_goes_with_every_request(tmp_path: Path) -> None:
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        client = Client(f"unix:{tmp_path}/s", key="secret")
        try:
            await client.get("/weight_info")
            await client.post("/pause", mode="keep")
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(main())
    assert seen == ["Bearer secret"] * 2


def test_health_is_waited_for(tmp_path: Path) -> None:
    async def body(fake: FakeVllm, client: Client) -> None:
        fake.control_failures = {"/health": 503}
        await client.until_healthy(0.0)
        assert fake.control_failures == {}

    run(tmp_path, body)
