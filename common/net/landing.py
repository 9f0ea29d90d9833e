"""What arrives of one stream, on its way into memory: opened, verified and decoded in codec threads.

Used by remote.py for a prefill's state, and by push.py for a prefix that is pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

from common.backend import StateSink
from common.errors import ChecksumMismatch, PdError, RemoteProtocolError, SealBroken, TransferIncomplete
from common.layout import StateLayout
from common.net.codecs import CodecPool, Verification
from common.net.link import Link
from common.wire.arrivals import InSegment
from common.wire.buffers import BUFFERS
from common.wire.codec import segment_shape
from common.wire.framing import Unopened
from common.wire.incoming import ReceiveStream
from common.wire.messages import Piece
from common.wire.outgoing import SendStream


class Receiver(Protocol):
    """Whose stream it is."""

    def landed(self, segment: InSegment) -> None:
        """It is verified and in place."""

    def failed(self, error: PdError) -> None:
        """The stream cannot go on."""

    def opened(self, piece: Piece, unopened: Unopened, payload: memoryview) -> None:
        """A sealed piece was opened."""

    def flush(self) -> None:
        """Send what there is to say."""


class Landing:
    """Work on one stream's segments; `on_idle` is called whenever the last of it is done."""

    def __init__(
        self,
        receiver: Receiver,
        stream: ReceiveStream | SendStream,
        layout: StateLayout,
        sink: StateSink,
        codecs: CodecPool,
    ) -> None:
        self._receiver, self._stream, self._layout, self._sink, self._codecs = receiver, stream, layout, sink, codecs
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_idle: Callable[[], None] | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing touches the sink's memory now."""
        return not self._tasks

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
        self._receiver.opened(piece, unopened, opened)
        self._receiver.flush()

    async def _land(self, segment: InSegment) -> None:
        receiver, stream, head = self._receiver, self._stream, segment.head
        if not stream.wants(segment):
            return
        shape = segment_shape(self._layout, head.start, head.stop, head.layers)
        views = tuple(segment.views)
        try:
            await self._codecs.verify(
                Verification(head.codec, head.digest, views, segment.is_apart, shape),
                lambda: self._sink.buffers(head.start, head.stop, head.layers),
            )
        except (ChecksumMismatch, RemoteProtocolError) as e:
            if stream.wants(segment):
                receiver.failed(TransferIncomplete(f"segment {head.no}: {e}"))
        except PdError as e:
            receiver.failed(e)
        else:
            if stream.wants(segment):
                self._sink.landed(head.start, head.stop, head.layers)
                receiver.landed(segment)
        receiver.flush()
        if segment.is_apart:
            segment.views = []
            for view in views:
                BUFFERS.give_back(view)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._receiver.failed(TransferIncomplete(f"a segment could not be put in place: {error!r}"))
            self._loop.call_exception_handler({"message": "landing a segment failed", "exception": error})
            self._receiver.flush()
        if not self._tasks and self.on_idle is not None:
            self.on_idle()
