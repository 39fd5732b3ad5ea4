"""The directory through which weights travel as files: names in it, whose it is, and what may be deleted. No torch.

    <incarnation>.<version>.safetensors      whole weights: they get this name when they are complete and on disk
    <incarnation>.<version>.delta.safetensors    with payload "delta": what changed in them since the version before
    .<run id>.tmp                            what the trainer is writing
    .<run id>.<engine id>/                   adapters of an engine that is a server, and the base they lie on: for the server alone

The trainer writes, the engine reads. A file's metadata name the run, so that nobody deletes or takes another run's weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import RunFolderError
from slipstream.weight_sync.safetensors_header import read_header

RUN = "run"  # key of the metadata
_WEIGHTS = re.compile(r"\d+\.\d+(\.delta)?\.safetensors")


@dataclass(frozen=True, slots=True)
class WeightDirectory:
    path: Path
    run_id: str

    def file(self, incarnation: int, version: int) -> Path:
        """Where whole weights lie."""
        return self.path / f"{incarnation}.{version}.safetensors"

    def part(self, incarnation: int, version: int) -> Path:
        """Where what changed up to this version lies."""
        return self.path / f"{incarnation}.{version}.delta.safetensors"

    @property
    def temporary(self) -> Path:
        """What is written now; there is one writer."""
        return self.path / f".{self.run_id}.tmp"

    def of_engine(self, engine_id: str) -> Path:
        """The folder that this engine may write in."""
        return self.path / f".{self.run_id}.{engine_id}"

    def prepare(self) -> None:
        """Make the directory, and remove what an earlier incarnation left there.

        Raises RunFolderError where it cannot be made or written, or holds what is not this run's.
        """
        with _refusals(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.clear()

    def clear(self) -> None:
        """Remove this run's weights. RunFolderError where others lie there, or where they cannot be removed."""
        with _refusals(self.path):
            runs = {path: _run_of(path) for path in self.path.iterdir() if _WEIGHTS.fullmatch(path.name)}
        foreign = next((path for path, run in runs.items() if run != self.run_id), None)
        if foreign is not None:
            raise RunFolderError(f"{foreign} is not of this run, and two cannot share a directory for weights. {_ELSEWHERE}, or remove it")
        with _refusals(self.path):
            for path in (*runs, self.temporary):
                path.unlink(missing_ok=True)
            for folder in self.path.glob(f".{self.run_id}.*"):
                shutil.rmtree(folder)


def check_room(path: Path, num_bytes: int) -> None:
    """RunFolderError where this many bytes do not fit into the existing folder's file system, as far as it tells."""
    with _refusals(path):
        usage = shutil.disk_usage(path)
    if usage.total and usage.free < num_bytes:  # a mounted object store may not know how large it is
        raise RunFolderError(
            f"weights in flight take {num_bytes / 2**20:,.0f} MiB in {path}, where {usage.free / 2**20:,.0f} MiB are free. {_ELSEWHERE}, "
            'free space there, or use weight_sync.transport = "shared_memory"'
        )


_ELSEWHERE = "Name another weight_sync.directory"


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """The operating system's refusals in our vocabulary."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"the directory for weights, {path}, cannot be used: {error}. {_ELSEWHERE}") from error


def _run_of(path: Path) -> str | None:
    """The run that wrote a file; None where it is no file of weights."""
    try:
        with path.open("rb") as file:
            return read_header(file).metadata.get(RUN)
    except ValueError:
        return None
