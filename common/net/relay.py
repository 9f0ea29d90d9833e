"""A TCP relay that gives connections through it a rate and a round-trip time, for `--fake-peer` and tests.

User space only: it emulates a narrow, distant link but no packet loss (benchmarks/wan does that with kernel TCP).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

_READ_BYTES = 64 * 1024
_MAX_QUEUED_READS = 64


@dataclass(slots=True)
class Shaper:
    """One direction's bottleneck, shared by all connections: bytes leave one after another at `rate_bps` bits/s."""

    rate_bps: float
    free_at: float = 0.0

    def departure(self, num_bytes: int, now: float) -> float:
        """Instant at which these bytes have left the bottleneck."""
        self.free_at = max(self.free_at, now) + num_bytes * 8 / self.rate_bps
        return self.free_at


class Relay:
    """Listens on loopback and forwards to `host:port`."""

    def __init__(self, host: str, port: int, *, rate_bps: float, rtt_s: float) -> None:
        self._target = (host, port)
        self._delay_s = rtt_s / 2
        self._up, self._down = Shaper(rate_bps), Shaper(rate_bps)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Start listening; returns the port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_READ_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # No coroutine: asyncio would watch it, and report its cancellation as an error.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_READ_BYTES)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer, self._up))
                group.create_task(self._forward(far_reader, writer, self._down))
        except* OSError:
            pass
        finally:
            writer.close()
            far_writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shaper: Shaper) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_QUEUED_READS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, queue, shaper))
            group.create_task(self._write(writer, queue))

    async def _read(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]], shaper: Shaper
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(_READ_BYTES):
            leaves_at = shaper.departure(len(data), loop.time())
            await queue.put((leaves_at + self._delay_s, data))
            # Read no faster than the bottleneck sends, so that back-pressure reaches the sender.
            await asyncio.sleep(max(0.0, leaves_at - loop.time()))
        await queue.put((loop.time() + self._delay_s, b""))

    async def _write(self, writer: asyncio.StreamWriter, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at, data = await queue.get()
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
