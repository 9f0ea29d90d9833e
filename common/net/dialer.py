"""Keeps one control link and N data links to a peer up: connects, waits, reconnects with jittered backoff.

Tells its owner (PeerClient) what is up; knows addresses, sockets and handshakes, no streams. Failures of this machine
(no descriptors, no ports) are told apart from the peer's.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.errors import TLS_KINDS, LinkLost, PdError
from common.hosts import is_loopback
from common.linkfacts import FIRST_LINKS
from common.net.codecs import CodecPool
from common.net.link import Link, LinkOwner
from common.net.options import LinkOptions
from common.net.tls import CertificateFacts, TlsChannel
from common.wire.connection import Closed, Connection, Received
from common.wire.frames import Target
from common.wire.handshake import ConnectionConfig, Handshake
from common.wire.messages import HelloAck, Piece

log = logging.getLogger(__name__)
LOCAL_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
INCOMPATIBLE_CODES = {"layout_mismatch", "auth", "version", "bad_magic"} | {
    f"tls_{kind}" for kind in TLS_KINDS if kind != "failed"
}
MakeTls = Callable[[], TlsChannel]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a control link is not there. `is_local`: this machine's fault; `is_refused`: nothing listens there."""

    error: PdError
    code: str
    is_local: bool = False
    is_refused: bool = False


class DialerOwner(Protocol):
    """Who is told. All calls come on the event loop."""

    def dial_up(self, control: Link, peer: HelloAck) -> None: ...

    def dial_down(self, failure: Failure) -> None:
        """The control link is lost, or an attempt failed."""

    def dial_data(self, lost: int | None) -> None:
        """A data link opened or failed to open, or `lost` is the one that went."""

    def dial_lost(self, closed: Closed) -> None:
        """A link that was open closed, and neither end had left."""

    def link_received(self, link: Link, event: Received) -> None: ...

    def open_piece(self, link: Link, stream_id: int, piece: Piece, num_bytes: int) -> Target: ...

    def pump(self) -> None:
        """A link has room."""


class _LinkClosed(Exception):
    """A link closed before it was open."""

    def __init__(self, closed: Closed) -> None:
        super().__init__(str(closed.error))
        self.closed = closed


class Dialer(LinkOwner):
    """The links to one peer. `bytes_in` and `bytes_out` count links that are closed.

    `config` and `tls`, which makes a control link's channel where there is TLS, may be exchanged: new links take them.
    """

    def __init__(
        self, host: str, port: int, config: ConnectionConfig, options: LinkOptions, owner: DialerOwner
    ) -> None:
        self.host, self.port, self.config, self.options, self.owner = host, port, config, options, owner
        self.tls: MakeTls | None = None
        self.codecs: CodecPool | None = None
        """Seals what is sent over data links."""
        self.control: Link | None = None
        self.data: dict[int, Link] = {}
        self.num_data_links = options.data_links or (1 if is_loopback(host) else FIRST_LINKS)
        self.bytes_in = self.bytes_out = 0
        self._tried: set[int] = set()
        self._num_first = self.num_data_links
        self._start_slot: Callable[[int], None] | None = None
        self._opening: dict[Link, asyncio.Future[None]] = {}

    @property
    def is_warm(self) -> bool:
        """True when every data link that this session began with is open, or has failed once."""
        return len(self._tried) >= self._num_first

    def want(self, num_links: int) -> None:
        """Have at least so many data links from now on."""
        first, self.num_data_links = self.num_data_links + 1, max(self.num_data_links, num_links)
        for index in range(first, self.num_data_links + 1):
            if self._start_slot is not None:
                self._start_slot(index)

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        attempt = 0
        while True:
            try:
                await self._session()
                attempt = 0
            except _LinkClosed as e:
                attempt = 20 if e.closed.code in INCOMPATIBLE_CODES else attempt + 1
                self.owner.dial_down(Failure(e.closed.error, e.closed.code))
            except LinkLost as e:
                attempt += 1
                self.owner.dial_down(Failure(e, e.code))
            except OSError as e:
                attempt += 1
                self.owner.dial_down(self._os_failure(e))
            await asyncio.sleep(self._backoff_s(attempt))

    def close(self, reason: str) -> None:
        """Leave for good on every link."""
        links = [*([self.control] if self.control else []), *self.data.values(), *self._opening]
        for link in links:
            if link.has_transport:
                link.leave(reason)

    async def _session(self) -> None:
        """One control link from connecting to loss, with its data links."""
        session, lost = secrets.token_bytes(16), asyncio.Event()
        self._tried.clear()
        link = await self._connect(session, 0, None, lost)
        key = link.connection.handshake.session_key
        slots: list[asyncio.Task[None]] = []

        def start_slot(index: int) -> None:
            slots.append(asyncio.create_task(self._keep_data_link(session, key, index)))

        self._num_first, self._start_slot = self.num_data_links, start_slot
        for index in range(1, self.num_data_links + 1):
            start_slot(index)
        try:
            await lost.wait()
        finally:
            self._start_slot = None
            for slot in slots:
                slot.cancel()
            for data in list(self.data.values()):
                data.fail(LinkLost("the control link of this session is gone"))
            await asyncio.gather(*slots, return_exceptions=True)

    async def _keep_data_link(self, session: bytes, key: bytes | None, index: int) -> None:
        attempt = 0
        while True:
            lost = asyncio.Event()
            try:
                await self._connect(session, index, key, lost)
                attempt = 0
                await lost.wait()
            except (_LinkClosed, LinkLost, OSError) as e:
                attempt += 1
                log.warning("data link %d to %s:%d: %s", index, self.host, self.port, e)
                self._tried.add(index)
                self.owner.dial_data(None)
            await asyncio.sleep(self._backoff_s(attempt))

    async def _connect(self, session: bytes, index: int, key: bytes | None, lost: asyncio.Event) -> Link:
        """A link whose handshake is done; `lost` is set when it goes. Raises _LinkClosed, LinkLost or OSError."""
        loop = asyncio.get_running_loop()

        def make(link: Link, now: float) -> Connection:
            nonce, secret = secrets.token_bytes(32), secrets.token_bytes(32)
            handshake = Handshake.client(self.config, nonce, secret, session, index, key)
            return Connection(
                self.config, handshake, now, lambda s, piece, num: self.owner.open_piece(link, s, piece, num)
            )

        link = Link(self, make, tls=self.tls if index == 0 else None, codecs=self.codecs)
        link.on_lost = lost.set
        opened = self._opening[link] = loop.create_future()
        is_handed_on = False
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                await loop.create_connection(lambda: link, self.host, self.port)
                await opened
            is_handed_on = True
            return link
        except TimeoutError:
            limit = self.options.connect_timeout_s
            raise LinkLost(f"{self.host}:{self.port} did not answer within {limit:g} s") from None
        finally:
            del self._opening[link]
            # Reading the exception also tells asyncio that it was not lost when this task was cancelled meanwhile.
            if not opened.cancel() and not opened.cancelled():
                opened.exception()
            if not is_handed_on:
                link.abort()

    def _os_failure(self, error: OSError) -> Failure:
        if error.errno in LOCAL_ERRNOS:
            text = f"this machine cannot open another connection: {error.strerror or error}"
            return Failure(LinkLost(text), "local", is_local=True)
        text = f"cannot connect to {self.host}:{self.port}: {error.strerror or error}"
        return Failure(LinkLost(text), "connect", is_refused=isinstance(error, ConnectionRefusedError))

    def _backoff_s(self, attempt: int) -> float:
        longest = min(self.options.reconnect_max_s, self.options.reconnect_min_s * 2.0 ** min(attempt, 20))
        return longest * random.uniform(0.5, 1.0)

    # ---- LinkOwner

    def link_secured(self, link: Link, certificate: CertificateFacts) -> None:
        """TLS has compared the name: nothing more is asked for."""

    @property
    def congestion_control(self) -> str:
        """Of every link."""
        return self.options.congestion_control

    def link_opened(self, link: Link, peer: HelloAck | None) -> None:
        """The handshake is done."""
        if link.index == 0 and peer is not None:
            self.control = link
            self.owner.dial_up(link, peer)
        else:
            self.data[link.index] = link
            self._tried.add(link.index)
            self.owner.dial_data(None)
        future = self._opening.get(link)
        if future is not None and not future.done():
            future.set_result(None)

    def link_received(self, link: Link, event: Received) -> None:
        """A complete frame."""
        self.owner.link_received(link, event)

    def link_writable(self, link: Link) -> None:
        """Room in the transport's buffer."""
        self.owner.pump()

    def link_closed(self, link: Link, closed: Closed) -> None:
        """A link is gone, or never opened."""
        future = self._opening.get(link)
        if future is not None and not future.done():
            future.set_exception(_LinkClosed(closed))
        self.bytes_in += link.connection.bytes_in
        self.bytes_out += link.bytes_out
        is_known = link is self.control or self.data.get(link.index) is link
        if is_known and closed.code != "closing":
            level = logging.WARNING if closed.is_fault else logging.INFO
            log.log(level, "link %d to %s:%d closed: %s", link.index, self.host, self.port, closed.error)
            self.owner.dial_lost(closed)
        if link is self.control:
            self.control = None
            self.owner.dial_down(Failure(closed.error, closed.code))
        elif self.data.get(link.index) is link:
            del self.data[link.index]
            self.owner.dial_data(link.index)
        if link.on_lost is not None:
            link.on_lost()
