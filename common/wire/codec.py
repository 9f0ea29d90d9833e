"""Segment codecs: `raw`, `zstd` (lossless, planes.py), `q8` and `q4` (quantise.py): buffers to parts and back.

What the bytes are comes from the layout (`segment_shape`). A plane that does not compress is stored; a segment that
does not shrink stays `raw`, so nothing ever grows. Decoding believes no length before it is checked. A Codec belongs to
one thread at a time; numpy, zstd and xxh3 release the GIL. Knows no stream; called by net/ from worker threads.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from common.errors import BadMessage, LocalProtocolError
from common.wire.cursor import Cursor, flat, joined
from common.wire.digest import segment_digest
from common.wire.lossy import LOSSY
from common.wire.planes import STORED, ZSTD, Part, Planes
from common.wire.quantise import Quantised, TensorRun, num_groups, num_levels, quantise, restore, segment_shape

__all__ = ["CODECS", "LOSSY", "Codec", "Encoded", "TensorRun", "segment_shape"]
CODECS = ("raw", "zstd", *LOSSY)
_TENSOR = struct.Struct(">BBIBI")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A segment ready to be sent. `parts` refer to the caller's buffers where nothing had to change."""

    codec: str
    parts: tuple[memoryview, ...]
    num_bytes: int
    digest: bytes


def offered(codec: str) -> tuple[str, ...]:
    """What to offer to have `codec`: a lossy one leaves to a lossless one what it cannot round."""
    return (codec, "zstd") if codec in LOSSY else (codec,)


def _by_width(shape: Sequence[TensorRun]) -> Iterator[list[TensorRun]]:
    """Stretches of tensors of one element size, in order: a block may cover several of them."""
    for _, runs in itertools.groupby(shape, key=lambda run: run.width):
        yield list(runs)


class Codec:
    """Encoder and decoder with their zstd contexts; not to be used by two threads at once."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
        self._lossless = Planes()

    def encode(self, codec: str, buffers: Sequence[memoryview], shape: Sequence[TensorRun]) -> Encoded:
        """Encode a segment's buffers with `codec`, or as `raw` when that is not larger.

        A lossy codec answers `zstd` for what has values that are not finite.

        Raises:
            LocalProtocolError: the buffers do not have the size of the shape, or a codec we do not know.
        """
        raw = tuple(flat(b) for b in buffers)
        raw_bytes = sum(b.nbytes for b in raw)
        if raw_bytes != sum(run.num_bytes for run in shape):
            raise LocalProtocolError(f"the segment's buffers hold {raw_bytes} bytes, the layout says {list(shape)}")
        if codec not in CODECS:
            raise LocalProtocolError(f"codec {codec!r} is not one of {CODECS}")
        parts: list[memoryview] | None = None
        if codec in LOSSY and (parts := self._tensors(codec, raw, shape)) is None:
            codec = "zstd"
        if codec == "zstd":
            parts = [memoryview(p) for p in self._lossless.encode(raw, shape)]
        if parts is not None and (num_bytes := sum(p.nbytes for p in parts)) < raw_bytes:
            return Encoded(codec, tuple(parts), num_bytes, segment_digest(parts))
        return Encoded("raw", raw, raw_bytes, segment_digest(raw))

    def decode(self, codec: str, encoded: memoryview, out: Sequence[memoryview], shape: Sequence[TensorRun]) -> None:
        """Decode `zstd`, `q8` or `q4` bytes into the writable buffers of the segment.

        Raises:
            BadMessage: the bytes are not what the encoder makes for this shape; `out` may be partly written.
            LocalProtocolError: `out` does not have the size of the shape.
        """
        views = [flat(b) for b in out]
        if sum(v.nbytes for v in views) != sum(run.num_bytes for run in shape):
            raise LocalProtocolError(f"the sink's buffers hold {sum(v.nbytes for v in views)} bytes, not {list(shape)}")
        cursor, at = Cursor(views), 0
        if codec in LOSSY:
            for run in shape:
                at = self._decode_tensor(codec, encoded, at, cursor, run)
        else:
            for runs in _by_width(shape):
                at = self._lossless.decode(encoded, at, cursor, runs)
        if at != len(encoded):
            raise BadMessage(f"{codec}: {len(encoded) - at} bytes behind the last block")

    # ---- lossy

    def _tensors(self, codec: str, raw: Sequence[memoryview], shape: Sequence[TensorRun]) -> list[memoryview] | None:
        """Parts of all tensors; None when one has values that are not finite."""
        cursor, parts = Cursor(raw), []
        for run in shape:
            data = joined(list(cursor.take(run.num_bytes, run.width)))
            if not run.is_float:
                parts += [memoryview(p) for p in self._lossless.encode([data], [run])]
                continue
            found = quantise(data, run, num_levels(codec, run))
            if found is None:
                return None
            parts += self._tensor(found)
        return parts

    def _tensor(self, found: Quantised) -> list[memoryview]:
        codes: Part = self._compressor.compress(found.codes.data)
        how = ZSTD
        if len(codes) >= len(found.codes):
            how, codes = STORED, found.codes.data
        ends = _planes(found.ends, 2 if found.is_half else 4)
        packed = self._compressor.compress(ends)
        how_ends, ends = (ZSTD, packed) if len(packed) < len(ends) else (STORED, ends)
        head = _TENSOR.pack(found.is_half, how, len(codes), how_ends, len(ends))
        return [memoryview(head), memoryview(codes), memoryview(ends)]

    def _decode_tensor(self, codec: str, data: memoryview, at: int, cursor: Cursor, run: TensorRun) -> int:
        """Decode the tensor at `at`; answers the offset behind it."""
        if not run.is_float:
            return self._lossless.decode(data, at, cursor, [run])
        if len(data) - at < _TENSOR.size:
            raise BadMessage(f"{codec}: the bytes end inside a tensor's header at {at}")
        is_half, how, len_codes, how_ends, len_ends = _TENSOR.unpack_from(data, at)
        at += _TENSOR.size
        if is_half > 1 or len_codes + len_ends > len(data) - at:
            raise BadMessage(f"{codec}: a tensor of {len_codes} + {len_ends} bytes at {at} passes {len(data)}")
        levels, num = num_levels(codec, run), run.num_rows * run.num_channels
        values = self._lossless.unpack(how, data[at : at + len_codes], num)
        if values.max(initial=0) >= levels:
            raise BadMessage(f"{codec}: a code of {values.max()}, must be below {levels}")
        at += len_codes
        width, num_ends = (2 if is_half else 4), 2 * num_groups(run)
        ends = self._lossless.unpack(how_ends, data[at : at + len_ends], num_ends * width)
        plain = memoryview(np.ascontiguousarray(ends.reshape(width, num_ends).T).reshape(-1).data)
        views = list(cursor.take(run.num_bytes, run.width))
        target = views[0] if len(views) == 1 else memoryview(bytearray(run.num_bytes))
        restore(values, plain, run, is_half=bool(is_half), out=target)
        done = 0
        for view in views if len(views) > 1 else ():
            view[:] = target[done : done + len(view)]
            done += len(view)
        behind: int = at + len_ends
        return behind


def place(parts: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    """Copy the bytes of `parts`, one after another, into the writable buffers.

    Raises:
        LocalProtocolError: they do not hold the same number of bytes.
    """
    views = [flat(b) for b in out]
    if sum(map(len, parts)) != sum(map(len, views)):
        raise LocalProtocolError(f"the sink's buffers hold {sum(map(len, views))} bytes, not {sum(map(len, parts))}")
    cursor = Cursor(views)
    for part in parts:
        done = 0
        for view in cursor.take(len(part), 1):
            # Not a slice assignment, which would hold the GIL.
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(part[done : done + len(view)], np.uint8))
            done += len(view)


def _planes(data: bytes, width: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()
