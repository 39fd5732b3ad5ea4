"""The driver's own copy of an adapter, and folders of its versions that peft and vLLM read.

trainer ──bytes──► own copy, hashed as it fills, as an embedded engine's is ──► <folder>/policy-1-v7/adapter_config.json
                                                                                                    adapter_model.safetensors
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from slipstream.engines.vllm.labels import Version, adapter_name
from slipstream.errors import WeightSyncError
from slipstream.models.lora import Adapter, write_adapter
from slipstream.protocols import WeightsOffer
from slipstream.weight_sync.packing import OnBase


class AdapterFiles:
    """`folder` is this driver's own, empty, and seen by the server under the same path. `reader`: makes what applies an offer to tensors
    and gives the hash of what they hold then (`launch.assemble_weights.build_reader`)."""

    def __init__(self, adapter: Adapter, folder: Path, reader: Callable[[OnBase], Callable[[WeightsOffer], str]]):
        self._config, self._tensors = adapter.config, adapter.sent  # the model is not held
        self._folder = folder.absolute()
        self._apply = reader(self._tensors)

    def write(self, offer: WeightsOffer) -> tuple[str, Path]:
        """The checksum of the own copy, and the version's folder, which is there whole or not at all.

        WeightSyncError for bytes that are not what was published, for an adapter that does not fit the settings or lies on another base,
        and where the disk refuses.
        """
        checksum = self._apply(offer)
        target = self._folder / adapter_name((offer.manifest.incarnation, offer.manifest.version))
        unfinished = target.with_suffix(".tmp")
        try:
            write_adapter(unfinished, self._config, self._tensors)
            os.replace(unfinished, target)
        except OSError as error:
            raise WeightSyncError(f"{target.name} cannot be written for the server: {error}; free space in {self._folder}") from error
        return checksum, target

    def remove(self, version: Version) -> None:
        shutil.rmtree(self._folder / adapter_name(version), ignore_errors=True)
