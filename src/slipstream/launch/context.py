"""What the roles of one incarnation share, besides what they say to each other. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config.paths import resolve_path
from slipstream.config.settings import Config
from slipstream.errors import SlipstreamError
from slipstream.weight_sync.weight_directory import WeightDirectory

if TYPE_CHECKING:
    from slipstream.controller.controller import Controller


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
    experiment: str = ""  # which of those that are launched together; empty: the only run

    @property
    def where(self) -> str:
        """What comes before a message about it, where there are others."""
        return f"experiment {self.experiment}: " if self.experiment else ""

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """An error within says which of several experiments it is of."""
        try:
            yield
        except SlipstreamError as error:
            if self.where:
                error.args = (f"{self.where}{error}",)
            raise

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


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run whose folder is locked and whose ledger is read: a launcher places its roles."""

    context: RunContext
    controller: Controller

    @property
    def config(self) -> Config:
        return self.context.config

    def placed(self, sockets: str) -> OpenRun:
        """The same with this private directory."""
        return replace(self, context=replace(self.context, sockets=sockets))

    async def finished(self) -> None:
        """Wait until the run has ended; raises the error that ended it."""
        with self.context.named_errors():
            await self.controller.wait_finished()
