"""Names of weights on a server: the label on its tokens and on its prefix cache, and that of an adapter.

    3f2a..:engine-0:1.20      version 20 of incarnation 1, given to this server by engine-0 of run 3f2a..
    3f2a..:engine-0:base      weights that its adapters lie on
    policy-1-v20              an adapter

A label says who gave the weights, in characters that vLLM takes as a `cache_salt`. So one server is never two engines' without either of
them seeing it at the next token.
"""

from __future__ import annotations

import re

from slipstream.errors import PeerLost, WeightSyncError

Version = tuple[int, int]  # (incarnation, version)

ADAPTER_PREFIX = "policy-"

_VERSION = re.compile(r"(\d+)\.(\d+)")
_BASE = "base"


class StartedAnew(PeerLost):
    """The server holds nothing of what this run gave it: its owner has started it anew. Attaching again mends that."""


def name_of_version(version: Version) -> str:
    """
    >>> name_of_version((1, 20))
    '1.20'
    """
    return f"{version[0]}.{version[1]}"


def adapter_name(version: Version) -> str:
    """A name for every version: requests name it, the server's prefix cache is kept apart by it, and it is never used again.

    >>> adapter_name((1, 20))
    'policy-1-v20'
    """
    return f"{ADAPTER_PREFIX}{version[0]}-v{version[1]}"


def giver_of(label: str) -> str | None:
    """Who gave a server the weights with this label; None where no run has given it any.

    >>> giver_of("3f2a:engine-0:1.20"), giver_of("default")
    ('3f2a:engine-0', None)
    """
    return label.rpartition(":")[0] or None


class Labels:
    """Labels of the weights that one engine of one run gives its server.

    >>> labels = Labels("3f2a", "engine-0")
    >>> labels.of((1, 20)), labels.version_of("3f2a:engine-0:1.20")
    ('3f2a:engine-0:1.20', (1, 20))
    """

    def __init__(self, run_id: str, engine_id: str):
        self.giver = f"{run_id}:{engine_id}"
        self.base = f"{self.giver}:{_BASE}"

    def of(self, version: Version) -> str:
        return f"{self.giver}:{name_of_version(version)}"

    def version_of(self, label: str) -> Version:
        """The version with this label; raises `not_ours` for another's."""
        match = _VERSION.fullmatch(label.removeprefix(f"{self.giver}:"))
        if match is None or giver_of(label) != self.giver:
            raise self.not_ours(label)
        return int(match[1]), int(match[2])

    def not_ours(self, label: str) -> StartedAnew | WeightSyncError:
        """What a token means whose weights this engine did not give the server."""
        giver = giver_of(label)
        if giver is None:
            return StartedAnew(f'the server samples with weights labelled "{label}", which no run gave it: it has been started anew')
        if giver == self.giver:
            return WeightSyncError(f'the server samples with weights labelled "{label}", which are not those that it was given')
        return WeightSyncError(f"{taken_by(giver)}, which has given it weights of its own: a server can be one engine of one run")


def taken_by(giver: str) -> str:
    """
    >>> taken_by("3f2a:engine-0")
    'the server has been taken by engine-0 of run 3f2a'
    """
    run_id, _, engine_id = giver.rpartition(":")
    return f"the server has been taken by {engine_id} of run {run_id}"
