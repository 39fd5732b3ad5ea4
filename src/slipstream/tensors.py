"""What everything that stores or sends named tensors must agree on: tied storage once, dtypes by name, and
tensors that are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that nobody holds: it is made each time it is asked for."""

    outline: Tensor  # its shape and dtype, over the memory of one element; the same one where two names mean the same tensor
    make: Callable[[], Tensor]


class LazyTensors(Mapping[str, Tensor]):
    """Named tensors, some of them `Made`: who takes one after the other never holds two of those."""

    def __init__(self, entries: Mapping[str, Tensor | Made]):
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        return entry.make() if isinstance(entry, Made) else entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def outlines(self) -> dict[str, Tensor]:
        """What has the shapes, dtypes and ties of all of them; nothing is made."""
        return {name: entry.outline if isinstance(entry, Made) else entry for name, entry in self.entries.items()}


def outline(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of that shape that takes one element, for `Made`; its values mean nothing."""
    return torch.empty((), dtype=dtype).expand(shape)


def distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each storage once, under its first name; tied name -> the name its storage goes under).

    Tied is what looks at the same memory in the same way; a transposed or partial view of another tensor is a tensor of its own.
    """
    out: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, _address(tensor), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            out[name] = tensor
    return out, aliases


def _address(tensor: Tensor) -> int:
    """Where its bytes begin; of a sharded tensor this rank's, whose storage tells ties even where the rank's part is empty."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """As records and files name it: "float32", "bfloat16", ..."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name; ValueError where there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


@torch.no_grad()
def overwrite(own: Mapping[str, Tensor], given: Mapping[str, Tensor], source: object) -> None:
    """Copy the tensors `given`, read from `source`, into `own`; CheckpointError, before any is touched, where names, shapes or dtypes
    differ."""
    if own.keys() != given.keys():
        raise CheckpointError(f"{source} holds other tensors than this model: {sorted(own.keys() ^ given.keys())[:3]} and so on")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{source}: {name} is {dtype_name(given[name].dtype)}{list(given[name].shape)}, this model has "
                f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            )
    for name, tensor in own.items():
        tensor.copy_(given[name])
