"""decoded's side of the network: one PeerClient per configured prefilld keeps a session alive and asks for prefills.

Puts together Dialer (links), ClientSession (rules) and RemotePrefill (one request). Decides no routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from common.backend import StateSink, StateSource
from common.errors import BadMessage, LayoutMismatch, LinkLost, LocalProtocolError, PdError, PeerDraining, PromptTooLong
from common.hosts import is_loopback
from common.linkfacts import MOST_LINKS, sane
from common.net.codecs import INLINE_BYTES, CodecPool
from common.net.dialer import INCOMPATIBLE_CODES, Dialer, Failure
from common.net.ends import connection_config
from common.net.link import Link, now
from common.net.linkview import delivery_bps, link_rows, security_facts
from common.net.measure import Measurement, Measuring
from common.net.options import (
    LinkOptions,
    LocalEnd,
    PeerState,
    RemoteRequest,
    Security,
    Trace,
    TransferProgress,
    TransferReport,
)
from common.net.remote import RemotePrefill
from common.net.striping import fill_in_turn
from common.net.tls import CertificateFacts, TlsChannel
from common.wire.buffers import BUFFERS
from common.wire.codec import offered
from common.wire.connection import FAULT_CODES, Closed, Received
from common.wire.frames import Target
from common.wire.framing import Unopened
from common.wire.holdings import Holding, read_holdings
from common.wire.messages import CacheEvent, Drain, Filler, HelloAck, Piece, Prefill, Status
from common.wire.session import ClientSession, PushMoved, SegmentArrived, StreamEnded
from common.wire.tokens import pack_tokens

__all__ = [
    "LinkOptions",
    "LocalEnd",
    "PeerClient",
    "RemotePrefill",
    "RemoteRequest",
    "TransferProgress",
    "TransferReport",
]
_MAX_FAULTS, _FAULT_WINDOW_S = 3, 30.0
_EXPIRE_AGAIN_S = 0.02
"""The loop's clock is coarser than ours, so that the timer may come a moment too early."""


class CacheListener(Protocol):
    """Told what a peer holds of prefixes; with `is_anew` nothing else of what it told before."""

    def __call__(self, client: PeerClient, holdings: Sequence[Holding], *, is_anew: bool) -> None: ...


class PeerClient:
    """One configured peer.

    `state`: connecting (no session yet), ready, draining (takes nothing new), incompatible (refused for good reasons,
    tried again slowly), down. `reason` says why it is not ready. `on_state` is called on the event loop when either
    changed.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        local: LocalEnd,
        options: LinkOptions,
        tls_name: str = "",
        trace: Trace | None = None,
    ) -> None:
        self.name, self.host, self.port, self.tls_name = name, host, port, tls_name or host
        self.local, self.options, self.trace = local, options, trace
        self.state: PeerState = "connecting"
        self.reason = "not connected yet"
        self.on_state: Callable[[PeerClient], None] | None = None
        self.on_lost: Callable[[PeerClient, Closed], None] | None = None
        """Told of every open link that closes without an end having left."""
        self.on_refused: Callable[[PeerClient, str], None] | None = None
        """Told the code whenever this end or the peer refuses the other for good reasons."""
        self.on_cache: CacheListener | None = None
        """Told what the peer holds of prefixes."""
        self._next_event = 0
        config = connection_config(local, options)
        is_sealed = local.security.mode == "tls"
        self._session = ClientSession(config.ack, local.info.layout, options.credit_bytes, is_sealed=is_sealed)
        self._dialer = Dialer(host, port, config, options, self)
        self._dialer.tls = self._make_tls()
        self._codecs = self._dialer.codecs = CodecPool(options.codec_threads, now)
        self._prefills: dict[int, RemotePrefill] = {}
        self._measuring = Measuring()
        self._runner: asyncio.Task[None] | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._load: dict[str, float] = {}
        self._is_draining = False
        self._refused_at: float | None = None
        self._faults_at: list[float] = []
        self._last_error = ""
        self._last_error_at: float | None = None
        self._mismatch: dict[str, object] = {}
        self._is_local_error = False
        self._num_sessions = 0

    @property
    def is_started(self) -> bool:
        """True from `start` on."""
        return self._runner is not None or self.state != "connecting"

    @property
    def certificate(self) -> CertificateFacts | None:
        """The peer's, while there is a control link with TLS."""
        return self._dialer.control.certificate if self._dialer.control is not None else None

    @property
    def rtt_s(self) -> float:
        """Round trip of the control link; 0 before it is known."""
        control = self._dialer.control
        return (control.connection.rtt_s or 0.0) if control is not None else 0.0

    @property
    def num_streams(self) -> int:
        """Prefills under way at this peer."""
        return len(self._prefills)

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        if self.local.security.mode == "none" and not is_loopback(self.host):
            why = "there is neither a shared key (security.key_file) nor TLS (security.mode)"
            self._set("incompatible", f"{self.host} is not loopback and {why}")
            return
        self._runner = asyncio.create_task(self._dialer.run(), name=f"peer {self.name}")

    def set_security(self, security: Security) -> None:
        """New connections take these keys or certificates; those that are up stay. "tls" cannot come or go."""
        self.local = replace(self.local, security=security)
        self._dialer.config, self._dialer.tls = connection_config(self.local, self.options), self._make_tls()

    def _make_tls(self) -> Callable[[], TlsChannel] | None:
        end = self.local.security.tls
        return None if end is None else lambda: TlsChannel(end, self.tls_name)

    async def close(self) -> None:
        """Cancel all prefills, tell the peer that we leave, close the links."""
        for prefill in list(self._prefills.values()):
            prefill.cancel()
        self._dialer.close("this decoded closes the session")
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        if self._lease is not None:
            self._lease.cancel()
        self._codecs.close()
        self._set("down", "closed")

    def prefill(self, request: RemoteRequest, sink: StateSink, source: StateSource | None = None) -> RemotePrefill:
        """Ask the peer for the state of `request.tokens` from `request.start` on; it lands in the sink.

        `source` has the state of [held, start), to be sent where `request.pushes` says so.

        Raises:
            PeerDraining, LinkLost: the peer is not ready now.
            PromptTooLong, PeerShed, PeerInvalid: its limits would refuse this.
            LocalProtocolError: a field that the protocol does not allow (a request id of more than 256 bytes).
        """
        if self.state == "draining":
            raise PeerDraining(f"peer {self.name} is draining")
        if self.state != "ready":
            raise LinkLost(f"peer {self.name} is {self.state}: {self.reason}")
        num_tokens = len(request.tokens)
        if not 0 <= request.start <= num_tokens:
            raise LocalProtocolError(f"start is {request.start}, must be 0..{num_tokens}")
        num_bytes = self.local.info.layout.transfer_bytes(request.start, num_tokens)
        if num_bytes > self.options.max_stream_bytes:
            raise PromptTooLong(f"{num_bytes} bytes of state exceed max_stream_bytes {self.options.max_stream_bytes}")
        message = Prefill(
            request_id=request.request_id,
            start=request.start,
            num_tokens=num_tokens,
            deadline_s=request.deadline_s,
            priority=request.priority,
            salt=request.tenant_salt,
            codecs=request.codecs or offered(self.options.codec),
            limit=0,
            token_hash=bytes(16),
            pushes=request.pushes and source is not None,
            held=request.held if request.pushes and source is not None else 0,
            due_s=request.due_s,
        )
        tokens = pack_tokens(request.tokens)
        stream = self._session.request(message, tokens, sink.buffers, now())
        own = source if message.pushes else None
        prefill = RemotePrefill(self._session, stream, sink, self._codecs, source=own)
        self._prefills[stream.stream_id] = prefill
        prefill.flush, prefill.trace = self._flush, self.trace
        prefill.start_deadline(request.deadline_s)
        self._flush()
        return prefill

    async def measure(self, num_bytes: int, timeout_s: float) -> Measurement:
        """What the data links carry now, beside whatever else they do.

        Raises:
            LinkLost: the peer is not ready, or the session was lost.
            LocalProtocolError: a measurement is running, or so many bytes are not allowed.
            TransferTimeout: the bytes did not come in time.
        """
        control = self._dialer.control
        if control is None or self.state not in ("ready", "draining"):
            raise LinkLost(f"peer {self.name} is {self.state}: {self.reason}")
        control.send(self._measuring.ask(num_bytes, now()))
        try:
            return await self._measuring.wait(timeout_s)
        finally:
            if (control := self._dialer.control) is not None and control.is_open:
                control.send(self._measuring.stop())

    def status(self) -> dict[str, object]:
        """What `peers` shows."""
        peer, control = self._session.peer, self._dialer.control
        return {
            "name": self.name,
            "address": f"{self.host}:{self.port}",
            "state": self.state,
            "reason": self.reason,
            "codec": self.options.codec,
            "num_links": (1 if control else 0) + len(self._dialer.data),
            "num_data_links": self._dialer.num_data_links,
            "num_streams": self.num_streams,
            "num_sessions": self._num_sessions,
            **security_facts(self.local.security.mode, control),
            "rtt_s": control.connection.rtt_s if control else None,
            "bytes_in": self._dialer.bytes_in + sum(link.connection.bytes_in for link in self._links()),
            "bytes_out": self._dialer.bytes_out + sum(link.bytes_out for link in self._links()),
            "delivery_bps": delivery_bps(self._dialer.data.values()),
            "data_links": link_rows(self._dialer.data.values()),
            "peer_name": peer.name if peer else None,
            "instance_id": peer.instance if peer else None,
            "identity": _identity(peer) if peer else None,
            "numerics": dict(peer.numerics) if peer else None,
            "load": dict(self._load),
            "last_error": self._last_error,
            "last_error_age_s": None if self._last_error_at is None else round(now() - self._last_error_at, 3),
            "is_local_error": self._is_local_error,
            "mismatch": self._mismatch,
        }

    @property
    def load(self) -> dict[str, float]:
        """The facts of the peer's latest Status message; empty before the first."""
        return self._load

    # ---- DialerOwner

    def dial_up(self, control: Link, peer: HelloAck) -> None:
        """A control link is open."""
        self._num_sessions += 1
        self._is_draining, self._refused_at, self._is_local_error, self._mismatch = False, None, False, {}
        self._cancel_lease()
        self._session.attach(peer, now())
        self._forget_cache()
        self._set("connecting", "no data link yet")
        self._flush()

    def dial_down(self, failure: Failure) -> None:
        """The control link is lost, or could not be made."""
        at = now()
        self._last_error, self._last_error_at, self._is_local_error = str(failure.error), at, failure.is_local
        self._mismatch = _mismatch(failure.error)
        was_attached = self._session.is_attached
        if was_attached:
            self._forget_cache()
        self._measuring.lost(str(failure.error))
        self._session.detach(at)
        if was_attached:
            self._lease = asyncio.get_running_loop().call_later(self._session.lease_s, self._expire)
        if failure.code in INCOMPATIBLE_CODES or failure.code == "closing":
            self._session.fail_all(LinkLost(f"peer {self.name}: {failure.error}"))
        if failure.code in FAULT_CODES:
            self._count_fault(at, failure)
        if failure.code in INCOMPATIBLE_CODES and self.on_refused is not None:
            self.on_refused(self, failure.code)
        if not failure.is_refused:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = at
        elif at - self._refused_at >= self.options.gone_after_s:
            self._session.fail_all(LinkLost(f"peer {self.name} is gone: {failure.error}"))
        self._set("incompatible" if failure.code in INCOMPATIBLE_CODES else "down", str(failure.error))
        self._flush()

    def _count_fault(self, at: float, failure: Failure) -> None:
        """What broke the protocol once may be noise; what does so after every Resume would go on for ever."""
        self._faults_at = [t for t in self._faults_at if at - t < _FAULT_WINDOW_S] + [at]
        if len(self._faults_at) >= _MAX_FAULTS:
            self._faults_at.clear()
            why = f"the protocol was broken {_MAX_FAULTS} times within {_FAULT_WINDOW_S:g} s"
            self._session.fail_all(LinkLost(f"peer {self.name}: {why}: {failure.error}"))

    def dial_data(self, lost: int | None) -> None:
        """A data link opened or went."""
        if lost is not None:
            self._session.link_lost(lost)
        self._update_state()
        # A stream that was lied to on the link that went has ended: tell whoever waits, and the peer.
        self._flush()

    def dial_lost(self, closed: Closed) -> None:
        """A link that was open is gone."""
        if self.on_lost is not None:
            self.on_lost(self, closed)

    def link_received(self, link: Link, event: Received) -> None:
        """A complete frame. Raises RemoteProtocolError."""
        message = event.message
        if isinstance(message, Piece):
            if isinstance(event.payload, Unopened):
                self._open(link, event.stream_id, message, event.payload)
            elif isinstance(event.payload, Target):
                self._session.piece_arrived(event.stream_id, message, event.payload, now())
        elif isinstance(message, Filler):
            self._measuring.arrived(message, now())
        elif isinstance(message, CacheEvent):
            self._cache_event(message)
        elif isinstance(message, Drain):
            self._is_draining = message.is_draining
            self._update_state()
        elif isinstance(message, Status):
            self._load = sane(message.facts)
            if not self.options.data_links:
                self._dialer.want(int(min(self._load.get("wanted_data_links", 0), MOST_LINKS)))
        else:
            self._session.receive(event.stream_id, message, now())
        self._flush()

    def _cache_event(self, event: CacheEvent) -> None:
        """What the peer holds. A gap cannot be: whoever skips a number has lost count, and tells all of it anew."""
        if event.no != self._next_event:
            raise BadMessage(f"CACHE_EVENT.no is {event.no}, must be {self._next_event}")
        self._next_event += 1
        if self.on_cache is not None:
            self.on_cache(self, read_holdings(event), is_anew=event.is_anew)

    def _forget_cache(self) -> None:
        self._next_event = 0
        if self.on_cache is not None:
            self.on_cache(self, [], is_anew=True)

    def open_piece(self, link: Link, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        """Where a payload goes. Raises RemoteProtocolError."""
        return self._session.open_piece(link.index, stream_id, piece, num_bytes)

    # ---- inside

    def _open(self, link: Link, stream_id: int, piece: Piece, unopened: Unopened) -> None:
        """A sealed payload. Raises SealBroken when it is small enough to be opened at once, and does not open."""
        prefill = self._prefills.get(stream_id)
        if prefill is None or unopened.target.is_discarded:
            BUFFERS.give_back(unopened.sealed)
            return
        if len(unopened.sealed) <= INLINE_BYTES:
            self._session.piece_arrived(stream_id, piece, unopened.target, now(), unopened.run())
        else:
            prefill.open_piece(link, piece, unopened)

    def pump(self) -> None:
        """Give every data link with room a piece of a pushed prefix, in turn, until there is none."""
        fill_in_turn(self._dialer.data.values(), self._send_next)

    def _send_next(self, link: Link) -> bool:
        piece = self._session.next_piece(link.index)
        if piece is not None:
            link.send_piece(piece)
        return piece is not None

    def _flush(self) -> None:
        self._hand_on()
        self.pump()

    def _hand_on(self) -> None:
        control = self._dialer.control
        while True:
            outbox, events = self._session.take_outbox(), self._session.events()
            if not outbox and not events:
                return
            for out in outbox:
                if control is not None and control.is_open:
                    control.send(out.message, out.stream_id, out.payload)
            for event in events:
                if isinstance(event, SegmentArrived):
                    self._prefills[event.stream.stream_id].segment_arrived(event.segment)
                elif isinstance(event, PushMoved):
                    if (prefill := self._prefills.get(event.stream.stream_id)) is not None:
                        prefill.push_moved()
                elif isinstance(event, StreamEnded):
                    self._prefills.pop(event.stream.stream_id).ended()

    def _update_state(self) -> None:
        if self._dialer.control is None:
            return
        if not self._dialer.data or not self._dialer.is_warm:
            self._set("connecting", f"{len(self._dialer.data)} of {self._dialer.num_data_links} data links are open")
        elif self._is_draining:
            self._set("draining", "the peer is draining")
        else:
            self._set("ready", "")

    def _set(self, state: PeerState, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            if self.on_state is not None:
                self.on_state(self)

    def _expire(self) -> None:
        self._lease = None
        self._session.expire(now())
        self._flush()
        if not self._session.is_attached and self._prefills:
            self._lease = asyncio.get_running_loop().call_later(_EXPIRE_AGAIN_S, self._expire)

    def _cancel_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _links(self) -> list[Link]:
        return [*([self._dialer.control] if self._dialer.control else []), *self._dialer.data.values()]


def _mismatch(error: PdError) -> dict[str, object]:
    """What the reason has in short, whole."""
    pairs = error.differences if isinstance(error, LayoutMismatch) else {}
    return {name: {"ours": ours, "theirs": theirs} for name, (ours, theirs) in pairs.items()}


def _identity(peer: HelloAck) -> dict[str, object]:
    names = ("weights", "config", "tokenizer", "layout", "block_tokens", "hash_scheme")
    return {name: getattr(peer, name) for name in names}
