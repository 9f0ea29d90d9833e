"""One stream at the client without I/O: phases, messages, what they promise, and the prefix that is pushed if one is.

What arrives is checked by arrivals.py, what is pushed waits in departures.py. Knows phases (tables.py); not decoding,
not links beyond a number. Owned by ClientSession.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from common.errors import BadMessage, LocalProtocolError, PdError, PeerError, TransferIncomplete, UnknownFrame
from common.layout import StateLayout
from common.wire.arrivals import Arrivals, InSegment, SinkBuffers, StreamLimits, discarding
from common.wire.departures import Departures, OutPiece
from common.wire.digest import push_digest, seal
from common.wire.frames import FrameType, Target
from common.wire.messages import (
    Accepted,
    Complete,
    Error,
    Message,
    Piece,
    Prefill,
    Progress,
    PushAck,
    Pushed,
    Refused,
    Resume,
    Started,
)
from common.wire.tables import CLIENT_ATTACH, CLIENT_STREAM, FINAL, Attach, Do, Input, Phase, step

_MAX_LANDED = 2048


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
        self.outbox: list[Message] = []
        self.phase, self.attach = Phase.IDLE, Attach.ATTACHED
        self.marks = Marks()
        self.error: PdError | None = None
        self._handle = b""
        self.num_cached = 0
        """Tokens that the peer needed not compute."""
        self._asked = (prefill.deadline_s, prefill.due_s)
        self._complete: Complete | None = None
        self._reset()

    def _reset(self) -> None:
        """Nothing of this request has arrived (any more)."""
        prefill, first = self.prefill, self.prefill.token_hash
        self.num_computed, self.num_queued = prefill.start, 0
        self.verified_count = 0
        rows = (prefill.start, prefill.num_tokens)
        self.arrivals = Arrivals(first, rows, prefill.codecs, self.layout, self.limits, self.sink_buffers)
        self.arrivals.limit = prefill.limit
        self._last_progress = Progress(prefill.start, 0, first)
        self._unverified: deque[Progress] = deque()
        self.push = Departures(self.stream_id, push_digest(first)) if prefill.pushes else None
        self._pushed: Pushed | None = None

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
        return self.arrivals.open_piece(piece, num_bytes, link)

    def piece_arrived(self, target: Target, now: float, opened: memoryview | None = None) -> None:
        """A target is full; `opened` is the piece where it came sealed."""
        if not self.is_over and self.arrivals.piece_arrived(target, opened):
            self.marks.first_byte_at = self.marks.first_byte_at or now
            self.marks.last_byte_at = now

    def take_whole(self) -> list[InSegment]:
        """Segments that arrived and wait for verification. None before Accepted: until then the peer may start over."""
        if self.phase is Phase.REQUESTED:
            return []
        return self.arrivals.take_whole()

    def link_lost(self, link: int | None) -> None:
        """Forget pieces that were arriving on that link (None: on any), and send again what went out over it."""
        self.arrivals.link_lost(link)
        if self.push is not None and link is not None:
            self.push.link_lost(link)

    def wants(self, segment: InSegment) -> bool:
        """False when the stream ended, or was asked for again, since the segment arrived."""
        return not self.is_over and self.arrivals.has(segment)

    def landed(self, segment: InSegment, now: float) -> bool:
        """The segment was verified and is in place; the end may be reached. False when it is of no use any more."""
        if not self.wants(segment):
            return False
        self.arrivals.landed(segment)
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
                self._repeat_push()
            self._handle, self.num_queued = message.handle, message.num_queued
            self.marks.accepted_at = self.marks.accepted_at or now
        elif isinstance(message, Refused | Error):
            self._close(PeerError.from_wire(message.code, message.message, message.retry_after_s))
        elif isinstance(message, PushAck):
            self._on_push_ack(message)
        elif isinstance(message, Started):
            self._end_push()
            self.marks.first_chunk_at = self.marks.first_chunk_at or now
            self.marks.queue_s = message.queue_s
            self.num_cached = min(message.num_cached, self.prefill.num_tokens)
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

    # ---- the prefix that is pushed

    @property
    def is_pushing(self) -> bool:
        """The prefix was asked for and is not all there yet."""
        return self.push is not None and self.phase is Phase.ACCEPTED

    def next_piece(self, link: int) -> OutPiece | None:
        """The next piece of it, if credit covers its whole segment; it counts as written to that link."""
        is_attached = self.attach is Attach.ATTACHED
        return self.push.next_piece(link) if self.push is not None and self.is_pushing and is_attached else None

    def push_all(self) -> None:
        """All of the prefix was queued."""
        push = self.push
        if push is None or not self.is_pushing:
            raise LocalProtocolError(f"stream {self.stream_id} pushes nothing now")
        self._pushed = Pushed(push.next_no, push.next_at, push.digest)
        self.outbox.append(self._pushed)

    def _on_push_ack(self, ack: PushAck) -> None:
        if self.push is None:
            raise UnknownFrame(f"stream {self.stream_id}: PUSH_ACK, and nothing is pushed")
        self.push.acked(ack.segments, "PUSH_ACK.segments")
        self.push.grant(ack.limit)

    def _repeat_push(self) -> None:
        if self.push is not None and self.is_pushing:
            self.push.requeue()
            if self._pushed is not None:
                self.outbox.append(self._pushed)

    def _end_push(self) -> None:
        if self.push is not None:
            self.push.drop()

    # ---- ending

    def request(self, limit: int, now: float) -> Prefill:
        """The message that asks, for the first time or again, with what is left of its times."""
        self._step(Do.REQUEST)
        asked_at = self.marks.requested_at = self.marks.requested_at or now
        deadline_s, due_s = (None if s is None else max(0.0, s - (now - asked_at)) for s in self._asked)
        self.prefill = seal(replace(self.prefill, limit=limit, deadline_s=deadline_s, due_s=due_s), self.tokens)
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
        pairs: list[int] = []
        for no in self.arrivals.landed_numbers:
            if pairs and pairs[-1] == no:
                pairs[-1] = no + 1
            elif len(pairs) < _MAX_LANDED:
                pairs += [no, no + 1]
        return Resume(self.prefill.request_id, self._handle, self.prefill.token_hash, tuple(pairs), self.arrivals.limit)

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
        return self.arrivals.prefix(self.verified_count)

    def _close(self, error: PdError | None) -> None:
        self.error = error
        self.arrivals.close()
        self._end_push()

    def _check_progress(self) -> None:
        while self._unverified:
            progress, digest = self._unverified[0], self.arrivals.digest(self._unverified[0].num_segments)
            if digest is None:
                return
            self._unverified.popleft()
            if digest != progress.digest:
                self.fail(TransferIncomplete(f"the digest of the first {progress.num_segments} segments is wrong"))
                return
            self.verified_count = progress.num_segments

    def _try_finish(self, now: float) -> None:
        complete = self._complete
        if complete is None or self.is_over or self.arrivals.num_landed < complete.num_segments:
            return
        wrong = self.arrivals.wrong(complete.num_segments, complete.encoded, complete.digest)
        if wrong:
            self.fail(TransferIncomplete(f"the transfer is not whole: {wrong}"))
            return
        self._step(Do.VERIFIED)
        self.marks.verified_at = now
        self._close(None)

    def _step(self, given: Input) -> None:
        self.phase = step(CLIENT_STREAM, self.phase, given, f"stream {self.stream_id}")
