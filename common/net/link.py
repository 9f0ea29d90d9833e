"""One TCP connection: an asyncio.BufferedProtocol around a sans-I/O Connection. Runs on uvloop and on plain asyncio.

The only reader of the clocks for wire/ and net/. Bytes are received straight into the views the connection names and
sent by reference, header and payload with one write each; payloads that must be sealed are so in worker threads, and
leave in the order in which they were queued. On a control link with TLS a TlsChannel lies between the two. Knows no
stream; pool.py and server.py own links.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from time import monotonic, time
from typing import Protocol, cast

from common.errors import LinkLost, PdError, PeerError, RemoteProtocolError, TlsFailed
from common.hosts import is_loopback
from common.linkfacts import LinkKey, LinkPlan, LinkSample
from common.net import tuning
from common.net.codecs import CodecPool
from common.net.sealing import SealQueue
from common.net.tcpinfo import tcp_info
from common.net.tls import CertificateFacts, TlsChannel, is_tls, plain_peer
from common.wire.connection import Closed, Connection, Opened, Received
from common.wire.departures import OutPiece
from common.wire.messages import Filler, HelloAck, Message

log = logging.getLogger(__name__)
# What may wait in front of the kernel, before anything is known of a link's rate; on loopback, for speed.
QUEUE_BYTES, LOOPBACK_QUEUE_BYTES = 1 << 20, 4 << 20
HELD_BYTES = 16 << 20
"""Sealed payloads of one link that wait to be opened; past it nothing more is read."""
_TLS_READ_BYTES = 32 << 10
_LINGER_S = 1.0


def now() -> float:
    """Monotonic seconds; finer than the loop's own clock, which stands still within one iteration."""
    return monotonic()


def unix_now() -> float:
    """Seconds since 1970, to compare with dates in certificates."""
    return time()


class LinkOwner(Protocol):
    """Who is told what happens on a link. All calls come on the event loop."""

    @property
    def congestion_control(self) -> str:
        """Of its links; "auto" is the best the kernel has."""

    def link_secured(self, link: Link, certificate: CertificateFacts) -> None:
        """TLS is there and the certificate verified. May raise RemoteProtocolError, which is told to the peer."""

    def link_opened(self, link: Link, peer: HelloAck | None) -> None: ...

    def link_received(self, link: Link, event: Received) -> None:
        """A complete frame. May raise RemoteProtocolError: the link is closed with that error."""

    def link_closed(self, link: Link, closed: Closed) -> None:
        """Called exactly once for each link that was made."""

    def link_writable(self, link: Link) -> None: ...


class Link(asyncio.BufferedProtocol):
    """One link; `make` builds its Connection when the transport is there.

    `tls` makes the channel below it; with `is_tls_optional` the peer's first byte says whether there is one, and the
    Connection whether there may be. `codecs` seals what is larger than a few KiB.
    """

    def __init__(
        self,
        owner: LinkOwner,
        make: Callable[[Link, float], Connection],
        *,
        tls: Callable[[], TlsChannel] | None = None,
        is_tls_optional: bool = False,
        codecs: CodecPool | None = None,
    ) -> None:
        self.owner, self._make = owner, make
        self._make_tls, self._is_tls_optional = tls, is_tls_optional
        self.loop = asyncio.get_running_loop()
        self.bytes_out = 0
        self.address = self.congestion_control = ""
        self.is_loopback = False
        """Both ends are on this machine; known from connection_made on."""
        self.certificate: CertificateFacts | None = None
        """The peer's, on a control link with TLS."""
        self.on_written: Callable[[OutPiece], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._connection: Connection | None = None
        self._tls: TlsChannel | None = None
        self._tls_buffer: memoryview | None = None
        self._is_tls_heard = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._linger: asyncio.TimerHandle | None = None
        self._is_told = False
        self._is_paused = False
        self._held_bytes = 0
        self._is_holding = False
        self._queue = SealQueue(codecs, self._sealed)
        self._unwritten: deque[tuple[int, OutPiece]] = deque()
        self._is_polling = False
        self.plan: LinkPlan | None = None
        """How it sends; None before that was decided."""

    @property
    def connection(self) -> Connection:
        """The protocol state; only after connection_made."""
        if self._connection is None:
            raise RuntimeError("the link has no transport yet")
        return self._connection

    @property
    def index(self) -> int:
        """0 is the control link."""
        return self.connection.link

    @property
    def is_open(self) -> bool:
        """True between handshake and close."""
        return self._connection is not None and self._connection.is_open

    @property
    def is_writable(self) -> bool:
        """False when enough waits in the transport's buffer, or to be sealed for it."""
        transport, num_bytes = self._transport, self._queue.num_bytes
        if self._is_paused or transport is None or not self.is_open:
            return False
        _, high = transport.get_write_buffer_limits()
        return not num_bytes or num_bytes + transport.get_write_buffer_size() < high

    @property
    def queued_bytes(self) -> int:
        """What was given to this link and its kernel has not taken."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return self._queue.num_bytes + waiting

    @property
    def has_transport(self) -> bool:
        """True between connection_made and connection_lost."""
        return self._transport is not None

    def socket(self) -> socket.socket | None:
        """The socket, for TCP_INFO."""
        found = self._transport.get_extra_info("socket") if self._transport is not None else None
        return found if found is not None and found.fileno() >= 0 else None

    def sample(self, key: LinkKey) -> LinkSample | None:
        """What the kernel says of this link now; None where it says nothing, and on loopback: there is no path."""
        info = tcp_info(self.socket()) if self._transport is not None and not self.is_loopback else None
        if info is None or self._transport is None:
            return None
        return LinkSample(
            key=key,
            rtt_s=info.rtt_s,
            min_rtt_s=info.min_rtt_s,
            bytes_acked=info.bytes_acked,
            bytes_sent=info.bytes_sent,
            bytes_retrans=info.bytes_retrans,
            sndbuf_limited_s=info.sndbuf_limited_s,
            has_backlog=info.notsent_bytes > 0 or self._transport.get_write_buffer_size() > 0,
            busy_s=info.busy_s,
            segs_sent=info.segs_sent,
            segs_delivered=info.segs_delivered,
        )

    def tune(self, plan: LinkPlan) -> None:
        """Send as the plan says from now on."""
        before, self.plan, sock = self.plan, plan, self.socket()
        if sock is None or self._transport is None or plan == before:
            return
        if before is None or plan.queue_bytes != before.queue_bytes:
            self._transport.set_write_buffer_limits(high=plan.queue_bytes)
        if plan.pacing_bps != (before.pacing_bps if before else None):
            tuning.set_pacing(sock, plan.pacing_bps)
        if plan.send_buffer_bytes and plan.send_buffer_bytes != (before.send_buffer_bytes if before else None):
            tuning.set_send_buffer(sock, plan.send_buffer_bytes)
        if plan.renewals > (before.renewals if before else 0) and self.congestion_control.startswith("bbr"):
            self.congestion_control = tuning.renew_congestion_control(sock, self.congestion_control)

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A transport is there: say Hello if we are the client."""
        # uvloop's transports are not registered as asyncio.Transport.
        self._transport = transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        self.address = f"{name[0]}:{name[1]}" if name else "?"
        self.is_loopback = bool(name) and is_loopback(str(name[0]))
        transport.set_write_buffer_limits(high=LOOPBACK_QUEUE_BYTES if self.is_loopback else QUEUE_BYTES)
        if not self.is_loopback:
            self.congestion_control = tuning.set_congestion_control(sock, self.owner.congestion_control)
            tuning.set_notsent_limit(sock, tuning.NOTSENT_BYTES)
        connection = self._connection = self._make(self, now())
        if self._make_tls is not None:
            self._tls_buffer = memoryview(bytearray(_TLS_READ_BYTES))
            if not self._is_tls_optional:
                self._begin_tls(connection)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self.connection.get_buffer() if self._tls_buffer is None else self._tls_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes are there."""
        if self._tls_buffer is None:
            self.connection.buffer_updated(nbytes, now())
        else:
            self._receive_tls(self._tls_buffer[:nbytes])
        self.flush()

    def eof_received(self) -> None:
        """The peer sends no more: so do we not."""
        self.connection.receive_eof()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        if self._connection is not None:
            self._connection.receive_eof()
            self.flush()
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()
        self._transport = None

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The transport's buffer has room again."""
        self._is_paused = False
        self._check_written()
        if self.is_writable:
            self.owner.link_writable(self)

    # ---- our side

    def send(self, message: Message, stream_id: int = 0, payload: bytes = b"") -> None:
        """Write a control frame."""
        self.connection.send(message, stream_id, (payload,) if payload else (), len(payload))
        self._write()

    def send_piece(self, piece: OutPiece) -> None:
        """Write a Piece frame by reference: its buffers must not change until they are acknowledged."""
        self.connection.send(piece.message, piece.stream_id, piece.payload(), piece.num_bytes)
        self._write()
        if not self.connection.is_open:
            # The link's key is used up. The caller is about to fill other links: it hears of this when it is done.
            self.loop.call_soon(self.flush)
        elif self.on_written is not None:
            self._unwritten.append((self.bytes_out + self._queue.num_bytes, piece))
            self.loop.call_soon(self._check_written)

    def hold(self, num_bytes: int) -> None:
        """So much that was received waits to be opened: stop reading when it becomes too much."""
        self._held_bytes += num_bytes
        transport = self._transport
        if self._held_bytes > HELD_BYTES and not self._is_holding and transport and not transport.is_closing():
            self._is_holding = True
            transport.pause_reading()

    def release(self, num_bytes: int) -> None:
        """So much was opened."""
        self._held_bytes -= num_bytes
        if self._is_holding and self._held_bytes <= HELD_BYTES // 2:
            self._is_holding = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def send_filler(self, filler: Filler, payload: memoryview) -> None:
        """Write bytes that mean nothing, by reference."""
        self.connection.send(filler, 0, (payload,), len(payload))
        self._write()

    def fail(self, error: PdError) -> None:
        """Close with an Error frame."""
        self.connection.fail(error)
        self.flush()

    def leave(self, reason: str) -> None:
        """Close for good: the peer drops our streams at once."""
        self.connection.leave(reason)
        self.flush()

    def abort(self) -> None:
        """Drop the transport with whatever is in it."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        # A connect that is cancelled half-way closes the transport and never says connection_lost.
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()

    def flush(self) -> None:
        """Hand on events, write what is to be sent, arm the timer."""
        connection = self.connection
        while events := connection.events():
            for event in events:
                try:
                    self._dispatch(event)
                except (RemoteProtocolError, PeerError) as e:
                    connection.fail(e)
        self._write()
        self._arm()

    def _dispatch(self, event: Opened | Received | Closed) -> None:
        if isinstance(event, Received):
            self.owner.link_received(self, event)
        elif isinstance(event, Opened):
            self.owner.link_opened(self, event.peer)
        elif not self._is_told:
            # The Error frame that says why belongs to the bytes that the owner counts now.
            self._write()
            self._is_told = True
            self.owner.link_closed(self, event)

    def _write(self) -> None:
        for part in self.connection.data_to_send():
            self._queue.push(part)
        self._write_queue()

    def _sealed(self) -> None:
        self._write_queue()
        if self.is_writable:
            self.owner.link_writable(self)

    def _write_queue(self) -> None:
        """Write what is ready, in order, up to the first payload that is still being sealed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            self._queue.clear()
            return
        try:
            while (part := self._queue.take()) is not None:
                if self._tls is not None:
                    self._tls.write(part)
                else:
                    self.bytes_out += len(part)
                    transport.write(part)
        except LinkLost as e:
            log.warning("link %d to %s closed: %s", self.index, self.address, e)
            self.abort()
            return
        self._flush_tls(transport)
        self._queue.written(transport.get_write_buffer_size())
        if not self.connection.is_open and self._is_told and not self._queue:
            # A peer that does not read must not keep the socket.
            transport.close()
            self._linger = self._linger or self.loop.call_later(_LINGER_S, transport.abort)

    # ---- TLS

    def _begin_tls(self, connection: Connection) -> None:
        if self._make_tls is not None:
            self._tls = self._make_tls()
            connection.handshake.is_in_tls = True

    def _receive_tls(self, data: memoryview) -> None:
        connection = self.connection
        if self._tls is None and is_tls(data):
            self._begin_tls(connection)
        if self._tls is None:
            self._tls_buffer = None
            connection.receive(data, now())
            return
        try:
            if not self._is_tls_heard and not is_tls(data):
                raise plain_peer()
            self._is_tls_heard = True
            self._tls.receive(data)
            self._check_certificate(self._tls)
            while num := self._tls.read_into(connection.get_buffer()):
                connection.buffer_updated(num, now())
        except TlsFailed as e:
            connection.lose(e)

    def _check_certificate(self, tls: TlsChannel) -> None:
        if tls.certificate is None or self.certificate is not None:
            return
        self.certificate = tls.certificate
        try:
            self.owner.link_secured(self, tls.certificate)
        except RemoteProtocolError as e:
            self.connection.fail(e)

    def _flush_tls(self, transport: asyncio.Transport) -> None:
        if self._tls is not None and (data := self._tls.take_output()):
            self.bytes_out += len(data)
            transport.write(data)

    def _arm(self) -> None:
        due = self.connection.next_timer() if self._transport is not None else None
        if self._timer is not None and (due is None or due < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if due is not None and self._timer is None:
            self._timer, self._timer_at = self.loop.call_at(due, self._on_timer), due

    def _on_timer(self) -> None:
        self._timer = None
        self.connection.handle_timer(now())
        self.flush()

    def _check_written(self) -> None:
        """Report pieces whose last byte has left for the kernel."""
        if self._transport is None or self._transport.is_closing():
            self._unwritten.clear()
            return
        waiting = self._transport.get_write_buffer_size()
        while self._unwritten and self._unwritten[0][0] <= self.bytes_out - waiting:
            _, piece = self._unwritten.popleft()
            if self.on_written is not None:
                self.on_written(piece)
        if self._unwritten and not self._is_polling:
            self._is_polling = True
            self.loop.call_later(0.001, self._poll_written)

    def _poll_written(self) -> None:
        self._is_polling = False
        self._check_written()
