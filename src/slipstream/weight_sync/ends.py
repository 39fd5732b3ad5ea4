"""The two ends of weight sync. Each transport and payload has a pair of them; `launch/assemble_weights.py` picks it by the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slipstream.protocols import Manifest, WeightsOffer


class Publisher(Protocol):
    """The trainer's side: writes its weights into a slot, whatever that is for the transport."""

    def pack(self, slot: int, incarnation: int, version: int) -> Manifest:
        """Write the current weights, cast included, and hash them. The caller owns the slot (`begin_write`) until it publishes it."""
        ...

    def close(self) -> None:
        """End its threads and connections, where it has some."""


class Reader(Protocol):
    """The engine's side: overwrites its model with what an offer holds."""

    fetch: Callable[[WeightsOffer], None] | None = None
    """Brings an offer's bytes here, to be called beside the engine's work; the model is not touched. None where they lie in reach."""

    refused: str = ""
    """Why what had changed was not used for the last offer, where it should have been: whole weights were taken in its place."""

    def __call__(self, offer: WeightsOffer) -> str:
        """The checksum of the engine's own copy. Raises WeightSyncError for an offer that does not fit the model or arrive as published."""
        ...

    def close(self) -> None:
        """End its threads and connections, where it has some."""
