"""A TCP proxy that does to connections what networks and middleboxes do, at random, and counts what it did.

    delay        everything of one connection is late for a while
    throttle     one connection is slow for a while
    cut          a connection is reset on both sides
    half_close   one direction ends while the other goes on
    drop         a connection forgets its bytes, both ways, and tells nobody
    duplicate    the first bytes of a connection are sent again over another one
    corrupt      one bit of what passes is flipped
    reorder      one connection stands still while the others go on, then catches up

Runs on a thread of its own. Used by the chaos tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

FAULTS = ("delay", "throttle", "cut", "half_close", "drop", "duplicate", "corrupt", "reorder")
_READ_BYTES = 64 << 10
_FIRST_BYTES = 4096


@dataclass(eq=False)
class _Connection:
    """Both sides of one connection, and what is wrong with it at the moment."""

    writers: list[asyncio.StreamWriter]
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    is_dropping: bool = False
    flips: int = 0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    first: bytes = b""

    @property
    def is_open(self) -> bool:
        return not any(w.is_closing() for w in self.writers)


class FaultProxy:
    """Listens on loopback and forwards to `port`. `counts` says how often each fault happened."""

    def __init__(self, port: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.port = 0
        self._target, self._rng = port, random.Random(seed)
        self._connections: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fault proxy", daemon=True)

    def start(self) -> int:
        """Listen; answers the port."""
        self._thread.start()
        self._ready.wait(10)
        return self.port

    def stop(self) -> None:
        """Cut everything and stop listening."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    def harm(self, fault: str) -> None:
        """Do this to some connection, as soon as there is one."""
        self._loop.call_soon_threadsafe(self._harm, fault)

    def num_open(self) -> int:
        """Connections that are open on both sides."""
        return sum(c.is_open for c in list(self._connections))

    # ---- on the thread

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for connection in self._connections:
            _reset(connection)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _harm(self, fault: str) -> None:
        alive = [c for c in self._connections if c.is_open and not c.is_dropping]
        if not alive:
            return
        connection, rng = self._rng.choice(alive), self._rng
        self.counts[fault] += 1
        if fault == "delay":
            connection.delay_s = rng.uniform(0.01, 0.3)
            self._loop.call_later(rng.uniform(0.2, 1.0), setattr, connection, "delay_s", 0.0)
        elif fault == "throttle":
            connection.bytes_per_s = rng.uniform(50e3, 2e6)
            self._loop.call_later(rng.uniform(0.2, 1.0), setattr, connection, "bytes_per_s", 0.0)
        elif fault == "cut":
            _reset(connection)
        elif fault == "half_close":
            with contextlib.suppress(OSError, RuntimeError):
                rng.choice(connection.writers).write_eof()
        elif fault == "drop":
            connection.is_dropping = True
        elif fault == "duplicate":
            self._spawn(self._duplicate(connection.first))
        elif fault == "corrupt":
            connection.flips += 1
        else:
            connection.flowing.clear()
            self._loop.call_later(rng.uniform(0.05, 0.5), connection.flowing.set)

    async def _duplicate(self, first: bytes) -> None:
        """What somebody who recorded the beginning of a connection could send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
        with contextlib.suppress(OSError):
            writer.write(first)
            async with asyncio.timeout(10):
                while await reader.read(_READ_BYTES):
                    pass
        writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection([writer, far_writer])
        connection.flowing.set()
        self._connections = [c for c in self._connections if c.is_open] + [connection]
        self._spawn(self._forward(connection, reader, far_writer, is_up=True))
        self._spawn(self._forward(connection, far_reader, writer, is_up=False))

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool
    ) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while data := await reader.read(_READ_BYTES):
                if is_up and len(connection.first) < _FIRST_BYTES:
                    connection.first += data[: _FIRST_BYTES - len(connection.first)]
                await connection.flowing.wait()
                if connection.delay_s or connection.bytes_per_s:
                    rate = connection.bytes_per_s
                    await asyncio.sleep(connection.delay_s + (len(data) / rate if rate else 0.0))
                if connection.is_dropping:
                    continue
                if connection.flips and not is_up:
                    connection.flips -= 1
                    at = self._rng.randrange(len(data))
                    data = data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
                writer.write(data)
                await writer.drain()
        if not connection.is_dropping:
            with contextlib.suppress(OSError, RuntimeError):
                if writer.can_write_eof():
                    writer.write_eof()
            await asyncio.sleep(1.0)
            _reset(connection)


def _reset(connection: _Connection) -> None:
    for writer in connection.writers:
        writer.transport.abort()
