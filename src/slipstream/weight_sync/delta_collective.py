"""Payload `delta` over messages: an engine asks for the parts that it lacks; they lie one after the other behind its slot's whole block.

Everything else is `delta.py` and `collective.py`: the trainer's slots are those of shared memory, only that nobody else maps them.
"""

from __future__ import annotations

import numpy as np

from slipstream.protocols import WeightsOffer
from slipstream.weight_sync.collective import CollectiveWeights
from slipstream.weight_sync.delta import DeltaWeights, first_delta, place_of, split
from slipstream.weight_sync.packing import Source


class CollectiveDeltaWeights(DeltaWeights):
    """The engine's side. `fetch` brings what the call needs, beside the ticks; whole weights for a repair are asked for by the call."""

    def __init__(self, model: Source, whole: CollectiveWeights):
        super().__init__(model, whole, lambda offer, first: split(self._received, offer.manifest, first))
        self._collective = whole
        self._fetched: WeightsOffer | None = None
        self._received = np.empty(0, np.uint8)  # its parts, from the first that the model lacks

    def fetch(self, offer: WeightsOffer) -> None:
        """Receive the parts that lead on from what the model holds, or else whole weights. The model is not touched.

        Raises what `CollectiveWeights.fetch` raises.
        """
        first = first_delta(offer.manifest, self._held)
        if first is None:
            self._collective.fetch(offer)
        else:
            place = place_of(offer.manifest, first)
            self._received, _ = self._collective.receive(offer, place.start, place.stop - place.start)
        self._fetched = offer

    def __call__(self, offer: WeightsOffer) -> str:
        """As `DeltaWeights`; fetches first what is not here yet."""
        if self._fetched is not offer:
            self.fetch(offer)
        return super().__call__(offer)

    def close(self) -> None:
        self._collective.close()
