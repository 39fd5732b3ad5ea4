"""Weights of a live server's model over a transport and a payload that the server cannot read itself: through the driver's copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel
from vllm_server import LiveServer

from slipstream.config.settings import Config
from slipstream.engines.vllm.driver_copy import CopiedWeights, DriverCopy
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.server import MODEL
from slipstream.engines.vllm.weights import ServerWeights
from slipstream.launch.assemble_weights import build_publisher, build_reader
from slipstream.launch.context import RunContext
from slipstream.models.memory import num_weight_slots
from slipstream.protocols import WeightsOffer
from slipstream.trainer.probe import ProbedPublisher
from slipstream.weight_sync.ends import Reader
from slipstream.weight_sync.memory import weight_slots
from slipstream.weight_sync.packing import Source

WAYS = [("collective", "full"), ("shared_memory", "delta"), ("files", "delta"), ("collective", "delta")]


@torch.no_grad()
def perturb_some(model: PreTrainedModel) -> None:
    """The signs of a twentieth of the rows: few enough that they travel as what changed."""
    for tensor in model.parameters():
        tensor[::20] *= -1


class Way:
    """Both ends, chosen as a run chooses them."""

    def __init__(self, live: LiveServer, context: RunContext, slots: list):
        self._live, self._num_slots, self._readers = live, num_weight_slots(context.config), list[Reader]()
        self._publisher = ProbedPublisher(build_publisher(context, live.model, None, slots), live.model)

        def reader(own: Source) -> Reader:
            self._readers.append(build_reader(context, own, "engine-0", slots))
            return self._readers[-1]

        self.copy = DriverCopy(reader)

    def offer(self) -> WeightsOffer:
        """The model as it is now."""
        self._live.version += 1
        slot = self._live.version % self._num_slots
        return WeightsOffer(slot=slot, manifest=self._publisher.pack(slot, 1, self._live.version))

    def sync(self) -> WeightsOffer:
        """Give it to the server, and have it probed."""
        offer, live = self.offer(), self._live
        assert self.copy.update(offer) == ""
        assert live.run(live.weights.update(self.copy.path, offer.manifest, recompute=False)) == offer.manifest.checksum
        live.run(live.weights.probe(offer.manifest))
        return offer

    def weights(self, engine: VllmEngine) -> CopiedWeights:
        return CopiedWeights(engine, ServerWeights(self._live.client, MODEL, self._live.model.config.vocab_size), self.copy)

    def close(self) -> None:
        for each in (*self._readers, self._publisher):
            each.close()


@contextmanager
def way_to(live: LiveServer, transport: str, payload: str, folder: Path) -> Iterator[Way]:
    dtype = str(live.dtype).removeprefix("torch.")
    settings = {"engine": {"type": "vllm"}, "model": {"dtype": dtype}, "weight_sync": {"transport": transport, "payload": payload}}
    context = RunContext(Config.model_validate(settings), folder, folder, 1, 0, run_id="run-a", sockets=str(folder))
    if context.weights is not None:
        context.weights.prepare()
    with weight_slots(transport, num_weight_slots(context.config)) as slots:
        way = Way(live, context, slots)
        try:
            yield way
        finally:
            way.close()
