"""One stream at the server without I/O: queued segments, pieces to send, acknowledgements, what to repeat on Resume.

Keeps every segment's buffers until they are acknowledged. Knows credit and phases (tables.py); does not know links
beyond a number, nor other streams. Owned by ServerSession.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

from common.errors import BadMessage, LinkLost, LocalProtocolError, PeerError
from common.wire.codec import Encoded
from common.wire.digest import extend
from common.wire.frames import FrameType
from common.wire.messages import (
    MAX_SEGMENTS,
    Accepted,
    Ack,
    Complete,
    Error,
    Message,
    Piece,
    Prefill,
    Progress,
    Refused,
    Resume,
    Started,
    check_outgoing,
)
from common.wire.tables import FINAL, SERVER_ATTACH, SERVER_STREAM, Attach, Do, Input, Phase, step


@dataclass(slots=True)
class OutSegment:
    """A segment until it is acknowledged. `flying`: offset of a piece -> number of the link it was written to."""

    head: Piece
    parts: tuple[memoryview, ...]
    flying: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutPiece:
    """One frame to be written now."""

    stream: SendStream
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


class SendStream:
    """What the server holds of one stream. Messages it wants sent gather in `outbox`."""

    def __init__(self, stream_id: int, prefill: Prefill, tokens: bytearray) -> None:
        self.stream_id, self.prefill, self.tokens = stream_id, prefill, tokens
        self.phase = step(SERVER_STREAM, Phase.IDLE, FrameType.PREFILL, f"stream {stream_id}")
        self.attach = Attach.ATTACHED
        self.handle = b""
        self.error: PeerError | LinkLost | None = None
        self.limit = prefill.limit
        self.digest = prefill.token_hash
        self.next_no = self.next_at = 0
        self.staged_bytes = 0
        self.accepted_at = self.queue_s = 0.0
        self.outbox: list[Message] = []
        self._segments: dict[int, OutSegment] = {}
        self._pending: deque[tuple[int, int]] = deque()
        self._started: Started | None = None
        self._progress: Progress | None = None
        self._complete: Complete | None = None

    @property
    def is_over(self) -> bool:
        """True in a final phase."""
        return self.phase in FINAL

    @property
    def is_attached(self) -> bool:
        """True while the client's control link is up and the stream goes on."""
        return self.attach is Attach.ATTACHED and not self.is_over

    # ---- what the service does

    def accept(self, handle: bytes, num_queued: int, now: float) -> None:
        """The stream is queued."""
        self._step(Do.ACCEPT)
        self.handle, self.accepted_at = handle, now
        self._say(Accepted(handle, num_queued, self.prefill.token_hash))

    def refuse(self, error: PeerError) -> None:
        """The stream is not taken."""
        self._step(Do.REFUSE)
        self.error = error
        self.outbox.append(Refused(error.wire_code, _short(error), _retry_after(error)))

    def start(self, now: float) -> None:
        """The first chunk begins."""
        self._step(Do.START)
        self.queue_s = max(0.0, now - self.accepted_at)
        self._started = Started(self.queue_s)
        self._say(self._started)

    def progress(self, num_computed: int) -> None:
        """The segments queued so far cover [start, num_computed). Nothing new is not said."""
        self._step(Do.PROGRESS)
        if num_computed <= (self._progress.num_computed if self._progress else self.prefill.start):
            return
        self._progress = Progress(num_computed, self.next_no, self.digest)
        self._say(self._progress)

    def add_segment(
        self, rows: tuple[int, int], layers: tuple[int, ...], raw_bytes: int, encoded: Encoded, piece_bytes: int
    ) -> OutSegment:
        """Queue an encoded segment; its number is the order of these calls."""
        self._step(Do.SEGMENT)
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
        segment = self._segments[head.no] = OutSegment(head, encoded.parts)
        self._pending.extend((head.no, offset) for offset in _offsets(head))
        self.digest = extend(self.digest, head)
        self.next_no, self.next_at = self.next_no + 1, self.next_at + encoded.num_bytes
        self.staged_bytes += raw_bytes
        return segment

    def complete(self, num_tokens: int, prefill_s: float, waited_s: float = 0.0) -> None:
        """Everything was queued; `waited_s` of queueing came after the first chunk."""
        self._step(Do.COMPLETE)
        queue_s = self.queue_s + waited_s
        self._complete = Complete(num_tokens, self.next_no, self.next_at, self.digest, queue_s, prefill_s)
        self._say(self._complete)

    def fail(self, error: PeerError) -> None:
        """End the stream with an error for the peer."""
        if not self.is_over:
            self._say(Error(error.wire_code, _short(error), _retry_after(error)))
        self._end(Do.FAIL, error)

    # ---- what the peer does

    def on_ack(self, ack: Ack) -> list[OutSegment]:
        """Free what is in place; answers the segments that were."""
        self._step(Do.FINAL_ACK if ack.is_final else FrameType.ACK)
        if any(no >= self.next_no for no in ack.segments):
            raise BadMessage(f"ACK.segments of stream {self.stream_id} names more than the {self.next_no} sent")
        self.limit = max(self.limit, ack.limit)
        freed = [s for no in ack.segments if (s := self._segments.pop(no, None)) is not None]
        self.staged_bytes -= sum(s.head.raw for s in freed)
        if self.is_over:
            self._drop()
        return freed

    def on_credit(self, limit: int) -> None:
        """The peer allows more."""
        self._step(FrameType.CREDIT)
        self.limit = max(self.limit, limit)

    def on_cancel(self, error: PeerError) -> None:
        """The peer wants no more."""
        self._end(FrameType.CANCEL, error)

    def on_resume(self, resume: Resume, handle: bytes) -> list[OutSegment]:
        """Go on over a new control link: repeat what was said, resend what did not land. Answers what did."""
        self._step(FrameType.RESUME)
        self.attach = SERVER_ATTACH[self.attach][FrameType.RESUME]
        self.handle, self.limit = handle, max(self.limit, resume.limit)
        ranges = list(zip(resume.landed[::2], resume.landed[1::2], strict=False))
        landed = [no for no in self._segments if any(a <= no < b for a, b in ranges)]
        freed = [self._segments.pop(no) for no in landed]
        self.staged_bytes -= sum(s.head.raw for s in freed)
        self._requeue()
        said = (self._started, self._progress, self._complete)
        self.outbox = [Accepted(handle, 0, self.prefill.token_hash), *(m for m in said if m is not None)]
        return freed

    # ---- links

    def next_piece(self, link: int) -> OutPiece | None:
        """The next piece, if credit covers its whole segment; it counts as written to that link."""
        while self._pending and self.is_attached:
            no, offset = self._pending[0]
            segment = self._segments.get(no)
            if segment is None:
                self._pending.popleft()
                continue
            head = segment.head
            if head.at + head.encoded > self.limit:
                return None
            num_bytes = min(head.piece, head.encoded - offset)
            self._pending.popleft()
            segment.flying[offset] = link
            return OutPiece(self, segment, replace(head, offset=offset), num_bytes)
        return None

    def link_lost(self, link: int) -> None:
        """What was written to that link and is not acknowledged goes to the front of the queue."""
        lost = [(no, at) for no, s in self._segments.items() for at, where in s.flying.items() if where == link]
        for no, offset in sorted(lost, reverse=True):
            del self._segments[no].flying[offset]
            self._pending.appendleft((no, offset))

    def detach(self) -> None:
        """The control link is lost."""
        if not self.is_over and self.attach is Attach.ATTACHED:
            self.attach = SERVER_ATTACH[self.attach][Do.DETACH]
            self._step(Do.DETACH)
            self.outbox.clear()
            if self.is_over:
                self._drop()

    def cancel(self, error: PeerError | LinkLost) -> None:
        """End the stream without a word to the peer (it is gone, or does not know it any more)."""
        self._end(Do.CANCEL, error)

    def _say(self, message: Message) -> None:
        check_outgoing(message)
        if self.is_attached:
            self.outbox.append(message)

    def _requeue(self) -> None:
        self._pending.clear()
        for no in sorted(self._segments):
            self._segments[no].flying.clear()
            self._pending.extend((no, offset) for offset in _offsets(self._segments[no].head))

    def _end(self, given: Input, error: PeerError | LinkLost) -> None:
        if not self.is_over:
            self.error = error
        self._step(given)
        self._drop()

    def _drop(self) -> None:
        self._segments.clear()
        self._pending.clear()
        self.staged_bytes = 0

    def _step(self, given: Input) -> None:
        self.phase = step(SERVER_STREAM, self.phase, given, f"stream {self.stream_id}")


def _offsets(head: Piece) -> range:
    return range(0, max(1, head.encoded), head.piece)


def _short(error: PeerError) -> str:
    return str(error).encode()[:1000].decode(errors="ignore")


def _retry_after(error: PeerError) -> float | None:
    after = error.retry_after_s
    return after if after is not None and 0 <= after < inf else None
