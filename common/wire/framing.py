"""How frames become bytes on one link: as they are with checksums, or sealed record by record. No I/O.

A Connection holds one of the two and knows the order of things; docs/protocol.md sections 2 and 5 have the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import BadMessage
from common.wire.buffers import BUFFERS
from common.wire.frames import FrameHead, Target, check_header, pack_head
from common.wire.messages import Message, encode_frame, encode_header
from common.wire.seal import TAG_BYTES, OpenJob, SealJob, SealKey

Part = bytes | memoryview
Out = Part | SealJob
"""What is to be written; a SealJob's bytes are those that its `run` answers."""


@dataclass(frozen=True, slots=True)
class Unopened:
    """A payload as it came over a sealed link. `sealed` is of BUFFERS, and so is what `run` answers."""

    target: Target
    job: OpenJob
    sealed: memoryview

    def run(self) -> memoryview:
        """The clear payload. Raises SealBroken."""
        return self.job.run(self.sealed)


class Framing(Protocol):
    """One link's way. `extra_bytes` is what a header or payload is longer on the link than what it holds."""

    extra_bytes: int

    def has_room(self, num_bytes: int) -> bool:
        """False when a frame with such a payload must not be sent any more, only an Error."""

    def encode(self, message: Message, stream_id: int, payload: tuple[Part, ...], num_bytes: int) -> list[Out]:
        """A frame."""

    def open_header(self, head: FrameHead, data: memoryview) -> memoryview:
        """The msgpack header. Raises RemoteProtocolError when it is not what was sent."""

    def receive_into(self, head: FrameHead, target: Target) -> tuple[Target, Unopened | None]:
        """Where the payload's bytes go, and what comes of them when they are not the payload yet."""


class ClearFraming:
    """Frames as they are."""

    extra_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Always."""
        return True

    def encode(self, message: Message, stream_id: int, payload: tuple[Part, ...], num_bytes: int) -> list[Out]:
        """Header and payload; nothing is copied."""
        return [encode_frame(message, stream_id, num_bytes), *payload]

    def open_header(self, head: FrameHead, data: memoryview) -> memoryview:
        """Compare the checksum."""
        check_header(head, data)
        return data

    def receive_into(self, head: FrameHead, target: Target) -> tuple[Target, Unopened | None]:
        """Straight where they belong."""
        return target, None


class SealedFraming:
    """Frames whose msgpack header and payload are a sealed record each, bound to the fixed header."""

    extra_bytes = TAG_BYTES

    def __init__(self, send_key: SealKey, receive_key: SealKey) -> None:
        self._send_key, self._receive_key = send_key, receive_key

    def has_room(self, num_bytes: int) -> bool:
        """False when the key is nearly used up."""
        return self._send_key.has_room(num_bytes)

    def encode(self, message: Message, stream_id: int, payload: tuple[Part, ...], num_bytes: int) -> list[Out]:
        """Fixed header and sealed header at once, since they are small; the payload as a job."""
        header = encode_header(message)
        # No checksum of the header: it would tell whether a guess of it was right.
        head = pack_head(FrameHead(message.type, stream_id, len(header), num_bytes))
        out: list[Out] = [b"".join((head, self._send_key.seal(head, (header,), len(header)).run()))]
        if num_bytes:
            out.append(self._send_key.seal(head, payload, num_bytes))
        return out

    def open_header(self, head: FrameHead, data: memoryview) -> memoryview:
        """Open the record at once: it is small."""
        if head.header_check:
            raise BadMessage(f"{head.type.name}: header check is {head.header_check} on a sealed link, must be 0")
        return self._receive_key.open(pack_head(head), head.header_bytes).run(data)

    def receive_into(self, head: FrameHead, target: Target) -> tuple[Target, Unopened | None]:
        """Into memory of their own. A payload that nobody wants is thrown away unopened, but its turn passes."""
        if not head.payload_bytes:
            return target, None
        job, num_bytes = self._receive_key.open(pack_head(head), head.payload_bytes), head.payload_bytes + TAG_BYTES
        if target.is_discarded:
            nowhere = Target([], num_bytes)
            nowhere.discard()
            return nowhere, None
        buffer = BUFFERS.take(num_bytes)
        return Target([buffer], num_bytes), Unopened(target, job, buffer)
