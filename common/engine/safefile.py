"""The header of a safetensors file, checked before a byte of it is used.

    +----------------+----------------------+------------------------------+
    | 8 bytes length | JSON header          | tensor bytes, nothing between |
    +----------------+----------------------+------------------------------+

Knows neither torch nor what the tensors mean. Called by the manifest (digests) and the importer (validation).
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from common.errors import StartupError

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: name, dtype as safetensors spells it, shape, and its byte range [start, stop) in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SafeFile:
    """A validated header and a read-only map of the whole file."""

    path: Path
    tensors: tuple[TensorEntry, ...]
    _view: memoryview

    @classmethod
    def open(cls, path: Path) -> SafeFile:
        """Map a file and check its header. Raises StartupError naming the file and what is wrong."""
        try:
            with path.open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StartupError(f"{path} cannot be read: {error}.") from error
        try:
            return cls(path, _parse_header(view), view)
        except (KeyError, TypeError, ValueError) as error:
            raise StartupError(f"{path} is not a whole safetensors file: {error}.") from error

    def data(self, tensor: TensorEntry) -> memoryview:
        """The tensor's bytes, in place."""
        return self._view[tensor.start : tensor.stop]


def _parse_header(view: memoryview) -> tuple[TensorEntry, ...]:
    if len(view) < 8:
        raise ValueError(f"it has only {len(view)} bytes")
    header_bytes = int.from_bytes(view[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError(f"it declares a header of {header_bytes} bytes and has {len(view)}")
    header = json.loads(bytes(view[8 : 8 + header_bytes]))
    base = 8 + header_bytes
    entries = [_parse_tensor(n, v, base) for n, v in header.items() if n != "__metadata__"]
    expected = base
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != expected:
            raise ValueError(f"tensor {entry.name!r} begins at byte {entry.start} instead of {expected}")
        expected = entry.stop
    if expected != len(view):
        raise ValueError(f"its tensors end at byte {expected} but the file has {len(view)}")
    return tuple(sorted(entries, key=lambda e: e.name))


def _parse_tensor(name: str, value: dict[str, Any], base: int) -> TensorEntry:
    dtype, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if any(not isinstance(n, int) or n < 0 for n in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has a shape or offset that is not a natural number")
    if (stop - start) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise ValueError(f"tensor {name!r} of shape {list(shape)} and dtype {dtype} cannot have {stop - start} bytes")
    return TensorEntry(name, dtype, shape, base + start, base + stop)
