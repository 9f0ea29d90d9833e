"""Looks at paths of which nothing is known yet, and at those that nobody has used for a while.

A router that knows nothing of a path cannot say what it costs, and the first prompt's state finds out by overrunning
it; one that believes a path to be narrow sends nothing over it, and so would never see it become wide again. Bytes that
mean nothing are asked of the peer (protocol.md, Measure), as many as the path would carry in PROBE_S; state of prompts
goes before them. The peer's own estimate follows from that and comes back in its Status. Owned by service.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from common.errors import PdError
from common.hosts import is_loopback
from common.net.pool import PeerClient
from decoded.background import Background
from decoded.metrics import DecodeMetrics

log = logging.getLogger(__name__)
# How long a look takes at the capacity that is believed, its least and most bytes, and what it may take at most.
PROBE_S, LEAST_BYTES, MOST_BYTES, TIMEOUT_S = 1.0, 64 << 10, 64 << 20, 10.0
# A path of which nothing is known is first asked for so much.
FIRST_BYTES = 1 << 20
# A look that finds the same within this part of it makes the next one wait twice as long, at most so many times.
SAME, MOST_BACKOFF = 0.25, 6.0


@dataclass(slots=True)
class _Look:
    interval_s: float
    before_bps: float = 0.0
    is_first: bool = True


class PathProber(Background):
    """Runs until closed. `interval_s`: a path's capacity may be so old while it is idle; inf never looks."""

    def __init__(
        self, peers: Callable[[], Sequence[PeerClient]], metrics: DecodeMetrics, interval_s: Callable[[], float]
    ) -> None:
        super().__init__()
        self._peers, self._metrics, self._interval_s = peers, metrics, interval_s
        self._looks: dict[str, _Look] = {}

    async def turn(self) -> None:
        """Look at the paths that are due."""
        clients = self._peers()
        self._looks = {c.name: self._looks.get(c.name, _Look(self._interval_s())) for c in clients}
        for client in clients:
            look = self._looks[client.name]
            look.is_first |= client.state != "ready"
            if look.is_first and self._is_unknown(client):
                look.is_first = False
                if (found_bps := await self._ask(client, FIRST_BYTES)) is not None:
                    await self._ask(client, _worth(found_bps))
            elif self._is_due(client):
                await self._look(client)

    def _is_unknown(self, client: PeerClient) -> bool:
        is_path = not is_loopback(client.host) and not client.load.get("path_capacity_bps")
        return is_path and self._interval_s() < inf and _is_idle(client)

    def _is_due(self, client: PeerClient) -> bool:
        """Whether the path's capacity is known, old, and nobody is just about to see it anyway."""
        load, look = client.load, self._looks[client.name]
        base_s = self._interval_s()
        look.interval_s = min(max(look.interval_s, base_s), MOST_BACKOFF * base_s)
        capacity, age_s = load.get("path_capacity_bps", 0.0), load.get("path_age_s", 0.0)
        return _is_idle(client) and capacity > 0 and age_s >= look.interval_s

    async def _look(self, client: PeerClient) -> None:
        look, before = self._looks[client.name], client.load.get("path_capacity_bps", 0.0)
        # What the last look has led to is in the Status by now.
        is_same = abs(before - look.before_bps) <= SAME * look.before_bps
        look.interval_s = 2.0 * look.interval_s if is_same else self._interval_s()
        look.before_bps = before
        await self._ask(client, _worth(before))

    async def _ask(self, client: PeerClient, num_bytes: int) -> float | None:
        """Bits per second that so many bytes came at; None when they did not."""
        believed = client.load.get("path_capacity_bps", 0.0)
        try:
            found = await client.measure(num_bytes, TIMEOUT_S)
        except PdError as e:
            log.info("an idle path could not be looked at: %s", e, extra={"peer": client.name})
            return None
        self._metrics.probed_bytes.labels(client.name).inc(num_bytes)
        facts = {"peer": client.name, "believed_bps": round(believed), "goodput_bps": round(found.goodput_bps)}
        log.debug("looked at an idle path", extra=facts)
        return found.goodput_bps


def _is_idle(client: PeerClient) -> bool:
    return client.state == "ready" and not client.num_streams


def _worth(bps: float) -> int:
    """Bytes that take PROBE_S."""
    return int(min(MOST_BYTES, max(LEAST_BYTES, PROBE_S * bps / 8)))
