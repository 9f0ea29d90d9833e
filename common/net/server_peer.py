"""One decoded as prefilld's network sees it: its links, its session, and a handler task for each of its streams.

Lives from the first handshake of a client process until its lease is over. Stripes pieces over whichever data link has
room. Made by PrefillServer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from math import isfinite

from common.errors import LinkLost, PdError, PeerEngineFailed, PeerError
from common.layout import StateLayout
from common.linkfacts import CodecChooser, PathEstimate
from common.net.codecs import INLINE_BYTES, CodecPool
from common.net.governor import Governor
from common.net.link import Link, now
from common.net.linkview import delivery_bps, link_rows, path_facts, security_facts
from common.net.measure import FillerSource
from common.net.options import PeerId, Trace
from common.net.send_order import SendOrdering
from common.net.server_stream import ServerStream, StreamPort
from common.net.striping import fill_in_turn
from common.wire.buffers import BUFFERS
from common.wire.connection import Received
from common.wire.departures import OutPiece
from common.wire.frames import Target
from common.wire.framing import Unopened
from common.wire.holdings import Holding, cache_events
from common.wire.incoming import ReceiveStream
from common.wire.messages import Complete, Drain, HelloAck, Measure, Piece, Status
from common.wire.outgoing import SendStream
from common.wire.serving import ServerSession
from common.wire.session import (
    PushMoved,
    SegmentAcked,
    SegmentArrived,
    StreamEnded,
    StreamRefused,
    StreamRequested,
    StreamResumed,
)
from common.wire.tables import Phase

_EXPIRE_AGAIN_S = 0.02
"""The loop's clock is coarser than ours, so that the timer may come a moment too early."""
# Pieces last about so long on their link, and are at least so large.
PIECE_S, MIN_PIECE = 0.04, 256 << 10
log = logging.getLogger(__name__)
Handler = Callable[[ServerStream], Coroutine[None, None, None]]


class ServerPeer:
    """One client process."""

    def __init__(
        self,
        ours: HelloAck,
        layout: StateLayout,
        vocab_size: int,
        codecs: CodecPool,
        handler: Handler,
        trace: Trace | None,
        *,
        credit_bytes: int,
        is_sealed: bool,
    ) -> None:
        self.ours, self.layout, self.codecs, self.handler, self.trace = ours, layout, codecs, handler, trace
        self.session = ServerSession(
            ours, layout, vocab_size, partial(secrets.token_bytes, 16), credit_bytes=credit_bytes, is_sealed=is_sealed
        )
        self.ordering = SendOrdering(self.session, self._path_bps)
        self.session_id = b""
        self.session_key: bytes | None = None
        self.control: Link | None = None
        self.data: dict[int, Link] = {}
        self.load: Callable[[], Mapping[str, float]] | None = None
        self.cache: Callable[[], Iterable[Holding] | None] = lambda: None
        self._next_event = 0
        self.governor: Governor | None = None
        self.choosers: dict[str, CodecChooser] = {}
        self.on_idle: Callable[[], None] | None = None
        self.on_refused: Callable[[StreamRefused, str], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._filler = FillerSource()
        self.bytes_in = self.bytes_out = 0
        self._moved_at = 0.0
        self._attached_at, self._most_links, self._before = 0.0, 0, (0, 0)
        self._streams: dict[SendStream, tuple[ServerStream, asyncio.Task[None]]] = {}
        self._lease: asyncio.TimerHandle | None = None
        self._status: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """No link and no stream: nothing to keep."""
        return self.control is None and not self._streams and not self.session.streams

    @property
    def name(self) -> str:
        """What the client calls itself; "?" before it did."""
        return self.session.peer.name if self.session.peer else "?"

    # ---- links

    def attach(self, control: Link, peer: HelloAck, *, is_draining: bool) -> None:
        """A control link of this client is open; an older one is replaced."""
        if self.control is not None:
            self.detach(LinkLost("the client opened another control link"))
        if self._lease is not None:
            self._lease.cancel()
        self.control = control
        self.session_id, self.session_key = control.connection.session, control.connection.handshake.session_key
        self.session.attach(peer)
        self._attached_at, self._most_links, self._before = now(), 1, self.traffic
        log.info("session begins", extra=self._who(control))
        self.set_draining(is_draining)
        self._send_status()
        self._next_event = 0
        if (held := self.cache()) is not None:
            self.tell_cache(held, is_anew=True)
        self.flush()

    def tell_cache(self, holdings: Iterable[Holding], *, is_anew: bool) -> None:
        """Tell this client what is held of prefixes."""
        if self.control is not None and self.control.is_open:
            for event in cache_events(self._next_event, holdings, is_anew=is_anew):
                self.control.send(event)
                self._next_event = event.no + 1

    def detach(self, error: PdError, *, has_left: bool = False) -> None:
        """The control link is lost; streams wait for the lease, unless the client said that it leaves."""
        control, self.control, self.session_key = self.control, None, None
        self._filler = FillerSource()
        self.session.detach(now())
        if has_left:
            self.session.drop(LinkLost(f"the client left: {error}"))
        for link in [*self.data.values(), *([control] if control else [])]:
            link.fail(LinkLost("the control link of this session is gone"))
        if control is not None:
            self._log_end(control, error, has_left=has_left)
        if self._status is not None:
            self._status.cancel()
        if self.session.streams:
            self._lease = self._loop.call_later(self.session.lease_s, self._expire)
        self.flush()

    def add_data(self, link: Link) -> None:
        """A data link joined."""
        older = self.data.get(link.index)
        if older is not None:
            older.fail(LinkLost("the client opened this data link again"))
        self.data[link.index] = link
        self._most_links = max(self._most_links, 1 + len(self.data))
        if self.trace is not None:
            link.on_written = self._written
        self.flush()

    def closed(self, link: Link) -> None:
        """A link is gone, whichever it was: what it carried stays counted."""
        self.bytes_in += link.connection.bytes_in
        self.bytes_out += link.bytes_out

    def lost_data(self, link: Link) -> None:
        """A data link is gone: what it carried goes over the others."""
        if self.data.get(link.index) is link:
            del self.data[link.index]
            self.session.link_lost(link.index)
            self.flush()

    def received(self, event: Received) -> None:
        """A frame of the control link. Raises RemoteProtocolError."""
        payload = event.payload if isinstance(event.payload, bytearray) else None
        if isinstance(event.message, Measure):
            self._filler.start(event.message)
        else:
            self.session.receive(event.stream_id, event.message, payload)
        self.flush()

    def open_piece(self, link: Link, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        """Where a pushed piece goes. Raises RemoteProtocolError."""
        return self.session.open_piece(link.index, stream_id, piece, num_bytes)

    def piece_received(self, link: Link, event: Received) -> None:
        """A piece of a pushed prefix. Raises SealBroken when it is small enough to be opened at once, and does not."""
        message, payload = event.message, event.payload
        if isinstance(message, Piece) and isinstance(payload, Unopened):
            served = self._served(event.stream_id)
            if served is None or served.push is None or payload.target.is_discarded:
                BUFFERS.give_back(payload.sealed)
            elif len(payload.sealed) <= INLINE_BYTES:
                self.session.piece_arrived(event.stream_id, message, payload.target, payload.run())
            else:
                served.push.landing.open_piece(link, message, payload)
        elif isinstance(message, Piece) and isinstance(payload, Target):
            self.session.piece_arrived(event.stream_id, message, payload)
        self.flush()

    def set_draining(self, is_draining: bool) -> None:
        """Tell the client, when there is something to tell."""
        was_draining, self.session.is_draining = self.session.is_draining, is_draining
        if self.control is not None and self.control.is_open and (is_draining or was_draining):
            self.control.send(Drain(is_draining))

    def drop(self, error: LinkLost) -> None:
        """End every stream without a word (the server closes, or the client was replaced)."""
        self.session.drop(error)
        self.flush()

    def flush(self) -> None:
        """Write messages, hand on events, fill the links."""
        while True:
            outbox, events = self.session.take_outbox(), self.session.events()
            if not outbox and not events:
                break
            for out in outbox:
                if self.control is not None and self.control.is_open:
                    if isinstance(out.message, Complete):
                        self._send_facts()  # or the client would see its own prompt wait until the next heartbeat
                    self.control.send(out.message, out.stream_id, out.payload)
            for event in events:
                if isinstance(event, StreamRequested):
                    self._start(event.stream)
                elif isinstance(event, StreamRefused):
                    if self.on_refused is not None:
                        self.on_refused(event, self.name)
                elif isinstance(event, SegmentAcked):
                    self._acked(event)
                elif isinstance(event, StreamResumed | PushMoved):
                    self._changed(event.stream)
                elif isinstance(event, SegmentArrived):
                    self._arrived(event)
                elif isinstance(event, StreamEnded) and isinstance(event.stream, SendStream):
                    self._ended(event.stream)
        self.pump()

    def pump(self) -> None:
        """Give every data link with room a piece, in turn, until there is none."""
        self.ordering.look(served for served, _ in self._streams.values())
        fill_in_turn(self.data.values(), self._send_next, lambda: (self.session.num_waiting, self._piece_bytes()))

    def _send_next(self, link: Link) -> bool:
        """Give a link a piece, or filler where no stream has one. False: there is neither."""
        piece = self.session.next_piece(link.index)
        if piece is not None:
            link.send_piece(piece)
            self._moved_at = now()
            if (served := self._served(piece.stream_id)) is not None:
                served.moved()
        elif (filler := self._filler.take(self._piece_bytes())) is not None:
            link.send_filler(*filler)
        else:
            return False
        if self.governor is not None and not link.is_loopback:
            self.governor.wake()
        return True

    def forget(self) -> None:
        """The server keeps it no longer: nothing of it may wait."""
        if self._lease is not None:
            self._lease.cancel()

    @property
    def links(self) -> list[Link]:
        """All open links, the control link first."""
        return [*([self.control] if self.control else []), *self.data.values()]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes in and out over all links of this client, open and closed."""
        links = self.links
        num_in = self.bytes_in + sum(link.connection.bytes_in for link in links)
        return num_in, self.bytes_out + sum(link.bytes_out for link in links)

    def status(self) -> dict[str, object]:
        """What `peers` shows."""
        peer, control = self.session.peer, self.control
        num_in, num_out = self.traffic
        return {
            "name": peer.name if peer else "?",
            "instance_id": peer.instance if peer else "?",
            "address": control.address if control else "",
            "state": "ready" if control else "detached",
            "numerics": dict(peer.numerics) if peer else {},
            "num_links": len(self.links),
            "num_streams": len(self._streams),
            "staged_bytes": sum(s.staged_bytes for s in self._streams),
            **security_facts(control.connection.config.mode if control else "", control),
            "rtt_s": control.connection.rtt_s if control else None,
            "bytes_in": num_in,
            "bytes_out": num_out,
            "delivery_bps": delivery_bps(self.data.values()),
            "data_links": link_rows(self.data.values()),
            "path": asdict(path) if (path := self.path) is not None else None,
        }

    def _who(self, control: Link) -> dict[str, object]:
        peer = self.session.peer
        return {
            "peer": peer.name if peer else None,
            "instance": peer.instance if peer else None,
            "address": control.address,
            "certificate": control.certificate.name if control.certificate else None,
        }

    def _log_end(self, control: Link, error: PdError, *, has_left: bool) -> None:
        (num_in, num_out), before = self.traffic, self._before
        facts = {
            "why": str(error),
            "seconds": round(now() - self._attached_at, 3),
            "num_links": self._most_links,
            "bytes_in": num_in - before[0],
            "bytes_out": num_out - before[1],
            "num_streams_left": len(self._streams),
        }
        text = "session ends, the client left" if has_left else "session ends"
        log.info(text, extra=self._who(control) | facts)

    # ---- streams

    def _start(self, stream: SendStream) -> None:
        peer = self.session.peer
        if peer is None:
            raise RuntimeError("a stream without a peer")
        port = StreamPort(
            layout=self.layout,
            codecs=self.codecs,
            piece_bytes=self._piece_bytes,
            max_segment_bytes=self.session.limits.max_segment_bytes,
            settle=self._settle,
            trace=self.trace,
            choosers=self.choosers,
            path_bps=self._path_bps,
            session=self.session,
            moved_at=lambda: self._moved_at,
        )
        address = self.control.address if self.control else ""
        served = ServerStream(stream, PeerId(peer.name, peer.instance, address), port)
        task = self._loop.create_task(self.handler(served), name=f"stream {peer.name}/{stream.stream_id}")
        self._streams[stream] = (served, task)
        task.add_done_callback(lambda t: self._done(stream, served, t))

    def _path_facts(self) -> dict[str, float]:
        """What the client should know of its own path: only the sender sees it."""
        path, peer = self.path, self.session.peer
        if path is None or peer is None or self.governor is None:
            return {}
        control = next((link.congestion_control for link in self.data.values()), "")
        return path_facts(path) | {"wanted_data_links": self.governor.control.num_links(peer.instance, control)}

    def _path_bps(self) -> float:
        path = self.path
        return max(path.goodput_bps, path.capacity_bps) if path is not None else 0.0

    def _piece_bytes(self) -> int:
        """Of the next segment: small where links are slow, so that the faster one takes more and no tail is long."""
        most = min(self.ours.max_piece_bytes, self.session.peer.max_piece_bytes if self.session.peer else MIN_PIECE)
        links = [link for link in self.data.values() if not link.is_loopback]
        if not links:
            return most
        wanted = max(MIN_PIECE, 1 << int(PIECE_S * self._path_bps() / 8 / len(links)).bit_length() >> 1)
        return min(most, wanted)

    @property
    def path(self) -> PathEstimate | None:
        """What is known about the way to this client."""
        if self.governor is None or self.session.peer is None:
            return None
        return self.governor.control.estimate(self.session.peer.instance)

    def _settle(self, stream: SendStream) -> None:
        self.session.settle(stream)
        self.flush()

    def _ended(self, stream: SendStream) -> None:
        found = self._streams.get(stream)
        if found is None:
            return  # The handler is done already: nobody is left to tell.
        served, task = found
        served.changed()
        is_own_doing = task is asyncio.current_task() or stream.phase is Phase.DONE
        # It hears of it where it waits for the prefix, once nothing writes to the memory any more.
        is_own_doing = is_own_doing or (stream.phase is Phase.FAILED and served.is_taking_push)
        if not is_own_doing and not (served.is_completing and isinstance(stream.error, LinkLost)):
            task.cancel(str(stream.error))

    def _done(self, stream: SendStream, served: ServerStream, task: asyncio.Task[None]) -> None:
        """The handler returned, raised or was cancelled."""
        self._streams.pop(stream, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PdError):
            log.error("the handler of stream %s failed", task.get_name(), exc_info=error)
        elif error is not None and not stream.is_over:
            log.warning("stream %s: %s", task.get_name(), error)
        if not stream.is_over:
            if not isinstance(error, PeerError):
                error = PeerEngineFailed(f"the request ended early at the prefill peer: {error or 'no reason given'}")
            stream.fail(error)
            self._settle(stream)
        if self.is_idle and self.on_idle is not None:
            self.on_idle()

    def _acked(self, event: SegmentAcked) -> None:
        entry = self._streams.get(event.stream)
        if entry is not None:
            entry[0].acked(event.segment)
            entry[0].changed()

    def _changed(self, stream: SendStream | ReceiveStream) -> None:
        served = self._served(stream.stream_id)
        if served is not None:
            served.changed()

    def _arrived(self, event: SegmentArrived) -> None:
        served = self._served(event.stream.stream_id)
        if served is not None and served.push is not None:
            served.push.landing.segment_arrived(event.segment)

    def _written(self, piece: OutPiece) -> None:
        served = self._served(piece.stream_id)
        if served is not None:
            served.written(piece.segment, piece.message.offset, piece.num_bytes)

    def _served(self, stream_id: int) -> ServerStream | None:
        """The live stream of that number."""
        stream = self.session.streams.get(stream_id)
        entry = self._streams.get(stream) if stream is not None else None
        return entry[0] if entry is not None else None

    def _expire(self) -> None:
        self._lease = None
        self.session.expire(now())
        self.flush()
        if self.control is None and self.session.streams:
            self._lease = self._loop.call_later(_EXPIRE_AGAIN_S, self._expire)

    def _send_status(self) -> None:
        self._send_facts()
        self._status = self._loop.call_later(self.ours.heartbeat_s, self._send_status)

    def _send_facts(self) -> None:
        facts = self._path_facts() | (dict(self.load()) if self.load is not None else {})
        if facts and self.control is not None and self.control.is_open:
            self.control.send(Status({name: float(value) for name, value in facts.items() if isfinite(value)}))
