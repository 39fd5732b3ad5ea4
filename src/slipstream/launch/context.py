"""What the roles of one incarnation share, besides what they say to each other. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.config.settings import Config


@dataclass(frozen=True, slots=True)
class RunContext:
    """The facts that a role starts from; a role in another process gets them as a run folder and a few numbers."""

    config: Config
    base_folder: Path  # that relative reward and tool files are relative to
    run_folder: Path
    incarnation: int
    start_step: int  # the checkpoint's; 0 without one

    @property
    def checkpoints(self) -> Path:
        return self.run_folder / "checkpoints"
