"""The frame: a fixed 24-byte header, a msgpack header, a raw payload.

 0        2         3      4       6            8            12               16             20           24
 | "PF"   | version | type | flags | header len | stream id  | payload length | header check | head check | header ..

Both checks are CRC-32: of the msgpack header, and of the 20 bytes before it, so that no damaged length is believed.
Knows frame types and lengths, not what messages mean. Used by messages.py and connection.py; see docs/protocol.md.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from common.errors import BadMagic, BadMessage, ChecksumMismatch, UnknownFrame, VersionMismatch

MAGIC = b"PF"
VERSION = 6
FRAME_BYTES = 24
MAX_HEADER_BYTES = 16384
MAX_EARLY_HEADER_BYTES = 512
MIN_PIECE_BYTES = 4096
_FRAME = struct.Struct(">2sBBHHIIII")
_CHECKED_BYTES = FRAME_BYTES - 4
_TLS = (b"\x15\x03", b"\x16\x03")
"""How an alert and a ClientHello begin."""


class FrameType(IntEnum):
    """Numbers on the wire."""

    HELLO = 1
    AUTH = 2
    HELLO_ACK = 3
    PING = 4
    PONG = 5
    ERROR = 6
    DRAIN = 7
    STATUS = 8
    PREFILL = 16
    ACCEPTED = 17
    REFUSED = 18
    STARTED = 19
    PROGRESS = 20
    PIECE = 21
    COMPLETE = 22
    ACK = 23
    CREDIT = 24
    CANCEL = 25
    RESUME = 26
    RESUMED = 27
    MEASURE = 28
    FILLER = 29
    CACHE_EVENT = 32
    PUSHED = 33
    PUSH_ACK = 34


class FrameHead(NamedTuple):
    """The fixed header of one frame. `header_check` is `checksum` of the msgpack header."""

    type: FrameType
    stream_id: int
    header_bytes: int
    payload_bytes: int
    header_check: int = 0


def checksum(data: bytes | bytearray | memoryview) -> int:
    """CRC-32: finds any flipped bit and any burst of up to 32."""
    return zlib.crc32(data)


def pack_head(head: FrameHead) -> bytes:
    """The 24 bytes of a frame's fixed header."""
    fields = (head.type, 0, head.header_bytes, head.stream_id, head.payload_bytes, head.header_check)
    checked = _FRAME.pack(MAGIC, VERSION, *fields, 0)[:_CHECKED_BYTES]
    return checked + checksum(checked).to_bytes(4, "big")


def parse_head(data: bytes | bytearray | memoryview) -> FrameHead:
    """Read the first 24 bytes of a frame.

    Raises:
        BadMagic, VersionMismatch, UnknownFrame, BadMessage: these bytes do not begin a frame of our version.
        ChecksumMismatch: they did when they were sent.
    """
    magic, version, number, flags, header_bytes, stream_id, payload_bytes, header_check, check = _FRAME.unpack(
        memoryview(data)[:FRAME_BYTES]
    )
    if magic != MAGIC:
        why = "; they are TLS, which this end does not speak here: compare security.mode" if magic in _TLS else ""
        raise BadMagic(f"the peer's bytes {bytes(magic).hex()} are not the start of a frame ({MAGIC.hex()}){why}")
    if version != VERSION:
        raise VersionMismatch(f"the peer speaks protocol version {version}, this end version {VERSION}")
    if checksum(memoryview(data)[:_CHECKED_BYTES]) != check:
        raise ChecksumMismatch("a frame's fixed header was damaged on the way: its checksum is wrong")
    try:
        kind = FrameType(number)
    except ValueError:
        raise UnknownFrame(f"frame type {number} is not known in version {VERSION}") from None
    if flags:
        raise BadMessage(f"{kind.name}: flags are {flags}, must be 0")
    return FrameHead(kind, stream_id, header_bytes, payload_bytes, header_check)


def check_header(head: FrameHead, header: bytes | bytearray | memoryview) -> None:
    """Compare the msgpack header with its checksum. Raises ChecksumMismatch."""
    if checksum(header) != head.header_check:
        raise ChecksumMismatch(f"{head.type.name}: the header was damaged on the way: its checksum is wrong")


class Target:
    """Where one payload goes: writable views filled one after another. After `discard()` the rest goes nowhere.

    `context` is the owner's business (which piece of which segment this is).
    """

    __slots__ = ("_at", "_index", "_views", "context", "num_bytes", "num_left")

    def __init__(self, views: list[memoryview], num_bytes: int, context: object = None) -> None:
        self._views: list[memoryview] | None = views
        self._index = self._at = 0
        self.num_bytes = self.num_left = num_bytes
        self.context = context

    @property
    def is_discarded(self) -> bool:
        """True when the bytes are thrown away."""
        return self._views is None

    def discard(self) -> None:
        """Write no further byte to the views."""
        self._views = None

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; idempotent. Only called while `num_left` > 0."""
        if self._views is None:
            return NOWHERE[: self.num_left]
        while len(self._views[self._index]) == self._at:
            self._index, self._at = self._index + 1, 0
        view = self._views[self._index]
        return view[self._at : self._at + self.num_left]

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` were written to the start of get_buffer()."""
        self._at += num_bytes
        self.num_left -= num_bytes


NOWHERE = memoryview(bytearray(1 << 18))
"""Shared by all discarding targets of the process; nobody reads it."""
