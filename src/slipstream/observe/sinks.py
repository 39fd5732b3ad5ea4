"""Further places for the metric lines: TensorBoard, Weights & Biases, trackio; each only when installed and asked for.

None of them is given slipstream's step as its own monotonic step: after a resume steps are trained again, and wandb would drop such
lines. Our step travels as a value of the line and is declared as the x-axis. Settings go as plain JSON; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any, Protocol

import xxhash

from slipstream.errors import ConfigError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Sink(Protocol):
    name: str

    def log(self, kind: str, line: dict[str, Any]) -> None:
        """A line of kind "step" or "evaluation"."""
        ...

    def close(self) -> None: ...


def check_installed(names: list[str]) -> None:
    """Raises ConfigError for every sink whose package is missing; run at load, before any work."""
    missing = [n for n in names if importlib.util.find_spec(PACKAGES[n]) is None]
    if missing:
        raise ConfigError(
            [f"metrics.sinks = [..., \"{n}\"]: the package {n!r} is not installed; pip install 'slipstream[{n}]'" for n in missing]
        )


def open_sinks(names: list[str], folder: Path, settings: dict[str, Any]) -> list[Sink]:
    """One sink per name; `settings` is the resolved configuration as plain JSON values."""
    check_installed(names)
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
    return [kinds[name](folder, settings) for name in names]


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numeric values of a line (None is "not applicable": left out)."""
    return {k: float(v) for k, v in line.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def identity(folder: Path) -> str:
    """The run's name at a tracking service: the same when it is resumed, another for another folder of the same name."""
    return f"{folder.name}-{xxhash.xxh3_64_hexdigest(str(folder.resolve()).encode())[:8]}"


class TensorBoard:
    """Event files in `<run folder>/tensorboard`, through TensorBoard's own writer (torch is not needed)."""

    name = "tensorboard"

    def __init__(self, folder: Path, settings: dict[str, Any]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.summary import DirectoryOutput, Writer  # type: ignore[import-not-found]
        self._writer = Writer(DirectoryOutput(str(folder / "tensorboard")))

    def log(self, kind: str, line: dict[str, Any]) -> None:
        for key, value in numbers(line).items():
            self._writer.add_scalar(f"{kind}/{key}", value, int(line["version"]))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    name = "wandb"

    def __init__(self, folder: Path, settings: dict[str, Any]):
        import wandb  # type: ignore[import-not-found]

        self._run = wandb.init(
            project="slipstream", name=folder.name, id=identity(folder), dir=str(folder), config=settings, resume="allow"
        )
        self._run.define_metric("slipstream/version")
        self._run.define_metric("*", step_metric="slipstream/version")

    def log(self, kind: str, line: dict[str, Any]) -> None:
        values = {f"{kind}/{k}": v for k, v in numbers(line).items()}
        self._run.log({**values, "slipstream/version": int(line["version"])})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    name = "trackio"

    def __init__(self, folder: Path, settings: dict[str, Any]):
        import trackio  # type: ignore[import-not-found]

        self._trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):  # it prints; stdout may be read by a program
            trackio.init(project="slipstream", name=identity(folder), config=settings, resume="allow", embed=False)

    def log(self, kind: str, line: dict[str, Any]) -> None:
        values = {f"{kind}/{k}": v for k, v in numbers(line).items()}
        self._trackio.log({**values, "slipstream/version": int(line["version"])})

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()
