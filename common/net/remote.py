"""One prefill at a peer as decoded holds it: progress, result, and the verification of segments as they arrive.

Made by PeerClient.prefill. Knows the sink and the codec threads; the rules are in wire/incoming.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from common.backend import StateSink, StateSource
from common.errors import PdError, TransferTimeout
from common.net.codecs import CodecPool
from common.net.landing import Landing
from common.net.link import Link, now
from common.net.options import Trace, TransferProgress, TransferReport
from common.net.push import PushOut
from common.wire.arrivals import InSegment
from common.wire.codec import CODECS
from common.wire.framing import Unopened
from common.wire.incoming import ReceiveStream
from common.wire.messages import Piece
from common.wire.session import ClientSession


class RemotePrefill:
    """A prefill under way (the Receiver of its Landing).

    The sink's and the source's memory may be used for something else only after `wait` or `closed` returned.
    """

    def __init__(
        self,
        session: ClientSession,
        stream: ReceiveStream,
        sink: StateSink,
        codecs: CodecPool,
        *,
        source: StateSource | None = None,
    ) -> None:
        self._session, self._stream = session, stream
        self._loop = asyncio.get_running_loop()
        self._landing = Landing(self, stream, stream.layout, sink, codecs)
        self._landing.on_idle = self._close_if_idle
        self._push = None if source is None else PushOut(session, stream, source, codecs, lambda: self.flush())
        self._closed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self.trace: Trace | None = None
        self.flush: Callable[[], None] = _nothing

    @property
    def request_id(self) -> str:
        """The request this belongs to."""
        return self._stream.prefill.request_id

    @property
    def progress(self) -> TransferProgress:
        """A snapshot of how far it is."""
        s, m = self._stream, self._stream.marks
        return TransferProgress(
            num_computed_tokens=s.num_computed,
            num_queued=s.num_queued,
            wire_bytes=s.arrivals.wire_bytes,
            raw_bytes=s.arrivals.raw_bytes,
            num_segments=s.arrivals.num_landed,
            pushed_bytes=s.push.acked_bytes if s.push is not None else 0,
            requested_at=m.requested_at,
            accepted_at=m.accepted_at,
            first_chunk_at=m.first_chunk_at,
            first_byte_at=m.first_byte_at,
            prefill_ended_at=m.prefill_ended_at,
            last_byte_at=m.last_byte_at,
            verified_at=m.verified_at,
            num_peer_moves=self._session.num_moves,
        )

    @property
    def report(self) -> TransferReport:
        """What arrived so far; final after `wait`, also when it raised."""
        s = self._stream
        marks = asdict(s.marks)
        queue_s = marks.pop("queue_s")
        return TransferReport(
            wire_bytes=s.arrivals.wire_bytes,
            raw_bytes=s.arrivals.raw_bytes,
            codec=max(s.arrivals.codecs_used, key=CODECS.index, default="raw"),
            codecs=dict(s.arrivals.codecs_used),
            num_cached_tokens=s.num_cached,
            num_tokens=s.prefill.num_tokens,
            num_segments=s.arrivals.num_landed,
            pushed_bytes=s.push.acked_bytes if s.push is not None else 0,
            pushed_raw_bytes=s.push.acked_raw_bytes if s.push is not None else 0,
            remote_queue_s=queue_s,
            verified_tokens=s.verified_prefix(),
            **marks,
        )

    async def wait(self) -> TransferReport:
        """Until COMPLETE was verified: count, digest and every required row.

        Raises:
            PeerError: the peer refused, failed or was told to stop (PeerCancelled after `cancel`).
            TransferError: the state did not arrive; `report.verified_tokens` says how much can be used.
        """
        await self._closed.wait()
        error = self._stream.error
        if isinstance(error, PdError):
            raise error
        return self.report

    async def closed(self) -> None:
        """Until nothing of this prefill can touch the sink's memory any more."""
        await self._closed.wait()

    def cancel(self) -> None:
        """The peer stops within one chunk; no further byte is taken. Idempotent."""
        self._session.cancel(self._stream)
        self.flush()

    # ---- called by PeerClient

    def start_deadline(self, deadline_s: float | None) -> None:
        """Fail with TransferTimeout after so long."""
        if deadline_s is not None:
            self._deadline = self._loop.call_later(deadline_s, self._on_deadline, deadline_s)

    def open_piece(self, link: Link, piece: Piece, unopened: Unopened) -> None:
        """Open a piece of a sealed link; it counts when its tag was right."""
        self._landing.open_piece(link, piece, unopened)

    def segment_arrived(self, segment: InSegment) -> None:
        """Verify and decode; acknowledges when done."""
        self._landing.segment_arrived(segment)

    def push_moved(self) -> None:
        """The peer takes the prefix, has more of it, or has begun."""
        if self._push is not None and self._stream.is_pushing:
            self._push.moved()
        elif self._push is not None:
            self._push.end()

    def ended(self) -> None:
        """The stream is over; wait() returns when the last thread has left the sink's memory."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._push is not None:
            self._push.end()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._stream.is_over and self._landing.is_idle:
            self._closed.set()

    # ---- Receiver

    def landed(self, segment: InSegment) -> None:
        """It is verified and in place."""
        head = segment.head
        self._session.segment_landed(self._stream, segment, now())
        if self.trace is not None:
            self.trace("segment_landed", now=now(), request_id=self.request_id, no=head.no, layers=head.layers)

    def failed(self, error: PdError) -> None:
        """The state cannot be used."""
        self._session.fail(self._stream, error)

    def opened(self, piece: Piece, unopened: Unopened, payload: memoryview) -> None:
        """A sealed piece was opened."""
        self._session.piece_arrived(self._stream.stream_id, piece, unopened.target, now(), payload)

    def _on_deadline(self, deadline_s: float) -> None:
        self._session.fail(
            self._stream, TransferTimeout(f"the state did not arrive within the deadline of {deadline_s:g} s")
        )
        self.flush()


def _nothing() -> None:
    """Before PeerClient has set `flush`."""
