"""`prefilld --fake-peer RATE,RTT`: a pretended decoded in this process behind an emulated link, to bench it alone.

It asks for prefills of random prompts over the real protocol, one after another, drops the state, logs what it saw.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random

from common.daemon import FakePeer
from common.errors import PeerError, TransferError
from common.layout import StateLayout
from common.net.options import LinkOptions, LocalEnd, RemoteRequest
from common.net.pool import PeerClient
from common.net.relay import Relay

log = logging.getLogger(__name__)
_PROMPT_TOKENS = (256, 2048)


class DiscardSink:
    """State memory that is written to and never read."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        """Fresh memory for one segment: one view for each tensor."""
        specs = [self._layout.states[n] for n in layers]
        rows = [(stop - start) if s.is_rows else 1 for s in specs]
        return tuple(
            memoryview(bytearray(num * t.row_bytes)) for s, num in zip(specs, rows, strict=True) for t in s.tensors
        )

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """Nothing to do."""


class FakeDecoded:
    """A PeerClient that asks for random prompts, behind a relay."""

    def __init__(self, end: LocalEnd, options: LinkOptions, port: int, link: FakePeer) -> None:
        self._info = end.info
        self._rtt_s = link.rtt_s
        self._relay = Relay("127.0.0.1", port, rate_bps=link.rate_bps, rtt_s=link.rtt_s)
        self._end, self._options = dataclasses.replace(end, name="fake-peer"), options
        self._client: PeerClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Connect and begin to ask."""
        port = await self._relay.start()
        self._client = PeerClient("self", "127.0.0.1", port, local=self._end, options=self._options)
        self._client.on_state = lambda _: self._changed.set()
        await self._client.start()
        self._task = asyncio.create_task(self._ask_for_ever(self._client))

    async def close(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            await self._client.close()
            # The goodbye is still in the relay; without it the server would keep the streams for a lease.
            await asyncio.sleep(self._rtt_s + 0.01)
        await self._relay.close()

    async def _wait_ready(self, client: PeerClient) -> None:
        while client.state != "ready":
            self._changed.clear()
            await self._changed.wait()

    async def _ask_for_ever(self, client: PeerClient) -> None:
        rng = random.Random(0)
        number = 0
        while True:
            await self._wait_ready(client)
            number += 1
            length = min(rng.randint(*_PROMPT_TOKENS), self._info.max_context - 1)
            tokens = [rng.randrange(self._info.vocab_size) for _ in range(length)]
            try:
                report = await client.prefill(
                    RemoteRequest(f"fake-{number}", tokens), DiscardSink(self._info.layout)
                ).wait()
            except (PeerError, TransferError) as e:
                log.warning("fake request failed: %s", e)
                await asyncio.sleep(0.5)
                continue
            seconds = report.verified_at - report.requested_at
            log.info(
                "fake request done",
                extra={
                    "num_tokens": length,
                    "prefill_s": round(report.prefill_s, 3),
                    "total_s": round(seconds, 3),
                    "tokens_per_s": round(length / seconds),
                    "wire_bytes": report.wire_bytes,
                    "raw_bytes": report.raw_bytes,
                },
            )
