"""Anonymous memory files: shared memory that has no name, so a crash of every process leaves nothing behind.

The launching process creates them empty; children inherit the descriptor (`pass_fds`) and open it with `MemoryFile(descriptor)`.
On Linux they are memfds; elsewhere an unlinked temporary file, mapped, which works the same.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from slipstream.errors import MemoryNeedError
from slipstream.system_memory import available_bytes


class MemoryFile:
    """One block of memory that several processes map. Who may write when is not its concern (see `slots.py`)."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._maps: dict[bool, np.ndarray] = {}  # writable? -> uint8[nbytes]; the array keeps its mapping alive

    @classmethod
    def create(cls, label: str, directory: str | None = None) -> MemoryFile:
        """A new empty one. `label` is seen in /proc/<pid>/maps; `directory` is where systems without memfds put their unlinked file."""
        if hasattr(os, "memfd_create") and directory is None:
            return cls(os.memfd_create(f"slipstream-{label}", os.MFD_CLOEXEC))
        descriptor, path = tempfile.mkstemp(prefix=f"slipstream-{label}-", dir=directory)
        os.unlink(path)
        return cls(descriptor)

    def fileno(self) -> int:
        """The descriptor, to be inherited by a child (it is not inheritable unless the child is started with it in `pass_fds`)."""
        return self._descriptor

    @property
    def nbytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def resize(self, nbytes: int) -> None:
        """Grow to at least `nbytes` and reserve the memory now: a lack of it raises MemoryNeedError here, not SIGBUS at a later write.

        Never shrinks, because a reader's mapping of a file that shrank would crash it.
        """
        more = nbytes - self.nbytes
        if more <= 0:
            return
        available = available_bytes()  # asked first: reserving more than there is would have the kernel kill processes, not fail
        try:
            if available is not None and more > available:
                raise OSError(f"{available / 2**20:,.0f} MiB are available")
            os.ftruncate(self._descriptor, nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            raise MemoryNeedError(
                f"{more / 2**20:,.0f} MiB of shared memory for weights cannot be reserved ({error.strerror or error}): "
                "use a smaller model or dtype, or give this machine or container more memory"
            ) from error

    def map(self, *, writable: bool = False) -> np.ndarray:
        """uint8[nbytes], backed by the file: what one process writes, the others see. Mapped once, and again after the file has grown."""
        nbytes = self.nbytes
        if nbytes == 0:
            return np.empty(0, np.uint8)
        block = self._maps.get(writable)
        if block is None or len(block) != nbytes:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            block = self._maps[writable] = np.frombuffer(mmap.mmap(self._descriptor, nbytes, access=access), np.uint8)
        return block

    def close(self) -> None:
        """Close the descriptor. The memory lives on while any process maps it or holds a descriptor."""
        self._maps.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def weight_slots(transport: str, count: int) -> Iterator[list[MemoryFile]]:
    """The memory of the weight slots, closed however the run ends, also while it loads; none where weights travel otherwise."""
    slots: list[MemoryFile] = []
    try:
        if transport == "shared_memory":
            slots.extend(MemoryFile.create(f"weights-{i}") for i in range(count))
        yield slots
    finally:
        for slot in slots:
            slot.close()
