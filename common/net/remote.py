"""One prefill at a peer as decoded holds it: progress, result, and the verification of segments as they arrive.

Made by PeerClient.prefill. Knows the sink and the codec threads; the rules are in wire/incoming.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict

from common.backend import StateSink
from common.errors import (
    ChecksumMismatch,
    PdError,
    RemoteProtocolError,
    SealBroken,
    TransferIncomplete,
    TransferTimeout,
)
from common.net.codecs import CodecPool, Verification
from common.net.link import Link, now
from common.net.options import Trace, TransferProgress, TransferReport
from common.wire.buffers import BUFFERS
from common.wire.codec import CODECS, segment_shape
from common.wire.framing import Unopened
from common.wire.incoming import InSegment, ReceiveStream
from common.wire.messages import Piece
from common.wire.session import ClientSession


class RemotePrefill:
    """A prefill under way. The sink's memory may be used for something else only after `wait` or `closed` returned."""

    def __init__(self, session: ClientSession, stream: ReceiveStream, sink: StateSink, codecs: CodecPool) -> None:
        self._session, self._stream, self._sink, self._codecs = session, stream, sink, codecs
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
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
            wire_bytes=s.wire_bytes,
            raw_bytes=s.raw_bytes,
            num_segments=s.num_landed,
            requested_at=m.requested_at,
            accepted_at=m.accepted_at,
            first_chunk_at=m.first_chunk_at,
            first_byte_at=m.first_byte_at,
            prefill_ended_at=m.prefill_ended_at,
            last_byte_at=m.last_byte_at,
            verified_at=m.verified_at,
        )

    @property
    def report(self) -> TransferReport:
        """What arrived so far; final after `wait`, also when it raised."""
        s = self._stream
        marks = asdict(s.marks)
        queue_s = marks.pop("queue_s")
        return TransferReport(
            wire_bytes=s.wire_bytes,
            raw_bytes=s.raw_bytes,
            codec=max(s.codecs_used, key=CODECS.index, default="raw"),
            num_tokens=s.prefill.num_tokens,
            num_segments=s.num_landed,
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
        link.hold(len(unopened.sealed))
        self._spawn(self._open(link, piece, unopened))

    def segment_arrived(self, segment: InSegment) -> None:
        """Verify and decode; acknowledges when done."""
        self._spawn(self._land(segment))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def ended(self) -> None:
        """The stream is over; wait() returns when the last thread has left the sink's memory."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._tasks:
            self._closed.set()

    async def _open(self, link: Link, piece: Piece, unopened: Unopened) -> None:
        try:
            if self._stream.is_over:
                return
            opened = await self._codecs.open(unopened)
        except SealBroken as e:
            link.fail(e)
            return
        finally:
            link.release(len(unopened.sealed))
            BUFFERS.give_back(unopened.sealed)
        self._session.piece_arrived(self._stream.stream_id, piece, unopened.target, now(), opened)
        self.flush()

    async def _land(self, segment: InSegment) -> None:
        stream, head = self._stream, segment.head
        if not stream.wants(segment):
            return
        shape = segment_shape(stream.layout, head.start, head.stop, head.layers)
        views = tuple(segment.views)
        try:
            await self._codecs.verify(
                Verification(head.codec, head.digest, views, segment.is_apart, shape),
                lambda: self._sink.buffers(head.start, head.stop, head.layers),
            )
        except (ChecksumMismatch, RemoteProtocolError) as e:
            if stream.wants(segment):
                self._session.fail(stream, TransferIncomplete(f"segment {head.no}: {e}"))
        except PdError as e:
            self._session.fail(stream, e)
        else:
            if stream.wants(segment):
                self._sink.landed(head.start, head.stop, head.layers)
                self._session.segment_landed(stream, segment, now())
                if self.trace is not None:
                    self.trace("segment_landed", now=now(), request_id=self.request_id, no=head.no, layers=head.layers)
        self.flush()
        if segment.is_apart:
            segment.views = []
            for view in views:
                BUFFERS.give_back(view)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._session.fail(self._stream, TransferIncomplete(f"a segment could not be put in place: {error!r}"))
            self._loop.call_exception_handler({"message": "landing a segment failed", "exception": error})
            self.flush()
        if self._stream.is_over and not self._tasks:
            self._closed.set()

    def _on_deadline(self, deadline_s: float) -> None:
        self._session.fail(
            self._stream, TransferTimeout(f"the state did not arrive within the deadline of {deadline_s:g} s")
        )
        self.flush()


def _nothing() -> None:
    """Before PeerClient has set `flush`."""
