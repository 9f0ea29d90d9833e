"""Messages as frozen dataclasses, and their msgpack headers with every field checked. See docs/protocol.md section 3.

Each field carries its check; decoding refuses missing, unknown, mistyped and out-of-range fields. Knows no state
machine: whether a message may come now is the business of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, get_type_hints

import msgpack

from common.errors import BadMessage, FrameTooLarge, LocalProtocolError
from common.wire.fields import (
    Check,
    blob,
    blob_upto,
    duration,
    flag,
    integer,
    list_of,
    map_of,
    maybe_blob,
    maybe_duration,
    number,
    one_of,
    text,
    uint,
)
from common.wire.frames import MAX_HEADER_BYTES, FrameHead, FrameType, checksum, pack_head

_U31, _U62 = 2**31, 2**62
MAX_SEGMENTS = 2**20
MAX_ACKED = 1024
MAX_MEASURE_BYTES = 1 << 30
MAX_RECORDS_BYTES = 16128


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; `type` is the frame type."""

    type: ClassVar[FrameType]


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First frame of each end on each link; says nothing about who it is.

    `keys` on a control link of mode "key": digests of the shared keys, the client's all, then the server's choice.
    """

    type: ClassVar[FrameType] = FrameType.HELLO
    role: Annotated[str, one_of("decode", "prefill")]
    nonce: Annotated[bytes, blob(32)]
    session: Annotated[bytes, blob(16)]
    link: Annotated[int, uint(255)]
    mode: Annotated[str, one_of("none", "key", "tls")]
    keys: Annotated[tuple[bytes, ...], list_of(blob(8), 0, 2)]


@dataclass(frozen=True, slots=True)
class Auth(Message):
    """Proof of the key over both Hellos."""

    type: ClassVar[FrameType] = FrameType.AUTH
    mac: Annotated[bytes, blob(32)]


@dataclass(frozen=True, slots=True)
class HelloAck(Message):
    """Identity, numerics, codecs and limits of one end; only after both macs were right.

    `secret` is this end's half of the session's secret, fresh for every session, and only there within TLS.
    """

    type: ClassVar[FrameType] = FrameType.HELLO_ACK
    name: Annotated[str, text(64)]
    instance: Annotated[str, text(64)]
    weights: Annotated[str, text(128)]
    config: Annotated[str, text(128)]
    tokenizer: Annotated[str, text(128)]
    layout: Annotated[str, text(128)]
    block_tokens: Annotated[int, uint(_U31)]
    hash_scheme: Annotated[str, text(64)]
    numerics: Annotated[dict[str, str], map_of(text(64), 32)]
    codecs: Annotated[tuple[str, ...], list_of(text(16), 0, 8)]
    max_piece_bytes: Annotated[int, integer(4096, _U31)]
    max_segment_bytes: Annotated[int, integer(4096, _U31)]
    max_prompt_tokens: Annotated[int, integer(1, _U31)]
    max_streams: Annotated[int, integer(1, _U31)]
    heartbeat_s: Annotated[float, duration]
    lease_s: Annotated[float, duration]
    secret: Annotated[bytes | None, maybe_blob(32)] = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Are you there."""

    type: ClassVar[FrameType] = FrameType.PING
    no: Annotated[int, uint(2**32 - 1)]


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """I am here: the number of the Ping."""

    type: ClassVar[FrameType] = FrameType.PONG
    no: Annotated[int, uint(2**32 - 1)]


@dataclass(frozen=True, slots=True)
class Error(Message):
    """Stream 0: the sender closes this link. Else: the stream failed."""

    type: ClassVar[FrameType] = FrameType.ERROR
    code: Annotated[str, text(32)]
    message: Annotated[str, text(1024)]
    retry_after_s: Annotated[float | None, maybe_duration]


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """The server takes no new streams, or takes them again."""

    type: ClassVar[FrameType] = FrameType.DRAIN
    is_draining: Annotated[bool, flag]


@dataclass(frozen=True, slots=True)
class Status(Message):
    """The server's load, by name."""

    type: ClassVar[FrameType] = FrameType.STATUS
    facts: Annotated[dict[str, float], map_of(number, 32)]


@dataclass(frozen=True, slots=True)
class Prefill(Message):
    """Compute the state of [start, num_tokens) of the tokens in the payload. `token_hash`: see digest.py.

    `deadline_s`: how long the client waits for it; `due_s`: within how many seconds it would have it, later is late.

    `pushes`: the client sends the state of [held, start), so that it need not be computed; [0, held) is in the server's
    prefix cache, as far as the client knows.
    """

    type: ClassVar[FrameType] = FrameType.PREFILL
    request_id: Annotated[str, text(256)]
    start: Annotated[int, uint(_U31)]
    num_tokens: Annotated[int, uint(_U31)]
    deadline_s: Annotated[float | None, maybe_duration]
    priority: Annotated[int, integer(-1000, 1000)]
    salt: Annotated[bytes, blob_upto(64)]
    codecs: Annotated[tuple[str, ...], list_of(text(16), 1, 8)]
    limit: Annotated[int, uint(_U62)]
    token_hash: Annotated[bytes, blob(16)]
    pushes: Annotated[bool, flag] = False
    held: Annotated[int, uint(_U31)] = 0
    due_s: Annotated[float | None, maybe_duration] = None


@dataclass(frozen=True, slots=True)
class Accepted(Message):
    """The stream is queued, or goes on after Resume; `handle` is for the next Resume, `token_hash` Prefill's."""

    type: ClassVar[FrameType] = FrameType.ACCEPTED
    handle: Annotated[bytes, blob(16)]
    num_queued: Annotated[int, uint(_U31)]
    token_hash: Annotated[bytes, blob(16)]


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """The stream is not taken, or cannot be resumed."""

    type: ClassVar[FrameType] = FrameType.REFUSED
    code: Annotated[str, text(32)]
    message: Annotated[str, text(1024)]
    retry_after_s: Annotated[float | None, maybe_duration]


@dataclass(frozen=True, slots=True)
class Started(Message):
    """The first chunk begins, `queue_s` after Accepted, behind `num_cached` tokens whose state was there or pushed."""

    type: ClassVar[FrameType] = FrameType.STARTED
    queue_s: Annotated[float, duration]
    num_cached: Annotated[int, uint(_U31)]


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """[start, num_computed) is covered by the first `num_segments` segments, whose running digest is `digest`."""

    type: ClassVar[FrameType] = FrameType.PROGRESS
    num_computed: Annotated[int, uint(_U31)]
    num_segments: Annotated[int, uint(MAX_SEGMENTS)]
    digest: Annotated[bytes, blob(16)]


@dataclass(frozen=True, slots=True)
class Piece(Message):
    """A segment's complete header and where in its encoded bytes this frame's payload belongs."""

    type: ClassVar[FrameType] = FrameType.PIECE
    no: Annotated[int, uint(MAX_SEGMENTS - 1)]
    start: Annotated[int, uint(_U31)]
    stop: Annotated[int, uint(_U31)]
    layers: Annotated[tuple[int, ...], list_of(uint(65535), 1, 4096)]
    codec: Annotated[str, text(16)]
    raw: Annotated[int, uint(2**40)]
    encoded: Annotated[int, uint(2**40)]
    at: Annotated[int, uint(_U62)]
    digest: Annotated[bytes, blob(16)]
    piece: Annotated[int, integer(4096, _U31)]
    offset: Annotated[int, uint(2**40)]


@dataclass(frozen=True, slots=True)
class Complete(Message):
    """Everything was sent: count, sum of encoded bytes and running digest of all segments."""

    type: ClassVar[FrameType] = FrameType.COMPLETE
    num_tokens: Annotated[int, uint(_U31)]
    num_segments: Annotated[int, uint(MAX_SEGMENTS)]
    encoded: Annotated[int, uint(_U62)]
    digest: Annotated[bytes, blob(16)]
    queue_s: Annotated[float, duration]
    prefill_s: Annotated[float, duration]


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Segments that were verified and are in place. `is_final`: Complete was verified, the stream is done."""

    type: ClassVar[FrameType] = FrameType.ACK
    segments: Annotated[tuple[int, ...], list_of(uint(MAX_SEGMENTS - 1), 0, MAX_ACKED)]
    limit: Annotated[int, uint(_U62)]
    is_final: Annotated[bool, flag]


@dataclass(frozen=True, slots=True)
class Credit(Message):
    """The server may send encoded bytes below `limit`."""

    type: ClassVar[FrameType] = FrameType.CREDIT
    limit: Annotated[int, uint(_U62)]


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """The client wants no more of this stream."""

    type: ClassVar[FrameType] = FrameType.CANCEL
    code: Annotated[str, text(32)]
    message: Annotated[str, text(1024)]


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """Go on with a stream of a lost control link. `landed`: pairs first, stop of segment numbers in place."""

    type: ClassVar[FrameType] = FrameType.RESUME
    request_id: Annotated[str, text(256)]
    handle: Annotated[bytes, blob(16)]
    token_hash: Annotated[bytes, blob(16)]
    landed: Annotated[tuple[int, ...], list_of(uint(MAX_SEGMENTS), 0, 2048)]
    limit: Annotated[int, uint(_U62)]


@dataclass(frozen=True, slots=True)
class Resumed(Message):
    """Every stream that shall live on was named since the handshake."""

    type: ClassVar[FrameType] = FrameType.RESUMED


@dataclass(frozen=True, slots=True)
class Measure(Message):
    """Send so many bytes of Filler over the data links, as fast as they go; 0: no more of an earlier one."""

    type: ClassVar[FrameType] = FrameType.MEASURE
    no: Annotated[int, uint(_U31)]
    num_bytes: Annotated[int, uint(MAX_MEASURE_BYTES)]


@dataclass(frozen=True, slots=True)
class Filler(Message):
    """A part of what Measure `no` asked for; the payload of `num_bytes` means nothing."""

    type: ClassVar[FrameType] = FrameType.FILLER
    no: Annotated[int, uint(_U31)]
    num_bytes: Annotated[int, uint(_U31)]


@dataclass(frozen=True, slots=True)
class CacheEvent(Message):
    """What the server holds of prefixes (holdings.py); `is_anew`: nothing but what is told from here on."""

    type: ClassVar[FrameType] = FrameType.CACHE_EVENT
    no: Annotated[int, uint(_U31)]
    is_anew: Annotated[bool, flag]
    records: Annotated[bytes, blob_upto(MAX_RECORDS_BYTES)]


@dataclass(frozen=True, slots=True)
class Pushed(Message):
    """All of the prefix was sent: count, sum of encoded bytes and running digest of its segments."""

    type: ClassVar[FrameType] = FrameType.PUSHED
    num_segments: Annotated[int, uint(MAX_SEGMENTS)]
    encoded: Annotated[int, uint(_U62)]
    digest: Annotated[bytes, blob(16)]


@dataclass(frozen=True, slots=True)
class PushAck(Message):
    """Pushed segments that were verified and are in place; encoded bytes below `limit` may be pushed."""

    type: ClassVar[FrameType] = FrameType.PUSH_ACK
    segments: Annotated[tuple[int, ...], list_of(uint(MAX_SEGMENTS - 1), 0, MAX_ACKED)]
    limit: Annotated[int, uint(_U62)]


_CLASSES: dict[FrameType, type[Message]] = {
    c.type: c
    for c in (
        *(Hello, Auth, HelloAck, Ping, Pong, Error, Drain, Status, Prefill, Accepted, Refused, Started, Progress),
        *(Piece, Complete, Ack, Credit, Cancel, Resume, Resumed, Measure, Filler, CacheEvent, Pushed),
        PushAck,
    )
}


def _checks_of(cls: type[Message]) -> dict[str, Check]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if name != "type"}


_CHECKS: dict[type[Message], dict[str, Check]] = {c: _checks_of(c) for c in _CLASSES.values()}
_ON_STREAM_0 = {
    FrameType.HELLO,
    FrameType.AUTH,
    FrameType.HELLO_ACK,
    FrameType.PING,
    FrameType.PONG,
    FrameType.DRAIN,
    FrameType.STATUS,
    FrameType.RESUMED,
    FrameType.MEASURE,
    FrameType.FILLER,
    FrameType.CACHE_EVENT,
}


def encode_frame(message: Message, stream_id: int = 0, payload_bytes: int = 0) -> bytes:
    """Frame header and msgpack header; the payload of `payload_bytes` bytes is sent behind them by the caller.

    Raises:
        FrameTooLarge: the header passes 16 KiB (a bug of the caller's).
    """
    header = encode_header(message)
    return pack_head(FrameHead(message.type, stream_id, len(header), payload_bytes, checksum(header))) + header


def encode_header(message: Message) -> bytes:
    """The msgpack header alone. Raises FrameTooLarge."""
    names = _CHECKS[type(message)]
    header: bytes = msgpack.packb({name: getattr(message, name) for name in names}, use_bin_type=True)
    if len(header) > MAX_HEADER_BYTES:
        raise FrameTooLarge(f"{message.type.name}: header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
    return header


def check_outgoing(message: Message) -> None:
    """What the peer would check anyway: a bug of ours must not cost the whole session.

    Raises:
        LocalProtocolError: names field and value.
    """
    for name, check in _CHECKS[type(message)].items():
        if wrong := check(getattr(message, name)):
            raise LocalProtocolError(f"{message.type.name}.{name} {wrong}, is {getattr(message, name)!r:.100}")


def decode_message(head: FrameHead, data: bytes | bytearray | memoryview) -> Message:
    """The message of a frame's msgpack header.

    Raises:
        BadMessage: not a map, not these fields, or a value that is not allowed; or a stream id that does not fit.
    """
    cls = _CLASSES[head.type]
    name = head.type.name
    if (head.stream_id == 0) != (head.type in _ON_STREAM_0) and head.type is not FrameType.ERROR:
        raise BadMessage(f"{name}: stream id {head.stream_id} is not allowed")
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as e:
        raise BadMessage(f"{name}: the header of {len(data)} bytes is not one msgpack map: {e!r}"[:500]) from None
    checks = _CHECKS[cls]
    if not isinstance(raw, dict) or raw.keys() != checks.keys():
        found = sorted(map(repr, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise BadMessage(f"{name}: fields must be {sorted(checks)}, found {found}"[:500])
    for key, check in checks.items():
        if wrong := check(raw[key]):
            raise BadMessage(f"{name}.{key} {wrong}, found {raw[key]!r:.100}"[:500])
        if isinstance(raw[key], list):
            raw[key] = tuple(raw[key])
    return cls(**raw)
