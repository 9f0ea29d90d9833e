"""One stream at the client without I/O: checks every piece before memory is touched, knows where its bytes go.

Pieces come over any link in any order, some twice. Knows credit limits and phases (tables.py); not decoding, not links
beyond a number. Owned by ClientSession.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from common.errors import BadMessage, LocalProtocolError, PdError, PeerError, TransferIncomplete, UnknownFrame
from common.layout import StateLayout
from common.wire.coverage import Coverage
from common.wire.digest import extend, seal
from common.wire.frames import MIN_PIECE_BYTES, FrameType, Target
from common.wire.messages import Accepted, Complete, Error, Message, Piece, Prefill, Progress, Refused, Resume, Started
from common.wire.tables import CLIENT_ATTACH, CLIENT_STREAM, FINAL, Attach, Do, Input, Phase, step

SinkBuffers = Callable[[int, int, tuple[int, ...]], tuple[memoryview, ...]]
_MAX_LANDED = 2048


@dataclass(slots=True)
class InSegment:
    """A segment while it arrives. `views` hold its encoded bytes: the sink's own memory for raw, staging else, and
    over sealed links the opened pieces, none of which is in the sink's memory before all were verified (`is_apart`).
    """

    head: Piece
    views: list[memoryview]
    have: bytearray
    num_left: int
    is_apart: bool = False
    flying: dict[int, Target] = field(default_factory=dict)
    is_landed: bool = False


@dataclass(frozen=True, slots=True)
class PieceContext:
    """What a Target of ours is for."""

    stream: ReceiveStream
    segment: InSegment
    index: int
    link: int


@dataclass(slots=True)
class Marks:
    """Local instants and the peer's durations of one stream; 0.0 = not yet."""

    requested_at: float = 0.0
    accepted_at: float = 0.0
    first_chunk_at: float = 0.0
    first_byte_at: float = 0.0
    prefill_ended_at: float = 0.0
    last_byte_at: float = 0.0
    verified_at: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one stream may not pass, from the negotiation. `is_sealed`: its pieces come sealed, each to be opened."""

    max_piece_bytes: int
    max_segment_bytes: int
    is_sealed: bool = False


class ReceiveStream:
    """What the client holds of one stream."""

    def __init__(
        self,
        stream_id: int,
        prefill: Prefill,
        tokens: bytes,
        layout: StateLayout,
        limits: StreamLimits,
        sink_buffers: SinkBuffers,
    ) -> None:
        self.stream_id, self.prefill, self.tokens, self.layout = stream_id, prefill, tokens, layout
        self.limits, self.sink_buffers = limits, sink_buffers
        self.limit = prefill.limit
        self.phase, self.attach = Phase.IDLE, Attach.ATTACHED
        self.marks = Marks()
        self.error: PdError | None = None
        self._handle = b""
        self._deadline_s = prefill.deadline_s
        self._complete: Complete | None = None
        self._reset()

    def _reset(self) -> None:
        """Nothing of this request has arrived (any more)."""
        self.num_computed, self.num_queued = self.prefill.start, 0
        self.wire_bytes = self.raw_bytes = self.landed_bytes = self.num_landed = 0
        self.codecs_used: set[str] = set()
        self.verified_count = 0
        self._coverage = Coverage(self.layout, self.prefill.start, self.prefill.num_tokens)
        self._segments: dict[int, InSegment] = {}
        self._whole: list[InSegment] = []
        self._claimed_bytes = 0
        first = self.prefill.token_hash
        self._chain = [first]
        self._last_progress = Progress(self.prefill.start, 0, first)
        self._unverified: deque[Progress] = deque()

    @property
    def is_over(self) -> bool:
        """True in a final phase."""
        return self.phase in FINAL

    # ---- pieces

    def open_piece(self, piece: Piece, num_bytes: int, link: int) -> Target:
        """Check a Piece header against everything known and say where its payload goes.

        Raises:
            BadMessage: any field that lies; nothing was reserved for it.
        """
        self._step(FrameType.PIECE)
        # IDLE: of the links that went with the control link, and were not closed yet.
        if self.is_over or self.phase is Phase.IDLE or self.attach is Attach.DETACHED:
            return discarding(num_bytes)
        segment = self._segments.get(piece.no)
        head = replace(piece, offset=0)
        if segment is not None and segment.head != head:
            raise BadMessage(f"PIECE of segment {piece.no} differs from the segment's earlier pieces")
        if segment is None:
            self._check_head(head)
        index = _check_cut(piece, num_bytes)
        if segment is None:
            segment = self._reserve(head)
        if segment.have[index]:
            return discarding(num_bytes)
        if (earlier := segment.flying.get(index)) is not None:
            earlier.discard()
        views = [] if segment.is_apart else _slices(segment.views, piece.offset, num_bytes)
        target = segment.flying[index] = Target(views, num_bytes, PieceContext(self, segment, index, link))
        return target

    def piece_arrived(self, target: Target, now: float, opened: memoryview | None = None) -> None:
        """A target is full; when that was the last of its segment's pieces, `take_whole` gives the segment.

        `opened` is the piece where it came sealed: it stays where it is until the whole segment is verified.
        """
        context = target.context
        if target.is_discarded or not isinstance(context, PieceContext) or self.is_over:
            return
        segment = context.segment
        if segment.is_apart and target.num_bytes:
            if opened is None or len(opened) != target.num_bytes:
                raise LocalProtocolError(f"a sealed piece of {target.num_bytes} bytes was not opened")
            segment.views[context.index] = opened
        segment.flying.pop(context.index, None)
        segment.have[context.index] = 1
        segment.num_left -= 1
        self.wire_bytes += target.num_bytes
        self.marks.first_byte_at = self.marks.first_byte_at or now
        self.marks.last_byte_at = now
        if not segment.num_left:
            self._whole.append(segment)

    def take_whole(self) -> list[InSegment]:
        """Segments that arrived and wait for verification. None before Accepted: until then the peer may start over."""
        if self.phase is Phase.REQUESTED:
            return []
        whole, self._whole = self._whole, []
        return whole

    def was_landed(self, target: Target, piece: Piece) -> bool:
        """True when a discarded piece belongs to a segment that is in place: its Ack was lost."""
        segment = self._segments.get(piece.no)
        return target.is_discarded and segment is not None and segment.is_landed

    def link_lost(self, link: int | None) -> None:
        """Forget pieces that were arriving on that link (None: on any)."""
        for segment in self._segments.values():
            for index, target in list(segment.flying.items()):
                context = target.context
                if link is None or (isinstance(context, PieceContext) and context.link == link):
                    target.discard()
                    del segment.flying[index]

    def wants(self, segment: InSegment) -> bool:
        """False when the stream ended, or was asked for again, since the segment arrived."""
        return not self.is_over and self._segments.get(segment.head.no) is segment

    def landed(self, segment: InSegment, now: float) -> bool:
        """The segment was verified and is in place; the end may be reached. False when it is of no use any more."""
        if not self.wants(segment):
            return False
        segment.is_landed, segment.views = True, []
        self.num_landed += 1
        self.landed_bytes += segment.head.encoded
        self.raw_bytes += segment.head.raw
        self.codecs_used.add(segment.head.codec)
        while (following := self._segments.get(len(self._chain) - 1)) is not None and following.is_landed:
            self._chain.append(extend(self._chain[-1], following.head))
        self._check_progress()
        self._try_finish(now)
        return True

    # ---- messages

    def receive(self, message: Message, now: float) -> None:
        """A control message of this stream.

        Raises:
            UnknownFrame, BadMessage: not allowed now, or against what was said before.
        """
        was_over = self.is_over
        self._step(message.type)
        if was_over:
            return
        if self.attach is not Attach.ATTACHED and not isinstance(message, Accepted | Refused | Error):
            raise UnknownFrame(f"stream {self.stream_id}: {message.type.name} before the Resume was accepted")
        if isinstance(message, Accepted):
            if message.token_hash != self.prefill.token_hash:
                raise BadMessage(f"ACCEPTED of stream {self.stream_id} is for other tokens than were sent")
            if self.attach is Attach.RESUMING:
                self.attach = CLIENT_ATTACH[self.attach][FrameType.ACCEPTED]
            self._handle, self.num_queued = message.handle, message.num_queued
            self.marks.accepted_at = self.marks.accepted_at or now
        elif isinstance(message, Refused | Error):
            self._close(PeerError.from_wire(message.code, message.message, message.retry_after_s))
        elif isinstance(message, Started):
            self.marks.first_chunk_at = self.marks.first_chunk_at or now
            self.marks.queue_s = message.queue_s
        elif isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, Complete):
            self._on_complete(message, now)

    def _on_progress(self, progress: Progress) -> None:
        last, most = self._last_progress, self.prefill.num_tokens
        if progress == last:
            return
        if not last.num_computed < progress.num_computed <= most:
            raise BadMessage(
                f"PROGRESS.num_computed is {progress.num_computed}, must be {last.num_computed + 1}..{most}"
            )
        if progress.num_segments < last.num_segments:
            raise BadMessage(f"PROGRESS.num_segments fell from {last.num_segments} to {progress.num_segments}")
        self._last_progress = progress
        self._unverified.append(progress)
        self.num_computed = progress.num_computed
        self._check_progress()

    def _on_complete(self, complete: Complete, now: float) -> None:
        if self._complete is not None and complete != self._complete:
            raise BadMessage(f"COMPLETE of stream {self.stream_id} differs from the one before")
        if complete.num_tokens != self.prefill.num_tokens:
            raise BadMessage(f"COMPLETE.num_tokens is {complete.num_tokens}, asked were {self.prefill.num_tokens}")
        if self._complete is None:
            self.marks.prefill_ended_at = now
            self.marks.queue_s, self.marks.prefill_s = complete.queue_s, complete.prefill_s
        self._complete, self.num_computed = complete, complete.num_tokens
        self._try_finish(now)

    # ---- ending

    def request(self, limit: int, now: float) -> Prefill:
        """The message that asks, for the first time or again, with what is left of the deadline."""
        self._step(Do.REQUEST)
        asked_at = self.marks.requested_at = self.marks.requested_at or now
        left_s = None if self._deadline_s is None else max(0.0, self._deadline_s - (now - asked_at))
        self.limit = limit
        self.prefill = seal(replace(self.prefill, limit=limit, deadline_s=left_s), self.tokens)
        self._reset()
        return self.prefill

    def detach(self) -> None:
        """The control link is lost."""
        if self.is_over or self.attach is Attach.DETACHED:
            return
        self.link_lost(None)
        self._step(Do.DETACH)
        if self.phase is Phase.IDLE:
            self._reset()
        else:
            self.attach = CLIENT_ATTACH[self.attach][Do.DETACH]

    def resume(self) -> Resume:
        """The message that continues this stream over a new control link."""
        self._step(Do.RESUME)
        self.attach = CLIENT_ATTACH[self.attach][Do.RESUME]
        landed = sorted(no for no, s in self._segments.items() if s.is_landed)
        pairs: list[int] = []
        for no in landed:
            if pairs and pairs[-1] == no:
                pairs[-1] = no + 1
            elif len(pairs) < _MAX_LANDED:
                pairs += [no, no + 1]
        return Resume(self.prefill.request_id, self._handle, self.prefill.token_hash, tuple(pairs), self.limit)

    def fail(self, error: PdError, given: Do = Do.FAIL) -> None:
        """End the stream for a reason of ours; no byte goes to the sink's memory afterwards."""
        was_over = self.is_over
        self._step(given)
        if not was_over:
            self._close(error)

    def verified_prefix(self) -> int:
        """The largest position at which every layer can continue with verified state."""
        if self.phase is Phase.DONE:
            return self.prefill.num_tokens
        verified = (self._segments[no].head for no in range(self.verified_count))
        return self._coverage.prefix(verified)

    def _close(self, error: PdError | None) -> None:
        self.error = error
        self.link_lost(None)
        for segment in self._segments.values():
            segment.views = []

    def _check_progress(self) -> None:
        while self._unverified and self._unverified[0].num_segments < len(self._chain):
            progress = self._unverified.popleft()
            if self._chain[progress.num_segments] != progress.digest:
                self.fail(TransferIncomplete(f"the digest of the first {progress.num_segments} segments is wrong"))
                return
            self.verified_count = progress.num_segments

    def _try_finish(self, now: float) -> None:
        complete = self._complete
        if complete is None or self.is_over or self.num_landed < complete.num_segments:
            return
        wrong = self._coverage.missing()
        if len(self._segments) != complete.num_segments or len(self._chain) - 1 != complete.num_segments:
            wrong = f"{len(self._segments)} segments were seen, COMPLETE counts {complete.num_segments}"
        elif self.landed_bytes != complete.encoded:
            wrong = f"{self.landed_bytes} bytes arrived, COMPLETE counts {complete.encoded}"
        elif self._chain[-1] != complete.digest:
            wrong = "the running digest is wrong"
        if wrong:
            self.fail(TransferIncomplete(f"the transfer is not whole: {wrong}"))
            return
        self._step(Do.VERIFIED)
        self.marks.verified_at = now
        self._close(None)

    # ---- checks

    def _check_head(self, head: Piece) -> None:
        name = f"PIECE of segment {head.no}"
        raw = self._coverage.check(head)
        if head.raw != raw:
            raise BadMessage(f"{name}: raw is {head.raw}, the layout says {raw}")
        if head.codec not in ("raw", *self.prefill.codecs):
            raise BadMessage(f"{name}: codec {head.codec!r} was not offered in {self.prefill.codecs}")
        if head.encoded > raw or (head.codec == "raw" and head.encoded != raw):
            raise BadMessage(f"{name}: encoded is {head.encoded} of {raw} bytes with codec {head.codec!r}")
        if head.encoded > self.limits.max_segment_bytes:
            raise BadMessage(f"{name}: encoded is {head.encoded}, the limit is {self.limits.max_segment_bytes}")
        if not MIN_PIECE_BYTES <= head.piece <= self.limits.max_piece_bytes:
            raise BadMessage(f"{name}: piece is {head.piece}, must be 4096..{self.limits.max_piece_bytes}")
        if max(head.at, self._claimed_bytes) + head.encoded > self.limit:
            raise BadMessage(
                f"{name}: {head.encoded} bytes at {head.at} (after {self._claimed_bytes}) pass the credit {self.limit}"
            )

    def _reserve(self, head: Piece) -> InSegment:
        num_pieces = max(1, -(-head.encoded // head.piece))
        if self.limits.is_sealed:
            views = [memoryview(b"")] * num_pieces
        elif head.codec == "raw":
            sink = self.sink_buffers(head.start, head.stop, head.layers)
            views = [v if v.format == "B" and v.ndim == 1 else v.cast("B") for v in sink]
        else:
            views = [memoryview(bytearray(head.encoded))]
        if not self.limits.is_sealed and sum(len(v) for v in views) != head.encoded:
            raise LocalProtocolError(f"the sink's buffers for segment {head.no} do not hold {head.encoded} bytes")
        self._coverage.claim(head)
        self._claimed_bytes += head.encoded
        segment = InSegment(head, views, bytearray(num_pieces), num_pieces, self.limits.is_sealed)
        self._segments[head.no] = segment
        return segment

    def _step(self, given: Input) -> None:
        self.phase = step(CLIENT_STREAM, self.phase, given, f"stream {self.stream_id}")


def discarding(num_bytes: int) -> Target:
    """A target that throws the payload away."""
    target = Target([], num_bytes)
    target.discard()
    return target


def _check_cut(piece: Piece, num_bytes: int) -> int:
    """The piece's index. Raises BadMessage when it is not cut where it must be."""
    expected = min(piece.piece, piece.encoded - piece.offset)
    if piece.offset % piece.piece or expected < 0 or (expected == 0 and piece.offset):
        raise BadMessage(f"PIECE of segment {piece.no}: offset {piece.offset} of {piece.encoded} bytes")
    if num_bytes != expected:
        raise BadMessage(f"PIECE of segment {piece.no}: payload of {num_bytes} bytes, must be {expected}")
    return piece.offset // piece.piece


def _slices(views: list[memoryview], offset: int, num_bytes: int) -> list[memoryview]:
    """Bytes [offset, offset + num_bytes) of the views, as views."""
    ends = list(accumulate(len(v) for v in views))
    index, out = bisect_right(ends, offset), []
    while num_bytes:
        begin = offset - (ends[index] - len(views[index]))
        part = views[index][begin : begin + num_bytes]
        out.append(part)
        offset, num_bytes, index = offset + len(part), num_bytes - len(part), index + 1
    return out
