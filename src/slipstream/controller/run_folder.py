"""A run's folder: where it is, who may use it, and whether the ledger can live there.

runs/<name>-<date>-<time>/
    config.toml  ledger.sqlite  metrics.jsonl  samples.jsonl  lock
    checkpoints/step-<n>/  log/<role>.log

Experiments, several runs that share a model, have such a folder each, within one of this name that holds nothing else:
    config.toml  log/<role>.log  <experiment>/
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.config import Config, save_config
from slipstream.config.experiments import Experiment
from slipstream.errors import RunFolderError

LEDGER = "ledger.sqlite"
LOCK = "lock"
MIN_FREE_BYTES = 64 << 20
NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs afs ceph lustre beegfs gpfs glusterfs ncpfs "
    "fuse.sshfs fuse.s3fs fuse.gcsfuse fuse.rclone fuse.glusterfs fuse.ceph fuse.davfs davfs".split()
)  # not 9p: that is also how a virtual machine's own disk may appear


class RunFolder:
    """An existing run folder. `lock` makes this process its only user."""

    def __init__(self, path: Path):
        self.path = path
        self._lock_fd: int | None = None

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @classmethod
    def create(cls, name: str, folder: str | Path | None = None, root: str | Path = "runs") -> RunFolder:
        """A new run folder: `folder` itself, or `root`/<name>-<date>-<time>. Raises RunFolderError where one already holds a run."""
        return cls(_new_path(name, folder, root))._prepared()

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder, for going on with its run."""
        path = Path(path).absolute()
        if not (path / LEDGER).is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no {LEDGER}")
        return cls(path)._prepared()

    @classmethod
    def newest(cls, name: str, root: str | Path = "runs") -> RunFolder:
        """The newest run folder of this name."""
        return cls.open(_newest_path(name, root, lambda path: (path / LEDGER).is_file()))

    def save_config(self, config: Config) -> None:
        """Write the resolved settings into the folder."""
        with _os_errors(self.path):
            save_config(config, self.config)

    def lock(self) -> RunFolder:
        """Take the folder for this process; the kernel gives it back when the process ends, however it ends."""
        if self._lock_fd is not None:
            return self
        with _os_errors(self.path):
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunFolderError(f"{self.path} cannot be locked ({error.strerror}); use a local disk") from error
            raise RunFolderError(f"{self.path} is in use by process {holder}; wait for it or stop it first") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        return self

    def release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _prepared(self) -> RunFolder:
        """Refuse places where a run would fail later. Make the subfolders."""
        check_place(self.path)
        with _os_errors(self.path):
            self.checkpoints.mkdir(exist_ok=True)
            self.log.mkdir(exist_ok=True)
        return self


class ExperimentsFolder:
    """The folder that holds the run folders of experiments, each under its experiment's name."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def log(self) -> Path:
        return self.path / "log"

    @classmethod
    def create(cls, name: str, folder: str | Path | None = None, root: str | Path = "runs") -> ExperimentsFolder:
        """A new one, where `RunFolder.create` would make one. Raises RunFolderError where one already holds a run or experiments."""
        return cls(_new_path(name, folder, root))

    @classmethod
    def open(cls, path: str | Path) -> ExperimentsFolder:
        """An existing one, for going on with its runs."""
        path = Path(path).absolute()
        if (path / LEDGER).is_file():
            raise RunFolderError(f"{path} is the folder of one run; it is resumed with its own settings: slipstream train --resume {path}")
        if not holds_experiments(path):
            raise RunFolderError(f"{path} holds no experiments: no folder in it is a run folder")
        return cls(path)

    @classmethod
    def newest(cls, name: str, root: str | Path = "runs") -> ExperimentsFolder:
        """The newest of this name."""
        return cls.open(_newest_path(name, root, lambda path: bool(holds_experiments(path))))

    def run_folder(self, experiment: str) -> RunFolder | None:
        """That of the experiment; None where it has none yet."""
        path = self.path / experiment
        return RunFolder.open(path) if (path / LEDGER).is_file() else None

    def save_config(self, config: Config, experiments: Sequence[Experiment]) -> None:
        """Write the settings that the experiments start from, and what each changes in them."""
        with _os_errors(self.path):
            save_config(config, self.path / "config.toml", experiments)


def holds_experiments(path: Path) -> list[str]:
    """The names of the experiments whose run folders are in this folder."""
    return sorted(ledger.parent.name for ledger in path.glob(f"*/{LEDGER}")) if (path / "config.toml").is_file() else []


def _new_path(name: str, folder: str | Path | None, root: str | Path) -> Path:
    """A folder that exists now and holds no run: `folder` itself, or `root`/<name>-<date>-<time>."""
    base = Path(folder) if folder is not None else Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while folder is None and path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    if (path / LEDGER).exists() or holds_experiments(path):
        raise RunFolderError(f"{path} already holds a run; resume it with --resume {path}, or name another folder")
    with _os_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path.absolute()


def _newest_path(name: str, root: str | Path, fits: Callable[[Path], bool]) -> Path:
    """The newest folder of this name that fits."""
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}(-\d+)?")
    found = [p for p in Path(root).glob("*") if pattern.fullmatch(p.name) and fits(p)]
    if not found:
        raise RunFolderError(f"there is no run named {name!r} in {Path(root).absolute()}; give its folder instead")
    return max(found, key=lambda p: _age_key(p.name))


def check_place(path: Path) -> None:
    """RunFolderError where a run in this existing folder would fail later: network file system, read-only, full."""
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        raise RunFolderError(
            f"{path} is on a network file system ({kind}), where the ledger's write-ahead log does not work; "
            "put the run folder on a local disk (--run.folder)"
        )
    with _os_errors(path):
        probe = path / f".probe-{os.getpid()}"
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        finally:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                probe.unlink(missing_ok=True)
        free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise RunFolderError(f"only {free >> 20} MiB are free for {path}; a run needs at least {MIN_FREE_BYTES >> 20} MiB")


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds the path, as the kernel names it ("ext4", "nfs4"); "" where it does not say."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text()
        except OSError:
            return ""
    real, best, kind = os.path.realpath(path), "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        place = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[1])
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, fields[2]
    return kind


def _age_key(name: str) -> tuple[str, int]:
    stamp = re.search(r"(\d{8}-\d{6})(?:-(\d+))?$", name)
    assert stamp is not None
    return stamp[1], int(stamp[2] or 1)


class _os_errors:
    """The operating system's refusals in our vocabulary."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, RunFolderError):
            return
        reason = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "permission denied",
            errno.EPERM: "permission denied",
            errno.ENOTDIR: "a part of the path is a file",
            errno.EEXIST: "a file is in the way",
        }.get(error.errno or 0, error.strerror or str(error))
        raise RunFolderError(f"the run folder {self._path} cannot be used: {reason}; choose another with --run.folder") from error
