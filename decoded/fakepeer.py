"""`decoded --fake-peer RATE,RTT`: a pretended prefilld in this process behind an emulated link, to bench decoded alone.

It speaks the real protocol over a real loopback socket and sends state of the right shape at the link's speed. The
state is noise (which no codec shrinks), so the tokens made from it mean nothing.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from functools import cache

from common.backend import ComputedSegment
from common.daemon import FakePeer
from common.layout import StateLayout
from common.net.options import LocalEnd
from common.net.relay import Relay
from common.net.server import PrefillServer, ServerStream
from common.wiring import link_options
from decoded.config import DecodeConfig, PeerConfig

_ROWS = 256


class FakePrefilld:
    """A PrefillServer that computes nothing, behind a relay."""

    def __init__(self, config: DecodeConfig, end: LocalEnd, link: FakePeer) -> None:
        self._layout = end.info.layout
        end = dataclasses.replace(end, role="prefill", name="fake-peer", instance_id=f"fake-{end.instance_id}")
        self._server = PrefillServer(end, link_options(config), self._serve)
        self._link = link
        self._relay: Relay | None = None

    async def start(self) -> PeerConfig:
        """Listen; returns the peer to configure."""
        await self._server.start("127.0.0.1", 0)
        self._relay = Relay("127.0.0.1", self._server.port, rate_bps=self._link.rate_bps, rtt_s=self._link.rtt_s)
        return PeerConfig(name="fake-peer", address=f"127.0.0.1:{await self._relay.start()}")

    async def close(self) -> None:
        """Cut all links."""
        if self._relay is not None:
            await self._relay.close()
        await self._server.close()

    async def _serve(self, stream: ServerStream) -> None:
        num_tokens = len(stream.request.tokens)
        await stream.accept()
        await stream.started(time.monotonic())
        for segment in noise_segments(self._layout, stream.request.start, num_tokens):
            await stream.send_segment(segment)
            await stream.wait_staged_below(64 << 20)
        await stream.progress(num_tokens)
        await stream.complete(num_tokens, prefill_s=0.0)


def noise_segments(layout: StateLayout, start: int, stop: int) -> Iterator[ComputedSegment]:
    """Segments of one layer and at most 256 rows each that cover everything a receiver of [start, stop) needs."""
    for layer, (first, last) in layout.required_segments(start, stop).items():
        for row in range(first, last, _ROWS):
            end = min(row + _ROWS, last)
            size = layout.segment_bytes(row, end, (layer,))
            yield ComputedSegment(row, end, (layer,), (_noise(size),), time.monotonic())


@cache
def _noise(num_bytes: int) -> memoryview:
    return memoryview(random.Random(0).randbytes(num_bytes))
