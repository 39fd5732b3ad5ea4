"""slipstream's weight engines: one `update_weights` call proves, checks and loads a whole version between two forward passes.

`start_weight_update` and `finish_weight_update` do nothing, so an update that fails leaves nothing behind that the next one could stumble
over. What an update came to is kept in `report`; the server's answer to a failed call does not say.
"""

import time
from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo

from slipstream_vllm.block import Block, from_file, from_memory
from slipstream_vllm.load import Broken, load_weights


@dataclass
class Report:
    """Of one update."""

    label: str  # that was asked for
    checksum: str = ""  # of the bytes received; "" where they were not those
    error: str = ""  # "" once the model holds them
    broken: bool = False  # the model holds neither version whole
    seconds: float = 0.0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing is set up beforehand."""


class OneCallEngine(WeightTransferEngine):
    """What both have in common; `read` gives a block's tensors and the hash of their bytes."""

    init_info_cls = InitInfo
    update_info_cls = Block
    supports_draft_weight_update = False
    report = None

    def init_transfer_engine(self, init_info): ...

    def start_weight_update(self): ...

    def finish_weight_update(self): ...

    def shutdown(self): ...

    def update_weights(self, update_info):
        """Load the block; raises where it is not loaded, with the reason in `report`."""
        if self.report is not None and self.report.broken:
            raise Broken(self.report.error)
        began = time.perf_counter()
        self.report = Report(str(update_info.get("label", "?")))
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            self.report.error = str(error)
            self.report.broken = isinstance(error, Broken)
            raise
        finally:
            self.report.seconds = time.perf_counter() - began

    def receive_weights(self, update_info):
        tensors, checksum = self.read(update_info)
        load_weights(self.model, self.model_config, tensors)
        self.report.checksum = checksum


class SharedMemoryEngine(OneCallEngine):
    """From an anonymous memory file of the process that offers the weights."""

    read = staticmethod(from_memory)


class FilesEngine(OneCallEngine):
    """From a safetensors file in a directory that trainer and server both see."""

    read = staticmethod(from_file)
