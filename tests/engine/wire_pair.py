"""A prefilld's and a decoded's halves around two engines in one process: real sockets, the real stream handler."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from common.local_backend import LocalBackend
from common.net.options import LinkOptions, LocalEnd, RemoteRequest, Security, TransferReport
from common.net.pool import PeerClient
from common.net.server import PrefillServer
from common.policy.admission import AdmissionController, AdmissionLimits
from common.request import Request
from prefilld.metrics import PrefillMetrics
from prefilld.stream import StreamHandler

KEY = b"k" * 32


class WirePair:
    """`decoder` generates; prompts are computed by `source` and cross a TCP connection on loopback."""

    def __init__(self, decoder: LocalBackend, source: LocalBackend) -> None:
        self.decoder, self.source = decoder, source
        self.reports: list[TransferReport] = []

    async def __aenter__(self) -> WirePair:
        options = LinkOptions(data_links=1)
        handler = StreamHandler(
            self.source,
            AdmissionController(AdmissionLimits(64, 256, 1 << 20, 1 << 34, 1.0)),
            PrefillMetrics(CollectorRegistry()),
            max_staged_bytes=1 << 26,
            max_prompt_tokens=0,
        )
        here = LocalEnd("decode", "decode", "decode", self.decoder.info, Security("key", (KEY,)))
        there = LocalEnd("prefill", "prefill", "prefill", self.source.info, Security("key", (KEY,)))
        self.server = PrefillServer(there, options, handler)
        await self.server.start("127.0.0.1", 0)
        self.client = PeerClient("prefill", "127.0.0.1", self.server.port, local=here, options=options)
        changed = asyncio.Event()
        self.client.on_state = lambda _client: changed.set()
        await self.client.start()
        async with asyncio.timeout(10):
            while self.client.state != "ready":
                await changed.wait()
                changed.clear()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.client.close()
        await self.server.close()

    async def remote(self, request: Request) -> list[Any]:
        """Outputs of a request whose prompt was computed at the other end."""
        generation = await self.decoder.open(request)
        tokens = request.prompt_tokens[:-1]
        if tokens:
            wanted = RemoteRequest(request.request_id, tokens)
            self.reports.append(await self.client.prefill(wanted, generation.sink).wait())
        generation.import_done(len(tokens))
        return [output async for output in generation]
