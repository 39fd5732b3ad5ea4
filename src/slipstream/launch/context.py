"""What the roles of one incarnation share, besides what they say to each other. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config.paths import resolve_path
from slipstream.config.settings import Config
from slipstream.weight_sync.weight_directory import WeightDirectory


@dataclass(frozen=True, slots=True)
class RunContext:
    """The facts that a role starts from; a role in another process gets them as a run folder and a few numbers."""

    config: Config
    base_folder: Path  # that relative reward and tool files are relative to
    run_folder: Path
    incarnation: int
    start_step: int  # the checkpoint's; 0 without one
    run_id: str
    sockets: str = ""  # private directory of this start: roles find each other in it

    @property
    def checkpoints(self) -> Path:
        return self.run_folder / "checkpoints"

    @property
    def weights(self) -> WeightDirectory | None:
        """Where weights travel as files; None with another transport."""
        sync = self.config.weight_sync
        if sync.transport != "files":
            return None
        place = self.run_folder / "weights" if sync.directory is None else resolve_path(sync.directory, self.base_folder)
        return WeightDirectory(place, self.run_id)
