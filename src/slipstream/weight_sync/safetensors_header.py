"""The header of a safetensors file: which tensor lies where. Written and read here, so that its bytes can be streamed, hashed on the way.

    8 bytes: length of the JSON, little-endian | JSON, padded with spaces | the tensors' bytes, one after the other

    {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [7, 5], "data_offsets": [start, end]}, ...}

The format allows no holes: a reader refuses a file whose tensors do not cover its data exactly, so they lie closer here than in a packed
block. The data begin at a multiple of 64 bytes. Source: https://huggingface.co/docs/safetensors. No torch.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from slipstream.protocols import ManifestEntry

_ALIGNMENT = 64
_MAX_JSON_BYTES = 100_000_000  # as the reference implementation
_LENGTH = struct.Struct("<Q")
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor as the header tells of it."""

    dtype: str  # "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the data
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]
    num_bytes: int  # where the data begin

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return self.num_bytes + max((place.end for place in self.tensors.values()), default=0)


def places(entries: Iterable[ManifestEntry]) -> dict[str, TensorPlace]:
    """Where these tensors lie in a file, one after the other. ValueError where the format has no name for a dtype."""
    entries = list(entries)
    unknown = next((entry for entry in entries if entry.dtype not in _NAMES), None)
    if unknown is not None:
        raise ValueError(f"{unknown.name} is {unknown.dtype}, which the safetensors format does not know")
    ends = list(itertools.accumulate((entry.nbytes for entry in entries), initial=0))
    return {e.name: TensorPlace(_NAMES[e.dtype], e.shape, *span) for e, span in zip(entries, itertools.pairwise(ends), strict=True)}


def write_header(tensors: Mapping[str, TensorPlace], metadata: Mapping[str, str]) -> bytes:
    """The header's bytes; their number depends on the length of the metadata's values alone, so they can be written last."""
    table = {name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": (t.start, t.end)} for name, t in tensors.items()}
    text = json.dumps({"__metadata__": dict(metadata), **table}, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def read_header(file: BinaryIO) -> Header:
    """Read the header; the file then stands where the data begin. ValueError says why it is no header. OSError where it cannot be read."""
    prefix = file.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        raise ValueError(f"it has {len(prefix)} bytes")
    (length,) = _LENGTH.unpack(prefix)
    if not 0 < length <= _MAX_JSON_BYTES:
        raise ValueError(f"its first 8 bytes tell of a header of {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise ValueError(f"it ends within its header of {length} bytes")
    try:
        table = json.loads(text)
        metadata = dict(table.pop("__metadata__", {}))
        tensors = {name: TensorPlace(t["dtype"], tuple(t["shape"]), *t["data_offsets"]) for name, t in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header is not one ({type(error).__name__}: {error})") from error
    return Header(tensors, metadata, _LENGTH.size + length)
