"""One TCP connection in virtual time: what the kernels at both ends and the line between them do with bytes.

A full pipe stops its sender, order is kept, a closed socket answers with RST, a reset loses what is on the way. Which
hosts there are, and who connects to whom, is network.py.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.faultsim.loop import Process

if TYPE_CHECKING:
    from tests.faultsim.network import Connection, Network


@dataclass
class Way:
    """The path between two hosts; both directions alike. `capacity`: bytes in the kernels' buffers and on the line."""

    latency_s: float = 0.005
    jitter_s: float = 0.0
    rate: float = 1e9
    capacity: int = 1 << 16
    burst: int = 1 << 14
    detours: float = 0.0
    """How often a connection takes a longer path than the others."""
    split: float = 0.1
    """How often the receiver finds only a part of what has arrived."""
    high_water: int = 1 << 15
    """The largest buffer a sender's transport takes before it says pause_writing, whatever it was asked for."""


class SimSocket:
    """Stands in for the socket behind a transport: takes options, answers TCP_INFO."""

    family = socket.AF_INET

    def __init__(self, transport: SimTransport) -> None:
        self._transport = transport

    def fileno(self) -> int:
        return 99 if self._transport.state == "open" else -1

    def setsockopt(self, *_: Any) -> None:
        if self._transport.state != "open":
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        out, way = self._transport.out, self._transport.way
        if level == socket.IPPROTO_TCP and option == getattr(socket, "TCP_CONGESTION", 13):
            return b"simulated"
        if level != socket.IPPROTO_TCP or option != getattr(socket, "TCP_INFO", 11):
            return way.capacity
        info = bytearray(232)
        struct.pack_into("=B", info, 7, 0 if out.queued else 1)  # limited by the application
        struct.pack_into("=II", info, 68, int(2e6 * (way.latency_s + way.jitter_s)), int(1e6 * way.jitter_s))
        struct.pack_into("=Q", info, 120, out.num_delivered)
        struct.pack_into("=I", info, 144, out.queued)
        struct.pack_into("=I", info, 148, int(2e6 * way.latency_s))
        struct.pack_into("=Q", info, 160, int(min(way.rate, 1e9)))
        return bytes(info[:size])


class Pipe:
    """Bytes from one end of a connection to the other: the sender's buffer, what is on the way, the receiver."""

    def __init__(self, net: Network, src: SimTransport, dst: SimTransport) -> None:
        self.net, self.loop, self.src, self.dst = net, net.loop, src, dst
        self.queue: deque[bytes | memoryview] = deque()  # by reference, as uvloop keeps them
        self.queued = 0
        self.flying: deque[tuple[float, bytes | None]] = deque()  # None: the end (FIN)
        self.num_flying = 0
        self.num_written = self.num_delivered = 0
        self.is_lost = False
        self.flip_after = -1
        self._busy_until = self._arrives = net.loop.now
        self._is_pumping = False

    def write(self, data: bytes | memoryview) -> None:
        self.queue.append(data)
        self.queued += len(data)
        self.num_written += len(data)
        if self.queued > self.src.high:
            self.pump()
        elif not self._is_pumping:
            self._is_pumping = True
            self.loop.call_soon(self.pump)

    def pump(self) -> None:
        """From the sender's buffer into the kernel, as far as there is room."""
        self._is_pumping = False
        way, rng = self.src.way, self.net.rng
        while self.queued and self.num_flying < way.capacity:
            data = self._take(min(self.queued, way.capacity - self.num_flying, way.burst))
            self.num_flying += len(data)
            self._busy_until = max(self.loop.now, self._busy_until) + len(data) / way.rate
            self._fly(self._busy_until + way.latency_s + rng.random() * way.jitter_s, data)
        self.src.sent()

    def end(self) -> None:
        """FIN, behind everything that was written."""
        self._fly(self.loop.now + self.src.way.latency_s, None)

    def drop(self) -> None:
        """What is in the sender's buffer is gone."""
        self.queue.clear()
        self.queued = 0

    def arrive(self) -> None:
        """On the receiver's machine: hand over what is due, then look whether the sender has more."""
        if self.is_lost or not self.flying or self.net.is_apart(self.src.host, self.dst.host):
            return
        if self.dst.state == "closed":
            self._refused()
            return
        self.net.run_in(self.dst.process, self._receive)
        if self.queued:
            self.net.run_in(self.src.process, self.pump)

    def _receive(self) -> None:
        if not self.dst.has_opened or self.is_lost:
            return  # nobody reads yet, or it was cut while the receiver was stopped
        while self.flying and self.flying[0][0] <= self.loop.now + 1e-9:
            if self.dst.state == "closed":
                self._refused()
                return
            if self.dst.state == "closing" and self.flying[0][1] is not None:
                # Nobody reads any more; close() will find unread bytes.
                self.dst.has_unread = True
                self.num_flying -= len(self.flying.popleft()[1] or b"")
                continue
            _, data = self.flying.popleft()
            if data is None:
                self.dst.ended()
            else:
                self._deliver(data)

    def _fly(self, arrival: float, data: bytes | None) -> None:
        self._arrives = max(self._arrives, arrival)
        self.flying.append((self._arrives, data))
        self.loop.at(self._arrives, self.arrive, context=self.net.world)

    def _take(self, num_bytes: int) -> bytes:
        """Copied only now: whoever changes a buffer that was written sends something else, as on a real socket."""
        parts, self.queued = [], self.queued - num_bytes
        while num_bytes:
            part = memoryview(self.queue[0])[:num_bytes]
            num_bytes -= len(part)
            rest = self.queue[0][len(part) :]
            if len(rest):
                self.queue[0] = rest
            else:
                self.queue.popleft()
            parts.append(bytes(part))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _refused(self) -> None:
        """Bytes for a socket that is closed: the other kernel answers with RST, a machine that is off does not."""
        self.flying.clear()
        self.num_flying = 0
        if self.dst.host not in self.net.hosts_off:
            self.net.reset(self.src, self.src.way.latency_s)

    def _deliver(self, data: bytes) -> None:
        net, dst = self.net, self.dst
        net.delivered(self, len(data))
        if 0 <= self.flip_after < self.num_delivered + len(data):
            index = max(0, self.flip_after - self.num_delivered)
            data = data[:index] + bytes([data[index] ^ (1 << net.rng.randrange(8))]) + data[index + 1 :]
            self.flip_after = -1
            dst.connection.is_damaged = True
            net.trace("damaged", dst.connection.name, dst.side, self.num_delivered + index)
        if len(data) > 1 and net.rng.random() < dst.way.split:
            # The receiver wakes up in the middle of it.
            cut = net.rng.randrange(1, len(data))
            later = self.loop.now + net.rng.random() * 2e-3
            self.flying.appendleft((later, data[cut:]))
            self.loop.at(later, self.arrive, context=net.world)
            data = data[:cut]
        view, again = memoryview(data), net.rng.random() < 0.05
        while view and dst.state == "open":
            buffer = dst.protocol.get_buffer(len(view))
            if again:  # EAGAIN: asked for and not used
                buffer = dst.protocol.get_buffer(len(view))
            num = min(len(buffer), len(view))
            buffer[:num] = view[:num]
            view = view[num:]
            self.num_delivered += num
            self.num_flying -= num
            dst.protocol.buffer_updated(num)
        net.on_received(dst)
        if view:
            dst.has_unread = True
            self.num_flying -= len(view)


class SimTransport:
    """One end of a connection. Not an asyncio.Transport, as uvloop's are none either."""

    def __init__(self, net: Network, connection: Connection, side: str, process: Process, host: str) -> None:
        self.net, self.connection, self.side, self.process, self.host = net, connection, side, process, host
        self.protocol: Any = None
        self.state = "open"  # or connecting, closing, closed
        self.is_paused = self.has_unread = self.has_opened = False
        self.high, self.low = 1 << 16, 1 << 14
        self.peer: SimTransport
        self.out: Pipe
        self.way: Way
        self._is_silent = False

    # ---- what the protocol calls

    def write(self, data: bytes | memoryview) -> None:
        if self.state != "open" or not len(data):
            return
        self.out.write(data)
        if self.out.queued > self.high:
            if self.out.queued > self.high + self.net.most_beyond_mark:
                self.net.on_overflow(self)
            if not self.is_paused:
                self.is_paused = True
                self.net.counts["path: transport paused"] += 1
                self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = min(high if high is not None else 1 << 16, self.way.high_water)
        self.low = min(low if low is not None else self.high // 4, self.high)

    def get_write_buffer_size(self) -> int:
        return self.out.queued

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self.low, self.high

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        port = self.connection.port
        mine, theirs = (self.host, 40000 + self.connection.no), (self.peer.host, port)
        if self.side == "server":
            mine, theirs = (self.host, port), (self.peer.host, 40000 + self.connection.no)
        found = {"socket": self.connection.sockets[self.side], "peername": theirs, "sockname": mine}
        return found.get(name, default)

    def is_closing(self) -> bool:
        return self.state != "open"

    def close(self) -> None:
        if self.state == "open":
            self.state = "closing"
            if not self.out.queued:
                self.net.loop.call_soon(self._close)

    def abort(self) -> None:
        if self.state != "closed":
            self.state = "closed"
            self.out.drop()
            self.net.loop.call_soon(self._lost, None)
            self.net.reset(self.peer, self.way.latency_s)

    def close_silently(self) -> None:
        """As uvloop does with a connect that is cancelled: the protocol never hears of it."""
        self._is_silent, self.has_opened = True, False
        self.abort()

    # ---- what happens to it

    def sent(self) -> None:
        """The kernel took something of the buffer."""
        if self.state == "closing" and not self.out.queued:
            self.net.loop.call_soon(self._close)
        if self.is_paused and self.out.queued <= self.low and self.state == "open":
            self.is_paused = False
            self.protocol.resume_writing()

    def ended(self) -> None:
        """The other end sends no more."""
        if self.state == "open" and not self.protocol.eof_received():
            self.close()

    def reset(self) -> None:
        """RST came in."""
        if self.state != "closed":
            self.state = "closed"
            self.out.drop()
            self._lost(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _close(self) -> None:
        if self.state == "closing":
            self.state = "closed"
            self._lost(None)
            if self.has_unread:
                self.net.reset(self.peer, self.way.latency_s)
            else:
                self.out.end()

    def _lost(self, error: Exception | None) -> None:
        self.net.closed(self)
        if not self._is_silent:
            self.protocol.connection_lost(error)
