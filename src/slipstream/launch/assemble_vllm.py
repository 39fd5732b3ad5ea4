"""Builds an engine that is a vLLM server, and runs it: the engine's role with `engine.type = "vllm"`."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from slipstream.beside import beside
from slipstream.config.arithmetic import drivers_copy
from slipstream.config.settings import Config
from slipstream.deadlines import LOAD_S
from slipstream.engines.interrupts import InterruptPolicy
from slipstream.engines.vllm.adapter_engine import AdapterEngine
from slipstream.engines.vllm.arrays import Wants
from slipstream.engines.vllm.attach import ATTACH_S, MODEL_KEYS, Needs, ask_what_it_tells, attach
from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.driver_copy import CopiedWeights, DriverCopy
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.environment import check_routing, find_environment
from slipstream.engines.vllm.labels import Labels
from slipstream.engines.vllm.loop import run_vllm_engine
from slipstream.engines.vllm.server import MODEL, AdapterRoom, Server, ServerSpec
from slipstream.engines.vllm.weights import ServerWeights, WholeWeights
from slipstream.launch.assemble_adapters import adapter_room, give_base
from slipstream.launch.assemble_weights import build_reader
from slipstream.launch.assemble_worker import context_limit
from slipstream.launch.context import RunContext
from slipstream.launch.engine_socket import serve, socket_path
from slipstream.launch.processes import Child, end_in_good_order
from slipstream.models.loading import ModelInfo, load_tokenizer
from slipstream.protocols import ControllerAPI, WeightsOffer
from slipstream.weight_sync.probe import CONTEXT_TOKENS


def weight_engine(config: Config) -> str:
    """The server's part of weight sync, by its name in the plugin. Whole weights and bases in files it reads there; everything else, also
    the driver's copy, in memory."""
    in_files = config.weight_sync.transport == "files" and config.payload != "delta"
    return "slipstream_files" if in_files else "slipstream_shared_memory"


async def run_vllm_role(child: Child, context: RunContext, controller: ControllerAPI) -> None:
    """Start a server, or attach to the one that is to be this engine, and serve its engine to the rollout worker."""
    config, engine_id = context.config, child.spec.role
    number, labels = int(engine_id.rpartition("-")[2]), Labels(context.run_id, engine_id)
    tokenizer, info = await beside(load_tokenizer, config.model)
    max_context = context_limit(config, info)
    room = await beside(adapter_room, config, info)
    async with AsyncExitStack() as held:
        if url := child.spec.options.get("url"):
            died = asyncio.Event().wait  # its end is seen by the calls that fail
            child.progress.working(f"wait for the server at {url}", 2 * ATTACH_S, owed="a healthy server")
            attached = await attach(url, _needs(context, info, max_context, room), labels, again="again" in child.spec.options)
            held.push_async_callback(attached.client.close)
            end_in_good_order()
            client, model, tells, notes = attached.client, attached.model, attached.tells, attached.notes
        else:
            log = context.run_folder / "log" / f"{engine_id}-vllm.log"
            spec = _spec(context, info, engine_id, number, max_context, room)
            environment = await find_environment(config.engine.python)
            check_routing(config.rollout.keep_routing, environment)
            server = await Server.start(spec, environment, Path(child.spec.socket_folder), log)
            held.push_async_callback(server.stop)
            client, model, died = Client(f"unix:{server.socket}"), MODEL, server.died
            held.push_async_callback(client.close)
            child.progress.working("start the vLLM server", LOAD_S, owed="a healthy server")
            await server.until_healthy(client, LOAD_S)
            await ServerWeights(client, model, info.vocab_size, labels).warm_up()
            tells = await ask_what_it_tells(client, _wants(config, info), max_context)
            notes = environment.notes
        for note in notes:
            await controller.note(f"{engine_id}: {note}")
        options: dict[str, Any] = {
            "labels": labels,
            "engine_id": engine_id,
            "model": model,
            "slots": config.engine.slots,
            "max_context": max_context,
            "vocab_size": info.vocab_size,
            "decode": lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            "policy": InterruptPolicy.of(config.rollout),
            "tells": tells,
        }
        server_weights = ServerWeights(client, model, info.vocab_size, labels)
        if room is None:
            engine = VllmEngine(client, **options)
            weights = _whole_weights(child, context, engine, server_weights)
        else:
            engine = AdapterEngine(client, places=room.places, **options)
            child.progress.working("give the server its base weights", LOAD_S, owed="the base of the adapters")
            weights = await give_base(child, context, engine, client, server_weights)
        frames = await serve(engine, socket_path(child.spec.socket_folder, engine_id), engine.wake.set)
        held.push_async_callback(frames.close)
        await run_vllm_engine(engine, weights, controller, frames.send_frame, child.progress, died)


def _whole_weights(child: Child, context: RunContext, engine: VllmEngine, weights: ServerWeights) -> WholeWeights:
    """What the server reads: what the trainer wrote, or the driver's copy."""
    if drivers_copy(context.config):
        return CopiedWeights(engine, weights, DriverCopy(lambda own: build_reader(context, own, engine.engine_id, child.slots)))
    return WholeWeights(engine, weights, _path_in(child, context))


def _path_in(child: Child, context: RunContext) -> Callable[[WeightsOffer], str]:
    """Where an offer's bytes lie: in a file, or in the slot's memory file, by the descriptor that this process holds."""

    def path_of(offer: WeightsOffer) -> str:
        if context.weights is not None:
            return str(context.weights.file(offer.manifest.incarnation, offer.manifest.version).absolute())
        return f"/proc/{os.getpid()}/fd/{child.slots[offer.slot].fileno()}"

    return path_of


def _needs(context: RunContext, info: ModelInfo, max_context: int, room: AdapterRoom | None) -> Needs:
    config, model = context.config, _model_config(info)
    return Needs(
        max_context=max(max_context, CONTEXT_TOKENS),
        slots=config.engine.slots,
        backend=weight_engine(config),
        model={key: getattr(model, key, None) for key in MODEL_KEYS},
        adapters=room,
        wants=_wants(config, info),
    )


def _wants(config: Config, info: ModelInfo) -> Wants:
    return Wants(
        keep_routing=config.rollout.keep_routing,
        top_k=config.rollout.top_k,
        vocab_size=info.vocab_size,
        samples_evaluations=config.data.eval is not None and config.evaluation.temperature > 0,
    )


def _spec(context: RunContext, info: ModelInfo, engine_id: str, number: int, max_context: int, room: AdapterRoom | None) -> ServerSpec:
    config = context.config
    return ServerSpec(
        engine_id=engine_id,
        model=info.source,
        dtype=config.model.dtype,
        max_context=max(max_context, CONTEXT_TOKENS),
        slots=config.engine.slots,
        threads=config.engine.threads,
        number=number,
        seed=_seed(config, context.incarnation, engine_id),
        kv_bytes_per_token=_kv_bytes_per_token(config, info),
        transfer=weight_engine(config),
        adapters=room,
        max_logprobs=info.vocab_size if config.rollout.top_k else 0,
        tells_routing=bool(config.rollout.keep_routing),
        extra=tuple(config.engine.server_args),
    )


def _seed(config: Config, incarnation: int, engine_id: str) -> int:
    """The server's own random stream: another one for every engine and every start, so that none repeats another's samples."""
    parts = f"{config.run.seed} {incarnation} {engine_id} {os.getpid()}"
    return int.from_bytes(hashlib.sha256(parts.encode()).digest()[:4]) >> 1


def _model_config(info: ModelInfo) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(info.source, trust_remote_code=False).get_text_config()


def _kv_bytes_per_token(config: Config, info: ModelInfo) -> int:
    model = _model_config(info)
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return 2 * model.num_hidden_layers * heads * head_dim * (2 if config.model.dtype == "bfloat16" else 4)
