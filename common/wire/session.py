"""decoded's streams at one peer process, without I/O; they outlive control links (lease, Resume).

Messages and pieces in, events out; what must be sent on the control link gathers in `take_outbox()`. Knows no socket,
clock, thread or codec. prefilld's end is serving.py; both share Out and the events here. Called by net/pool.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from common.errors import (
    LinkLost,
    PdError,
    PeerCancelled,
    PeerError,
    PeerInvalid,
    PeerShed,
    PromptTooLong,
    RemoteProtocolError,
    TransferIncomplete,
    UnknownFrame,
)
from common.layout import StateLayout
from common.wire.arrivals import InSegment, PieceContext, SinkBuffers, StreamLimits, discarding
from common.wire.credit import CreditPool
from common.wire.departures import OutPiece, OutSegment
from common.wire.frames import Target
from common.wire.incoming import ReceiveStream
from common.wire.messages import (
    Ack,
    Cancel,
    Credit,
    HelloAck,
    Message,
    Piece,
    Prefill,
    Progress,
    PushAck,
    Resumed,
    Started,
    check_outgoing,
)
from common.wire.outgoing import SendStream
from common.wire.tables import Do, Phase


@dataclass(frozen=True, slots=True)
class Out:
    """One message for the control link."""

    stream_id: int
    message: Message
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class SegmentArrived:
    """All pieces are there: verify, decode, then call `segment_landed` or `fail`. At the server: of a pushed prefix."""

    stream: ReceiveStream | SendStream
    segment: InSegment


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream reached a final phase; `stream.error` is None when it is DONE."""

    stream: ReceiveStream | SendStream


@dataclass(frozen=True, slots=True)
class StreamRequested:
    """A client asks; accept, refuse or fail it."""

    stream: SendStream


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """A Prefill that ended before anybody was asked: damaged, or past a limit of the protocol."""

    prefill: Prefill
    error: PeerError


@dataclass(frozen=True, slots=True)
class SegmentAcked:
    """The client has this segment; its buffers are free."""

    stream: SendStream
    segment: OutSegment


@dataclass(frozen=True, slots=True)
class PushMoved:
    """The peer takes the prefix, has more of it, or has begun. At the server: all of it is there."""

    stream: ReceiveStream | SendStream


@dataclass(frozen=True, slots=True)
class StreamResumed:
    """The client is back: the stream goes on."""

    stream: SendStream


Event = SegmentArrived | StreamEnded | StreamRequested | StreamRefused | StreamResumed | SegmentAcked | PushMoved


class Session:
    """What both ends have in common: who the peer is, messages for the control link, events for the caller.

    `credit_bytes`: what may be under way to this end beyond the largest segment of each stream. `is_sealed`: pieces
    come over sealed links.
    """

    streams: Mapping[int, ReceiveStream | SendStream]

    def __init__(self, ours: HelloAck, layout: StateLayout, credit_bytes: int, *, is_sealed: bool = False) -> None:
        self.ours, self.layout, self.is_sealed = ours, layout, is_sealed
        self._credit = CreditPool(credit_bytes, ours.max_segment_bytes)
        self._first: tuple[int, ...] = ()
        self.peer: HelloAck | None = None
        self.is_attached = False
        self.detached_at = 0.0
        self._last_id = 0
        self._outbox: list[Out] = []
        self._events: list[Event] = []

    @property
    def lease_s(self) -> float:
        """How long detached streams live."""
        return min(self.ours.lease_s, self.peer.lease_s if self.peer is not None else self.ours.lease_s)

    @property
    def limits(self) -> StreamLimits:
        """Of every stream: the smaller of both ends' values."""
        ours, peer = self.ours, self.peer or self.ours
        return StreamLimits(
            min(ours.max_piece_bytes, peer.max_piece_bytes),
            min(ours.max_segment_bytes, peer.max_segment_bytes),
            self.is_sealed,
        )

    def next_piece(self, link: int) -> OutPiece | None:
        """The next piece for that link, of the first stream that has one and may send it; None: nobody may.

        Whole states one after the other: sent side by side, all would be there as late as the last one.
        """
        for stream_id in (*self._first, *self.streams):
            stream = self.streams.get(stream_id)
            piece = stream.next_piece(link) if stream is not None else None
            if piece is not None:
                return piece
        return None

    def arrange(self, first: Iterable[int]) -> None:
        """These streams send first, in this order; the others follow as they came."""
        self._first = tuple(first)

    def take_outbox(self) -> list[Out]:
        """Messages for the control link since the last call."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def events(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events


class ClientSession(Session):
    """decoded's streams at one peer process; turns are those of pushed prefixes."""

    def __init__(self, ours: HelloAck, layout: StateLayout, credit_bytes: int, *, is_sealed: bool = False) -> None:
        super().__init__(ours, layout, credit_bytes, is_sealed=is_sealed)
        self.streams: dict[int, ReceiveStream] = {}
        self.num_moves = 0
        """Segments that have landed and words of progress, over all streams: while it grows the peer is at work."""

    # ---- control link

    def attach(self, peer: HelloAck, now: float) -> None:
        """A handshake is done. Streams go on if it is the same process, else they fail at once."""
        if self.peer is not None and self.peer.instance != peer.instance:
            self.fail_all(LinkLost(f"peer {peer.name} was restarted: it is another process now"))
        self.peer, self.is_attached = peer, True
        self._credit.reserve_bytes = self.limits.max_segment_bytes
        for stream in list(self.streams.values()):
            if stream.phase is Phase.IDLE:
                self._credit.close(stream.stream_id)
                self._request(stream, now)
            else:
                self._outbox.append(Out(stream.stream_id, stream.resume()))
        self._outbox.append(Out(0, Resumed()))

    def detach(self, now: float) -> None:
        """The control link is lost."""
        if self.is_attached:
            self.is_attached, self.detached_at = False, now
        self._outbox.clear()
        for stream in self.streams.values():
            stream.detach()

    def expire(self, now: float) -> None:
        """Fail detached streams whose lease is over."""
        if not self.is_attached and self.streams and now >= self.detached_at + self.lease_s:
            self.fail_all(LinkLost(f"the session did not come back within the lease of {self.lease_s:g} s"))

    def fail_all(self, error: PdError) -> None:
        """Every stream ends with this error."""
        for stream in list(self.streams.values()):
            self.fail(stream, error)

    def link_lost(self, link: int) -> None:
        """A data link is lost; its half pieces come again on another."""
        for stream in self.streams.values():
            stream.link_lost(link)

    # ---- streams

    def request(self, prefill: Prefill, tokens: bytes, sink_buffers: SinkBuffers, now: float) -> ReceiveStream:
        """Ask for a prefill; its `limit` and `token_hash` are filled in here.

        Raises:
            LinkLost: there is no control link.
            PromptTooLong: the peer's limit would refuse it.
            PeerShed: the peer's limit of streams is reached.
            PeerInvalid: it knows none of the codecs; those it does not know are left out.
            LocalProtocolError: a field that the protocol does not allow (a request id of more than 256 bytes).
        """
        peer = self.peer
        if peer is None or not self.is_attached:
            raise LinkLost("there is no session with this peer at the moment")
        most = min(peer.max_prompt_tokens, self.ours.max_prompt_tokens)
        if prefill.num_tokens > most:
            raise PromptTooLong(f"{prefill.num_tokens} tokens exceed what peer {peer.name} takes: {most}")
        if len(self.streams) >= peer.max_streams:
            raise PeerShed(f"{len(self.streams)} streams are open at peer {peer.name}, its limit is {peer.max_streams}")
        check_outgoing(prefill)
        codecs = tuple(c for c in prefill.codecs if c in peer.codecs)
        if not codecs:
            raise PeerInvalid(f"peer {peer.name} knows none of the codecs {prefill.codecs}, only {peer.codecs}")
        prefill = replace(prefill, codecs=codecs)
        self._last_id += 1
        stream = ReceiveStream(self._last_id, prefill, tokens, self.layout, self.limits, sink_buffers)
        self.streams[stream.stream_id] = stream
        self._request(stream, now)
        return stream

    def receive(self, stream_id: int, message: Message, now: float) -> None:
        """A control message of a stream. Raises RemoteProtocolError."""
        stream = self._find(stream_id, message)
        if stream is not None:
            with self._lies_end(stream):
                stream.receive(message, now)
            self.num_moves += isinstance(message, Progress)
            if stream.push is not None and isinstance(message, PushAck | Started):
                self._events.append(PushMoved(stream))
            self._arrived(stream)
            self._settle(stream)

    def open_piece(self, link: int, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        """Where a Piece's payload goes. Raises RemoteProtocolError before anything is reserved."""
        stream = self._find(stream_id, piece)
        if stream is None:
            return discarding(num_bytes)
        with self._lies_end(stream):
            return stream.open_piece(piece, num_bytes, link)

    def piece_arrived(
        self, stream_id: int, piece: Piece, target: Target, now: float, opened: memoryview | None = None
    ) -> None:
        """A Piece's payload is complete; `opened` is what it holds, where it came sealed."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if isinstance(target.context, PieceContext) and target.context.arrivals is not stream.arrivals:
            return
        stream.piece_arrived(target, now, opened)
        self._arrived(stream)
        if stream.arrivals.was_landed(target, piece):
            self._say(stream, Ack((piece.no,), stream.arrivals.limit, False))

    def segment_landed(self, stream: ReceiveStream, segment: InSegment, now: float) -> bool:
        """The segment's bytes were verified and are in place: acknowledge. False when nobody wants it any more."""
        if not stream.landed(segment, now):
            return False
        self.num_moves += 1
        stream.arrivals.limit = self._credit.landed(stream.stream_id, segment.head.encoded)
        self._say(stream, Ack((segment.head.no,), stream.arrivals.limit, False))
        self._settle(stream)
        return True

    def push_all(self, stream: ReceiveStream) -> None:
        """All of a stream's prefix was queued."""
        stream.push_all()
        self._settle(stream)

    def fail(self, stream: ReceiveStream, error: PdError) -> None:
        """End a stream for a reason of ours and tell the peer."""
        stream.fail(error)
        self._settle(stream)

    def cancel(self, stream: ReceiveStream) -> None:
        """The request is not wanted any more."""
        stream.fail(PeerCancelled("the request was cancelled at this end"), Do.CANCEL)
        self._settle(stream)

    def _request(self, stream: ReceiveStream, now: float) -> None:
        prefill = stream.request(self._credit.open(stream.stream_id), now)
        self._outbox.append(Out(stream.stream_id, prefill, stream.tokens))

    @contextmanager
    def _lies_end(self, stream: ReceiveStream) -> Iterator[None]:
        """What a stream was told before cannot be trusted either: resending would meet the same contradiction again."""
        try:
            yield
        except RemoteProtocolError as e:
            self.fail(stream, TransferIncomplete(f"the peer contradicted itself: {e}"))
            raise

    def _arrived(self, stream: ReceiveStream) -> None:
        self._events.extend(SegmentArrived(stream, s) for s in stream.take_whole())

    def _find(self, stream_id: int, message: Message) -> ReceiveStream | None:
        if stream_id > self._last_id:
            raise UnknownFrame(f"{message.type.name} for stream {stream_id}, the last one asked for is {self._last_id}")
        return self.streams.get(stream_id)

    def _settle(self, stream: ReceiveStream) -> None:
        """After any input: when the stream is over, tell the peer and the caller once, and hand on its credit."""
        said, stream.outbox = stream.outbox, []
        for message in said:
            self._say(stream, message)
        if not stream.is_over or self.streams.pop(stream.stream_id, None) is None:
            return
        if stream.phase is Phase.DONE:
            self._say(stream, Ack((), stream.arrivals.limit, True))
        elif stream.phase is Phase.CANCELLED or not isinstance(stream.error, PeerError):
            self._say(stream, Cancel(_code(stream.error), str(stream.error).encode()[:1000].decode(errors="ignore")))
        self._credit.close(stream.stream_id)
        for stream_id, limit in self._credit.refresh().items():
            self.streams[stream_id].arrivals.limit = limit
            self._say(self.streams[stream_id], Credit(limit))
        self._events.append(StreamEnded(stream))

    def _say(self, stream: ReceiveStream, message: Message) -> None:
        if self.is_attached:
            self._outbox.append(Out(stream.stream_id, message))


def _code(error: PdError | None) -> str:
    return error.wire_code if isinstance(error, PeerError) else error.code if error is not None else "cancelled"
