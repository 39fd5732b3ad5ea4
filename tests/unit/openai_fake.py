"""A server with the OpenAI API that says what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], "web.Response | dict[str, Any]"]


def says(text: str, finish_reason: str = "stop", **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "a",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}],
    }


def refuses(status: int, message: str = "no", **error: Any) -> web.Response:
    return web.json_response({"error": {"message": message, **error}}, status=status)


@asynccontextmanager
async def server(answer: Answer, models: tuple[str, ...] = ("m",)) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Its base URL, and the bodies that it was asked with."""
    bodies: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        given = answer(bodies[-1])
        return given if isinstance(given, web.Response) else web.json_response(given)

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in models]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    finally:
        await runner.cleanup()
