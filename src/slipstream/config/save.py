"""Writing the resolved settings, and naming them by a hash."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import xxhash

from slipstream.config.experiments import Experiment
from slipstream.config.settings import Config
from slipstream.errors import ConfigError


def to_toml(config: Config, experiments: Sequence[Experiment] = ()) -> str:
    """The whole tree as TOML that loads back equal. Keys without a value (None) are left out: None is their default.
    Experiments follow with what they change.

    >>> import tomllib
    >>> Config.model_validate(tomllib.loads(to_toml(Config()))) == Config()
    True
    """
    try:
        tables = [{"name": experiment.name, **experiment.table} for experiment in experiments]
        return tomli_w.dumps(_without_none(config.model_dump(mode="json")) | ({"experiment": tables} if tables else {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"settings that TOML cannot hold: {error}; use text, numbers, true/false, lists and tables in options") from error


def save_config(config: Config, path: Path, experiments: Sequence[Experiment] = ()) -> None:
    """Write `to_toml` to the file at once: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(to_toml(config, experiments))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def settings_hash(config: Config) -> str:
    """xxh3-128 (hex) of the settings in canonical JSON."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
