"""Versions of an adapter into a server, each one beside what runs: what `loop.py` asks for where adapters travel alone.

bring    the bytes are proved and written as a folder that peft knows           adapter_files.py
         the server still holds the base that it was given                      GET  /weight_info
         a place is made: an adapter that nothing needs goes                    POST /v1/unload_lora_adapter
         the server reads the folder, and its workers use all of it             POST /v1/load_lora_adapter, /collective_rpc
         its logprobs of the probe's tokens are the trainer's
adopt    requests ask for it
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from slipstream.beside import beside
from slipstream.engines.vllm.adapter_engine import AdapterEngine
from slipstream.engines.vllm.client import Client, Failed, Refused
from slipstream.engines.vllm.labels import ADAPTER_PREFIX, Version, adapter_name, name_of_version
from slipstream.engines.vllm.weights import UPDATE_S, Adopted, ServerWeights
from slipstream.errors import WeightSyncError
from slipstream.protocols import WeightsOffer


class Files(Protocol):
    """The driver's own copy of the adapter, and folders of it (`adapter_files.AdapterFiles`)."""

    def write(self, offer: WeightsOffer) -> tuple[str, Path]:
        """The checksum of the own copy, and the version's folder. WeightSyncError for what is not what was published."""
        ...

    def remove(self, version: Version) -> None: ...


class ServerAdapters:
    """Gives one server its adapters."""

    def __init__(self, engine: AdapterEngine, client: Client, weights: ServerWeights, files: Files):
        self._engine, self._client, self._weights, self._files = engine, client, weights, files
        self._brought: Adopted | None = None
        self._evicted: list[Version] = []  # their folders are still there

    async def clear(self) -> None:
        """Have the server forget adapters of earlier runs and drivers: their names are to be used again."""
        for served in (await self._client.get("/v1/models"))["data"]:
            if served["id"].startswith(ADAPTER_PREFIX):
                await self._client.post("/v1/unload_lora_adapter", {"lora_name": served["id"]})

    async def bring(self, offer: WeightsOffer) -> None:
        """Have the server hold this version, proved. WeightSyncError where it does not; it then goes on with what it holds."""
        version = (offer.manifest.incarnation, offer.manifest.version)
        self._remove_evicted()
        checksum, folder = await beside(self._files.write, offer)
        await self._weights.check_ours()
        await self._make_place()
        began = time.perf_counter()
        await self._load(version, folder)
        seconds = time.perf_counter() - began
        self._brought = Adopted(checksum, seconds, await self._weights.probe(offer.manifest, adapter_name(version)))

    async def adopt(self, offer: WeightsOffer) -> Adopted:
        assert self._brought is not None, "it has been brought"
        self._engine.adopt((offer.manifest.incarnation, offer.manifest.version), self._brought.checksum)
        return self._brought

    async def _make_place(self) -> None:
        """Unload what nothing needs, or wait until something ends that does: its stream has a deadline from token to token."""
        shelf = self._engine.shelf
        while shelf.full:
            version = shelf.unneeded()
            if version is None:
                await shelf.a_release()
                continue
            shelf.evict(version)
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": adapter_name(version)})
            self._evicted.append(version)

    def _remove_evicted(self) -> None:
        """One version later: vLLM may read a folder anew for a stream that we have closed, and whose end it has not seen yet."""
        while self._evicted:
            self._files.remove(self._evicted.pop())

    async def _load(self, version: Version, folder: Path) -> None:
        body = {"lora_name": adapter_name(version), "lora_path": str(folder)}
        try:
            await self._client.post("/v1/load_lora_adapter", body, UPDATE_S)
        except (Refused, Failed) as error:
            raise WeightSyncError(f"the server refuses adapter {name_of_version(version)}: {error}") from error
        reports = (await self._client.post("/collective_rpc", {"method": "slipstream_newest_adapter"}))["results"]
        unused = set.intersection(*(set(report["unused"]) for report in reports))  # a worker may have some of the layers alone
        if unused or not any(report["used"] for report in reports):
            which = ", ".join(sorted(unused)[:3]) or "any layer"
            raise WeightSyncError(f"the server took adapter {name_of_version(version)}, but computes without its part for {which}")
