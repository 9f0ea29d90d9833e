"""The set of configured peers: one PeerClient each; peers join and leave by reload."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

from common.layout import numerics_differ, numerics_text
from common.net.options import LocalEnd, Security
from common.net.pool import PeerClient
from common.trace import TraceWriter
from common.wire.connection import Closed
from common.wire.holdings import Holding
from common.wiring import link_options
from decoded.config import DecodeConfig, PeerConfig
from decoded.directory import Directory
from decoded.metrics import DecodeMetrics

log = logging.getLogger(__name__)


class PeerSet:
    """Keeps a client per configured peer, in the order of the configuration."""

    def __init__(self, end: LocalEnd, config: DecodeConfig, metrics: DecodeMetrics, trace: TraceWriter | None) -> None:
        self.end, self._options = end, link_options(config)
        self._metrics, self._trace = metrics, trace
        self._clients: dict[PeerConfig, PeerClient] = {}
        self._changed = asyncio.Event()
        self._warned: dict[str, object] = {}
        self.directory = Directory(end.info.layout)

    def __len__(self) -> int:
        return len(self._clients)

    def clients(self) -> list[PeerClient]:
        """All of them, usable or not."""
        return list(self._clients.values())

    async def update(self, peers: Sequence[PeerConfig]) -> None:
        """Connect to those that are new, then leave those that are gone: their requests may wait for the new ones."""
        leaving = [client for peer, client in self._clients.items() if peer not in peers]
        for client in leaving:
            log.info("leaving peer", extra={"peer": client.name})
            client.on_state = client.on_lost = client.on_refused = client.on_cache = None
            # Not when it is closed: another one may have its name by then.
            self.directory.forget(client.name)
        # In two steps: a client that leaves is in nobody's sight, and a new one is before anything is awaited.
        self._clients = {peer: self._clients.get(peer) or self._make(peer) for peer in peers}
        for client in self.clients():
            if not client.is_started:
                await client.start()
        for client in leaving:
            await client.close()
            if client.name not in {c.name for c in self.clients()}:
                self._metrics.peer_ready.remove(client.name)
                self._warned.pop(client.name, None)

    def facts(self) -> list[dict[str, object]]:
        """What `decodectl peers` shows."""
        return [
            {
                **c.status(),
                "numerics_differ": self._numerics_differ(c),
                "num_cached_prefixes": self.directory.num_entries(c.name),
            }
            for c in self.clients()
        ]

    def set_security(self, security: Security) -> None:
        """New connections to all peers take these keys or certificates."""
        self.end = dataclasses.replace(self.end, security=security)
        for client in self.clients():
            client.set_security(security)

    @property
    def certificates(self) -> dict[str, float]:
        """When the certificates of connected peers expire, by the peer's name."""
        return {c.name: found.expires_at for c in self.clients() if (found := c.certificate) is not None}

    async def changed(self) -> None:
        """Until any peer's state changes."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_warm(self, timeout_s: float) -> None:
        """Until every peer is ready or cannot become so soon, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(c.state == "connecting" for c in self.clients()):
                    await self.changed()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Leave all."""
        await self.update(())

    def _make(self, peer: PeerConfig) -> PeerClient:
        client = PeerClient(
            peer.name,
            peer.host,
            peer.port,
            local=self.end,
            options=self._options,
            tls_name=peer.tls_name,
            trace=self._trace,
        )
        client.on_state, client.on_lost, client.on_refused = self._on_state, self._on_lost, self._on_refused
        client.on_cache = self._on_cache
        self._metrics.peer_ready.labels(peer.name).set(0)
        return client

    def _on_lost(self, client: PeerClient, closed: Closed) -> None:
        self._metrics.links_lost.labels(client.name, closed.code).inc()
        if closed.is_fault:
            self._metrics.link_faults.labels(client.name, closed.code).inc()

    def _on_cache(self, client: PeerClient, holdings: Sequence[Holding], *, is_anew: bool) -> None:
        self.directory.told(client.name, holdings, is_anew=is_anew)

    def _on_refused(self, client: PeerClient, code: str) -> None:
        self._metrics.handshakes_failed.labels(client.name, code).inc()

    def _on_state(self, client: PeerClient) -> None:
        self._metrics.peer_ready.labels(client.name).set(client.state == "ready")
        # On the way up there is nothing to worry about, nor to read, at every link.
        level = {"ready": logging.INFO, "connecting": logging.DEBUG}.get(client.state, logging.WARNING)
        log.log(level, "peer is %s", client.state, extra={"peer": client.name, "why": client.reason})
        if client.state == "ready":
            self._warn_of_numerics(client)
        self._changed.set()

    def _numerics_differ(self, client: PeerClient) -> dict[str, dict[str, str]]:
        return numerics_differ(self.end.info.numerics, client.status()["numerics"])

    def _warn_of_numerics(self, client: PeerClient) -> None:
        """Once a session: a peer may be ready again and again in it."""
        session = client.status()["num_sessions"]
        if self._warned.get(client.name) != session and (differ := self._numerics_differ(client)):
            self._warned[client.name] = session
            advice = "tokens depend on where a prompt is computed; set them alike, or peer_policy.require_same_numerics"
            log.warning("%s: %s", numerics_text(differ), advice, extra={"peer": client.name})
