"""One request of a decoded as prefilld's handler sees it: accept, send segments, complete, or fail.

Encodes in worker threads and cuts segments to the negotiated size. The rules are in wire/outgoing.py; links are
ServerPeer's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from common.backend import ComputedSegment, StateSink
from common.errors import LinkLost, LocalProtocolError, PeerError
from common.layout import StateLayout
from common.linkfacts import CodecChooser, Sending
from common.net.codecs import CodecPool
from common.net.link import now
from common.net.options import PeerId, RemoteRequest, Trace
from common.net.push import PushIn
from common.net.split import split_segment
from common.wire.arrivals import SinkBuffers
from common.wire.codec import segment_shape
from common.wire.departures import OutSegment
from common.wire.outgoing import SendStream
from common.wire.serving import ServerSession
from common.wire.tables import Phase
from common.wire.tokens import unpack_tokens


@dataclass(frozen=True, slots=True)
class StreamPort:
    """What a ServerStream needs from its peer's session; the sizes are the negotiated ones."""

    layout: StateLayout
    codecs: CodecPool
    piece_bytes: Callable[[], int]
    max_segment_bytes: int
    settle: Callable[[SendStream], None]
    trace: Trace | None
    choosers: dict[str, CodecChooser]
    path_bps: Callable[[], float]
    session: ServerSession
    moved_at: Callable[[], float]
    """When a link last took a piece of any of its streams."""


class ServerStream:
    """One request. Every method raises PeerCancelled or LinkLost once the stream is over.

    `request` holds the tokens [0, n-1) and where to start; `peer` says who asks.
    """

    def __init__(self, stream: SendStream, peer: PeerId, port: StreamPort) -> None:
        prefill = stream.prefill
        self.peer = peer
        self.request = RemoteRequest(
            request_id=prefill.request_id,
            tokens=unpack_tokens(stream.tokens),
            start=prefill.start,
            deadline_s=prefill.deadline_s,
            priority=prefill.priority,
            tenant_salt=prefill.salt,
            codecs=prefill.codecs,
            pushes=prefill.pushes,
            held=prefill.held,
            due_s=prefill.due_s,
        )
        self.push: PushIn | None = None
        self.is_taking_push = False
        self.codec = prefill.codecs[0]  # ServerSession has refused what nobody knows
        self._stream, self._port = stream, port
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[asyncio.Future[None], None] = {}  # woken in the order in which they came
        self._over = asyncio.Event()
        self.is_completing = False
        self._moved_at = self._arrived_at = now()
        self._raw_bytes = port.layout.transfer_bytes(prefill.start, prefill.num_tokens)

    @property
    def staged_bytes(self) -> int:
        """Raw bytes queued or sent and not acknowledged."""
        return self._stream.staged_bytes

    @property
    def is_attached(self) -> bool:
        """False while the peer's control link is lost and after the end."""
        return self._stream.is_attached

    @property
    def is_over(self) -> bool:
        """True after Complete was acknowledged, a failure, a cancel or the end of the lease."""
        return self._stream.is_over

    @property
    def has_waiting(self) -> bool:
        """Something of it waits for a link."""
        return self._stream.departures.num_waiting > 0

    def sending(self, path_bps: float) -> Sending:
        """What is left of it, computed or not; as well compressed as what has arrived."""
        sent = self._stream.departures
        ratio = sent.acked_bytes / sent.acked_raw_bytes if sent.acked_raw_bytes else 1.0
        left_bytes = ratio * max(0, self._raw_bytes - sent.acked_raw_bytes)
        due_s = self.request.due_s if self.request.due_s is not None else inf
        left_s = 8 * left_bytes / path_bps if path_bps > 0 else 0.0
        return Sending(self._stream.stream_id, self._arrived_at, self._arrived_at + due_s, left_s)

    def stalled_s(self, at: float) -> float:
        """Seconds for which the peer took nothing of what waits for it; ask every now and then.

        0.0 while nothing waits, or while it is away: then the lease counts. While states of others go first, what the
        peer takes of those counts.
        """
        is_pushed = self.push is not None and not self._stream.is_pushed
        if not self.is_attached or not (self.staged_bytes or self.is_completing or is_pushed):
            self._moved_at = at
        elif self._stream.departures.waits_for_turn:
            self._moved_at = max(self._moved_at, self._port.moved_at())
        return at - self._moved_at

    async def accept(self, num_queued: int = 0) -> None:
        """Tell the peer that it is queued behind `num_queued` others."""
        self._check()
        self._stream.accept(self._port.session.new_handle(), num_queued, now())
        self._port.settle(self._stream)

    async def refuse(self, error: PeerError) -> None:
        """Refuse instead of accepting; ends the stream."""
        self._check()
        self._stream.refuse(error)
        self._port.settle(self._stream)

    async def take_push(self, sink: StateSink) -> None:
        """Let the peer send the state of [held, start) into the sink; returns when all of it is there."""
        self._check()
        port = self._port
        self.push = PushIn(port.session, self._stream, sink, port.codecs, port.layout, port.settle, self.moved)
        self._moved_at = began = now()
        self.is_taking_push = True
        try:
            port.session.accept_push(self._stream, self._push_buffers(sink))
            port.settle(self._stream)
            await self.push.wait()
        finally:
            self.is_taking_push = False
        self._stream.push_s = now() - began
        self._check()

    def _push_buffers(self, sink: StateSink) -> SinkBuffers:
        def buffers(start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
            self._moved_at = now()
            return sink.buffers(start, stop, layers)

        return buffers

    async def started(self, at: float, num_cached: int = 0) -> None:
        """The first chunk began at that monotonic instant, behind so many tokens that were cached or pushed;
        `complete` counts prefill_s from there.
        """
        self._check()
        self._stream.start(at, num_cached)
        self._port.settle(self._stream)

    async def progress(self, num_computed: int) -> None:
        """Tokens [0, num_computed) are computed and their segments were queued."""
        self._check()
        self._stream.progress(num_computed)
        self._port.settle(self._stream)

    async def send_segment(self, segment: ComputedSegment) -> list[str]:
        """Encode and queue; returns when queued, with the codec of each part. The buffers stay referenced until the
        peer acknowledges.

        Raises:
            LocalProtocolError: the buffers do not have the size of these rows and layers.
        """
        port = self._port
        codecs = []
        self._trace("segment_ready", start=segment.start, stop=segment.stop, layers=segment.layers)
        for part in split_segment(port.layout, segment, port.max_segment_bytes):
            self._check()
            shape = segment_shape(port.layout, part.start, part.stop, part.layers)
            raw_bytes = sum(run.num_bytes for run in shape)
            chooser = port.choosers.get(self.codec)
            is_worth_it = chooser is None or chooser.pays(port.path_bps())
            encoded, seconds = await port.codecs.encode(self.codec if is_worth_it else "raw", part.buffers, shape)
            if chooser is not None and is_worth_it:
                chooser.note(raw_bytes, encoded.num_bytes, seconds)
            self._check()
            queued = self._stream.add_segment(
                (part.start, part.stop), part.layers, raw_bytes, encoded, port.piece_bytes()
            )
            self._trace("segment_encoded", segment=queued)
            codecs.append(encoded.codec)
            port.settle(self._stream)
        return codecs

    async def wait_staged_below(self, num_bytes: int) -> None:
        """Until fewer raw bytes than that are unacknowledged and the peer is connected."""
        while self._check() and (self._stream.staged_bytes >= num_bytes or not self._stream.is_attached):
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)

    async def complete(self, num_tokens: int, prefill_s: float, waited_s: float = 0.0) -> None:
        """Send COMPLETE; returns when the peer verified everything.

        `prefill_s` is time spent computing this prompt, `waited_s` time it waited for other prompts' chunks meanwhile.

        Raises:
            LinkLost: the lease ended before that.
            PeerCancelled: the peer does not want it any more.
        """
        self._check()
        self._stream.complete(num_tokens, prefill_s, waited_s)
        self.is_completing = True
        self._port.settle(self._stream)
        await self._over.wait()
        if self._stream.phase is not Phase.DONE:
            self._check()

    async def fail(self, error: PeerError) -> None:
        """End the stream with an error that the peer raises. Nothing happens when it is over already."""
        if not self._stream.is_over:
            self._stream.fail(error)
            self._port.settle(self._stream)

    # ---- called by ServerPeer

    def changed(self) -> None:
        """Acknowledged, attached or over: look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.push is not None:
            self.push.changed()
        if self._stream.is_over:
            self._over.set()

    def moved(self) -> None:
        """A link had room for a piece, or a piece of the prefix came."""
        self._moved_at = now()

    def acked(self, segment: OutSegment) -> None:
        """The peer has this segment."""
        self._moved_at = now()
        self._trace("segment_acked", segment=segment)

    def written(self, segment: OutSegment, offset: int, num_bytes: int) -> None:
        """A piece's last byte is on the socket."""
        self._trace("piece_written", segment=segment, offset=offset, num_bytes=num_bytes)

    def _check(self) -> bool:
        if self._stream.is_over:
            error: PeerError | LinkLost | None = self._stream.error
            raise error or LocalProtocolError(f"stream {self._stream.stream_id} is complete")
        return True

    def _trace(self, event: str, *, segment: OutSegment | None = None, **fields: object) -> None:
        if self._port.trace is None:
            return
        if segment is not None:
            head = segment.head
            fields |= {
                "no": head.no,
                "start": head.start,
                "stop": head.stop,
                "layers": head.layers,
                "raw_bytes": head.raw,
                "encoded_bytes": head.encoded,
            }
        self._port.trace(event, now=now(), request_id=self.request.request_id, **fields)
