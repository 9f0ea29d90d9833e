"""Codecs: bit-exact on everything, never larger, and no lying length is believed."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BadMessage, LocalProtocolError
from common.wire.codec import Codec, TensorRun, segment_shape
from common.wire.digest import segment_digest
from tests.wire.kit import LAYOUT

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


def flat(num_bytes: int, width: int) -> list[TensorRun]:
    """One tensor of a single channel."""
    return [TensorRun(num_bytes // width, 1, DTYPES[width])] if num_bytes else []


def joined(parts) -> bytes:
    return b"".join(bytes(p) for p in parts)


def round_trip(codec: str, buffers, shape):
    c = Codec()
    encoded = c.encode(codec, buffers, shape)
    raw = joined(buffers)
    data = joined(encoded.parts)
    assert encoded.num_bytes == len(data) <= len(raw)
    assert encoded.digest == segment_digest([data])
    if encoded.codec == "raw":
        assert data == raw
        return encoded
    out = [bytearray(b"\xee" * b.nbytes) for b in buffers]
    c.decode("zstd", memoryview(data), [memoryview(o) for o in out], shape)
    assert joined(out) == raw
    return encoded


def smooth(num_bytes: int, seed: int = 0) -> memoryview:
    """Floats as a model makes them: high bytes alike, low bytes noise."""
    values = np.random.default_rng(seed).standard_normal(-(-num_bytes // 4)).astype("<f4")
    return memoryview(values.tobytes())[:num_bytes]


SIZES = [0, 1, 4, 511, 512, 4095, 4096, 65536, (1 << 20) - 4, 1 << 20, (1 << 20) + 4, 5_000_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_bit_exact(codec, width, size):
    size -= size % width
    data = smooth(size)
    encoded = round_trip(codec, (data,), flat(size, width))
    if codec == "zstd" and size > 4096 and width in (2, 4):
        assert encoded.codec == "zstd" and encoded.num_bytes < 0.95 * size


def state_of_channels(num_rows: int, num_channels: int, dtype: str) -> tuple[bytes, list[TensorRun]]:
    """Noise whose size is a channel's own, as keys and values have it."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((num_rows, num_channels)) * np.exp2(rng.integers(-20, 20, num_channels))
    raw = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    data = {"bfloat16": raw, "float32": values.astype("<f4").tobytes(), "float64": values.astype("<f8").tobytes()}
    return data[dtype], [TensorRun(num_rows, num_channels, dtype)]


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.68), ("float32", 0.84), ("float64", 0.97)])
@pytest.mark.parametrize("size", [(256, 192), (1, 70_000), (15, 64), (16, 64), (1000, 1), (7, 300_000), (5000, 200)])
def test_channels_of_different_sizes_cost_nothing(size, dtype, most):
    data, shape = state_of_channels(*size, dtype)
    encoded = round_trip("zstd", (memoryview(data),), shape)
    if size[0] >= 256 and size[1] > 1:
        assert encoded.num_bytes < most * len(data)


def test_every_bit_pattern_of_two_bytes():
    data = np.tile(np.arange(1 << 16, dtype="<u2").reshape(-1, 1), (1, 3)).tobytes()
    encoded = round_trip("zstd", (memoryview(data),), [TensorRun(1 << 16, 3, "bfloat16")])
    assert encoded.codec == "zstd"


def test_noise_stays_raw_and_is_not_copied():
    noise = bytearray(random.Random(0).randbytes(300_000))
    encoded = round_trip("zstd", (memoryview(noise),), flat(len(noise), 4))
    assert encoded.codec == "raw" and encoded.parts[0].obj is noise


def test_zeros_and_infinities_and_nans():
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45] * 5000, "<f4")
    values.view("<u4")[4::12] = 0x7FC01234
    assert round_trip("zstd", (memoryview(values.tobytes()),), flat(values.nbytes, 4)).codec == "zstd"


def test_mixed_dtypes_over_many_buffers():
    layers, start, stop = (0, 1, 2, 3, 4), 10, 200
    shape = segment_shape(LAYOUT, start, stop, layers)
    assert [run.width for run in shape] == [4, 4, 2, 4, 4, 1, 4]
    buffers = [
        smooth((stop - start if spec.is_rows else 1) * t.row_bytes, seed=i)
        for i, (spec, t) in enumerate((LAYOUT.states[n], t) for n in layers for t in LAYOUT.states[n].tensors)
    ]
    assert sum(b.nbytes for b in buffers) == LAYOUT.segment_bytes(start, stop, layers)
    round_trip("zstd", buffers, shape)


def test_buffers_may_be_cut_anywhere_between_elements():
    data = smooth(40_000)
    c = Codec()
    encoded = c.encode("zstd", (data[:4], data[4:1000], data[1000:]), flat(40_000, 4))
    out = bytearray(40_000)
    views = (memoryview(out)[:20_000], memoryview(out)[20_000:])
    c.decode("zstd", memoryview(joined(encoded.parts)), views, flat(40_000, 4))
    assert bytes(out) == bytes(data)


def test_buffers_that_do_not_fit_are_our_bug():
    c = Codec()
    with pytest.raises(LocalProtocolError):
        c.encode("raw", (memoryview(bytes(5)),), flat(4, 4))
    with pytest.raises(LocalProtocolError):
        c.encode("zstd", (memoryview(bytes(3)), memoryview(bytes(5))), flat(8, 4))
    with pytest.raises(LocalProtocolError):
        c.encode("lz4", (memoryview(bytes(4)),), flat(4, 4))
    with pytest.raises(LocalProtocolError):
        c.decode("zstd", memoryview(b""), (memoryview(bytearray(5)),), flat(4, 4))


def test_shaped_and_typed_buffers():
    values = np.arange(6000, dtype="<f4").reshape(30, 20, 10)
    round_trip("zstd", (memoryview(values),), flat(values.nbytes, 4))


def block(raw_len: int, width: int, planes: list[tuple[int, bytes]]) -> bytes:
    head = struct.pack(">IB", raw_len, width)
    head += b"".join(struct.pack(">BI", method, len(data)) for method, data in planes)
    return head + b"".join(data for _, data in planes)


def zstd(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


SHAPE = flat(8, 2)
BAD = {
    "empty": b"",
    "cut header": block(8, 2, [(0, b"abcd"), (0, b"abcd")])[:12],
    "cut plane": block(8, 2, [(0, b"abcd"), (0, b"abcd")])[:-1],
    "bytes behind": block(8, 2, [(0, b"abcd"), (0, b"abcd")]) + b"x",
    "second block": block(8, 2, [(0, b"abcd"), (0, b"abcd")]) * 2,
    "no bytes": block(0, 2, [(0, b""), (0, b"")]),
    "odd": block(7, 2, [(0, b"abc"), (0, b"abc")]),
    "too long": block(10, 2, [(0, b"abcde"), (0, b"abcde")]),
    "huge": block(2**32 - 2, 2, [(0, b""), (0, b"")]),
    "width of another dtype": block(8, 4, [(0, b"ab")] * 4),
    "width 0": struct.pack(">IB", 8, 0) + bytes(20),
    "width 3": block(6, 3, [(0, b"ab")] * 3),
    "stored plane too short": block(8, 2, [(0, b"abc"), (0, b"abcd")]),
    "stored plane too long": block(8, 2, [(0, b"abcde"), (0, b"abcd")]),
    "unknown method": block(8, 2, [(3, b"abcd"), (0, b"abcd")]),
    "turned, another dtype": block(8, 0x80 | 4, [(0, b"ab")] * 4),
    "columns without their number": block(8, 2, [(2, b"\0"), (0, b"abcd")]),
    "no columns": block(8, 2, [(2, b"\0\0" + zstd(b"abcd")), (0, b"abcd")]),
    "columns that do not divide": block(8, 2, [(2, b"\0\3abc" + zstd(b"abcd")), (0, b"abcd")]),
    "more columns than elements": block(8, 2, [(2, b"\0\10abcdefgh" + zstd(b"abcd")), (0, b"abcd")]),
    "references cut": block(8, 2, [(2, b"\0\4abc"), (0, b"abcd")]),
    "nothing behind the references": block(8, 2, [(2, b"\0\2ab"), (0, b"abcd")]),
    "differences of another size": block(8, 2, [(2, b"\0\2ab" + zstd(b"abcde")), (0, b"abcd")]),
    "not zstd": block(8, 2, [(1, b"abcd"), (0, b"abcd")]),
    "frame states another size": block(8, 2, [(1, zstd(b"abcde")), (0, b"abcd")]),
    "frame states no size": block(8, 2, [(1, zstd(b"abcd", write_content_size=False)), (0, b"abcd")]),
    "two frames": block(8, 2, [(1, zstd(b"abcd") * 2), (0, b"abcd")]),
    "cut frame": block(8, 2, [(1, zstd(b"abcd")[:-1]), (0, b"abcd")]),
}


def test_blocks_may_cover_tensors_and_cut_them_but_not_into_crumbs():
    shape = [TensorRun(4, 8, "bfloat16"), TensorRun(4, 4, "float16"), TensorRun(2, 2, "float32")]
    raw = bytes(range(64 + 32 + 16))

    def coded(cuts: list[int], width: int, at: int) -> bytes:
        out = b""
        for size in cuts:
            some = raw[at : at + size]
            out += block(size, width, [(0, some[p::width]) for p in range(width)])
            at += size
        return out

    for cuts in ([96], [64, 32], [2, 94], [70, 26]):
        out = bytearray(len(raw))
        data = coded(cuts, 2, 0) + coded([16], 4, 96)
        Codec().decode("zstd", memoryview(data), (memoryview(out),), shape)
        assert out == raw
    with pytest.raises(BadMessage, match="more than 2 blocks for 2 tensors"):
        Codec().decode("zstd", memoryview(coded([2, 2, 92], 2, 0)), (memoryview(bytearray(112)),), shape)


@pytest.mark.parametrize("name", BAD)
def test_lies_are_typed_errors(name):
    with pytest.raises(BadMessage):
        Codec().decode("zstd", memoryview(BAD[name]), (memoryview(bytearray(8)),), SHAPE)


def test_bomb_reserves_nothing():
    """A frame of 1 GiB of zeros in a plane that must hold 4 bytes."""
    compressor = zstandard.ZstdCompressor().compressobj(size=1 << 30)
    zeros = bytes(1 << 20)
    bomb = b"".join([compressor.compress(zeros) for _ in range(1024)] + [compressor.flush()])
    lie = bytearray(bomb)
    params = zstandard.get_frame_parameters(bomb)
    assert params.content_size == 1 << 30
    size_at = bytes(lie).index(struct.pack("<I", 1 << 30))
    lie[size_at : size_at + 4] = struct.pack("<I", 4)
    for data in (bomb, bytes(lie)):
        tracemalloc.start()
        with pytest.raises(BadMessage):
            Codec().decode(
                "zstd", memoryview(block(8, 2, [(1, data), (0, b"abcd")])), (memoryview(bytearray(8)),), SHAPE
            )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bits_never_raise_anything_else(data):
    raw = smooth(data.draw(st.sampled_from([64, 4096, 20_000])), seed=1)
    shape = flat(len(raw), 4)
    c = Codec()
    good = bytearray(joined(c._lossless.encode((raw,), shape)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] ^= 1 << data.draw(st.integers(0, 7))
    out = bytearray(len(raw))
    with contextlib.suppress(BadMessage):
        c.decode("zstd", memoryview(bytes(good)), (memoryview(out),), shape)
