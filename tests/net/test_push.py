"""A prefix that decoded sends to prefilld over real sockets: every byte, whatever the links do meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from common.backend import ComputedSegment
from common.errors import PeerCancelled, RequestDamaged
from common.net.options import RemoteRequest
from common.net.server import ServerStream
from tests.net.rig import FAST, Rig, State, both_loops, on_uvloop
from tests.wire.kit import Sink

N, START = 900, 600


class Source:
    """State of [0, start) as a decoded holds it; `gate` holds it back."""

    def __init__(self, state: State) -> None:
        self.state = state

    def segments(self, num_tokens: int, held: int = 0) -> Iterator[ComputedSegment]:
        yield from self.state.segments(0, num_tokens, 64)


class Taking(Rig):
    """Its handler takes what is pushed before it sends."""

    async def serve(self, stream: ServerStream) -> None:
        await stream.accept(0)
        if stream.request.pushes:
            self.taken = Sink(self.layout, stream.request.start)
            await stream.take_push(self.taken)
        await stream.started(time.monotonic())
        await self.send(stream)
        await stream.complete(len(stream.request.tokens), 0.25)

    def push(self, codec: str = "raw", name: str = "r1"):
        """A prefill whose prefix is pushed; the state that it is of."""
        sink, held = Sink(self.layout, N), State(self.layout, START, seed=9)
        request = RemoteRequest(name, tuple(range(N)), START, codecs=(codec,), pushes=True)
        return self.client.prefill(request, sink, Source(held)), sink, held


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@both_loops
async def test_a_prefix_is_there_before_anything_comes(codec):
    rig = await Taking().start()
    await rig.state("ready")
    prefill, sink, held = rig.push(codec)
    report = await rig.finish(prefill, sink)
    assert rig.taken.equals(held.sink, 0, START)
    raw_bytes = rig.layout.transfer_bytes(0, START)
    assert report.pushed_raw_bytes == raw_bytes and 0 < report.pushed_bytes <= raw_bytes
    assert rig.client.status()["num_streams"] == 0
    await rig.close()


@pytest.mark.parametrize("which", [0, 1, 2])
@on_uvloop
async def test_a_cut_costs_nothing_but_time(which):
    rig = await Taking(options=replace(FAST, credit_bytes=1 << 16, max_segment_bytes=1 << 16)).start(proxy=True)
    await rig.state("ready")
    rig.proxy.flowing.clear()
    prefill, sink, held = rig.push()
    rig.proxy.flowing.set()
    while prefill.progress.pushed_bytes < 200_000:
        await asyncio.sleep(0.001)
    rig.proxy.cut(which)
    await rig.finish(prefill, sink)
    assert rig.taken.equals(held.sink, 0, START)
    await rig.close()


@on_uvloop
async def test_a_damaged_prefix_ends_the_request():
    rig = await Taking().start(proxy=True)
    await rig.state("ready")
    prefill, _, _ = rig.push()
    rig.proxy.flip_last_up = 30_000
    with pytest.raises(RequestDamaged):
        await asyncio.wait_for(prefill.wait(), 10)
    async with asyncio.timeout(5):
        while "r1" not in rig.ended:
            await asyncio.sleep(0.01)
    assert isinstance(rig.ended["r1"], RequestDamaged), "the handler hears why"
    await rig.close()


@on_uvloop
async def test_a_cancel_while_it_is_pushed():
    rig = await Taking(options=replace(FAST, credit_bytes=1 << 16, max_segment_bytes=1 << 16)).start(proxy=True)
    await rig.state("ready")
    prefill, _, _ = rig.push()
    while prefill.progress.pushed_bytes < 100_000:
        await asyncio.sleep(0.001)
    prefill.cancel()
    with pytest.raises(PeerCancelled):
        await prefill.wait()
    async with asyncio.timeout(5):
        while rig.server.sessions[0]["num_streams"]:
            await asyncio.sleep(0.01)
    await rig.close()


@on_uvloop
async def test_a_handler_may_begin_without_it():
    rig = await Taking().start()
    rig.handler = Rig.serve.__get__(rig)
    await rig.state("ready")
    prefill, sink, _ = rig.push()
    report = await rig.finish(prefill, sink)
    assert report.pushed_bytes == 0
    await rig.close()


@on_uvloop
async def test_many_at_once_share_the_credit():
    rig = await Taking(options=replace(FAST, credit_bytes=1 << 18, max_segment_bytes=1 << 16)).start()
    await rig.state("ready")
    running = [rig.push("zstd", f"r{n}") for n in range(6)]
    for prefill, sink, _ in running:
        await rig.finish(prefill, sink)
    await rig.close()
