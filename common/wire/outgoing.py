"""One stream at the server without I/O: phases, what was said and is repeated on Resume, and a pushed prefix if any.

What is sent waits in departures.py, what is pushed is checked by arrivals.py. Knows phases (tables.py); does not know
links beyond a number, nor other streams. Owned by ServerSession.
"""

from __future__ import annotations

from math import inf

from common.errors import BadMessage, LinkLost, LocalProtocolError, PeerError, RequestDamaged
from common.wire.arrivals import Arrivals, InSegment, discarding
from common.wire.codec import Encoded
from common.wire.departures import Departures, OutPiece, OutSegment
from common.wire.frames import FrameType, Target
from common.wire.messages import (
    MAX_ACKED,
    Accepted,
    Ack,
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
    check_outgoing,
)
from common.wire.tables import FINAL, SERVER_ATTACH, SERVER_STREAM, Attach, Do, Input, Phase, step


class SendStream:
    """What the server holds of one stream. Messages it wants sent gather in `outbox`."""

    def __init__(self, stream_id: int, prefill: Prefill, tokens: bytearray) -> None:
        self.stream_id, self.prefill, self.tokens = stream_id, prefill, tokens
        self.phase = step(SERVER_STREAM, Phase.IDLE, FrameType.PREFILL, f"stream {stream_id}")
        self.attach = Attach.ATTACHED
        self.handle = self._last_handle = b""
        self.error: PeerError | LinkLost | None = None
        self.departures = Departures(stream_id, prefill.token_hash)
        self.departures.limit = prefill.limit
        self.arrivals: Arrivals | None = None
        self.accepted_at = self.queue_s = 0.0
        self.outbox: list[Message] = []
        self._pushed: Pushed | None = None
        self.push_s = 0.0
        """How long it took; no part of the queueing."""
        self.is_pushed = False
        """All of the prefix landed."""
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

    @property
    def staged_bytes(self) -> int:
        """Raw bytes queued or sent and not acknowledged."""
        return self.departures.staged_bytes

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

    def start(self, now: float, num_cached: int = 0) -> None:
        """The first chunk begins, behind so many tokens that need not be computed."""
        self._step(Do.START)
        self.queue_s = max(0.0, now - self.accepted_at - self.push_s)
        if self.arrivals is not None and not self.is_pushed:
            self.arrivals.close()
        self._started = Started(self.queue_s, num_cached)
        self._say(self._started)

    def progress(self, num_computed: int) -> None:
        """The segments queued so far cover [start, num_computed). Nothing new is not said."""
        self._step(Do.PROGRESS)
        if num_computed <= (self._progress.num_computed if self._progress else self.prefill.start):
            return
        self._progress = Progress(num_computed, self.departures.next_no, self.departures.digest)
        self._say(self._progress)

    def add_segment(
        self, rows: tuple[int, int], layers: tuple[int, ...], raw_bytes: int, encoded: Encoded, piece_bytes: int
    ) -> OutSegment:
        """Queue an encoded segment; its number is the order of these calls."""
        self._step(Do.SEGMENT)
        return self.departures.add(rows, layers, raw_bytes, encoded, piece_bytes)

    def complete(self, num_tokens: int, prefill_s: float, waited_s: float = 0.0) -> None:
        """Everything was queued; `waited_s` of queueing came after the first chunk."""
        self._step(Do.COMPLETE)
        queue_s = self.queue_s + waited_s
        sent = self.departures
        self._complete = Complete(num_tokens, sent.next_no, sent.next_at, sent.digest, queue_s, prefill_s)
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
        freed = self.departures.acked(ack.segments, "ACK.segments")
        self.departures.grant(ack.limit)
        if self.is_over:
            self._drop()
        return freed

    def on_credit(self, limit: int) -> None:
        """The peer allows more."""
        self._step(FrameType.CREDIT)
        self.departures.grant(limit)

    def on_cancel(self, error: PeerError) -> None:
        """The peer wants no more."""
        self._end(FrameType.CANCEL, error)

    def is_resumed_by(self, resume: Resume) -> bool:
        """Whether it shows the latest handle, or the one before it if that showed the one before: its answer, with the
        latest, may have been lost with the link.
        """
        mine = (self.prefill.request_id, self.prefill.token_hash)
        return resume.handle in (self.handle, self._last_handle) and mine == (resume.request_id, resume.token_hash)

    def on_resume(self, resume: Resume, handle: bytes) -> list[OutSegment]:
        """Go on over a new control link: repeat what was said, resend what did not land. Answers what did."""
        self._step(FrameType.RESUME)
        self.attach = SERVER_ATTACH[self.attach][FrameType.RESUME]
        self.handle, self._last_handle = handle, resume.handle
        self.departures.grant(resume.limit)
        ranges = list(zip(resume.landed[::2], resume.landed[1::2], strict=False))
        landed = [no for no in self.departures.segments if any(a <= no < b for a, b in ranges)]
        freed = self.departures.acked(landed, "RESUME.landed")
        self.departures.requeue()
        said = (self._started, self._progress, self._complete)
        self.outbox = [Accepted(handle, 0, self.prefill.token_hash), *self._push_acks()]
        self.outbox += [m for m in said if m is not None]
        return freed

    # ---- the prefix that the client pushes

    def accept_push(self, arrivals: Arrivals) -> None:
        """There is memory for it: the client may send below `arrivals.limit`."""
        if self.arrivals is not None or self.phase is not Phase.ACCEPTED or not self.prefill.pushes:
            raise LocalProtocolError(f"stream {self.stream_id} takes no prefix now")
        self.arrivals = arrivals
        self._say(PushAck((), arrivals.limit))

    def open_piece(self, piece: Piece, num_bytes: int, link: int) -> Target:
        """Where a pushed piece goes. Raises BadMessage."""
        self._step(FrameType.PIECE)
        if self.phase is not Phase.ACCEPTED or self.attach is Attach.DETACHED or self.is_pushed:
            return discarding(num_bytes)
        if self.arrivals is None:
            raise BadMessage(f"PIECE of stream {self.stream_id}: a prefix is pushed that was not asked for")
        return self.arrivals.open_piece(piece, num_bytes, link)

    def wants(self, segment: InSegment) -> bool:
        """False when the stream ended or began since the segment arrived."""
        return self.phase is Phase.ACCEPTED and self.arrivals is not None and self.arrivals.has(segment)

    def push_landed(self, segment: InSegment, limit: int) -> None:
        """A pushed segment is verified and in place."""
        if self.arrivals is None:
            raise LocalProtocolError(f"stream {self.stream_id} takes no prefix")
        self.arrivals.landed(segment)
        self.arrivals.limit = max(self.arrivals.limit, limit)
        self._say(PushAck((segment.head.no,), self.arrivals.limit))
        self._try_push()

    def on_pushed(self, pushed: Pushed) -> None:
        """The client has sent all of it. Raises BadMessage."""
        self._step(FrameType.PUSHED)
        if self.phase is not Phase.ACCEPTED:
            return
        if self.arrivals is None or (self._pushed is not None and pushed != self._pushed):
            raise BadMessage(f"PUSHED of stream {self.stream_id} differs from the one before, or nothing was asked for")
        self._pushed = pushed
        self._try_push()

    def _try_push(self) -> None:
        pushed, arrivals = self._pushed, self.arrivals
        if pushed is None or arrivals is None or arrivals.num_landed < pushed.num_segments:
            return
        if wrong := arrivals.wrong(pushed.num_segments, pushed.encoded, pushed.digest):
            self.fail(RequestDamaged(f"the pushed prefix is not whole: {wrong}"))
            return
        self.is_pushed = True

    def _push_acks(self) -> list[Message]:
        if self.arrivals is None or self.phase is not Phase.ACCEPTED:
            return []
        landed = self.arrivals.landed_numbers
        parts = [landed[at : at + MAX_ACKED] for at in range(0, max(1, len(landed)), MAX_ACKED)]
        return [PushAck(tuple(part), self.arrivals.limit) for part in parts]

    # ---- links

    def next_piece(self, link: int) -> OutPiece | None:
        """The next piece, if credit covers its whole segment; it counts as written to that link."""
        return self.departures.next_piece(link) if self.is_attached else None

    def link_lost(self, link: int) -> None:
        """What was written to that link and is not acknowledged is sent again; what was arriving is forgotten."""
        self.departures.link_lost(link)
        if self.arrivals is not None:
            self.arrivals.link_lost(link)

    def detach(self) -> None:
        """The control link is lost."""
        if not self.is_over and self.attach is Attach.ATTACHED:
            self.attach = SERVER_ATTACH[self.attach][Do.DETACH]
            self._step(Do.DETACH)
            self.outbox.clear()
            if self.arrivals is not None:
                self.arrivals.link_lost(None)
            if self.is_over:
                self._drop()

    def cancel(self, error: PeerError | LinkLost) -> None:
        """End the stream without a word to the peer (it is gone, or does not know it any more)."""
        self._end(Do.CANCEL, error)

    def _say(self, message: Message) -> None:
        check_outgoing(message)
        if self.is_attached:
            self.outbox.append(message)

    def _end(self, given: Input, error: PeerError | LinkLost) -> None:
        if not self.is_over:
            self.error = error
        self._step(given)
        self._drop()

    def _drop(self) -> None:
        self.departures.drop()
        if self.arrivals is not None:
            self.arrivals.close()

    def _step(self, given: Input) -> None:
        self.phase = step(SERVER_STREAM, self.phase, given, f"stream {self.stream_id}")


def _short(error: PeerError) -> str:
    return str(error).encode()[:1000].decode(errors="ignore")


def _retry_after(error: PeerError) -> float | None:
    after = error.retry_after_s
    return after if after is not None and 0 <= after < inf else None
