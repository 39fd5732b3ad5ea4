"""From what a server's streams bring to frames."""

from __future__ import annotations

import numpy as np

from slipstream.engines.vllm.labels import Version
from slipstream.types import Frame, StopReason


class Outbox:
    """What is to be told in the next frames."""

    def __init__(self, engine_id: str):
        self._engine_id = engine_id
        self._num_frames = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[tuple[Version, int, int, float, bytes]] = []  # (version, handle, token, logprob, kept) in order of arrival
        self._finished: list[tuple[int, StopReason]] = []
        self._prefilled: list[tuple[int, int, int]] = []
        self._recomputed: list[int] = []
        self._routing: dict[int, np.ndarray] = {}

    def token(self, handle: int, token: int, logprob: float, version: Version, kept: bytes) -> None:
        self._tokens.append((version, handle, token, logprob, kept))

    def routed(self, handle: int, routing: np.ndarray) -> None:
        self._routing[handle] = routing

    def finished(self, handle: int, reason: StopReason) -> None:
        self._finished.append((handle, reason))

    def prefilled(self, handle: int, version: Version) -> None:
        self._prefilled.append((handle, *version))

    def recomputed(self, handle: int) -> None:
        self._recomputed.append(handle)

    def take(self, current: Version) -> list[Frame]:
        """Frames of one version each, oldest first; the first one tells what was prefilled, the last one what ended."""
        if not (self._tokens or self._finished or self._prefilled or self._recomputed):
            return []
        versions = sorted({version for version, *_ in self._tokens}) or [current]
        frames = [self._frame(version, last=version == versions[-1], first=version == versions[0]) for version in versions]
        self._clear()
        return frames

    def _frame(self, version: Version, *, first: bool, last: bool) -> Frame:
        rows = [row for row in self._tokens if row[0] == version]
        self._num_frames += 1
        return Frame(
            tick=self._num_frames,
            engine_id=self._engine_id,
            incarnation=version[0],
            version=version[1],
            handles=np.array([handle for _, handle, *_ in rows], np.int32),
            token_ids=np.array([token for _, _, token, *_ in rows], np.int32),
            logprobs=np.array([logprob for *_, logprob, _ in rows], np.float32),
            kept=tuple(kept for *_, kept in rows) if any(kept for *_, kept in rows) else (),
            finished=tuple(self._finished) if last else (),
            prefilled=tuple(self._prefilled) if first else (),
            recomputed=tuple(self._recomputed) if first else (),
            routing=self._routing if last else {},
        )
