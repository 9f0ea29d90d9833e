"""Segments of one stream at the end that sends them: what is queued, written to a link, and not acknowledged yet.

Keeps every segment's buffers until they are acknowledged. Knows credit and the running digest; not phases, not links
beyond a number. Owned by SendStream (outgoing.py), and by ReceiveStream for a pushed prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from common.errors import BadMessage, LocalProtocolError
from common.wire.codec import Encoded
from common.wire.digest import extend
from common.wire.messages import MAX_SEGMENTS, Piece


@dataclass(slots=True)
class OutSegment:
    """A segment until it is acknowledged. `flying`: offset of a piece -> number of the link it was written to."""

    head: Piece
    parts: tuple[memoryview, ...]
    flying: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutPiece:
    """One frame to be written now."""

    stream_id: int
    segment: OutSegment
    message: Piece
    num_bytes: int

    def payload(self) -> tuple[memoryview, ...]:
        """The frame's bytes as slices of the segment's parts; nothing is copied."""
        return slice_parts(self.segment.parts, self.message.offset, self.num_bytes)


def slice_parts(parts: tuple[memoryview, ...], offset: int, num_bytes: int) -> tuple[memoryview, ...]:
    """Bytes [offset, offset + num_bytes) of the concatenation of parts, as views."""
    out: list[memoryview] = []
    for part in parts:
        if num_bytes <= 0:
            break
        if offset < len(part):
            out.append(part[offset : offset + num_bytes])
            num_bytes -= len(out[-1])
        offset = max(0, offset - len(part))
    return tuple(out)


class Departures:
    """What one end sends of a stream.

    Attributes:
        limit: encoded bytes that may be sent, an absolute offset.
        digest: the running digest over the `next_no` segments queued so far, of `next_at` encoded bytes.
        staged_bytes: raw bytes queued or sent and not acknowledged.
        acked_bytes, acked_raw_bytes: of segments that are in place at the other end, encoded and raw.
    """

    def __init__(self, stream_id: int, digest: bytes) -> None:
        self.stream_id, self.digest = stream_id, digest
        self.limit = self.next_no = self.next_at = self.staged_bytes = 0
        self.acked_bytes = self.acked_raw_bytes = 0
        self.segments: dict[int, OutSegment] = {}
        self._pending: deque[tuple[int, int]] = deque()

    def add(
        self, rows: tuple[int, int], layers: tuple[int, ...], raw_bytes: int, encoded: Encoded, piece_bytes: int
    ) -> OutSegment:
        """Queue an encoded segment; its number is the order of these calls."""
        if self.next_no >= MAX_SEGMENTS:
            raise LocalProtocolError(f"stream {self.stream_id}: more than {MAX_SEGMENTS} segments")
        head = Piece(
            no=self.next_no,
            start=rows[0],
            stop=rows[1],
            layers=layers,
            codec=encoded.codec,
            raw=raw_bytes,
            encoded=encoded.num_bytes,
            at=self.next_at,
            digest=encoded.digest,
            piece=piece_bytes,
            offset=0,
        )
        segment = self.segments[head.no] = OutSegment(head, encoded.parts)
        self._pending.extend((head.no, offset) for offset in _offsets(head))
        self.digest = extend(self.digest, head)
        self.next_no, self.next_at = self.next_no + 1, self.next_at + encoded.num_bytes
        self.staged_bytes += raw_bytes
        return segment

    @property
    def num_waiting(self) -> int:
        """Pieces that no link has taken."""
        return len(self._pending)

    @property
    def waits_for_turn(self) -> bool:
        """It could send, and all segments that it sent whole are acknowledged: others go first."""
        waiting = {no: self.segments[no].head for no, _ in self._pending if no in self.segments}
        first = next(iter(waiting.values()), None)
        if first is None or first.at + first.encoded > self.limit:
            return False
        return not any(segment.flying for no, segment in self.segments.items() if no not in waiting)

    def next_piece(self, link: int) -> OutPiece | None:
        """The next piece, if credit covers its whole segment; it counts as written to that link."""
        while self._pending:
            no, offset = self._pending[0]
            segment = self.segments.get(no)
            if segment is None:
                self._pending.popleft()
                continue
            head = segment.head
            if head.at + head.encoded > self.limit:
                return None
            num_bytes = min(head.piece, head.encoded - offset)
            self._pending.popleft()
            segment.flying[offset] = link
            return OutPiece(self.stream_id, segment, replace(head, offset=offset), num_bytes)
        return None

    def acked(self, segments: Iterable[int], name: str) -> list[OutSegment]:
        """Free what is in place; answers the segments that were. Raises BadMessage."""
        numbers = list(segments)
        if any(no >= self.next_no for no in numbers):
            raise BadMessage(f"{name} of stream {self.stream_id} names more than the {self.next_no} sent")
        freed = [s for no in numbers if (s := self.segments.pop(no, None)) is not None]
        raw_bytes = sum(s.head.raw for s in freed)
        self.staged_bytes -= raw_bytes
        self.acked_raw_bytes += raw_bytes
        self.acked_bytes += sum(s.head.encoded for s in freed)
        return freed

    def grant(self, limit: int) -> None:
        """The other end allows more; it never allows less."""
        self.limit = max(self.limit, limit)

    def link_lost(self, link: int) -> None:
        """What was written to that link and is not acknowledged goes to the front of the queue."""
        lost = [(no, at) for no, s in self.segments.items() for at, where in s.flying.items() if where == link]
        for no, offset in sorted(lost, reverse=True):
            del self.segments[no].flying[offset]
            self._pending.appendleft((no, offset))

    def requeue(self) -> None:
        """Nothing that was written and is not acknowledged counts: all links were lost."""
        self._pending.clear()
        for no in sorted(self.segments):
            self.segments[no].flying.clear()
            self._pending.extend((no, offset) for offset in _offsets(self.segments[no].head))

    def drop(self) -> None:
        """Nothing is sent any more."""
        self.segments.clear()
        self._pending.clear()
        self.staged_bytes = 0


def _offsets(head: Piece) -> range:
    return range(0, max(1, head.encoded), head.piece)
