"""The version registry: what was published, and that engines hold it. The name is (incarnation, version), the identity a checksum."""

from __future__ import annotations

from typing import Protocol

from slipstream.controller.run_state import RunState
from slipstream.errors import WeightSyncError
from slipstream.protocols import Manifest, WeightsOffer
from slipstream.types import EngineReport


class Broker(Protocol):
    """Who may write and who reads which weight slot; `weight_sync.slots.SlotBroker`, or one that holds engines back."""

    @property
    def num_slots(self) -> int: ...

    @property
    def newest(self) -> Manifest | None: ...

    def begin_write(self) -> int: ...

    def publish(self, slot: int, manifest: Manifest) -> None: ...

    def lease(self, engine_id: str, incarnation: int, version: int) -> WeightsOffer | None: ...

    def give_back(self, engine_id: str, slot: int) -> Manifest: ...

    def drop_engine(self, engine_id: str) -> None: ...


def check_manifest(state: RunState, manifest: Manifest, start_checksum: str | None) -> None:
    """Refuse weights of another incarnation, and start weights that are not those of the checkpoint the run goes on from."""
    if manifest.incarnation != state.incarnation:
        raise WeightSyncError(
            f"weights {manifest.incarnation}.{manifest.version} were published in incarnation {state.incarnation}: "
            "they come from a trainer of a dead run"
        )
    if not state.published and start_checksum is not None and manifest.checksum != start_checksum:
        raise WeightSyncError(
            f"the trainer starts from weights {manifest.checksum}, but the checkpoint of step {state.step} holds {start_checksum}"
        )


def check_report(state: RunState, report: EngineReport) -> None:
    """Refuse a report that does not name what was published, byte for byte (promise 3)."""
    name = f"{report.incarnation}.{report.version}"
    if report.incarnation != state.incarnation:
        raise WeightSyncError(f"engine {report.engine_id} reports version {name}; this is incarnation {state.incarnation}")
    published = state.published.get(report.version)
    if published is None:
        raise WeightSyncError(f"engine {report.engine_id} reports version {name}, which is not among {sorted(state.published)}")
    if published != report.checksum:
        raise WeightSyncError(
            f"engine {report.engine_id} holds other bytes than were published as version {name}: its copy hashes to "
            f"{report.checksum}, published was {published}"
        )
