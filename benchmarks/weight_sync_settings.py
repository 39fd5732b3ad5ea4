"""What `weight_sync.py` measures: layouts, dtypes, transports, payloads, engines, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from free_roles import settings
from smollm2 import MODEL
from weight_sync_bounds import bound_of
from weight_sync_decoding import BATCH, NEW_TOKENS, PROMPT_TOKENS

from slipstream.config.settings import Config

FIRST_USES = 2  # slots; the third one is only used by a trainer that is ahead of its engine
CHANGED = (0.01, 0.03)  # of bfloat16 weights in a step of AdamW at learning rate 1e-6 and 1e-5: docs/weight_sync.md
TRANSPORTS = ("shared_memory", "files", "collective")
RANK = 16


@dataclass(frozen=True, slots=True)
class Setting:
    layout: str
    dtype: str
    transport: str = "shared_memory"
    payload: str = "full"
    share: float = 1.0  # of the weights that change per version
    syncs: int = 10  # beyond the first use of each slot
    under_load: int = 0
    engine: str = "embedded"
    kv: str = "keep"  # of running sequences, when new weights come
    rates: bool = False  # how fast does it decode?

    @property
    def name(self) -> str:
        changed = f", {100 * self.share:g} % change" if self.payload == "delta" else ""
        return f"{self.layout} {self.dtype}{changed}"

    @property
    def over(self) -> str:
        return self.transport.replace("_", " ")

    def __str__(self) -> str:
        server = (self.engine, self.kv) if self.engine == "vllm" else ()
        return ", ".join((self.name, self.over, self.payload, *server))

    @property
    def bound(self) -> tuple[str, ...]:
        return bound_of(self.transport, self.payload)

    def config(self, python: str | None = None) -> Config:
        """Of the run that this is a part of; `python` has vLLM."""
        engine = {"type": self.engine, "python": python, "slots": BATCH, "max_context": PROMPT_TOKENS + NEW_TOKENS}
        return settings(
            in_flight=4,
            group_size=2,
            tokens=16,
            steps=10**6,
            model={"name": MODEL, "dtype": self.dtype},
            engine=engine,
            rollout={"kv": self.kv},
            weight_sync={"transport": self.transport, "payload": self.payload},
            lora={"rank": RANK if self.payload == "adapter" else 0},
        )

    def options(self) -> dict[str, str]:
        """What the roles are told besides: `weight_sync_roles.Case`."""
        return {"layout": self.layout, "share": str(self.share)}


SETTINGS = {
    True: (
        Setting("135M", "bfloat16", syncs=8, under_load=4),
        Setting("135M", "float32", syncs=4, under_load=3),
        Setting("135M", "bfloat16", "files", syncs=4, under_load=3),
        Setting("135M", "bfloat16", "collective", syncs=4, under_load=3),
        Setting("135M", "bfloat16", payload="delta", share=CHANGED[0], syncs=4, under_load=3),
        Setting("135M", "bfloat16", payload="adapter", syncs=4, under_load=3),
    ),
    False: (
        Setting("135M", "bfloat16", syncs=15, under_load=6),
        Setting("135M", "float32", syncs=10, under_load=4),
        Setting("1B", "bfloat16", syncs=4),
        Setting("135M", "bfloat16", "files", syncs=10, under_load=5),
        Setting("1B", "bfloat16", "files", syncs=3),
        Setting("135M", "bfloat16", "collective", syncs=10, under_load=5),
        Setting("1B", "bfloat16", "collective", syncs=3),
        *(Setting("135M", "bfloat16", over, "delta", share, syncs=6, under_load=4) for over in TRANSPORTS for share in CHANGED),
        *(Setting("135M", "bfloat16", over, "adapter", syncs=8, under_load=4) for over in TRANSPORTS),
    ),
}
# Of `weight_sync_vllm.py`: the real model, of which few weights change, and with adapters running sequences cannot keep keys and values.
VLLM = (
    Setting("135M", "bfloat16", share=0.01, syncs=4, under_load=4, engine="vllm", rates=True),
    Setting("135M", "bfloat16", "files", share=0.01, syncs=4, under_load=4, engine="vllm"),
    Setting("135M", "bfloat16", "collective", share=0.01, syncs=4, under_load=4, engine="vllm"),
    Setting("135M", "bfloat16", payload="delta", share=CHANGED[0], syncs=4, under_load=4, engine="vllm"),
    Setting("135M", "bfloat16", payload="adapter", syncs=4, under_load=3, engine="vllm", kv="recompute", rates=True),
)
