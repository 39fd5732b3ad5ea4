"""Servers are asked what they are, and refused in words where they will not do. One that somebody else started is waited for first.

GET  /health, /version, /v1/models       it answers, this key is its key, its version was tested, its context is long enough
GET  /is_paused, without a key           refused: whoever reaches the control routes can replace the weights
POST /collective_rpc slipstream_about    the plugin is loaded; the weight engine, the logprobs and the model are those of this run
GET  /weight_info                        who gave it weights: where another run has taken it meanwhile, it is not taken back
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipstream.engines.vllm.arrays import Tells, Wants, what_it_tells
from slipstream.engines.vllm.client import MAX_LINE_BYTES, Client, Refused, Transient
from slipstream.engines.vllm.labels import Labels, giver_of, taken_by
from slipstream.engines.vllm.server import ADAPTER_VARIABLE, HEALTH_INTERVAL_S, LOGPROBS_MODE, PROBES, AdapterRoom
from slipstream.engines.vllm.versions import check_version, device_note
from slipstream.errors import ConfigError, DeadlineExceeded, ModelError

KEY_VARIABLE = "SLIPSTREAM_VLLM_KEY"  # the name that `slipstream_vllm.middleware` reads
MODEL_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")  # that `slipstream_vllm.worker` tells
ATTACH_S = 120.0  # a server that was started, or started anew, at the same time may still be loading
SEE_DOCS = "start it with the command in docs/vllm.md"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a running server must be."""

    max_context: int
    slots: int
    backend: str  # the weight engine's name in the plugin
    model: dict[str, Any]  # of its config.json: MODEL_KEYS
    wants: Wants
    adapters: AdapterRoom | None = None  # payload "adapter"


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that will do."""

    client: Client
    model: str  # the name that it serves the model under
    tells: Tells
    notes: tuple[str, ...]  # what a person should know of it


async def attach(url: str, needs: Needs, labels: Labels, *, again: bool = False, wait_s: float = ATTACH_S) -> Attached:
    """Wait for the server and ask it what it is. `again`: it has been this engine before, in this incarnation.

    DeadlineExceeded where nothing answers, `client.Refused` for another key or closed control routes, ModelError for a version that was not
    tested, a missing plugin or another model, ConfigError for what its command line should say differently, a key above all, and for a
    server that another run has taken from this one.
    """
    client = Client(url, key=os.environ.get(KEY_VARIABLE))
    try:
        await _until_healthy(client, wait_s)
        version = (await client.get("/version"))["version"]
        check_version(version, f"the server at {url}")
        await _check_closed(url)
        served = (await client.get("/v1/models"))["data"][0]
        about = await _about(client, url)
        _check(url, needs, served.get("max_model_len"), about)
        taken = _giver_note(url, (await client.get("/weight_info"))["weight_version"], labels, again)
        tells = what_it_tells(about, needs.wants, f"the server at {url}")
        _make_room(client, tells, needs.max_context)
    except BaseException:
        await client.close()
        raise
    notes = (clear_note(url), device_note(version, about["device"]), taken)
    return Attached(client, served["id"], tells, tuple(note for note in notes if note is not None))


async def ask_what_it_tells(client: Client, wants: Wants, max_context: int) -> Tells:
    """What the server tells of tokens. ConfigError where it is not what the run wants."""
    tells = what_it_tells(await _about(client, client.address), wants, f"the server at {client.address}")
    _make_room(client, tells, max_context)
    return tells


def _make_room(client: Client, tells: Tells, max_context: int) -> None:
    """Let the client take the last chunk of a whole context."""
    if tells.routing is not None:
        client.max_line_bytes = MAX_LINE_BYTES + tells.routing.bytes_per_token * max_context


async def _until_healthy(client: Client, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await client.until_healthy(HEALTH_INTERVAL_S)
    except TimeoutError:
        raise DeadlineExceeded(f"no healthy vLLM server at {client.address} within {wait_s:.0f} s (engine.urls)") from None


async def _check_closed(url: str) -> None:
    """ConfigError where others may reach the control routes, and need no key for them."""
    if url.startswith("unix:") and _private(Path(url[5:])):
        return
    stranger = Client(url)
    try:
        await stranger.get("/is_paused")
    except Refused:
        return
    finally:
        await stranger.close()
    raise ConfigError(
        f"the server at {url} answers its control route /is_paused without a key: whoever reaches it can replace its weights and call any "
        f"method of its workers. Start it with --middleware slipstream_vllm.middleware.RequireKey and a key in {KEY_VARIABLE}, or on a "
        "Unix socket in a directory that only you may enter (--uds); see docs/vllm.md"
    )


def _private(socket: Path) -> bool:
    """Whether only its owner can connect to this socket: others may not write to it, or not enter a directory on the way."""
    path = socket.absolute()
    return not path.stat().st_mode & 0o022 or any(not folder.stat().st_mode & 0o011 for folder in path.parents)


def clear_note(url: str) -> str | None:
    """What a person is told where the key can be read on the way.

    >>> clear_note("http://127.0.0.1:8000"), clear_note("https://gpu-1:8000"), clear_note("unix:/run/me/socket")
    (None, None, None)
    """
    host = urlsplit(url).hostname or ""
    if not url.startswith("http://") or host == "localhost" or _is_loopback(host):
        return None
    return f"the key of the server at {url} travels in the clear, and rollouts with it: use https:// or a tunnel (docs/vllm.md)"


def _giver_note(url: str, label: str, labels: Labels, again: bool) -> str | None:
    """What a person is told where somebody else gave the server its weights. ConfigError where that was after this run had."""
    giver = giver_of(label)
    if giver is None or giver == labels.giver:
        return None
    if again:
        raise ConfigError(f"{url}: {taken_by(giver)}. A server can be one engine of one run: start another one, and name it in engine.urls")
    run_id, _, engine_id = giver.rpartition(":")
    return f"the server at {url} was {engine_id} of run {run_id} before. If that run still trains, it ends: a server serves one run alone"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


async def _about(client: Client, url: str) -> dict[str, Any]:
    """What the plugin says; workers are alike."""
    try:
        return (await client.post("/collective_rpc", {"method": "slipstream_about"}))["results"][0]
    except Transient as error:  # a 500: vLLM's words for a method that its workers do not have
        raise ModelError(f"the server at {url} runs without slipstream's plugin; {SEE_DOCS}. It says: {error}") from error


def _check(url: str, needs: Needs, context: int | None, about: dict[str, Any]) -> None:
    if context is not None and context < needs.max_context:
        raise ConfigError(
            f"this run needs a context of {needs.max_context} tokens (engine.max_context, and the weight probe's), but the server at {url} "
            f"was started with --max-model-len {context}"
        )
    differing = [key for key, value in needs.model.items() if about["model"].get(key) != value]
    if differing:
        said = ", ".join(f"{key} {about['model'].get(key)} instead of {needs.model[key]}" for key in differing)
        raise ModelError(f"the server at {url} serves another model than model.name: {said}")
    wrong = [
        ("--weight-transfer-config", about["backend"], needs.backend),
        ("--logprobs-mode", about["logprobs_mode"], LOGPROBS_MODE),
    ]
    for option, given, needed in wrong:
        if given != needed:
            raise ConfigError(f"the server at {url} runs with {option} {given}, this run needs {needed}; {SEE_DOCS}")
    if about["slots"] < needs.slots + PROBES:
        raise ConfigError(
            f"engine.slots = {needs.slots}, but the server at {url} runs {about['slots']} sequences at a time: others would wait inside "
            f"it, beyond the reach of an update. Start it with --max-num-seqs {needs.slots + PROBES}: one more, for the probe of weights"
        )
    if needs.adapters is not None:
        _check_adapters(url, needs.adapters, about["adapters"])


def _check_adapters(url: str, needs: AdapterRoom, has: dict[str, Any] | None) -> None:
    wanted = f'payload = "adapter" needs {ADAPTER_VARIABLE}=1 and {" ".join(needs.options())}'
    if has is None:
        raise ConfigError(f"the server at {url} takes no adapters: {wanted}")
    if not has["while_running"]:
        raise ConfigError(f"the server at {url} takes no adapters while it runs: {wanted}")
    short = [(option, has[key], least) for option, key, least in (
        ("--max-loras", "places", needs.places), ("--max-lora-rank", "rank", needs.rank)
    ) if has[key] < least]  # fmt: skip
    for option, given, least in short:
        raise ConfigError(f"the server at {url} runs with {option} {given}, this run needs at least {least}: {wanted}")
    if has["targets"] is not None and (left_out := sorted({_last(t) for t in needs.targets} - {_last(t) for t in has["targets"]})):
        raise ConfigError(f"the server at {url} would leave the adapter's part for {', '.join(left_out)} out: {wanted}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
