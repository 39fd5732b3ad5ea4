"""Run folders: names, the lock, and places where a run would fail later."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from slipstream.controller import run_folder
from slipstream.controller.run_folder import RunFolder, file_system
from slipstream.errors import RunFolderError


def made(path) -> RunFolder:
    folder = RunFolder.create("t", path)
    folder.ledger.write_bytes(b"")
    return folder


def test_a_new_folder_is_named_by_run_date_and_time_and_never_taken_twice(tmp_path):
    first, second = RunFolder.create("sort", root=tmp_path), RunFolder.create("sort", root=tmp_path)
    assert first.path != second.path
    assert all(f.path.name.startswith("sort-20") and f.checkpoints.is_dir() and f.log.is_dir() for f in (first, second))


def test_the_newest_run_of_a_name(tmp_path):
    for name in ("a-20250101-000000", "a-20250102-000000", "a-20250102-000000-2", "ab-20260101-000000"):
        made(tmp_path / name)
    (tmp_path / "a-20270101-000000").mkdir()  # holds no run
    assert RunFolder.newest("a", root=tmp_path).path.name == "a-20250102-000000-2"
    with pytest.raises(RunFolderError, match="no run named 'b'"):
        RunFolder.newest("b", root=tmp_path)


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path):
    made(tmp_path / "run")
    with pytest.raises(RunFolderError, match="already holds a run; resume it with --resume"):
        RunFolder.create("t", tmp_path / "run")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunFolder.open(tmp_path)


HOLDER = """
import sys, time
from slipstream.controller.run_folder import RunFolder
RunFolder.open(sys.argv[1]).lock()
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_names_its_user_and_is_free_once_that_is_killed(tmp_path):
    folder = made(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"in use by process {holder.pid}"):
            folder.lock()
    finally:
        holder.kill()
        holder.wait()
    folder.lock().release()
    folder.lock()
    with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        RunFolder.open(folder.path).lock()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/a/run", "ext4"),
        ("/home/share/x/run", "nfs4"),
        ("/home/shared/run", "ext4"),
        ("/mnt/my disk/run", "fuse.sshfs"),
        ("/", "ext4"),
    ],
)
def test_the_file_system_of_a_path(path, kind):
    mounts = "/dev/a / ext4 rw 0 0\nserver:/x /home/share nfs4 rw 0 0\nhost: /mnt/my\\040disk fuse.sshfs rw 0 0\n"
    assert file_system(path, mounts) == kind


@pytest.mark.parametrize("kind", ["nfs", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(run_folder, "file_system", lambda path: kind)
    with pytest.raises(RunFolderError, match=rf"network file system \({kind}\).*local disk"):
        RunFolder.create("t", tmp_path / "run")


def test_a_read_only_place_is_refused(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", read_only)
    with pytest.raises(RunFolderError, match=r"the file system is read-only; choose another with --run\.folder"):
        RunFolder.create("t", tmp_path / "run")
    assert not list((tmp_path / "run").glob(".probe*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunFolderError, match="permission denied"):
        RunFolder.create("t", tmp_path / "run")


def test_a_nearly_full_disk_is_refused(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 5 << 20))
    with pytest.raises(RunFolderError, match="only 5 MiB are free"):
        RunFolder.create("t", tmp_path / "run")


def test_a_file_in_the_way_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="a part of the path is a file"):
        RunFolder.create("t", tmp_path / "file" / "run")
