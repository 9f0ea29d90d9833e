"""A prefix that decoded pushes, so that a prefilld need not compute it: PushOut at decoded, PushIn at prefilld.

The rules are in wire/incoming.py and wire/outgoing.py; links are PeerClient's and ServerPeer's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.backend import ComputedSegment, StateSink, StateSource
from common.errors import PdError, PeerError, RequestDamaged, TransferIncomplete
from common.layout import StateLayout
from common.net.codecs import CodecPool
from common.net.landing import Landing
from common.net.split import split_segment
from common.wire.arrivals import InSegment
from common.wire.codec import segment_shape
from common.wire.departures import Departures
from common.wire.framing import Unopened
from common.wire.incoming import ReceiveStream
from common.wire.messages import Piece
from common.wire.outgoing import SendStream
from common.wire.serving import ServerSession
from common.wire.session import ClientSession

PIECE_BYTES, MAX_STAGED_BYTES = 1 << 20, 16 << 20


class PushOut:
    """Encodes the prefix and queues it, a part at a time, once the peer takes it."""

    def __init__(
        self,
        session: ClientSession,
        stream: ReceiveStream,
        source: StateSource,
        codecs: CodecPool,
        flush: Callable[[], None],
    ) -> None:
        self._session, self._stream, self._source, self._codecs, self._flush = session, stream, source, codecs, flush
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def moved(self) -> None:
        """The peer takes it, or has taken more."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._done)
        self._moved.set()

    def end(self) -> None:
        """The stream is over, or the peer has begun."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        stream = self._stream
        for segment in self._source.segments(stream.prefill.start, stream.prefill.held):
            for part in split_segment(stream.layout, segment, stream.limits.max_segment_bytes):
                if not await self._send(part):
                    return
        if stream.is_pushing:
            self._session.push_all(stream)
            self._flush()

    async def _send(self, part: ComputedSegment) -> bool:
        """False when nothing is pushed any more."""
        push = await self._room()
        stream = self._stream
        if push is None:
            return False
        shape = segment_shape(stream.layout, part.start, part.stop, part.layers)
        codec = "zstd" if "zstd" in stream.prefill.codecs else "raw"
        encoded, _ = await self._codecs.encode(codec, part.buffers, shape)
        if stream.is_pushing and stream.push is push:
            raw_bytes = sum(run.num_bytes for run in shape)
            piece_bytes = min(PIECE_BYTES, stream.limits.max_piece_bytes)
            push.add((part.start, part.stop), part.layers, raw_bytes, encoded, piece_bytes)
            self._flush()
        return True

    async def _room(self) -> Departures | None:
        """Once less than MAX_STAGED_BYTES waits; None when nothing is pushed any more."""
        while self._stream.is_pushing and (push := self._stream.push) is not None:
            if push.staged_bytes < MAX_STAGED_BYTES:
                return push
            self._moved.clear()
            await self._moved.wait()
        return None

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, PdError):
            asyncio.get_running_loop().call_exception_handler({"message": "pushing failed", "exception": error})
        # Another way may do without it.
        self._session.fail(self._stream, TransferIncomplete(f"the prefix could not be pushed: {error}"))
        self._flush()


class PushIn:
    """The prefix on its way into a job's memory (the Receiver of a Landing)."""

    def __init__(
        self,
        session: ServerSession,
        stream: SendStream,
        sink: StateSink,
        codecs: CodecPool,
        layout: StateLayout,
        settle: Callable[[SendStream], None],
        on_moved: Callable[[], None],
    ) -> None:
        self._session, self._stream, self._settle, self._on_moved = session, stream, settle, on_moved
        self.landing = Landing(self, stream, layout, sink, codecs)
        self.landing.on_idle = self.changed
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Until all of it landed, or the stream is over and nothing touches the memory any more."""
        while not ((self._stream.is_pushed or self._stream.is_over) and self.landing.is_idle):
            self._changed.clear()
            await self._changed.wait()

    def changed(self) -> None:
        """All of it landed, the stream is over, or nothing touches the memory now."""
        self._changed.set()

    # ---- Receiver

    def landed(self, segment: InSegment) -> None:
        """It is verified and in place."""
        self._on_moved()
        self._session.segment_landed(self._stream, segment)

    def failed(self, error: PdError) -> None:
        """The prefix cannot be used."""
        if not self._stream.is_over:
            self._stream.fail(error if isinstance(error, PeerError) else RequestDamaged(f"the pushed prefix: {error}"))
            self._settle(self._stream)

    def opened(self, piece: Piece, unopened: Unopened, payload: memoryview) -> None:
        """A sealed piece was opened."""
        self._session.piece_arrived(self._stream.stream_id, piece, unopened.target, payload)

    def flush(self) -> None:
        """Send what there is to say."""
        self._settle(self._stream)
