"""slipstream: asynchronous reinforcement-learning post-training of language models. Importing it imports no torch.

import slipstream

def reward(completion, answer):
    return float(completion.strip() == answer)

result = slipstream.train(model="builtin:tiny", data="builtin:sort_digits", reward=reward)
print(result.run_folder, result.metrics["trained_samples"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config.settings import Config
    from slipstream.run import Result, train

__version__ = "0.1.0"
__all__ = ["Config", "Result", "__version__", "train"]

_HOME = {"Config": "slipstream.config.settings", "Result": "slipstream.run", "train": "slipstream.run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
