"""A prefilld's and a decoded's network ends over real sockets in one process, and a proxy to cut and corrupt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import uvloop

from common.backend import ComputedSegment
from common.layout import ModelInfo, StateLayout, StateSpec, TensorSpec
from common.net.options import LinkOptions, LocalEnd, RemoteRequest, Security
from common.net.pool import PeerClient, RemotePrefill
from common.net.server import PrefillServer, ServerStream
from tests.wire.kit import Sink, cut

KEY = b"k" * 32
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
FAST = LinkOptions(
    data_links=2,
    heartbeat_s=0.5,
    lease_s=5.0,
    piece_bytes=65536,
    max_segment_bytes=1 << 20,
    reconnect_min_s=0.01,
    reconnect_max_s=0.1,
    gone_after_s=0.3,
)
WIDE = StateLayout(
    (
        StateSpec(0, "full", (TensorSpec("k", (4, 32), "float32"), TensorSpec("v", (4, 32), "bfloat16"))),
        StateSpec(1, "window", (TensorSpec("k", (4, 32), "float32"),), window=100),
        StateSpec(2, "full", (TensorSpec("k", (4, 32), "float32"),)),
        StateSpec(3, "recurrent", (TensorSpec("s", (500,), "float32"),)),
    )
)


def one_row(num_bytes: int, dtype: str = "uint8", width: int = 1) -> StateLayout:
    """A layout whose single token is so many bytes."""
    return StateLayout((StateSpec(0, "full", (TensorSpec("k", (num_bytes // width,), dtype),)),))


def model_info(layout: StateLayout = WIDE, **changes: Any) -> ModelInfo:
    info = ModelInfo("m", "weights", "config", "tokenizer", layout, 50_000, 100_000, (0,), {"dtype": "float32"})
    return replace(info, **changes)


def end(
    role: str, instance: str = "", info: ModelInfo | None = None, *, key: bytes | None = KEY, **changes: Any
) -> LocalEnd:
    security = Security() if key is None else Security("key", (key,))
    name = "p" if role == "prefill" else "d"
    return replace(LocalEnd(role, name, instance or f"{role}-1", info or model_info(), security), **changes)


class State:
    """The state of a request as the engine would make it: floats, so that codecs find what they look for."""

    def __init__(self, layout: StateLayout, num_tokens: int, seed: int = 0) -> None:
        self.layout, self.sink = layout, Sink(layout, num_tokens)
        rng = np.random.default_rng(seed)
        for n in range(len(layout.states)):
            for view in self.sink.buffers(0, num_tokens, (n,)):
                view[:] = rng.standard_normal(-(-len(view) // 4)).astype("<f4").tobytes()[: len(view)]

    def segment(self, start: int, stop: int, layers: tuple[int, ...]) -> ComputedSegment:
        return ComputedSegment(start, stop, layers, self.sink.buffers(start, stop, layers), 0.0)

    def segments(self, start: int, stop: int, chunk: int = 256) -> list[ComputedSegment]:
        return [self.segment(*where) for where in cut(self.layout, start, stop, chunk)]


class Proxy:
    """Forwards TCP to `port`. Connections are numbered as they come: 0 is the control link, then data links."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.writers: list[list[asyncio.StreamWriter]] = []
        self.num_down: list[int] = []
        self.cut_at: dict[int, int] = {}
        self.cut_all_at: dict[int, int] = {}
        self.flip_at: dict[int, int] = {}
        self.flip_last_up = 0  # of the next read of so many bytes or more
        self.record: dict[tuple[int, bool], bytearray] | None = None  # by connection and direction, when it is there
        self.mangle: Callable[[int, bytes], bytes] | None = None  # what becomes of bytes on their way down
        self.cuts = 0
        self.is_cut = asyncio.Event()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, index: int | None = None) -> None:
        """Reset one connection, or all of them."""
        for i in range(len(self.writers)) if index is None else (index,):
            for writer in self.writers[i]:
                writer.transport.abort()
        self.cuts += 1
        self.is_cut.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = len(self.writers)
        self.writers.append([writer])
        self.num_down.append(0)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self.writers[index].append(far_writer)
        for pump in (self._pump(index, reader, far_writer, False), self._pump(index, far_reader, writer, True)):
            task = asyncio.ensure_future(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, down: bool) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # uvloop: the handler is closed
            while data := await reader.read(65536):
                await self.flowing.wait()
                if self.record is not None:
                    self.record.setdefault((index, down), bytearray()).extend(data)
                if down and self.mangle is not None:
                    data = self.mangle(index, data)
                if down:
                    data = self._tamper(index, data)
                    if data is None:
                        return
                elif 0 < self.flip_last_up <= len(data):
                    self.flip_last_up, data = 0, data[:-4] + bytes([data[-4] ^ 1]) + data[-3:]
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    def _tamper(self, index: int, data: bytes) -> bytes | None:
        before = self.num_down[index]
        self.num_down[index] += len(data)
        for table, which in ((self.cut_at, index), (self.cut_all_at, None)):
            if index in table and self.num_down[index] >= table[index]:
                del table[index]
                self.cut(which)
                return None
        flip = self.flip_at.get(index)
        if flip is not None and before <= flip < self.num_down[index]:
            del self.flip_at[index]
            return data[: flip - before] + bytes([data[flip - before] ^ 1]) + data[flip - before + 1 :]
        return data


def on_loops(*names: str) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run an async test once on each of these event loops."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(*args: Any, loop: str, **fixtures: Any) -> None:
            async def main() -> None:
                await test(*args, **fixtures)

            with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
                runner.run(main())

        functools.update_wrapper(run, test)
        del run.__wrapped__
        signature = inspect.signature(test)
        loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])
        return pytest.mark.parametrize("loop", names)(run)

    return decorate


both_loops = on_loops("uvloop", "asyncio")
on_uvloop = on_loops("uvloop")


class Rig:
    """Server, client and what the handler does. `handler` may be replaced before a prefill."""

    def __init__(self, layout: StateLayout = WIDE, options: LinkOptions = FAST) -> None:
        self.layout, self.options, self.info = layout, options, model_info(layout)
        self.states: dict[str, State] = {}
        self.streams: list[ServerStream] = []
        self.ended: dict[str, BaseException | None] = {}
        self.handler: Callable[[ServerStream], Awaitable[None]] = self.serve
        self.chunk = 256
        self.trace: list[tuple[str, dict[str, Any]]] = []
        self.proxy: Proxy | None = None
        self.egress: Any = None
        self.load: dict[str, float] = {}
        self._changed = asyncio.Event()

    async def start(
        self,
        *,
        proxy: bool = False,
        server_end: LocalEnd | None = None,
        client_end: LocalEnd | None = None,
        server_options: LinkOptions | None = None,
        tls_name: str = "",
    ) -> Rig:
        self.server = await self.start_server(server_end, server_options)
        port = self.server.port
        if proxy:
            self.proxy = Proxy(port)
            port = await self.proxy.start()
        await self.start_client(client_end, port, tls_name=tls_name)
        return self

    async def start_client(self, client_end: LocalEnd | None, port: int, *, tls_name: str = "") -> None:
        client_end = client_end or end("decode", info=self.info)
        options = self.options
        self.client = PeerClient("peer", "127.0.0.1", port, local=client_end, options=options, tls_name=tls_name)
        self.client.on_state = lambda client: self._changed.set()
        await self.client.start()

    async def start_server(self, server_end: LocalEnd | None = None, options: LinkOptions | None = None, port: int = 0):
        server_end = server_end or end("prefill", info=self.info)
        server = PrefillServer(
            server_end,
            options or self.options,
            self._handle,
            load=lambda _: {"num_queued": 3, **self.load},
            egress=self.egress,
            trace=lambda event, *, now, **fields: self.trace.append((event, fields | {"at": now})),
        )
        await server.start("127.0.0.1", port)
        return server

    async def close(self) -> None:
        await self.client.close()
        await self.server.close()
        if self.proxy is not None:
            await self.proxy.close()

    async def state(self, *wanted: str, timeout: float = 5.0) -> None:
        """Until the client is in one of these states."""
        async with asyncio.timeout(timeout):
            while self.client.state not in wanted:
                self._changed.clear()
                await self._changed.wait()

    def ask(
        self, num_tokens: int, *, name: str = "r1", start: int = 0, codec: str = "raw", tokens=None, **changes: Any
    ):
        """A prefill and the sink it fills."""
        sink = Sink(self.layout, num_tokens)
        tokens = tokens or tuple(i % 50_000 for i in range(num_tokens))
        request = RemoteRequest(name, tokens, start, codecs=(codec,), **changes)
        return self.client.prefill(request, sink), sink

    async def finish(self, prefill: RemotePrefill, sink: Sink, timeout: float = 30.0):
        """Wait, and compare every byte; answers the report."""
        report = await asyncio.wait_for(prefill.wait(), timeout)
        num_tokens = report.num_tokens
        start = self.started[prefill.request_id]
        assert sink.equals(self.states[prefill.request_id].sink, start, num_tokens)
        assert (
            report.raw_bytes
            == self.layout.transfer_bytes(start, num_tokens)
            == sum(self.layout.segment_bytes(*where) for where in sink.landings)
        )
        assert report.verified_tokens == num_tokens and report.num_segments == len(sink.landings)
        return report

    @property
    def started(self) -> dict[str, int]:
        return {s.request.request_id: s.request.start for s in self.streams}

    async def serve(self, stream: ServerStream) -> None:
        """What prefilld does: accept, send everything chunk by chunk, complete."""
        await stream.accept(0)
        await stream.started(time.monotonic())
        await self.send(stream)
        await stream.complete(len(stream.request.tokens), 0.25)

    async def send(self, stream: ServerStream) -> None:
        num_tokens = len(stream.request.tokens)
        state = self.states.setdefault(stream.request.request_id, State(self.layout, num_tokens, len(self.states)))
        for segment in state.segments(stream.request.start, num_tokens, self.chunk):
            await stream.send_segment(segment)
            await stream.progress(segment.stop)

    async def _handle(self, stream: ServerStream) -> None:
        self.streams.append(stream)
        error: BaseException | None = None
        try:
            await self.handler(stream)
        except BaseException as e:
            error = e
            raise
        finally:
            self.ended[stream.request.request_id] = error


@contextlib.asynccontextmanager
async def rigged(layout: StateLayout = WIDE, options: LinkOptions = FAST, **args: Any) -> AsyncIterator[Rig]:
    """A rig whose client is ready."""
    rig = await Rig(layout, options).start(**args)
    try:
        await rig.state("ready")
        yield rig
    finally:
        await rig.close()
