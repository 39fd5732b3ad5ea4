"""How long each engine has run on which version."""

from __future__ import annotations

from typing import Any

from slipstream.protocols import Clock


class EngineTimes:
    """Told of every confirmation; tells the step lines and whoever asks."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._since: dict[str, float] = {}  # engine -> when it confirmed the version that it holds
        self._before: dict[str, float] = {}  # engine -> seconds it ran on the version before that

    def confirmed(self, engine_id: str) -> None:
        now = self._clock.now()
        if engine_id in self._since:
            self._before[engine_id] = now - self._since[engine_id]
        self._since[engine_id] = now

    def gone(self, engine_id: str) -> None:
        self._since.pop(engine_id, None)
        self._before.pop(engine_id, None)

    def now(self) -> dict[str, float]:
        """Engine -> seconds on the version that it holds."""
        now = self._clock.now()
        return {engine_id: now - since for engine_id, since in self._since.items()}

    def line(self, engines: dict[str, int], starts: dict[str, int]) -> dict[str, Any]:
        """What a step line says of each engine in service."""
        out: dict[str, Any] = {}
        for engine_id, version in sorted(engines.items()):
            out[f"engine/{engine_id}/version"] = version
            out[f"engine/{engine_id}/previous_version_s"] = self._before.get(engine_id)
            out[f"engine/{engine_id}/restarts"] = starts[engine_id] - 1
        return out
