"""The driver's copy of the weights, for what a server cannot read itself: messages, and what changed since the version before.

    trainer ──► the copy: a memory file of this process, laid out as the trainer packs ──/proc/<pid>/fd/<n>──► server
                overwritten beside what runs, and hashed, as an embedded engine's model is                     paused: hashes, loads

The server reads the copy within its update call alone, and that begins once the copy holds the version whole. So the copy may be written
over while the server samples with the version before. A version that does not get here whole is never named to the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from slipstream.beside import beside
from slipstream.engines.vllm.engine import VllmEngine
from slipstream.engines.vllm.weights import Adopted, ServerWeights, WholeWeights
from slipstream.errors import WeightSyncError
from slipstream.protocols import WeightsOffer
from slipstream.weight_sync.ends import Reader
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, name_of, tensors_in


class DriverCopy:
    """Weights in a memory file. `reader`: makes what applies an offer to tensors; one that failed once must write all of them next time.

    The first manifest decides the layout: the trainer's counts, and the server itself compares names and shapes with its model.
    """

    def __init__(self, reader: Callable[[Source], Reader]):
        self._make_reader = reader
        self._memory = MemoryFile.create("copy")
        self._reader: Reader | None = None

    @property
    def path(self) -> str:
        """The memory file, as other processes of this user may open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._memory.fileno()}"

    def update(self, offer: WeightsOffer) -> str:
        """Overwrite it with what is offered. Why what had changed was refused and whole weights were taken instead; "" where it was not.

        Raises MemoryNeedError where its memory cannot be had, WeightSyncError for a manifest that does not add up, and what the reader
        raises: the copy then holds nothing that may be used.
        """
        if self._reader is None:
            self._reader = self._laid_out_for(offer)
        self._reader(offer)
        return self._reader.refused

    def _laid_out_for(self, offer: WeightsOffer) -> Reader:
        manifest = offer.manifest
        self._memory.resize(manifest.total_bytes)
        try:
            return self._make_reader(tensors_in(self._memory.map(writable=True), manifest))
        except ValueError as error:
            raise WeightSyncError(f"the manifest of weights {name_of(manifest)} does not add up: {error}") from error


class CopiedWeights(WholeWeights):
    """What `loop.py` asks for where the server is given the driver's copy: the server stands still for its own load alone."""

    def __init__(self, engine: VllmEngine, weights: ServerWeights, copy: DriverCopy):
        super().__init__(engine, weights, lambda offer: copy.path)
        self._copy, self._repaired = copy, ""

    async def bring(self, offer: WeightsOffer) -> None:
        """Bring the copy up to date. Raises what `DriverCopy.update` raises; the server then goes on with what it holds."""
        self._repaired = await beside(self._copy.update, offer)

    async def adopt(self, offer: WeightsOffer) -> Adopted:
        return replace(await super().adopt(offer), repaired=self._repaired)
