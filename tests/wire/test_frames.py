"""The fixed header byte by byte, and the scatter target."""

from __future__ import annotations

import pytest

from common.errors import BadMagic, BadMessage, ChecksumMismatch, UnknownFrame, VersionMismatch
from common.wire.frames import NOWHERE, FrameHead, FrameType, Target, check_header, checksum, pack_head, parse_head

PIECE = FrameHead(FrameType.PIECE, 0x01020304, 0x0506, 0x0708090A, 0x0B0C0D0E)
PIECE_BYTES = bytes.fromhex("5046 06 15 0000 0506 01020304 0708090a 0b0c0d0e 6e7033d8")


def test_head_bytes():
    assert pack_head(PIECE) == PIECE_BYTES
    assert parse_head(PIECE_BYTES) == PIECE


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [(0, 0x47, BadMagic), (1, 0, BadMagic), (2, 1, VersionMismatch), (3, 99, UnknownFrame), (3, 35, UnknownFrame),
     (4, 1, BadMessage), (5, 1, BadMessage)],
)  # fmt: skip
def test_head_refuses(at, value, error):
    data = bytearray(PIECE_BYTES)
    data[at] = value
    data[20:] = checksum(data[:20]).to_bytes(4, "big")
    with pytest.raises(error):
        parse_head(data)


@pytest.mark.parametrize("bit", range(8 * len(PIECE_BYTES)))
def test_no_flipped_bit_is_believed(bit):
    data = bytearray(PIECE_BYTES)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadMagic if bit < 16 else VersionMismatch if bit < 24 else ChecksumMismatch):
        parse_head(data)


def test_header_has_a_checksum_of_its_own():
    head = FrameHead(FrameType.PING, 0, 5, 0, checksum(b"hello"))
    check_header(head, b"hello")
    with pytest.raises(ChecksumMismatch, match="PING"):
        check_header(head, b"hallo")


def test_target_scatters_over_views_and_is_idempotent():
    memory = [bytearray(3), bytearray(0), bytearray(5)]
    target = Target([memoryview(m) for m in memory], 7)
    for i in range(7):
        first, again = target.get_buffer(), target.get_buffer()
        assert len(first) == len(again) > 0
        first[0] = i + 1
        target.advance(1)
    assert target.num_left == 0
    assert [bytes(m) for m in memory] == [b"\1\2\3", b"", b"\4\5\6\7\0"]


def test_discarded_target_writes_nowhere():
    memory = bytearray(8)
    target = Target([memoryview(memory)], 8)
    target.get_buffer()[:2] = b"ab"
    target.advance(2)
    target.discard()
    while target.num_left:
        buffer = target.get_buffer()
        buffer[:] = b"x" * len(buffer)
        target.advance(len(buffer))
    assert bytes(memory) == b"ab" + bytes(6)


def test_discarded_target_larger_than_the_scratch():
    target = Target([], 3 * len(NOWHERE))
    target.discard()
    reads = 0
    while target.num_left:
        target.advance(len(target.get_buffer()))
        reads += 1
    assert reads == 3


@pytest.mark.parametrize(("data", "says"), [(b"\x16\x03\x01", "they are TLS"), (b"GET", "bytes 4745")])
def test_what_else_may_speak_is_named(data, says):
    with pytest.raises(BadMagic, match=says):
        parse_head(data.ljust(24, b"\0"))
