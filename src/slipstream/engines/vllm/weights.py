"""A version of the weights into a server, whole or not at all.

GET  /weight_info                it still holds what it was given, and nobody else's weights
POST /pause?mode=keep            the engine core finishes its step and everything it sampled is on its way
POST /start_weight_update        nothing happens yet (vLLM wants it)
POST /update_weights             slipstream's weight engine: checksum, names, shapes, whole groups, then the copy
POST /collective_rpc             its report: the hash of the bytes that each worker received, or why it refused them
POST /finish_weight_update       the label: every token from now on carries it
POST /resume                     unless it may hold a mixture, or one version under another's label: then it stays paused
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.deadlines import LOAD_S
from slipstream.engines.vllm.client import Client
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.labels import Labels, giver_of, name_of_version
from slipstream.errors import PeerLost, SlipstreamError, WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.weight_sync.probe import ProbeRecord, Reading, probe_tokens

_Report = dict[str, Any]  # of a worker: `plugin/slipstream_vllm/engines.py`

UPDATE_S = 240.0  # below `client.TOKEN_S`: streams stand still meanwhile


class NotWhole(SlipstreamError, RuntimeError):
    """The server's workers hold neither version whole. It stays paused, so nothing is sampled with that; only a new server mends it."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a server has made of a version."""

    checksum: str  # of the bytes it received
    seconds: float  # that it was given them for
    reading: Reading  # of the probe
    repaired: str = ""  # why what had changed was refused and whole weights were taken instead


def update_info(path: str, manifest: Manifest, label: str) -> dict[str, Any]:
    """What slipstream's weight engines are told (`plugin/slipstream_vllm/block.py`)."""
    return {
        "path": path,
        "label": label,
        "checksum": manifest.checksum,
        "total_bytes": manifest.total_bytes,
        "entries": [(e.name, e.dtype, e.shape, e.offset, e.nbytes) for e in manifest.entries],
        "aliases": manifest.aliases,
    }


def _refused(report: _Report | None, label: str) -> bool:
    """Whether a worker holds what it held before."""
    return report is not None and report["label"] == label and bool(report["error"]) and not report["broken"]


def _checksum(label: str, reports: list[_Report | None], failed: PeerLost | None) -> str:
    """The hash of the bytes that all workers hold as weights `label`; raises why they do not."""
    name = label.rpartition(":")[2]
    broken = [report["error"] for report in reports if report is not None and report["broken"]]
    if broken:
        raise NotWhole(
            f"the server holds neither weights {name} nor those before whole ({broken[0]}). It stays paused: nothing is sampled with a "
            "mixture. slipstream starts a server of its own anew; one that it was attached to must be started anew by hand (engine.urls)"
        )
    known = [report for report in reports if report is not None and report["label"] == label]
    if not known or len(known) < len(reports):
        raise failed or WeightSyncError(f"the server does not report on weights {name}: {reports}")
    errors = [f"worker {rank}: {report['error']}" for rank, report in enumerate(known) if report["error"]]
    if errors and len(errors) < len(known):
        raise NotWhole(f"some of the server's workers hold weights {name}, others refuse them ({errors[0]}). It stays paused")
    if errors:
        raise WeightSyncError(f"the server refuses weights {name}: {errors[0]}")
    checksums = {report["checksum"] for report in known}
    if failed is not None or len(checksums) != 1:
        raise failed or WeightSyncError(f"the server's workers received different bytes as weights {name}: {sorted(checksums)}")
    return checksums.pop()


class ServerWeights:
    """Gives one server its weights, and looks at what it makes of them. `model`: the name it serves; `labels`: of the weights."""

    def __init__(self, client: Client, model: str, vocab_size: int, labels: Labels):
        self._client, self._model, self.labels = client, model, labels
        self._tokens = probe_tokens(vocab_size)
        self._record = ProbeRecord()
        self._first = True

    async def update(
        self, path: str, manifest: Manifest, *, recompute: bool, paused: Callable[[], None] = lambda: None, label: str | None = None
    ) -> str:
        """Have the server load the bytes at `path`; the hash of what its workers received. `paused` is called between two steps; `label`:
        in place of the version.

        With `recompute`, keys and values of older weights are dropped; at the first update always, since they may be another run's.
        Raises WeightSyncError where the weights are refused: the server then goes on with what it held; and, before it is asked anything,
        for one that another run has taken (`labels.StartedAnew` where its owner has started it anew). NotWhole, PeerLost or
        DeadlineExceeded where it holds a mixture, or nobody knows what: it stays paused. A cancellation waits for the end of the update:
        broken off, it would leave the server paused, which may be somebody else's.
        """
        label = label or self.labels.of((manifest.incarnation, manifest.version))
        task = asyncio.create_task(self._update(path, manifest, label, recompute, paused), name=f"vLLM: update to {label}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})  # each of its calls has a deadline
            raise

    async def check_ours(self) -> None:
        """Raises `Labels.not_ours` where the server does not hold what this engine gave it any more: it would take more all the same."""
        held = (await self._client.get("/weight_info"))["weight_version"]
        if giver_of(held) != self.labels.giver:
            raise self.labels.not_ours(held)

    async def _update(self, path: str, manifest: Manifest, label: str, recompute: bool, paused: Callable[[], None]) -> str:
        if not self._first:
            await self.check_ours()
        await self._client.post("/pause", mode="keep", clear_cache="true" if recompute or self._first else "false")
        whole = True  # it holds one version, under its label
        try:
            paused()
            await self._client.post("/start_weight_update")
            info = update_info(path, manifest, label)
            whole = False
            reports, failed = await self._load(info)
            whole = bool(reports) and all(_refused(report, label) for report in reports)
            checksum = _checksum(label, reports, failed)
            await self._client.post("/finish_weight_update", {"weight_version": label})
            whole = True
        finally:
            if whole:
                await self._client.post("/resume")
        self._first = False
        return checksum

    async def _load(self, info: dict[str, Any]) -> tuple[list[_Report | None], PeerLost | None]:
        """What each worker says of it, and how the call failed."""
        failed: PeerLost | None = None
        try:
            await self._client.post("/update_weights", {"update_info": info}, UPDATE_S)
        except PeerLost as error:  # a 500, which does not say why; the report does
            failed = error
        return (await self._client.post("/collective_rpc", {"method": "slipstream_report"}))["results"], failed

    async def warm_up(self) -> None:
        """Ask for something, whatever weights there are: a server's first answer takes seconds (4 on two cores), later ones do not."""
        await self._logprobs("warm up", self._model, LOAD_S)

    async def probe(self, manifest: Manifest, model: str | None = None) -> Reading:
        """Compare the server's logprobs of the fixed tokens with the trainer's. WeightSyncError where they are not of the same weights.
        `model`: the name of an adapter."""
        name = name_of_version((manifest.incarnation, manifest.version))
        engine = await self._logprobs(f"probe {self.labels.of((manifest.incarnation, manifest.version))}", model or self._model, UPDATE_S)
        reading = self._record.read(engine, np.array(manifest.probe))
        if reading.problem is not None:
            raise WeightSyncError(
                f"the probe of weights {name}: the server's logprobs of fixed tokens are not the trainer's: {reading.problem}"
            )
        return reading

    async def _logprobs(self, salt: str, model: str, deadline_s: float) -> np.ndarray:
        """float[63]: the server's logprob of each of the probe's tokens but the first. `salt`: for the prefix cache."""
        # top_k: a server that tells what sampling kept wants one. It concerns the token that is sampled, not the prompt's logprobs.
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": model, "token_ids": self._tokens.tolist(), "sampling_params": sampling, "cache_salt": salt}
        answer = await self._client.retrying(lambda: self._client.post("/inference/v1/generate", body, deadline_s))
        entries = answer["prompt_logprobs"][1:]
        return np.array([e[str(t)]["logprob"] for e, t in zip(entries, self._tokens[1:].tolist(), strict=True)])


class WholeWeights:
    """What `loop.py` asks for where whole weights travel. `path_of`: the file that holds an offer's bytes, as the server may open it."""

    def __init__(self, engine: VllmEngine, weights: ServerWeights, path_of: Callable[[WeightsOffer], str]):
        self._engine, self._weights, self._path_of = engine, weights, path_of

    async def bring(self, offer: WeightsOffer) -> None:
        """Nothing: the server reads what the trainer wrote, while it is paused."""

    async def adopt(self, offer: WeightsOffer) -> Adopted:
        """Update and probe. The checksum is the one that the server's workers computed over the bytes they received."""
        engine, manifest, began = self._engine, offer.manifest, time.perf_counter()
        engine.begin_update((manifest.incarnation, manifest.version), manifest.checksum)
        checksum = await self._weights.update(self._path_of(offer), manifest, recompute=engine.policy.recomputes, paused=engine.interrupt)
        engine.end_update()
        seconds = time.perf_counter() - began
        return Adopted(checksum, seconds, await self._weights.probe(manifest))
