"""The label of weights: "<incarnation>.<version>", on a server's tokens and on its prefix cache."""

from __future__ import annotations

import re

from slipstream.errors import WeightSyncError

Version = tuple[int, int]  # (incarnation, version)

_LABEL = re.compile(r"(\d+)\.(\d+)")


def label_of(version: Version) -> str:
    """
    >>> label_of((1, 20)), version_of("1.20")
    ('1.20', (1, 20))
    """
    return f"{version[0]}.{version[1]}"


def version_of(label: str) -> Version:
    """WeightSyncError for what is no label of ours: the server holds weights that did not come from this run."""
    match = _LABEL.fullmatch(label)
    if match is None:
        raise WeightSyncError(f'the server samples with weights labelled "{label}", which this run did not give it')
    return int(match[1]), int(match[2])
