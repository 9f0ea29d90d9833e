"""prefilld's streams for one client process, without I/O; they outlive control links (lease, Resume).

Messages in, events out; pieces are pulled with `next_piece(link)`; after each call on a SendStream the caller runs
`settle(stream)`. Knows no socket, clock, thread or codec. Called by net/server.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import (
    BadMessage,
    LinkLost,
    PeerCancelled,
    PeerDraining,
    PeerError,
    PeerInvalid,
    PeerShed,
    PromptTooLong,
    RemoteProtocolError,
    RequestDamaged,
    StaleHandle,
    UnknownFrame,
)
from common.layout import StateLayout
from common.wire.arrivals import Arrivals, InSegment, PieceContext, SinkBuffers, discarding
from common.wire.departures import OutSegment
from common.wire.digest import push_digest, token_hash
from common.wire.frames import Target
from common.wire.messages import (
    Ack,
    Cancel,
    Credit,
    HelloAck,
    Message,
    Piece,
    Prefill,
    PushAck,
    Pushed,
    Refused,
    Resume,
    Resumed,
)
from common.wire.outgoing import SendStream
from common.wire.session import (
    Out,
    PushMoved,
    SegmentAcked,
    SegmentArrived,
    Session,
    StreamEnded,
    StreamRefused,
    StreamRequested,
    StreamResumed,
)
from common.wire.tables import Attach, Phase
from common.wire.tokens import largest_token


class ServerSession(Session):
    """All streams of one client process. `new_handle` draws 16 random bytes."""

    def __init__(
        self,
        ours: HelloAck,
        layout: StateLayout,
        vocab_size: int,
        new_handle: Callable[[], bytes],
        *,
        credit_bytes: int,
        is_sealed: bool = False,
    ) -> None:
        super().__init__(ours, layout, credit_bytes, is_sealed=is_sealed)
        self.vocab_size, self.new_handle = vocab_size, new_handle
        self.is_draining = False
        self.streams: dict[int, SendStream] = {}

    # ---- control link

    def attach(self, peer: HelloAck) -> None:
        """A handshake is done; detached streams wait for their Resume."""
        self.peer, self.is_attached = peer, True
        self._credit.reserve_bytes = self.limits.max_segment_bytes

    def detach(self, now: float) -> None:
        """The control link is lost."""
        if self.is_attached:
            self.is_attached, self.detached_at = False, now
        self._outbox.clear()
        for stream in list(self.streams.values()):
            stream.detach()
            if stream.is_over:
                stream.error = stream.error or PeerCancelled("the control link was lost before the stream was accepted")
            self.settle(stream)

    def expire(self, now: float) -> None:
        """End detached streams whose lease is over."""
        if not self.is_attached and self.streams and now >= self.detached_at + self.lease_s:
            self.drop(LinkLost(f"the peer did not come back within the lease of {self.lease_s:g} s"))

    def drop(self, error: PeerError | LinkLost) -> None:
        """End every stream without a word: the peer left, or its lease is over."""
        for stream in list(self.streams.values()):
            stream.cancel(error)
            self.settle(stream)

    def link_lost(self, link: int) -> None:
        """A data link is lost; what it carried and is not acknowledged is queued again."""
        for stream in self.streams.values():
            stream.link_lost(link)

    # ---- streams

    def receive(self, stream_id: int, message: Message, payload: bytearray | None) -> None:
        """A control message of the client. Raises RemoteProtocolError."""
        if isinstance(message, Prefill):
            self._on_prefill(stream_id, message, payload if payload is not None else bytearray())
            return
        if isinstance(message, Resumed):
            self._on_resumed()
            return
        if stream_id > self._last_id and not isinstance(message, Resume):
            raise UnknownFrame(f"{message.type.name} for stream {stream_id}, the last one asked for is {self._last_id}")
        stream = self.streams.get(stream_id)
        if isinstance(message, Resume):
            self._on_resume(stream_id, stream, message)
        elif stream is None:
            return
        elif not stream.is_attached:
            raise UnknownFrame(f"{message.type.name} for stream {stream_id} before its Resume")
        elif isinstance(message, Ack):
            self._freed(stream, stream.on_ack(message))
        elif isinstance(message, Credit):
            stream.on_credit(message.limit)
        elif isinstance(message, Pushed):
            with self._push_ends(stream), self._lies_end(stream):
                stream.on_pushed(message)
        elif isinstance(message, Cancel):
            stream.on_cancel(PeerCancelled(f"the client cancelled: {message.message}"))
        if stream is not None:
            self.settle(stream)

    def settle(self, stream: SendStream) -> None:
        """After any call on a stream: take its messages, and announce its end once."""
        messages, stream.outbox = stream.outbox, []
        if self.is_attached:
            self._outbox.extend(Out(stream.stream_id, m) for m in messages)
        if stream.arrivals is not None and stream.phase is not Phase.ACCEPTED:
            self._credit.close(stream.stream_id)
        if stream.is_over and self.streams.get(stream.stream_id) is stream:
            del self.streams[stream.stream_id]
            self._credit.close(stream.stream_id)
            self._events.append(StreamEnded(stream))

    @property
    def num_waiting(self) -> int:
        """Pieces of all streams that no link has taken."""
        return sum(stream.departures.num_waiting for stream in self.streams.values())

    # ---- pushed prefixes

    def accept_push(self, stream: SendStream, sink_buffers: SinkBuffers) -> None:
        """There is memory for the prefix: the client may send it."""
        prefill = stream.prefill
        rows = (prefill.held, prefill.start)
        digest = push_digest(prefill.token_hash)
        lossless = tuple(codec for codec in prefill.codecs if codec == "zstd")
        arrivals = Arrivals(digest, rows, lossless, self.layout, self.limits, sink_buffers)
        arrivals.limit = self._credit.open(stream.stream_id)
        stream.accept_push(arrivals)
        self.settle(stream)

    def open_piece(self, link: int, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        """Where a pushed piece goes. Raises RemoteProtocolError before anything is reserved."""
        if stream_id > self._last_id:
            raise UnknownFrame(f"PIECE for stream {stream_id}, the last one asked for is {self._last_id}")
        stream = self.streams.get(stream_id)
        if stream is None:
            return discarding(num_bytes)
        with self._lies_end(stream):
            return stream.open_piece(piece, num_bytes, link)

    def piece_arrived(self, stream_id: int, piece: Piece, target: Target, opened: memoryview | None = None) -> None:
        """A pushed piece is complete; `opened` is what it holds, where it came sealed."""
        stream = self.streams.get(stream_id)
        arrivals = stream.arrivals if stream is not None else None
        if stream is None or arrivals is None or stream.phase is not Phase.ACCEPTED:
            return
        if isinstance(target.context, PieceContext) and target.context.arrivals is not arrivals:
            return
        arrivals.piece_arrived(target, opened)
        self._events.extend(SegmentArrived(stream, s) for s in arrivals.take_whole())
        if arrivals.was_landed(target, piece) and stream.is_attached:
            self._outbox.append(Out(stream_id, PushAck((piece.no,), arrivals.limit)))

    def segment_landed(self, stream: SendStream, segment: InSegment) -> bool:
        """A pushed segment's bytes were verified and are in place. False when nobody wants it any more."""
        if not stream.wants(segment):
            return False
        with self._push_ends(stream):
            stream.push_landed(segment, self._credit.landed(stream.stream_id, segment.head.encoded))
        self.settle(stream)
        return True

    @contextmanager
    def _lies_end(self, stream: SendStream) -> Iterator[None]:
        """Sent again it would be the same."""
        try:
            yield
        except RemoteProtocolError as e:
            if not stream.is_over:
                stream.fail(RequestDamaged(f"the pushed prefix contradicts itself: {e}"))
                self.settle(stream)
            raise

    @contextmanager
    def _push_ends(self, stream: SendStream) -> Iterator[None]:
        """Say it once when all of the prefix is there."""
        was_pushed = stream.is_pushed
        yield
        if stream.is_pushed and not was_pushed:
            self._credit.close(stream.stream_id)
            self._events.append(PushMoved(stream))

    def _on_prefill(self, stream_id: int, prefill: Prefill, tokens: bytearray) -> None:
        before = self.streams.get(stream_id)
        if before is not None and before.attach is Attach.ATTACHED:
            raise BadMessage(f"PREFILL: stream {stream_id} is in use")
        if before is not None:
            before.cancel(PeerCancelled("the client asked again: it had not heard that the stream was accepted"))
            self.settle(before)
        refusal: PeerError | None
        if token_hash(prefill, tokens) != prefill.token_hash:
            refusal = RequestDamaged("the request was damaged on the way: its token_hash is wrong")
        else:
            self._check(prefill, tokens)
            refusal = self._refusal(prefill)
        self._last_id = max(self._last_id, stream_id)
        stream = SendStream(stream_id, prefill, tokens)
        if refusal is not None:
            stream.refuse(refusal)
            self._outbox.extend(Out(stream_id, m) for m in stream.outbox)
            self._events.append(StreamRefused(prefill, refusal))
            return
        self.streams[stream_id] = stream
        self._events.append(StreamRequested(stream))

    def _check(self, prefill: Prefill, tokens: bytearray) -> None:
        if prefill.start > prefill.num_tokens:
            raise BadMessage(f"PREFILL.start is {prefill.start}, must be 0..{prefill.num_tokens}")
        if prefill.pushes and not prefill.start:
            raise BadMessage("PREFILL.pushes is true where start is 0: there is no prefix")
        if prefill.held and not (prefill.pushes and prefill.held < prefill.start):
            raise BadMessage(f"PREFILL.held is {prefill.held}, must be below start where it pushes, else 0")
        if largest_token(tokens) >= self.vocab_size:
            raise BadMessage(f"PREFILL: a token id is not below the vocabulary size {self.vocab_size}")

    def _refusal(self, prefill: Prefill) -> PeerError | None:
        most = self.ours.max_prompt_tokens
        if self.is_draining:
            return PeerDraining("this prefilld is draining and takes no new streams")
        if prefill.num_tokens > most:
            return PromptTooLong(f"{prefill.num_tokens} tokens exceed max_prompt_tokens {most}")
        if unknown := [c for c in prefill.codecs if c not in self.ours.codecs]:
            return PeerInvalid(f"codecs {unknown} are not among {list(self.ours.codecs)}")
        if len(self.streams) >= self.ours.max_streams:
            return PeerShed(f"{len(self.streams)} streams are open, the limit is {self.ours.max_streams}", 1.0)
        return None

    def _on_resume(self, stream_id: int, stream: SendStream | None, resume: Resume) -> None:
        if stream is not None and stream.attach is Attach.ATTACHED:
            raise BadMessage(f"RESUME: stream {stream_id} has a control link")
        if stream is None or not stream.is_resumed_by(resume):
            self._last_id = max(self._last_id, stream_id)
            error = StaleHandle(f"the handle of stream {stream_id} was used, has expired or is for another request")
            self._outbox.append(Out(stream_id, Refused(error.wire_code, str(error), None)))
            return
        self._freed(stream, stream.on_resume(resume, self.new_handle()))
        self._events.append(StreamResumed(stream))

    def _on_resumed(self) -> None:
        for stream in list(self.streams.values()):
            if stream.attach is Attach.DETACHED:
                stream.cancel(PeerCancelled("the client came back without this stream"))
                self.settle(stream)

    def _freed(self, stream: SendStream, segments: list[OutSegment]) -> None:
        self._events.extend(SegmentAcked(stream, s) for s in segments)
