"""Names of weights on a server: the label on its tokens and on its prefix cache, "<incarnation>.<version>", and that of an adapter."""

from __future__ import annotations

import re

from slipstream.errors import WeightSyncError

Version = tuple[int, int]  # (incarnation, version)

BASE = "base"  # label of weights that adapters lie on
ADAPTER_PREFIX = "policy-"

_LABEL = re.compile(r"(\d+)\.(\d+)")


def label_of(version: Version) -> str:
    """
    >>> label_of((1, 20)), version_of("1.20")
    ('1.20', (1, 20))
    """
    return f"{version[0]}.{version[1]}"


def adapter_name(version: Version) -> str:
    """A name for every version: requests name it, the server's prefix cache is kept apart by it, and it is never used again.

    >>> adapter_name((1, 20))
    'policy-1-v20'
    """
    return f"{ADAPTER_PREFIX}{version[0]}-v{version[1]}"


def version_of(label: str) -> Version:
    """WeightSyncError for what is no label of ours: the server holds weights that did not come from this run."""
    match = _LABEL.fullmatch(label)
    if match is None:
        raise WeightSyncError(f'the server samples with weights labelled "{label}", which this run did not give it')
    return int(match[1]), int(match[2])
