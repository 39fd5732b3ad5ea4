"""An inference server that samples nothing: it answers with random tokens after a lognormal time. For every side of `vs_trl_async`.

    python latency_server.py '{"port": 8123, "mean_s": 1.0, "sigma": 1.0, "longest": 4.0, "vocabulary": 200, "seed": 0}'

The routes are those of vLLM that TRL's AsyncGRPOTrainer calls (/v1/completions, /health, /pause, /resume), /_reload for new weights, and
/_log for who measures. Runs in the peers' environment.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from aiohttp import web
from latency import draw

LOGPROB = -5.5  # of every token


class LatencyServer:
    """Latencies are drawn in the order in which requests come (`latency.draw`)."""

    def __init__(self, mean_s: float, sigma: float, longest: float, vocabulary: int, seed: int):
        self._random, self._vocabulary = random.Random(seed), vocabulary
        self._shape = (mean_s, sigma, longest)
        self.running = self.finished = self.cut_off = self.most_running = self.version = 0
        self.first_request: float | None = None  # monotonic seconds
        self.latency_s = self.cut_off_s = 0.0  # sums: of what was answered; spent on what nobody waited for to its end

    async def complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.first_request = self.first_request or time.monotonic()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        seconds, began = draw(self._random, *self._shape), time.monotonic()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:  # who asked is gone
            self.cut_off += 1
            self.cut_off_s += time.monotonic() - began
            raise
        finally:
            self.running -= 1
        tokens = [self._random.randrange(self._vocabulary) for _ in range(asked["max_tokens"])]
        self.finished += 1
        self.latency_s += seconds
        return web.json_response({"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": [LOGPROB] * len(tokens)}}]})

    async def reload(self, request: web.Request) -> web.Response:
        self.version += 1
        return web.json_response({})

    async def log(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "running": self.running,
                "finished": self.finished,
                "cut_off": self.cut_off,
                "cut_off_s": self.cut_off_s,
                "latency_s": self.latency_s,
                "most_running": self.most_running,
                "versions": self.version,
                "since_first_s": None if self.first_request is None else time.monotonic() - self.first_request,
            }
        )


async def fine(request: web.Request) -> web.Response:
    return web.json_response({})


def main() -> None:
    given = json.loads(sys.argv[1])
    port = given.pop("port")
    server = LatencyServer(**given)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", fine),
            web.post("/pause", fine),
            web.post("/resume", fine),
            web.post("/_reload", server.reload),
            web.post("/v1/completions", server.complete),
            web.get("/_log", server.log),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
