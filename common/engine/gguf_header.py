"""Where the tensors of a GGUF file lie, read before anything else of it is used.

    | GGUF | version u32 | tensors u64 | pairs u64 | key, type, value ... | name, dims, type, offset ... | pad | data |

The readers of the format answer a file that is cut short with whatever their arrays complain about; this names the
tensor and the byte. Sizes of block types come from the package gguf. Called by gguf_source.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from common.errors import StartupError

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY, UINT32 = 8, 9, 4
# Of the value types 0 to 12, but strings and arrays.
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its name in the file and where its bytes end."""

    name: str
    stop: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The architecture as the file names it ("" if it does not), and its tensors in the order of the file."""

    architecture: str
    tensors: tuple[GgufTensor, ...]


class _CutShort(ValueError):
    """The file ends inside its header."""


class _Header:
    """Reads forward through the file; little-endian, as all published files are."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view, self.at, self.alignment, self.architecture = view, 4, DEFAULT_ALIGNMENT, ""

    def number(self, kind: str) -> int:
        """The next number, as struct spells its type."""
        size = struct.calcsize(kind)
        return int(struct.unpack("<" + kind, self.take(size))[0])

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self._view) - self.at:
            raise _CutShort
        self.at += size
        return self._view[self.at - size : self.at]

    def text(self) -> str:
        """The next string."""
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def pair(self) -> None:
        """Pass over a key and its value."""
        key, kind = self.text(), self.number("I")
        if key == "general.alignment" and kind == UINT32:
            self.alignment = self.number("I")
            if self.alignment < 1 or self.alignment & (self.alignment - 1):
                raise ValueError(f"general.alignment is {self.alignment}, which is not a power of two")
        elif key == "general.architecture" and kind == STRING:
            self.architecture = self.text()
        else:
            self._value(key, kind)

    def _value(self, key: str, kind: int) -> None:
        if kind == STRING:
            self.take(self.number("Q"))
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALAR_BYTES:
                self.take(count * SCALAR_BYTES[inner])
            elif inner == STRING:
                for _ in range(count):  # ends with the file, whatever is declared
                    self.take(self.number("Q"))
            else:
                raise ValueError(f"{key!r} is an array of the unknown type {inner}")
        elif kind in SCALAR_BYTES:
            self.take(SCALAR_BYTES[kind])
        else:
            raise ValueError(f"{key!r} has the unknown type {kind}")

    def tensor(self) -> tuple[str, int, int]:
        """Name, offset and size in bytes of the next tensor."""
        name, num_dims = self.text(), self.number("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions, at most {MAX_DIMS} are known")
        dims = [self.number("Q") for _ in range(num_dims)]
        return name, _num_bytes(name, prod(dims), self.number("I")), self.number("Q")


def read_header(path: Path) -> GgufHeader:
    """Raises StartupError when it is not whole or makes no sense."""
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = len(view)
    try:
        header = _parse(view)
    except _CutShort:
        raise StartupError(f"{path} is not whole: {size} bytes, and its header does not end in them.") from None
    except ValueError as error:
        raise StartupError(f"{path} is not a GGUF file that can be read: {error}.") from error
    last = max(header.tensors, key=lambda t: t.stop, default=GgufTensor("", 0))
    if last.stop > size:
        raise StartupError(f"{path} is not whole: {size} bytes, tensor {last.name!r} ends at {last.stop}.")
    return header


def _parse(view: mmap.mmap) -> GgufHeader:
    header = _Header(view)
    if (version := header.number("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}, known are {', '.join(map(str, VERSIONS))} (little-endian)")
    num_tensors, num_pairs = header.number("Q"), header.number("Q")
    for _ in range(num_pairs):
        header.pair()
    found = [header.tensor() for _ in range(num_tensors)]
    start = -(-header.at // header.alignment) * header.alignment
    tensors = (GgufTensor(name, start + offset + num_bytes) for name, num_bytes, offset in found)
    return GgufHeader(header.architecture, tuple(tensors))


def _num_bytes(name: str, elements: int, kind: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"tensor {name!r} has the unknown block type {kind}") from None
    return elements // block * block_bytes
