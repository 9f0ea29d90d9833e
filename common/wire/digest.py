"""Digests: XXH3-128 of a segment's encoded bytes, BLAKE2b chain over segment headers, hash of a request's tokens.

Pure functions; the large ones release the GIL. See docs/protocol.md section 6.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import xxhash

from common.wire.messages import Piece

FIRST = bytes(16)
_HEAD = struct.Struct(">IIIQQ16sI")


def segment_digest(parts: Iterable[bytes | memoryview]) -> bytes:
    """16 bytes over the concatenation of the parts."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def extend(digest: bytes, segment: Piece) -> bytes:
    """The running digest after one more segment (given by the header of any of its pieces)."""
    head = _HEAD.pack(
        segment.no,
        segment.start,
        segment.stop,
        segment.raw,
        segment.encoded,
        segment.digest,
        len(segment.layers),
    )
    layers = struct.pack(f">{len(segment.layers)}I", *segment.layers)
    return hashlib.blake2b(digest + head + layers, digest_size=16).digest()


def token_hash(payload: bytes | bytearray | memoryview) -> bytes:
    """16 bytes that bind a handle to the tokens of its Prefill (the payload's bytes)."""
    return hashlib.blake2b(payload, digest_size=16).digest()
