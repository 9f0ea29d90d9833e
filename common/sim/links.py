"""A path between the sites: all transfers share its rate evenly, and the rate may change.

Processor sharing by virtual time: `_served` is the bytes that each transfer would have got since the start, so one
number per transfer says when it is done, and a change of rate or number moves no other (as in fair queueing; Demers,
Keshav and Shenker, SIGCOMM 1989). Loss shows as a lower rate. Called by cluster.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from common.sim.loop import Loop

MSS_BYTES = 1448


def tcp_bps(rate_bps: float, rtt_s: float, loss: float, num_links: int = 4) -> float:
    """What loss-based TCP gets of a path: rate, or MSS / RTT sqrt(3 / 2 loss) of each connection (Mathis et al., 1997).
    BBR, which the daemons prefer, gets more; so this is the careful side.
    """
    if loss <= 0 or rtt_s <= 0:
        return rate_bps
    return min(rate_bps, num_links * 8 * MSS_BYTES / rtt_s * math.sqrt(1.5 / loss))


class Link:
    """One direction of a path. `changes` are (instant, bits per second), in order."""

    def __init__(self, loop: Loop, rate_bps: float, changes: Sequence[tuple[float, float]] = ()) -> None:
        self._loop, self.rate_bps = loop, rate_bps
        self._served = 0.0
        self._at = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._wake_version = 0
        self.busy_s = 0.0
        self.num_bytes = 0.0
        for when, bps in changes:
            loop.at(when, self.set_rate, bps)

    def set_rate(self, rate_bps: float) -> None:
        """From now on."""
        self._advance()
        self.rate_bps = rate_bps
        self._wake()

    def send(self, num_bytes: float, done: Callable[..., None], *args: Any) -> None:
        """`done(*args)` when the last byte has left; propagation is the receiver's to add."""
        self._advance()
        self.num_bytes += num_bytes
        self._count += 1
        heappush(self._heap, (self._served + num_bytes, self._count, done, args))
        self._wake()

    def _advance(self) -> None:
        passed = self._loop.now - self._at
        if self._heap and passed > 0:
            self._served += passed * self.rate_bps / 8 / len(self._heap)
            self.busy_s += passed
        self._at = self._loop.now

    def _wake(self) -> None:
        self._wake_version += 1
        if self._heap and self.rate_bps > 0:
            left_s = max(0.0, self._heap[0][0] - self._served) * 8 * len(self._heap) / self.rate_bps
            self._loop.at(self._loop.now + left_s, self._finish, self._wake_version)

    def _finish(self, version: int) -> None:
        if version != self._wake_version:
            return
        self._advance()
        # The first is done by construction, whatever rounding says; so are those that end with it.
        until = max(self._served, self._heap[0][0])
        finished = []
        while self._heap and self._heap[0][0] <= until:
            finished.append(heappop(self._heap))
        self._wake()
        for _, _, done, args in finished:
            done(*args)
