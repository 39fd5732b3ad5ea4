"""What an engine that is a server cannot do, or needs. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from slipstream.config.problem import Problem
from slipstream.config.settings import Config, EngineSettings

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that vLLM has kernels for
VLLM_TEMPERATURES = (0.01, 2.0)  # beside 0: what is hotter it refuses, what is colder it would silently sample at 0.01
SERVER_URLS = ("http://", "https://", "unix:")  # what the URL of a vLLM server begins with


def engine_problems(config: Config, *, trains: bool) -> Iterator[Problem]:
    """Everything about the engine's type that does not go together with the rest; `trains`: it is to be given new weights."""
    if config.engine.model is not None and config.engine.type != "openai":
        yield (("engine.model", "engine.type"), f'model with engine.type = "{config.engine.type}", which has that of [model]; leave it out')
    if config.engine.type == "embedded":
        yield from _embedded(config.engine)
        return
    if config.engine.type == "openai":
        yield from _openai(config.engine, trains)
        return
    yield from _placing(config)
    yield from _exactness(config)
    yield from _sampling(config)
    if config.weight_sync.payload == "adapter" and config.lora.on:
        yield from _adapter(config)
    yield from _interrupt(config)


def _embedded(engine: EngineSettings) -> Iterator[Problem]:
    for key in ("python", "urls", "server_args"):
        if getattr(engine, key):
            yield (
                (f"engine.{key}", "engine.type"),
                f'{key} with engine.type = "embedded", which starts no server; use engine.type = "vllm" or leave it out',
            )


def _openai(engine: EngineSettings, trains: bool) -> Iterator[Problem]:
    if trains:
        yield (
            ("engine.type",),
            'engine.type = "openai" cannot be trained: such a server takes no weights, and tells neither its tokens nor their logprobs. It '
            'is for slipstream eval, generate and rollout; to train, use "embedded" or "vllm"',
        )
    if importlib.util.find_spec("openai") is None:
        yield (
            ("engine.type",),
            "engine.type = \"openai\" needs the package openai, which is not installed; pip install 'slipstream[openai]'",
        )
    if not engine.urls:
        yield (("engine.urls", "engine.type"), 'engine.type = "openai" needs urls = ["http://host:port/v1"], the base URL of a server')
    for key in ("python", "server_args"):
        if getattr(engine, key):
            yield ((f"engine.{key}", "engine.type"), f'{key} with engine.type = "openai", which starts no server; leave it out')
    bad = [url for url in engine.urls if not url.startswith(("http://", "https://"))]
    if bad:
        yield (("engine.urls", "engine.type"), f'"{bad[0]}" is no base URL, as http://host:port/v1')


def _placing(config: Config) -> Iterator[Problem]:
    engine = config.engine
    if importlib.util.find_spec("aiohttp") is None:
        yield (("engine.type",), "engine.type = \"vllm\" needs aiohttp, which is not installed; pip install 'slipstream[vllm]'")
    if config.launch == "inline" and not config.run.deterministic and engine.replicas == 1:
        yield (
            ("engine.type", "launch"),
            'engine.type = "vllm" with launch = "inline": a server generates when it likes, not at ticks of a logical clock; use launch = '
            '"local"',
        )
    if engine.device is not None:
        yield (
            ("engine.device", "engine.type"),
            f'device = "{engine.device}" with engine.type = "vllm": vLLM computes on what its build is for; leave it out',
        )
    if engine.urls and (engine.python or engine.server_args):
        key = "python" if engine.python else "server_args"
        yield (
            (f"engine.{key}", "engine.urls"),
            f"{key} with urls: the servers run already, so none is started; leave one of them out",
        )
    if engine.urls and len(engine.urls) != engine.replicas:
        yield (
            ("engine.urls", "engine.replicas"),
            f"urls names {len(engine.urls)} servers with replicas = {engine.replicas}: each server is an engine; use replicas = "
            f"{len(engine.urls)}",
        )
    bad = [url for url in engine.urls if not url.startswith(SERVER_URLS)]
    if bad:
        yield (("engine.urls",), f'"{bad[0]}" is neither http://host:port nor unix:/path/of/socket')
    servers = [url.rstrip("/") for url in engine.urls]
    twice = [url for url in servers if servers.count(url) > 1]
    if twice:
        yield (("engine.urls",), f'urls names "{twice[0]}" {servers.count(twice[0])} times, and a server can be one engine')


def _exactness(config: Config) -> Iterator[Problem]:
    if config.run.deterministic:
        yield (
            ("run.deterministic", "engine.type"),
            'deterministic = true with engine.type = "vllm": a server batches sequences as they come, and its sampling has no per-request '
            'seed that its CPU build survives; use engine.type = "embedded"',
        )


def _sampling(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    low, high = VLLM_TEMPERATURES
    for key, value in (("rollout.temperature", rollout.temperature), ("evaluation.temperature", config.evaluation.temperature)):
        if value and not low <= value <= high:
            text = f'{key} = {value:g} with engine.type = "vllm", which takes {low:g} to {high:g}; choose one of these'
            yield ((key, "engine.type"), text)
    if rollout.top_k == 0:
        for key in ("top_p", "min_p"):
            if getattr(rollout, key) != type(rollout).model_fields[key].default:
                yield (
                    (f"rollout.{key}", "engine.type"),
                    f'{key} = {getattr(rollout, key):g} with engine.type = "vllm" and no top_k: the trainer normalises over the vocabulary '
                    "that was kept, and this server tells it for as many tokens as it is asked for; set top_k besides, e.g. 100",
                )


def _adapter(config: Config) -> Iterator[Problem]:
    lora, rollout = config.lora, config.rollout
    if lora.modules_to_save:
        yield (
            ("lora.modules_to_save", "weight_sync.payload", "engine.type"),
            'modules_to_save with payload = "adapter" and engine.type = "vllm": a server takes products beside linear layers, and no '
            'whole modules; use payload = "full", which sends everything merged',
        )
    if lora.rank > SERVED_RANKS[-1]:
        yield (
            ("lora.rank", "weight_sync.payload", "engine.type"),
            f'rank = {lora.rank} with payload = "adapter" and engine.type = "vllm", which serves ranks up to {SERVED_RANKS[-1]}; use '
            'payload = "full"',
        )
    if rollout.interrupt == "in_flight" and rollout.kv == "keep":
        yield (
            ("rollout.kv", "weight_sync.payload", "engine.type"),
            'kv = "keep" with payload = "adapter" and engine.type = "vllm": a server keeps the keys and values of each adapter apart, so '
            'a sequence that goes on under the next one has them made again; set rollout.kv = "recompute", or rollout.interrupt = '
            '"drain", with which it ends on the adapter it started with',
        )


def _interrupt(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.interrupt == "abort_resume" and rollout.kv == "keep":
        yield (
            ("rollout.kv", "rollout.interrupt", "engine.type"),
            'interrupt = "abort_resume" with kv = "keep" and engine.type = "vllm": a sequence that left the server comes back as tokens, '
            'and the new weights read them anew; set kv = "recompute", or use interrupt = "in_flight"',
        )
