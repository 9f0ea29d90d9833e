"""`decoded --fake-peer RATE,RTT`: a pretended prefilld in this process behind an emulated link, to bench decoded alone.

It speaks the real protocol over a real loopback socket and sends state of the right shape at the link's speed. The
state is made of small random numbers in the layout's dtypes: valid for any engine, about as compressible as real state,
and without meaning, like the tokens made from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from common.backend import ComputedSegment
from common.daemon import FakePeer
from common.layout import DTYPE_BYTES, StateLayout, StateSpec
from common.net.options import LocalEnd
from common.net.relay import Relay
from common.net.server import PrefillServer, ServerStream
from common.wiring import link_options
from decoded.config import DecodeConfig, PeerConfig

_ROWS = 256
WARNING = "--fake-peer: the state of remote prompts is made up, the tokens made from it mean nothing"


class FakePrefilld:
    """A PrefillServer that computes nothing, behind a relay."""

    def __init__(self, config: DecodeConfig, end: LocalEnd, link: FakePeer) -> None:
        self._state = MadeUpState(end.info.layout)
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
        for segment in self._state.segments(stream.request.start, num_tokens):
            await stream.send_segment(segment)
            await stream.wait_staged_below(64 << 20)
        await stream.progress(num_tokens)
        await stream.complete(num_tokens, prefill_s=0.0)


class MadeUpState:
    """State of a layout that no model computed: the same few numbers again and again, all finite."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        sizes: dict[str, int] = {}
        for spec in layout.states:
            for tensor in spec.tensors:
                num_bytes = tensor.row_bytes * _num_rows(spec, _ROWS)
                sizes[tensor.dtype] = max(num_bytes, sizes.get(tensor.dtype, 0))
        self._numbers = {dtype: _numbers(dtype, num_bytes) for dtype, num_bytes in sizes.items()}

    def segments(self, start: int, stop: int) -> Iterator[ComputedSegment]:
        """Segments of one layer and at most 256 rows each that cover everything a receiver of [start, stop) needs."""
        for layer, (first, last) in self._layout.required_segments(start, stop).items():
            spec = self._layout.states[layer]
            for row in range(first, last, _ROWS):
                end = min(row + _ROWS, last)
                num_rows = _num_rows(spec, end - row)
                buffers = tuple(self._numbers[t.dtype][: t.row_bytes * num_rows] for t in spec.tensors)
                yield ComputedSegment(row, end, (layer,), buffers, time.monotonic())


def _num_rows(spec: StateSpec, num_tokens: int) -> int:
    return num_tokens if spec.is_rows else 1


def _numbers(dtype: str, num_bytes: int) -> memoryview:
    """So many bytes of small numbers around zero, of one of the dtypes a layout may have."""
    numbers = np.random.default_rng(0).standard_normal(-(-num_bytes // DTYPE_BYTES[dtype]), np.float32) / 8
    if dtype == "bfloat16":
        return memoryview((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
    return memoryview(np.abs(numbers).astype(dtype).tobytes() if dtype == "uint8" else numbers.astype(dtype).tobytes())
