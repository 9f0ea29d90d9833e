"""Segments of one stream at the end that receives them: every piece is checked before memory is touched.

Pieces come over any link in any order, some twice. Knows credit limits, rows and the running digest; not phases, not
decoding, not links beyond a number. Owned by ReceiveStream (incoming.py), and by SendStream for a pushed prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from common.errors import BadMessage, LocalProtocolError
from common.layout import StateLayout
from common.wire.coverage import Coverage
from common.wire.digest import extend
from common.wire.frames import MIN_PIECE_BYTES, Target
from common.wire.messages import Piece

SinkBuffers = Callable[[int, int, tuple[int, ...]], tuple[memoryview, ...]]


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

    arrivals: Arrivals
    segment: InSegment
    index: int
    link: int


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one stream may not pass, from the negotiation. `is_sealed`: its pieces come sealed, each to be opened."""

    max_piece_bytes: int
    max_segment_bytes: int
    is_sealed: bool = False


class Arrivals:
    """What has come of the state of rows [start, stop).

    Attributes:
        limit: encoded bytes that may be sent, an absolute offset.
        wire_bytes: of whole pieces, encoded; raw_bytes and landed_bytes (encoded): of segments in place.
    """

    def __init__(
        self,
        digest: bytes,
        rows: tuple[int, int],
        codecs: tuple[str, ...],
        layout: StateLayout,
        limits: StreamLimits,
        sink_buffers: SinkBuffers,
    ) -> None:
        """`digest` is where the running digest begins; `codecs` are those that were offered."""
        self.layout, self.limits, self.sink_buffers = layout, limits, sink_buffers
        self.codecs, self.limit = codecs, 0
        self.wire_bytes = self.raw_bytes = self.landed_bytes = self.num_landed = 0
        self.codecs_used: Counter[str] = Counter()
        self.segments: dict[int, InSegment] = {}
        self._coverage = Coverage(layout, *rows)
        self._whole: list[InSegment] = []
        self._claimed_bytes = 0
        self._chain = [digest]

    # ---- pieces

    def open_piece(self, piece: Piece, num_bytes: int, link: int) -> Target:
        """Check a Piece header against everything known and say where its payload goes.

        Raises:
            BadMessage: any field that lies; nothing was reserved for it.
        """
        segment = self.segments.get(piece.no)
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

    def piece_arrived(self, target: Target, opened: memoryview | None = None) -> bool:
        """A target is full; when that was the last of its segment's pieces, `take_whole` gives the segment.

        `opened` is the piece where it came sealed: it stays where it is until the whole segment is verified. False
        when it is of no use.
        """
        context = target.context
        if target.is_discarded or not isinstance(context, PieceContext) or context.arrivals is not self:
            return False
        segment = context.segment
        if segment.is_apart and target.num_bytes:
            if opened is None or len(opened) != target.num_bytes:
                raise LocalProtocolError(f"a sealed piece of {target.num_bytes} bytes was not opened")
            segment.views[context.index] = opened
        segment.flying.pop(context.index, None)
        segment.have[context.index] = 1
        segment.num_left -= 1
        self.wire_bytes += target.num_bytes
        if not segment.num_left:
            self._whole.append(segment)
        return True

    def take_whole(self) -> list[InSegment]:
        """Segments that arrived and wait for verification."""
        whole, self._whole = self._whole, []
        return whole

    def was_landed(self, target: Target, piece: Piece) -> bool:
        """True when a discarded piece belongs to a segment that is in place: its acknowledgement was lost."""
        segment = self.segments.get(piece.no)
        return target.is_discarded and segment is not None and segment.is_landed

    def link_lost(self, link: int | None) -> None:
        """Forget pieces that were arriving on that link (None: on any)."""
        for segment in self.segments.values():
            for index, target in list(segment.flying.items()):
                context = target.context
                if link is None or (isinstance(context, PieceContext) and context.link == link):
                    target.discard()
                    del segment.flying[index]

    def has(self, segment: InSegment) -> bool:
        """False when it is of an earlier request."""
        return self.segments.get(segment.head.no) is segment

    def landed(self, segment: InSegment) -> None:
        """The segment was verified and is in place."""
        segment.is_landed, segment.views = True, []
        self.num_landed += 1
        self.landed_bytes += segment.head.encoded
        self.raw_bytes += segment.head.raw
        self.codecs_used[segment.head.codec] += 1
        while (following := self.segments.get(len(self._chain) - 1)) is not None and following.is_landed:
            self._chain.append(extend(self._chain[-1], following.head))

    def close(self) -> None:
        """Nothing more is taken, and no byte goes to the sink's memory."""
        self.link_lost(None)
        for segment in self.segments.values():
            segment.views = []

    # ---- what there is

    @property
    def landed_numbers(self) -> list[int]:
        """Of the segments in place, in order."""
        return sorted(no for no, s in self.segments.items() if s.is_landed)

    def digest(self, num_segments: int) -> bytes | None:
        """The running digest after so many segments; None before all of those landed."""
        return self._chain[num_segments] if num_segments < len(self._chain) else None

    def prefix(self, num_segments: int) -> int:
        """The largest position at which every layer can continue with only the first `num_segments` segments."""
        return self._coverage.prefix(self.segments[no].head for no in range(num_segments))

    def wrong(self, num_segments: int, encoded: int, digest: bytes) -> str:
        """ "" when what landed is all of the state, and what the sender counts; else how it differs."""
        if missing := self._coverage.missing():
            return missing
        if len(self.segments) != num_segments or len(self._chain) - 1 != num_segments:
            return f"{len(self.segments)} segments were seen, the sender counts {num_segments}"
        if self.landed_bytes != encoded:
            return f"{self.landed_bytes} bytes arrived, the sender counts {encoded}"
        return "" if self._chain[-1] == digest else "the running digest is wrong"

    # ---- checks

    def _check_head(self, head: Piece) -> None:
        name = f"PIECE of segment {head.no}"
        raw = self._coverage.check(head)
        if head.raw != raw:
            raise BadMessage(f"{name}: raw is {head.raw}, the layout says {raw}")
        if head.codec not in ("raw", *self.codecs):
            raise BadMessage(f"{name}: codec {head.codec!r} was not offered in {self.codecs}")
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
        self.segments[head.no] = segment
        return segment


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
