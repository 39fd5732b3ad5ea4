"""What each way to bring a LoRA adapter to the engine costs: bytes, both sides' seconds, and the decode steps that follow.

    python benchmarks/lora.py [--short] [--json PATH]

Random parameters in the layout of SmolLM2-135M, an adapter of rank 16 on every linear layer but the head, one thread, one process.

    full       whole weights, as a run without an adapter sends them
    merged     base + s B A is computed for every layer by the trainer, and sent as whole weights         payload = "full"
    adapter    A and B are sent; the engine adds their products in its linear layers                      payload = "adapter"
    at engine  A and B are sent; the engine computes base + s B A into weights of its own beside the base (not shipped)

The ways take turns within a round; ratios are medians of the rounds' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench import Report, alternate, paired_ratio, spread, start
from torch import Tensor
from transformers import PreTrainedModel
from weight_sync_decoding import PROMPT_TOKENS, decode_request
from weight_sync_roles import random_model

from slipstream.config.settings import LoraSettings, ModelSettings
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.models.lora import Adapter
from slipstream.protocols import Manifest
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import Source, WeightSet
from slipstream.weight_sync.shared_memory import MemoryPublisher

RANK = 16
BATCH, NEW_TOKENS = 32, 64
ROUNDS = {True: 5, False: 15}  # of syncs; of decoding, so many times TICKS
TICKS = 4


@dataclass(slots=True)
class Way:
    """One way of sending: the trainer's side, the engine's, and what they take."""

    publisher: MemoryPublisher
    apply: Callable[[np.ndarray, Manifest], Any]
    slot: MemoryFile
    manifest: Manifest | None = None

    def pack(self) -> None:
        self.manifest = self.publisher.pack(0, 1, 0)

    def adopt(self) -> None:
        assert self.manifest is not None
        self.apply(self.slot.map(), self.manifest)


def ways(whole: PreTrainedModel, adapter: Adapter) -> dict[str, Way]:
    into_whole, into_adapter = WeightSet(whole), WeightSet(adapter.sent)

    @torch.no_grad()
    def merge(block: np.ndarray, manifest: Manifest) -> None:
        into_adapter.apply(block, manifest)
        own: Mapping[str, Tensor] = whole.state_dict()
        for name, tensor in adapter.merged().items():
            if tensor is not adapter.base[name]:
                own[name].copy_(tensor)

    sides: dict[str, tuple[Source, Callable[[np.ndarray, Manifest], Any]]] = {
        "full": (whole, into_whole.apply),
        "merged": (adapter.merged, into_whole.apply),
        "adapter": (adapter.sent, into_adapter.apply),
        "at engine": (adapter.sent, merge),
    }
    made = {}
    for name, (source, apply) in sides.items():
        slot = MemoryFile.create("lora")
        made[name] = Way(MemoryPublisher(source, [slot]), apply, slot)
        made[name].pack()  # reserves the slot's memory
        made[name].adopt()
    return made


# ---- decoding ------------------------------------------------------------------------------------------------------------------


def engine_of(model: PreTrainedModel, adapter: Adapter | None) -> EmbeddedEngine:
    engine = EmbeddedEngine(model.requires_grad_(False), slots=BATCH, max_context=PROMPT_TOKENS + NEW_TOKENS, adapter=adapter)
    engine.set_version(1, 0, "")
    return engine


def decode(engine: EmbeddedEngine) -> None:
    """Some ticks of a full batch. Untimed ones fill it: see `fill`."""
    for _ in range(TICKS):
        assert len(engine.tick().handles) == BATCH


def fill(engine: EmbeddedEngine) -> None:
    """A batch of sequences that do not end while they are timed, prompts prefilled."""
    for sample in range(BATCH):
        engine.submit(decode_request(sample, NEW_TOKENS))
    while len(engine.tick().handles) < BATCH:
        pass


# ---- tables ----------------------------------------------------------------------------------------------------------------------


def measure(report: Report, dtype: str, rounds: int) -> None:
    whole, base = random_model("135M", dtype), random_model("135M", dtype)
    adapter = Adapter.of(base, LoraSettings(rank=RANK), ModelSettings())
    adapter.perturb()
    made = ways(whole, adapter)
    packed = alternate({name: way.pack for name, way in made.items()}, rounds)
    adopted = alternate({name: way.adopt for name, way in made.items()}, rounds)
    engines = {"whole weights": engine_of(whole, None), "adapter": engine_of(base, adapter)}
    for engine in engines.values():
        fill(engine)
    ticks = alternate({name: (lambda engine=engine: decode(engine)) for name, engine in engines.items()}, min(rounds, 10))
    steps = {name: [1e3 * s / TICKS for s in seconds] for name, seconds in ticks.items()}
    table = report.table(
        f"A version of an adapter of rank {RANK}, 135M {dtype}, one thread, milliseconds",
        ("way", "MB", "trainer: pack, hash", "engine: stall", f"decode step, {BATCH} sequences"),
        note="Median [least, most]. The way at the engine needs a second copy of the adapted weights there; the others hold one.",
    )
    for name, way in made.items():
        assert way.manifest is not None
        step = steps["adapter" if name == "adapter" else "whole weights"]
        cells = [spread([1e3 * s for s in seconds]) for seconds in (packed[name], adopted[name])]
        table.rows.append((name, f"{way.manifest.total_bytes / 1e6:.1f}", *cells, spread(step)))
    slower = paired_ratio(steps["adapter"], steps["whole weights"])
    report.at_most(f"{dtype}: decode step with the adapter beside it, over whole weights", slower, 1.25)
    report.data[dtype] = {"pack_s": packed, "adopt_s": adopted, "decode_ms": steps}


def main() -> None:
    report, options = start("lora", "A LoRA adapter from trainer to engine, each way beside the others.")
    torch.set_num_threads(1)
    for dtype in ("float32",) if options.short else ("float32", "bfloat16"):
        measure(report, dtype, ROUNDS[options.short])
    report.finish(options.json)


if __name__ == "__main__":
    main()
