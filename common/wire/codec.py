"""Segment codecs: `raw`, `zstd` (lossless, byte planes), `q8` and `q4` (quantise.py): buffers to parts and back.

What the bytes are comes from the layout (`segment_shape`). A plane that does not compress is stored; a segment that
does not shrink stays `raw`, so nothing ever grows. Decoding believes no length before it is checked. A Codec belongs to
one thread at a time; numpy, zstd and xxh3 release the GIL. Knows no stream; called by net/ from worker threads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from common.errors import BadMessage, LocalProtocolError
from common.wire.digest import segment_digest
from common.wire.quantise import LOSSY, Quantised, TensorRun, num_groups, num_levels, quantise, restore, segment_shape

__all__ = ["CODECS", "LOSSY", "Codec", "Encoded", "TensorRun", "segment_shape"]
CODECS = ("raw", "zstd", *LOSSY)
MAX_BLOCK_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_BLOCK = struct.Struct(">IB")
_PLANE = struct.Struct(">BI")
_TENSOR = struct.Struct(">BBIBI")
_STORED, _ZSTD = 0, 1
_WORTHWHILE = 0.96

Part = bytes | memoryview
Plane = np.ndarray[Any, np.dtype[np.uint8]]


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


def _element_runs(shape: Sequence[TensorRun]) -> list[tuple[int, int]]:
    """(bytes, element size) of stretches of equal element size, in order."""
    runs: list[tuple[int, int]] = []
    for run in shape:
        if runs and runs[-1][1] == run.width:
            runs[-1] = (runs[-1][0] + run.num_bytes, run.width)
        else:
            runs.append((run.num_bytes, run.width))
    return runs


class Codec:
    """Encoder and decoder with their zstd contexts; not to be used by two threads at once."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, codec: str, buffers: Sequence[memoryview], shape: Sequence[TensorRun]) -> Encoded:
        """Encode a segment's buffers with `codec`, or as `raw` when that is not larger.

        A lossy codec answers `zstd` for what has values that are not finite.

        Raises:
            LocalProtocolError: the buffers do not have the size of the shape, or a codec we do not know.
        """
        raw = tuple(_flat(b) for b in buffers)
        raw_bytes = sum(b.nbytes for b in raw)
        if raw_bytes != sum(run.num_bytes for run in shape):
            raise LocalProtocolError(f"the segment's buffers hold {raw_bytes} bytes, the layout says {list(shape)}")
        if codec not in CODECS:
            raise LocalProtocolError(f"codec {codec!r} is not one of {CODECS}")
        parts: list[memoryview] | None = None
        if codec in LOSSY and (parts := self._tensors(codec, raw, shape)) is None:
            codec = "zstd"
        if codec == "zstd":
            parts = [memoryview(p) for p in self._blocks(raw, shape)]
        if parts is not None and (num_bytes := sum(p.nbytes for p in parts)) < raw_bytes:
            return Encoded(codec, tuple(parts), num_bytes, segment_digest(parts))
        return Encoded("raw", raw, raw_bytes, segment_digest(raw))

    def decode(self, codec: str, encoded: memoryview, out: Sequence[memoryview], shape: Sequence[TensorRun]) -> None:
        """Decode `zstd`, `q8` or `q4` bytes into the writable buffers of the segment.

        Raises:
            BadMessage: the bytes are not what the encoder makes for this shape; `out` may be partly written.
            LocalProtocolError: `out` does not have the size of the shape.
        """
        views = [_flat(b) for b in out]
        if sum(v.nbytes for v in views) != sum(run.num_bytes for run in shape):
            raise LocalProtocolError(f"the sink's buffers hold {sum(v.nbytes for v in views)} bytes, not {list(shape)}")
        cursor, at = _Cursor(views), 0
        if codec in LOSSY:
            for run in shape:
                at = self._decode_tensor(codec, encoded, at, cursor, run)
        else:
            for run_bytes, width in _element_runs(shape):
                at = self._decode_run(encoded, at, cursor, run_bytes, width)
        if at != len(encoded):
            raise BadMessage(f"{codec}: {len(encoded) - at} bytes behind the last block")

    # ---- lossy

    def _tensors(self, codec: str, raw: Sequence[memoryview], shape: Sequence[TensorRun]) -> list[memoryview] | None:
        """Parts of all tensors; None when one has values that are not finite."""
        cursor, parts = _Cursor(raw), []
        for run in shape:
            data = _joined(list(cursor.take(run.num_bytes, run.width)))
            if not run.is_float:
                parts += [memoryview(p) for p in self._blocks([data], [run])]
                continue
            found = quantise(data, run, num_levels(codec, run))
            if found is None:
                return None
            parts += self._tensor(found)
        return parts

    def _tensor(self, found: Quantised) -> list[memoryview]:
        codes: Part = self._compressor.compress(found.codes.data)
        how = _ZSTD
        if len(codes) >= len(found.codes):
            how, codes = _STORED, found.codes.data
        ends = _planes(found.ends, 2 if found.is_half else 4)
        packed = self._compressor.compress(ends)
        how_ends, ends = (_ZSTD, packed) if len(packed) < len(ends) else (_STORED, ends)
        head = _TENSOR.pack(found.is_half, how, len(codes), how_ends, len(ends))
        return [memoryview(head), memoryview(codes), memoryview(ends)]

    def _decode_tensor(self, codec: str, data: memoryview, at: int, cursor: _Cursor, run: TensorRun) -> int:
        """Decode the tensor at `at`; answers the offset behind it."""
        if not run.is_float:
            return self._decode_run(data, at, cursor, run.num_bytes, run.width)
        if len(data) - at < _TENSOR.size:
            raise BadMessage(f"{codec}: the bytes end inside a tensor's header at {at}")
        is_half, how, len_codes, how_ends, len_ends = _TENSOR.unpack_from(data, at)
        at += _TENSOR.size
        if is_half > 1 or len_codes + len_ends > len(data) - at:
            raise BadMessage(f"{codec}: a tensor of {len_codes} + {len_ends} bytes at {at} passes {len(data)}")
        levels, num = num_levels(codec, run), run.num_rows * run.num_channels
        values = self._decode_plane(how, data[at : at + len_codes], num)
        if values.max(initial=0) >= levels:
            raise BadMessage(f"{codec}: a code of {values.max()}, must be below {levels}")
        at += len_codes
        width, num_ends = (2 if is_half else 4), 2 * num_groups(run)
        ends = self._decode_plane(how_ends, data[at : at + len_ends], num_ends * width)
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

    # ---- lossless

    def _blocks(self, raw: Sequence[memoryview], shape: Sequence[TensorRun]) -> Iterator[Part]:
        cursor = _Cursor(raw)
        for run_bytes, width in _element_runs(shape):
            block_bytes = _BLOCK_BYTES // width * width
            for begin in range(0, run_bytes, block_bytes):
                yield from self._block(cursor, min(block_bytes, run_bytes - begin), width)

    def _block(self, cursor: _Cursor, num_bytes: int, width: int) -> list[Part]:
        planes = np.empty((width, num_bytes // width), np.uint8)
        at = 0
        for view in cursor.take(num_bytes, width):
            num = len(view) // width
            _split(view, planes[:, at : at + num], width)
            at += num
        head, body = [_BLOCK.pack(num_bytes, width)], []
        for plane in planes:
            method, part = self._plane(plane.data)
            head.append(_PLANE.pack(method, len(part)))
            body.append(part)
        return [b"".join(head), *body]

    def _plane(self, plane: memoryview) -> tuple[int, Part]:
        if len(plane) > 8 * _SAMPLE_BYTES:
            middle = len(plane) // 2
            sample = self._compressor.compress(plane[middle : middle + _SAMPLE_BYTES])
            if len(sample) > _WORTHWHILE * _SAMPLE_BYTES:
                return _STORED, plane
        packed: bytes = self._compressor.compress(plane)
        return (_ZSTD, packed) if len(packed) < _WORTHWHILE * len(plane) else (_STORED, plane)

    def _decode_run(self, encoded: memoryview, at: int, cursor: _Cursor, run_bytes: int, width: int) -> int:
        """Decode the blocks at `at` that hold so many raw bytes; answers the offset behind them."""
        left = run_bytes
        while left:
            raw_len, at = self._decode_block(encoded, at, cursor, width, left)
            left -= raw_len
        return at

    def _decode_block(self, data: memoryview, at: int, cursor: _Cursor, width: int, most: int) -> tuple[int, int]:
        """Decode the block at `at` of at most `most` raw bytes; answers (raw bytes, offset behind it)."""
        head_bytes = _BLOCK.size + width * _PLANE.size
        if len(data) - at < head_bytes:
            raise BadMessage(f"zstd: the bytes end inside a block header at {at}")
        raw_len, stated = _BLOCK.unpack_from(data, at)
        if stated != width or raw_len % width or not 0 < raw_len <= min(most, MAX_BLOCK_BYTES):
            raise BadMessage(f"zstd: block of {raw_len} bytes, width {stated}; must be 1..{most} of width {width}")
        heads = [_PLANE.unpack_from(data, at + _BLOCK.size + p * _PLANE.size) for p in range(width)]
        at += head_bytes
        planes = []
        for method, length in heads:
            if length > len(data) - at:
                raise BadMessage(f"zstd: a plane of {length} bytes at {at} passes the end at {len(data)}")
            planes.append(self._decode_plane(method, data[at : at + length], raw_len // width))
            at += length
        done = 0
        for view in cursor.take(raw_len, width):
            num = len(view) // width
            _join([plane[done : done + num] for plane in planes], view, width)
            done += num
        return raw_len, at

    def _decode_plane(self, method: int, data: memoryview, num_bytes: int) -> Plane:
        if method == _STORED:
            if len(data) != num_bytes:
                raise BadMessage(f"zstd: a stored plane of {len(data)} bytes, must be {num_bytes}")
            return np.frombuffer(data, np.uint8)
        if method != _ZSTD:
            raise BadMessage(f"zstd: plane method {method} is not known")
        try:
            stated = zstandard.get_frame_parameters(data).content_size
            if stated != num_bytes:
                raise BadMessage(f"zstd: a frame that states {stated} bytes, must be {num_bytes}")
            plain = self._decompressor.decompress(data, max_output_size=num_bytes, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise BadMessage(f"zstd: a plane of {len(data)} bytes is not one frame: {e}") from None
        if len(plain) != num_bytes:
            raise BadMessage(f"zstd: a frame of {len(plain)} bytes, must be {num_bytes}")
        return np.frombuffer(plain, np.uint8)


def place(parts: Sequence[memoryview], out: Sequence[memoryview]) -> None:
    """Copy the bytes of `parts`, one after another, into the writable buffers.

    Raises:
        LocalProtocolError: they do not hold the same number of bytes.
    """
    views = [_flat(b) for b in out]
    if sum(map(len, parts)) != sum(map(len, views)):
        raise LocalProtocolError(f"the sink's buffers hold {sum(map(len, views))} bytes, not {sum(map(len, parts))}")
    cursor = _Cursor(views)
    for part in parts:
        done = 0
        for view in cursor.take(len(part), 1):
            # Not a slice assignment, which would hold the GIL.
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(part[done : done + len(view)], np.uint8))
            done += len(view)


class _Cursor:
    """Walks over buffers as if they were one."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views, self._index, self._at = views, 0, 0

    def take(self, num_bytes: int, width: int) -> Iterator[memoryview]:
        """The next `num_bytes` as slices, each a whole number of elements."""
        while num_bytes:
            view = self._views[self._index]
            if self._at == len(view):
                self._index, self._at = self._index + 1, 0
                continue
            part = view[self._at : self._at + num_bytes]
            if len(part) % width:
                raise LocalProtocolError(f"a buffer of {len(view)} bytes cuts an element of {width} bytes")
            self._at += len(part)
            num_bytes -= len(part)
            yield part


def _split(elements: memoryview, planes: Plane, width: int) -> None:
    """Byte p of every element to planes[p]."""
    if width == 2:
        # Twice as fast as the strided copy, and bf16 is the common case.
        values = np.frombuffer(elements, "<u2")
        np.copyto(planes[0], values, casting="unsafe")
        np.right_shift(values, 8, out=planes[1], casting="unsafe")
    else:
        planes[:] = np.frombuffer(elements, np.uint8).reshape(-1, width).T


def _join(planes: list[Plane], elements: memoryview, width: int) -> None:
    """The inverse of _split, in whole words instead of strided bytes."""
    values = np.frombuffer(elements, f"<u{width}")
    np.copyto(values, planes[-1], casting="unsafe")
    for plane in planes[-2::-1]:
        np.left_shift(values, 8, out=values)
        np.bitwise_or(values, plane, out=values)


def _flat(buffer: memoryview) -> memoryview:
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def _joined(views: list[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


def _planes(data: bytes, width: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()
