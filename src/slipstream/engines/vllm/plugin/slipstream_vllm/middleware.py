"""A key for every route. vLLM's own `--api-key` leaves its control routes, `/collective_rpc`, `/metrics` and `/invocations` open."""

import hmac
import os

KEY_VARIABLE = "SLIPSTREAM_VLLM_KEY"


class RequireKey:
    """ASGI middleware: `Authorization: Bearer KEY` or 401, whatever is asked for. The key comes from the environment."""

    def __init__(self, app):
        self._app = app
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ValueError(f"RequireKey needs a key in the environment variable {KEY_VARIABLE}")
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "a key is required"}'})

    def _knows(self, scope):
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
