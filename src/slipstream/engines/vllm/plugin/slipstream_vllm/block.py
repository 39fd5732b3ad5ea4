"""A version of the weights as slipstream's manifest describes it: bytes that are proved before anything looks at them."""

import mmap
import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash

ALIGNMENT = 64  # of entries in a packed block, the form that is hashed; the gaps between them are zeros


@dataclass
class Block:
    """What an update is told: the fields of slipstream's `Manifest`, and where the bytes are."""

    path: str  # a safetensors file, or /proc/<pid>/fd/<n>: an anonymous memory file of the process that offers it
    label: str  # "<who gives them>:<incarnation>.<version>"
    checksum: str  # xxh3-128 (hex) of the packed block, total_bytes long
    total_bytes: int
    entries: list  # (name, dtype, shape, offset, nbytes) each, in order of their offsets
    aliases: dict  # tied name -> the name its bytes are sent under

    def __post_init__(self):
        end = 0
        for name, dtype, shape, offset, nbytes in self.entries:
            size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
            for extent in shape:
                size *= extent
            if size != nbytes or offset < end or offset % ALIGNMENT or offset + nbytes > self.total_bytes:
                raise ValueError(f"weights {self.name}: the manifest's entry for {name} does not add up")
            end = offset + nbytes

    @property
    def name(self):
        return self.label.rpartition(":")[2]

    def whole(self, tensors, checksum):
        """The tensors by name, tied ones included, if they hash to what the trainer sent. ValueError otherwise."""
        if checksum != self.checksum:
            raise ValueError(f"weights {self.name}: the bytes received hash to {checksum}, the trainer sent {self.checksum}")
        # vLLM packs the output head apart from the embedding, and would keep the old one if the tied name were not sent.
        return tensors | {alias: tensors[name] for alias, name in self.aliases.items()}


def from_memory(block):
    """(tensors by name, the hash of their bytes): views of the packed block, mapped read-only. ValueError where it is not those weights."""
    with _opened(block) as file:
        held = os.fstat(file.fileno()).st_size
        if held < block.total_bytes:
            raise ValueError(f"weights {block.name}: {block.path} holds {held} bytes, the manifest says {block.total_bytes}")
        mapping = mmap.mmap(file.fileno(), block.total_bytes, access=mmap.ACCESS_READ)
    checksum = xxhash.xxh3_128_hexdigest(mapping)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory: nobody writes to these tensors
        packed = torch.frombuffer(mapping, dtype=torch.uint8)
    tensors = {
        name: packed[offset : offset + nbytes].view(getattr(torch, dtype)).view(tuple(shape))
        for name, dtype, shape, offset, nbytes in block.entries
    }
    return block.whole(tensors, checksum), checksum


def from_file(block):
    """The same from a safetensors file, whose tensors lie one after the other behind its header: read, and hashed as if packed."""
    hasher, tensors, zeros = xxhash.xxh3_128(), {}, bytes(ALIGNMENT)
    with _opened(block) as file:
        file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        for name, dtype, shape, _, nbytes in block.entries:
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            if file.readinto(tensor.numpy()) != nbytes:
                raise ValueError(
                    f"weights {block.name}: {block.path} ended within {name}; it was cut short, or something else writes to it"
                )
            hasher.update(tensor.numpy())
            hasher.update(zeros[: -nbytes % ALIGNMENT])
            tensors[name] = tensor.view(getattr(torch, dtype)).view(tuple(shape))
    checksum = hasher.hexdigest()
    return block.whole(tensors, checksum), checksum


@contextmanager
def _opened(block):
    try:
        file = open(block.path, "rb")
    except OSError as error:
        raise ValueError(
            f"weights {block.name}: {block.path} cannot be opened by the server ({error.strerror}). It must see the trainer's directory "
            "(weight_sync.transport = 'files' with whole weights), or run on the run's machine as the same user and see its processes"
        ) from error
    with file:
        yield file
