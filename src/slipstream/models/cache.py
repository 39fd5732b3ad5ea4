"""Things made once per machine and kept: the tiny model, converted GGUF files. No torch.

They lie under `$SLIPSTREAM_CACHE` (default `$XDG_CACHE_HOME/slipstream`, `~/.cache/slipstream`), one folder each, and appear there by
one rename: a folder that exists is whole. Several processes may ask for the same folder at once; one makes it, the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.errors import DeadlineExceeded

_RETRY_S = 0.1


def cache_folder() -> Path:
    """Where made things are kept; not created here."""
    if explicit := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "slipstream"


def build_once(name: str, build: Callable[[Path], None], wait_s: float = 900.0) -> Path:
    """The cached folder `name`; where it is absent, `build(temporary_folder)` fills it first.

    Whatever `build` raises reaches the caller and nothing is left behind. DeadlineExceeded when another process has been making the
    same folder for `wait_s` seconds.
    """
    target = cache_folder() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(f".{target.name}.lock"), wait_s, what=f"another process to make {target}"):
        if target.is_dir():
            return target
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            build(temporary)
            _sync_files(temporary)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


@contextlib.contextmanager
def _exclusive(lock: Path, wait_s: float, what: str) -> Iterator[None]:
    """Hold the lock file. The kernel drops the lock of a process that dies, so a crash never blocks the next one."""
    deadline = time.monotonic() + wait_s
    with lock.open("w") as file:
        while True:  # flock has no deadline of its own
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"waited {wait_s:.0f} s for {what} (lock file {lock})") from None
                time.sleep(_RETRY_S)
        yield


def _sync_files(folder: Path) -> None:
    """Bytes before the name: after a power cut a folder under its final name is whole."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
