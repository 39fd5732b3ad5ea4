"""Weights of a live server's model over the transports and payloads of runs: files, and what comes through the driver's copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel
from vllm_server import LABELS, PROMPT, LiveServer

from slipstream.config.arithmetic import drivers_copy
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
        self.live, self._context, self._readers = live, context, list[Reader]()
        self._num_slots = num_weight_slots(context.config)
        self._publisher = ProbedPublisher(build_publisher(context, live.model, None, slots), live.model)

        def reader(own: Source) -> Reader:
            self._readers.append(build_reader(context, own, "engine-0", slots))
            return self._readers[-1]

        self.copy = DriverCopy(reader)

    def offer(self) -> WeightsOffer:
        """The model as it is now."""
        self.live.version += 1
        slot = self.live.version % self._num_slots
        return WeightsOffer(slot=slot, manifest=self._publisher.pack(slot, 1, self.live.version))

    def sync(self) -> WeightsOffer:
        """Give it to the server, and have it probed."""
        offer, live = self.offer(), self.live
        if drivers_copy(self._context.config):
            assert self.copy.update(offer) == ""
            path = self.copy.path
        else:
            path = str(self._context.weights.file(1, live.version))
        assert live.run(live.weights.update(path, offer.manifest, recompute=False)) == offer.manifest.checksum
        live.run(live.weights.probe(offer.manifest))
        return offer

    def weights(self, engine: VllmEngine) -> CopiedWeights:
        return CopiedWeights(engine, ServerWeights(self.live.client, MODEL, self.live.model.config.vocab_size, LABELS), self.copy)

    def close(self) -> None:
        for each in (*self._readers, self._publisher):
            each.close()


def context_of(folder: Path, transport: str, payload: str, **tables: dict) -> RunContext:
    """Of a run whose weights travel so."""
    settings = {"engine": {"type": "vllm"}, "weight_sync": {"transport": transport, "payload": payload}, **tables}
    context = RunContext(Config.model_validate(settings), folder, folder, 1, 0, run_id="run-a", sockets=str(folder))
    if context.weights is not None:
        context.weights.prepare()
    return context


def check_perturb_and_revert(through: Way) -> WeightsOffer:
    """Greedy output is that of the weights, and at the end the one of before; what was offered in between."""
    through.sync()
    live = through.live
    before, saved = live.greedy(PROMPT), {name: value.clone() for name, value in live.model.state_dict().items()}
    perturb_some(live.model)
    offer = through.sync()
    live.check_same_as_transformers()
    assert live.greedy(PROMPT) != before
    live.model.load_state_dict(saved)
    through.sync()
    assert live.greedy(PROMPT) == before
    return offer


@contextmanager
def way_to(live: LiveServer, transport: str, payload: str, folder: Path) -> Iterator[Way]:
    context = context_of(folder, transport, payload, model={"dtype": str(live.dtype).removeprefix("torch.")})
    with weight_slots(transport, num_weight_slots(context.config)) as slots:
        way = Way(live, context, slots)
        try:
            yield way
        finally:
            way.close()
