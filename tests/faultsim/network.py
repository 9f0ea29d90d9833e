"""The hosts, listeners and connections of a simulated TCP network, and what may be done to them.

Order is kept within a connection only; every pair of hosts has its own latency, jitter, rate and buffers. Connections
are opened by SimLoop; faults.py breaks them.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.faultsim.loop import Handle, Process, SimLoop
from tests.faultsim.transport import Pipe, SimSocket, SimTransport, Way

Trace = Callable[..., None]
_SYN_AGAIN_S = (1.0, 2.0, 4.0)


@dataclass
class Connection:
    """Both ends of one TCP connection."""

    no: int
    port: int
    client: SimTransport = field(init=False)
    server: SimTransport = field(init=False)
    is_damaged: bool = False
    is_silenced: bool = False
    sockets: dict[str, SimSocket] = field(init=False)

    @property
    def name(self) -> str:
        return f"c{self.no}"

    @property
    def ends(self) -> tuple[SimTransport, SimTransport]:
        return self.client, self.server

    @property
    def is_up(self) -> bool:
        """True while both ends think so."""
        return self.client.state == self.server.state == "open"


@dataclass
class Listener:
    """What create_server answers."""

    net: Network
    process: Process
    factory: Callable[[], Any]
    address: tuple[str, int]

    @property
    def sockets(self) -> list[Listener]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        if self.net.listeners.get(self.address) is self:
            del self.net.listeners[self.address]


class Network:
    """All hosts, listeners and connections."""

    def __init__(self, loop: SimLoop, seed: int, trace: Trace, counts: Counter[str]) -> None:
        self.loop, self.rng, self.trace, self.counts = loop, random.Random(seed), trace, counts
        self.way: Callable[[str, str], Way] = lambda a, b: Way()
        self.is_uvloop = True
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: list[Connection] = []
        self.num_deliveries = 0
        self.on_delivery: Callable[[Pipe, int], None] = lambda pipe, num: None
        self.on_received: Callable[[SimTransport], None] = lambda end: None
        self.on_overflow: Callable[[SimTransport], None] = lambda end: None
        self.most_beyond_mark = 1 << 20
        """A write may pass a transport's mark by one frame; beyond that it is reported."""
        self.on_connect: Callable[[SimTransport], None] = lambda end: None
        self.apart: set[frozenset[str]] = set()
        self.hosts_off: set[str] = set()
        self.refusing: set[str] = set()
        self.dropping_syn: set[str] = set()
        self.local_errnos: dict[str, int] = {}
        self.world = Context()
        """What happens between processes belongs to none of them: kernels go on when one is stopped or dead."""
        loop.net = self

    def run_in(self, process: Process, call: Callable[[], None]) -> None:
        """Now, or when the process runs again."""
        if process.is_stopped:
            process.backlog.append(Handle(self.loop, call, (), process.context))
        elif not process.is_dead:
            process.context.run(call)
            self.loop.after_step(process)

    # ---- what the loop asks for

    def listen(self, process: Process, factory: Callable[[], Any], host: str, port: int) -> Listener:
        if (host, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = self.listeners[host, port] = Listener(self, process, factory, (host, port))
        return listener

    async def connect(
        self, process: Process, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[SimTransport, Any]:
        number = self.local_errnos.get(process.name)
        if number is not None:
            self.counts["path: local error at connect"] += 1
            raise OSError(number, os.strerror(number))
        made, waiter = self.loop.create_future(), self.loop.create_future()
        way = self.way(process.host, host)
        self.loop.at(self.loop.now + way.latency_s, self._syn, process, (host, port), made, 0, context=self.world)
        transport: SimTransport | None = None
        try:
            transport = await made
            transport.protocol = protocol = factory()
            self.loop.call_soon(self._made, transport, waiter)
            await waiter
            return transport, protocol
        except BaseException:
            if transport is None and made.done() and not made.cancelled() and made.exception() is None:
                transport = made.result()
            if transport is not None:
                transport.protocol = transport.protocol or factory()
                if self.is_uvloop or not waiter.done():
                    transport.close_silently()
                else:
                    transport.close()
            raise

    def _made(self, transport: SimTransport, waiter: Any) -> None:
        if transport.state == "open":
            transport.has_opened = True
            transport.protocol.connection_made(transport)
            self.loop.at(self.loop.now, transport.peer.out.arrive, context=self.world)
            if not waiter.done():
                waiter.set_result(None)
        elif not waiter.done():
            waiter.set_exception(ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)))

    def _syn(self, process: Process, address: tuple[str, int], made: Any, attempt: int) -> None:
        """A SYN reaches the other host, or is lost and sent again."""
        if made.done() or process.is_dead:
            return
        host, way = address[0], self.way(process.host, address[0])
        if self.is_apart(process.host, host) or host in self.hosts_off or host in self.dropping_syn:
            if attempt == len(_SYN_AGAIN_S):
                made.set_exception(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
                return
            when = self.loop.now + _SYN_AGAIN_S[attempt]
            self.loop.at(when, self._syn, process, address, made, attempt + 1, context=self.world)
            return
        listener = self.listeners.get(address)
        if listener is None or host in self.refusing:
            self.loop.at(self.loop.now + way.latency_s, _refuse, made, context=self.world)
            return
        connection = self._pair(process, listener)
        self.loop.at(self.loop.now + way.latency_s, self._established, connection, made, context=self.world)

    def _pair(self, process: Process, listener: Listener) -> Connection:
        connection = Connection(len(self.connections), listener.address[1])
        client = SimTransport(self, connection, "client", process, process.host)
        client.state = "connecting"
        server = SimTransport(self, connection, "server", listener.process, listener.address[0])
        client.way = server.way = self._way_of_connection(process.host, server.host)
        client.peer, server.peer = server, client
        client.out, server.out = Pipe(self, client, server), Pipe(self, server, client)
        connection.client, connection.server = client, server
        connection.sockets = {"client": SimSocket(client), "server": SimSocket(server)}
        self.connections.append(connection)
        self.trace("connect", connection.name, process.name, listener.process.name)
        accept_at = self.loop.now + self.rng.random() * 2 * client.way.latency_s
        accept = partial(self._accepted, server, listener)
        self.loop.at(accept_at, self.run_in, listener.process, accept, context=self.world)
        return connection

    def _way_of_connection(self, a: str, b: str) -> Way:
        """Routers spread connections over paths that are not alike: one link may be far behind the others."""
        way = self.way(a, b)
        if self.rng.random() > way.detours:
            return way
        return replace(way, latency_s=min(0.3, way.latency_s * self.rng.choice((3, 10))))

    def _accepted(self, server: SimTransport, listener: Listener) -> None:
        if self.listeners.get(listener.address) is not listener:
            server.state = "closed"  # it closed meanwhile, and its queue with it
            self.reset(server.peer, server.way.latency_s)
            return
        server.protocol, server.has_opened = listener.factory(), True
        if server.state != "open":
            server.state = "open"  # reset in the queue of the listener: the process finds out at its first read
            self.loop.call_soon(server.reset)
        server.protocol.connection_made(server)
        self.loop.at(self.loop.now, server.peer.out.arrive, context=self.world)

    def _established(self, connection: Connection, made: Any) -> None:
        if made.done() or connection.client.process.is_dead:
            # The connect was given up meanwhile: the kernel resets what the other end has accepted.
            connection.client.state = "closed"
            self.reset(connection.server, connection.client.way.latency_s)
        elif connection.client.state == "closed":
            made.set_exception(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        else:
            connection.client.state = "open"
            made.set_result(connection.client)
            self.on_connect(connection.client)

    # ---- what happens on the way

    def is_apart(self, a: str, b: str) -> bool:
        return bool(self.apart) and frozenset((a, b)) in self.apart

    def reset(self, transport: SimTransport, after_s: float) -> None:
        """RST is on its way to this end; it is lost where everything is, and is not sent again."""
        self.loop.at(self.loop.now + after_s, self._reset, transport, context=self.world)

    def _reset(self, transport: SimTransport) -> None:
        pipe = transport.peer.out
        if pipe.is_lost or self.is_apart(pipe.src.host, pipe.dst.host):
            return
        if not transport.has_opened:
            transport.state = "closed"
        else:
            self.run_in(transport.process, transport.reset)

    def delivered(self, pipe: Pipe, num_bytes: int) -> None:
        self.num_deliveries += 1
        self.trace("bytes", pipe.dst.connection.name, pipe.dst.side, num_bytes)
        self.on_delivery(pipe, num_bytes)

    def closed(self, transport: SimTransport) -> None:
        self.trace("closed", transport.connection.name, transport.side)

    # ---- what faults.py does

    def open_connections(self) -> list[Connection]:
        return [c for c in self.connections if c.is_up and c.client.has_opened]

    def cut(self, connection: Connection) -> None:
        """Both ends get a reset, one a little later than the other; what is on the way is lost."""
        for end in connection.ends:
            end.out.flying.clear()
            end.out.is_lost = True
            self.loop.at(self.loop.now + self.rng.random() * 0.02, self._cut, end, context=self.world)

    def _cut(self, end: SimTransport) -> None:
        if not end.has_opened:
            end.state = "closed"
        else:
            self.run_in(end.process, end.reset)

    def silence(self, connection: Connection, sides: tuple[str, ...]) -> None:
        """What is written at these ends is never heard of again."""
        connection.is_silenced = True
        for end in connection.ends:
            if end.side in sides:
                end.out.is_lost = True

    def rejoin(self, pair: frozenset[str]) -> None:
        """A partition heals: what was sent meanwhile is sent again by the kernels."""
        self.apart.discard(pair)
        for connection in self.connections:
            for end in connection.ends:
                if end.out.flying and {end.host, end.peer.host} == pair:
                    when = self.loop.now + self.rng.random() * 0.2
                    self.loop.at(when, end.out.arrive, context=self.world)

    def process_died(self, process: Process, *, is_silent: bool) -> None:
        """Its sockets are gone; other hosts hear of it unless the whole machine is off."""
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for end in self.ends_of(process):
            if end.state != "closed":
                end.state = "closed"
                end.out.drop()
                if is_silent:
                    end.out.flying.clear()
                else:
                    self.reset(end.peer, end.way.latency_s)

    def ends_of(self, process: Process) -> Iterator[SimTransport]:
        for connection in self.connections:
            for end in connection.ends:
                if end.process is process:
                    yield end


def _refuse(made: Any) -> None:
    if not made.done():
        made.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))
