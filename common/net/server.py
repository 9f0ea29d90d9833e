"""prefilld's side of the network: listens, accepts sessions, runs one handler task per requested stream.

Puts together links, ServerPeer (one per client process) and the handler the service gives. Decides nothing about
admission: the handler accepts or refuses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from common.errors import AuthFailed, LinkLost, StartupError, TlsFailed, UnknownFrame
from common.hosts import is_loopback
from common.linkfacts import CodecChooser, EgressControl, LinkKey, PathEstimate, SendOrder
from common.net.codecs import CodecPool
from common.net.ends import connection_config
from common.net.governor import Governor
from common.net.link import Link, now
from common.net.options import LinkOptions, LocalEnd, PeerId, RemoteRequest, Security, Trace
from common.net.server_peer import Handler, ServerPeer
from common.net.server_stream import ServerStream
from common.net.tls import CertificateFacts, TlsChannel
from common.wire.connection import Closed, Connection, Received
from common.wire.frames import Target
from common.wire.handshake import Handshake
from common.wire.holdings import Holding
from common.wire.messages import HelloAck, Piece
from common.wire.session import StreamRefused

__all__ = ["LinkOptions", "LocalEnd", "PeerId", "PrefillServer", "RemoteRequest", "ServerStream"]
StreamRefusal = Callable[[StreamRefused, str], None]
_MAX_EARLY_LINKS = 128


class PrefillServer:
    """Listens for decodeds.

    `handler(stream)` runs as one task per requested stream; it is cancelled when the client cancels, leaves, or its
    lease ends. `load(name)` gives the facts of Status messages to that client, every heartbeat. `egress`
    decides how fast links send (none: as fast as the kernel does). `trace` is described in options.py.
    """

    def __init__(
        self,
        local: LocalEnd,
        options: LinkOptions,
        handler: Handler,
        *,
        load: Callable[[str], Mapping[str, float]] | None = None,
        egress: EgressControl | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.local, self.options, self.handler = local, options, handler
        self.load, self.trace = load, trace
        self.is_draining = False
        self.choosers: dict[str, CodecChooser] = {}
        """By codec: whether a segment is worth encoding; a codec without one always is."""
        self.order: SendOrder | None = None
        """Whose state of a client is sent first; without, whoever asked first."""
        self.on_refused: Callable[[Closed, str], None] | None = None
        """Told of every connection that ends before its handshake is done, with the address it came from."""
        self.on_lost: Callable[[Closed, str], None] | None = None
        """Told of every open link that closes without an end having left, with the peer's name."""
        self.cache: Callable[[], Iterable[Holding]] | None = None
        """What is held of prefixes, for whoever connects."""
        self.on_stream_refused: StreamRefusal | None = None
        """Told of every Prefill that the network layer refused by itself, with the peer's name."""
        self._config = connection_config(local, options)
        self._codecs = CodecPool(options.codec_threads, now)
        self._server: asyncio.Server | None = None
        # In order of arrival, as a set is not: a simulated run must repeat.
        self._early: dict[Link, None] = {}
        self._peers: dict[str, ServerPeer] = {}
        self._links: dict[Link, ServerPeer] = {}
        self._forgotten = (0, 0)
        self._governor = Governor(egress, self._data_links) if egress is not None else None

    @property
    def port(self) -> int:
        """The bound port."""
        if self._server is None or not self._server.sockets:
            raise StartupError("the server does not listen")
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def sessions(self) -> list[dict[str, object]]:
        """One dict per client process, for `peers`."""
        return [peer.status() for peer in self._peers.values()]

    @property
    def num_sessions(self) -> int:
        """Client processes whose control link is open."""
        return sum(peer.control is not None for peer in self._peers.values())

    @property
    def certificates(self) -> dict[str, float]:
        """When the certificates of connected clients expire (Unix seconds), by their first name."""
        links = (peer.control for peer in self._peers.values() if peer.control is not None)
        return {found.name: found.expires_at for link in links if (found := link.certificate) is not None}

    @property
    def num_links(self) -> int:
        """Open links of all sessions, control and data."""
        return sum(len(peer.links) for peer in self._peers.values())

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes in and out over all links of all clients since the start, frames and handshakes included."""
        totals = [self._forgotten, *(peer.traffic for peer in self._peers.values())]
        return sum(n for n, _ in totals), sum(n for _, n in totals)

    @property
    def paths(self) -> dict[str, PathEstimate]:
        """What is known about the ways to peers to whom anything was sent, by their names."""
        return {peer.name: path for peer in self._peers.values() if (path := peer.path) is not None}

    async def start(self, host: str, port: int) -> None:
        """Bind and listen.

        Raises:
            StartupError: the address is in use or not ours, or is not loopback while there is neither key nor TLS.
        """
        if self.local.security.mode == "none" and not is_loopback(host):
            why = "a shared key (security.key_file) or TLS (security.mode) is needed"
            raise StartupError(f"listen.host {host!r} is not loopback: {why}")
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._new_link, host, port, backlog=256)
        except OSError as e:
            raise StartupError(f"cannot listen on {host}:{port} (listen.host, listen.port): {e}") from e

    async def close(self) -> None:
        """Stop listening, end every stream, tell the peers and close their links."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers.values()):
            peer.drop(LinkLost("this prefilld closes"))
        for link in [*self._early, *self._links]:
            if link.has_transport:
                link.leave("this prefilld closes")
        if self._governor is not None:
            self._governor.close()
        self._codecs.close()
        await asyncio.sleep(0)

    def set_draining(self, is_draining: bool) -> None:
        """Tell every peer; new streams are refused while draining, accepted ones go on."""
        self.is_draining = is_draining
        for peer in self._peers.values():
            peer.set_draining(is_draining)

    def set_security(self, security: Security) -> None:
        """New connections take these keys or certificates; those that are up stay. "tls" cannot come or go."""
        self.local = replace(self.local, security=security)
        self._config = connection_config(self.local, self.options)

    # ---- LinkOwner

    @property
    def congestion_control(self) -> str:
        """Of every link."""
        return self.options.congestion_control

    def link_secured(self, link: Link, certificate: CertificateFacts) -> None:
        """A client's certificate was verified: is it one of those that may? Raises AuthFailed."""
        allowed = self.local.security.allowed_names
        if allowed and not certificate.has_name(allowed):
            names = ", ".join(certificate.names)[:200] or "no name"
            raise AuthFailed(f"the certificate of this decoded ({names}) has none of prefilld's security.allowed_names")

    def link_opened(self, link: Link, peer: HelloAck | None) -> None:
        """A handshake is done."""
        self._early.pop(link, None)
        if peer is None:
            found = self._by_session(link.connection.session)
            if found is None:
                link.fail(LinkLost("the session's control link is gone"))
                return
            self._links[link] = found
            found.add_data(link)
            return
        self._retire(peer)
        known = self._peers.get(peer.instance) or self._new_peer()
        self._links[link] = known
        known.attach(link, peer, is_draining=self.is_draining)
        # After and not before: replacing an old control link makes the peer idle for a moment, and idle ones are swept.
        self._peers[peer.instance] = known

    def link_received(self, link: Link, event: Received) -> None:
        """A frame. Raises RemoteProtocolError."""
        peer = self._links.get(link)
        if peer is not None and link is peer.control:
            peer.received(event)
        elif peer is not None:
            peer.piece_received(link, event)

    def link_closed(self, link: Link, closed: Closed) -> None:
        """A link is gone."""
        is_early = link in self._early
        self._early.pop(link, None)
        peer = self._links.pop(link, None)
        if peer is None:
            if is_early and self.on_refused is not None:
                self.on_refused(closed, link.address)
            return
        peer.closed(link)
        if closed.code != "closing" and self.on_lost is not None:
            self.on_lost(closed, peer.name)
        if link is peer.control:
            peer.detach(closed.error, has_left=closed.is_remote and closed.code == "closing")
        else:
            peer.lost_data(link)
        self._sweep()

    def link_writable(self, link: Link) -> None:
        """Room in a transport's buffer."""
        peer = self._links.get(link)
        if peer is not None:
            peer.pump()

    # ---- inside

    def _new_link(self) -> Link:
        end = self.local.security.tls
        make_tls = None if end is None else lambda: TlsChannel(end, None)
        link = Link(self, self._make, tls=make_tls, is_tls_optional=True, codecs=self._codecs)
        self._early[link] = None
        return link

    def _drop_oldest(self) -> None:
        """Who connects in earnest is done within a round trip or two: the link that has been silent longest goes."""
        oldest = next(iter(self._early))
        why = f"more than {_MAX_EARLY_LINKS} connections have not finished their handshake"
        if self.local.security.mode == "tls":
            oldest.connection.lose(TlsFailed(why, "failed"))  # words in the clear would be taken for another mode
            oldest.flush()
        else:
            oldest.fail(LinkLost(why))

    def _make(self, link: Link, now: float) -> Connection:
        nonce, secret = secrets.token_bytes(32), secrets.token_bytes(32)
        handshake = Handshake.server(self._config, nonce, secret, self._find_key)
        connection = Connection(self._config, handshake, now, lambda *piece: self._open_piece(link, *piece))
        host = link.address.rsplit(":", 1)[0]
        if len(self._early) > _MAX_EARLY_LINKS:
            self._drop_oldest()
        if self.local.security.mode == "none" and not is_loopback(host):
            connection.fail(LinkLost("this prefilld has no shared key and takes loopback connections only"))
        return connection

    def _open_piece(self, link: Link, stream_id: int, piece: Piece, num_bytes: int) -> Target:
        peer = self._links.get(link)
        if peer is None:
            raise UnknownFrame(f"PIECE for stream {stream_id} on a link of no session")
        return peer.open_piece(link, stream_id, piece, num_bytes)

    def _find_key(self, session: bytes) -> bytes | None:
        peer = self._by_session(session)
        return None if peer is None else peer.session_key

    def _by_session(self, session: bytes) -> ServerPeer | None:
        return next((p for p in self._peers.values() if p.control is not None and p.session_id == session), None)

    def _data_links(self) -> Iterator[tuple[LinkKey, Link]]:
        for instance, peer in self._peers.items():
            for index, link in peer.data.items():
                yield (instance, index), link

    def _new_peer(self) -> ServerPeer:
        info = self.local.info
        peer = ServerPeer(
            self._config.ack,
            info.layout,
            info.vocab_size,
            self._codecs,
            self.handler,
            self.trace,
            credit_bytes=self.options.credit_bytes,
            is_sealed=self.local.security.mode == "tls",
        )
        peer.ordering.order = self.order
        peer.governor, peer.choosers = self._governor, self.choosers
        peer.on_idle, peer.on_refused = self._sweep, self._stream_refused
        peer.load = lambda: self.load(peer.name) if self.load is not None else {}
        peer.cache = lambda: self.cache() if self.cache is not None else None
        return peer

    def tell_cache(self, holdings: Sequence[Holding], *, is_anew: bool) -> None:
        """Tell every client what is held of prefixes now; `is_anew`: and that nothing else is."""
        for peer in self._peers.values():
            peer.tell_cache(holdings, is_anew=is_anew)

    def _stream_refused(self, event: StreamRefused, peer: str) -> None:
        if self.on_stream_refused is not None:
            self.on_stream_refused(event, peer)

    def _retire(self, newcomer: HelloAck) -> None:
        """A client of the same name under a new instance id was restarted: its old streams wait for nobody."""
        for instance, peer in list(self._peers.items()):
            known = peer.session.peer
            is_older = known is not None and known.name == newcomer.name and instance != newcomer.instance
            if is_older and peer.control is None:
                peer.drop(LinkLost(f"decoded {newcomer.name} was restarted"))
        self._sweep()

    def _sweep(self) -> None:
        """Forget client processes that have neither links nor streams."""
        for instance, peer in list(self._peers.items()):
            if peer.is_idle:
                del self._peers[instance]
                peer.forget()
                num_in, num_out = peer.traffic
                self._forgotten = (self._forgotten[0] + num_in, self._forgotten[1] + num_out)
