"""Find a function that a setting names: a built-in, 'package.module:function' or 'file.py:function'. No torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError


def split_spec(spec: str) -> tuple[str, str]:
    """('file.py' or 'package.module', 'function'); ConfigError if it is not of that form."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f"function {spec!r}: expected 'package.module:function' or 'file.py:function'")
    return place, name


def function_name(spec: str) -> str:
    """The name a function goes by in metrics: 'rewards.py:score' -> 'score', 'exact' -> 'exact'."""
    return spec.rpartition(":")[2]


def load_function(spec: str) -> Callable[..., Any]:
    """The function behind `spec`. A relative file is below the working directory (the settings loader makes paths absolute).

    The file's folder is put on the import path, so that it may import its neighbours. Raises ConfigError that says what is wrong:
    no such file, an import that fails (with its error), no such function (with those that exist).
    """
    place, name = split_spec(spec)
    module = _load_file(Path(place), spec) if place.endswith(".py") else _load_module(place, spec)
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_"))
        raise ConfigError(f"function {spec!r}: {place} has no function {name!r}; it has: {', '.join(there) or 'none'}")
    return function


def _load_module(place: str, spec: str) -> Any:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise ConfigError(f"function {spec!r}: importing {place} failed: {type(error).__name__}: {error}") from error


def _load_file(path: Path, spec: str) -> Any:
    path = path.expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"function {spec!r}: there is no file {path}")
    name = f"_slipstream_file_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickling inside the file look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"function {spec!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    return module
