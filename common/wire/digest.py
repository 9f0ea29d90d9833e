"""Digests: XXH3-128 of a segment's encoded bytes, BLAKE2b chain over segment headers, hash of what is asked for.

The chain begins with the hash of the request, so that a state is never taken for that of another prompt.

Pure functions; the large ones release the GIL. See docs/protocol.md section 6.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import replace

import xxhash

from common.wire.messages import Piece, Prefill

_HEAD = struct.Struct(">IIIQQ16sI")
_REQUEST = struct.Struct(">IIh?I?d?d")


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
    return hashlib.blake2b(digest + head + layers + _sized(segment.codec.encode()), digest_size=16).digest()


def token_hash(prefill: Prefill, payload: bytes | bytearray | memoryview) -> bytes:
    """16 bytes over the tokens and every other field of a Prefill but `limit`, which changes when it is repeated."""
    asked = (prefill.start, prefill.num_tokens, prefill.priority, prefill.pushes, prefill.held)
    times = (prefill.deadline_s, prefill.due_s)
    facts = (*asked, *(part for time_s in times for part in (time_s is not None, time_s or 0.0)))
    texts = (prefill.request_id.encode(), prefill.salt, *(c.encode() for c in prefill.codecs))
    state = hashlib.blake2b(_REQUEST.pack(*facts), digest_size=16)
    state.update(len(texts).to_bytes(2, "big") + b"".join(map(_sized, texts)))
    state.update(payload)
    return state.digest()


def push_digest(token_hash: bytes) -> bytes:
    """Where the running digest of a pushed prefix begins."""
    return hashlib.blake2b(token_hash + b"push", digest_size=16).digest()


def seal(prefill: Prefill, payload: bytes | bytearray | memoryview) -> Prefill:
    """The Prefill with its `token_hash`."""
    return replace(prefill, token_hash=token_hash(prefill, payload))


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data
