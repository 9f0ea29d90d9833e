"""Paths between the sites: one whose transfers share its rate evenly, and one that each node uses state by state.

Loss shows as a lower rate. Called by cluster.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from common.linkfacts import Sending
from common.sched.deadlines import send_order
from common.sim.loop import Loop
from common.sim.workload import SimRequest

MSS_BYTES = 1448


def tcp_bps(rate_bps: float, rtt_s: float, loss: float, num_links: int = 4) -> float:
    """What loss-based TCP gets of a path: rate, or MSS / RTT sqrt(3 / 2 loss) of each connection (Mathis et al., 1997).
    BBR, which the daemons prefer, gets more; so this is the careful side.
    """
    if loss <= 0 or rtt_s <= 0:
        return rate_bps
    return min(rate_bps, num_links * 8 * MSS_BYTES / rtt_s * math.sqrt(1.5 / loss))


@dataclass(slots=True, eq=False)
class _Transfer:
    """Bytes of one request, and what to call when the last of them has left."""

    left_bytes: float
    request: SimRequest
    done: Callable[..., None]
    args: tuple[Any, ...]

    def finish(self) -> None:
        self.done(self.request, *self.args)


class Link(ABC):
    """One direction of a path. `changes` are (instant, bits per second), in order."""

    def __init__(self, loop: Loop, rate_bps: float, changes: Sequence[tuple[float, float]] = ()) -> None:
        self._loop, self.rate_bps = loop, rate_bps
        self._at = 0.0
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

    def send(self, num_bytes: float, request: SimRequest, done: Callable[..., None], *args: Any) -> None:
        """`done(request, *args)` when the last byte has left; propagation is the receiver's to add."""
        self._advance()
        self.num_bytes += num_bytes
        self._add(_Transfer(num_bytes, request, done, args))
        self._wake()

    def _advance(self) -> None:
        passed = self._loop.now - self._at
        if self._num_sending and passed > 0:
            self._serve(passed * self.rate_bps / 8 / self._num_sending)
            self.busy_s += passed
        self._at = self._loop.now

    def _wake(self) -> None:
        self._wake_version += 1
        if self._num_sending and self.rate_bps > 0:
            left_s = max(0.0, self._least_left()) * 8 * self._num_sending / self.rate_bps
            self._loop.at(self._loop.now + left_s, self._finish, self._wake_version)

    def _finish(self, version: int) -> None:
        if version != self._wake_version:
            return
        self._advance()
        finished = self._take_finished()
        self._wake()
        for transfer in finished:
            transfer.finish()

    @property
    @abstractmethod
    def _num_sending(self) -> int:
        """Transfers that get an even part of the rate now."""

    @abstractmethod
    def _add(self, transfer: _Transfer) -> None: ...

    @abstractmethod
    def _serve(self, num_bytes: float) -> None:
        """Each of those has sent so many more."""

    @abstractmethod
    def _least_left(self) -> float:
        """Bytes that the first of those to finish lacks."""

    @abstractmethod
    def _take_finished(self) -> list[_Transfer]:
        """That one by construction, whatever rounding says, and those that end with it."""


class EvenLink(Link):
    """All transfers share the rate.

    Processor sharing by virtual time: `_served` is the bytes that each transfer would have got since the start, so one
    number per transfer says when it is done, and a change of rate or number moves no other (as in fair queueing;
    Demers, Keshav and Shenker, SIGCOMM 1989).
    """

    def __init__(self, loop: Loop, rate_bps: float, changes: Sequence[tuple[float, float]] = ()) -> None:
        super().__init__(loop, rate_bps, changes)
        self._served = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, _Transfer]] = []

    @property
    def _num_sending(self) -> int:
        return len(self._heap)

    def _add(self, transfer: _Transfer) -> None:
        self._count += 1
        heappush(self._heap, (self._served + transfer.left_bytes, self._count, transfer))

    def _serve(self, num_bytes: float) -> None:
        self._served += num_bytes

    def _least_left(self) -> float:
        return self._heap[0][0] - self._served

    def _take_finished(self) -> list[_Transfer]:
        until, finished = max(self._served, self._heap[0][0]), []
        while self._heap and self._heap[0][0] <= until:
            finished.append(heappop(self._heap)[2])
        return finished


class OrderedLink(Link):
    """Each node sends whole states in the daemons' order (common/sched/deadlines.py), the nodes share the rate."""

    def __init__(self, loop: Loop, rate_bps: float, changes: Sequence[tuple[float, float]] = ()) -> None:
        super().__init__(loop, rate_bps, changes)
        self._waiting: dict[str, list[_Transfer]] = {}
        self._first: dict[str, _Transfer] = {}

    @property
    def _num_sending(self) -> int:
        return len(self._first)

    def _add(self, transfer: _Transfer) -> None:
        self._waiting.setdefault(transfer.request.node, []).append(transfer)
        self._choose(transfer.request.node)

    def _choose(self, node: str) -> None:
        """What the node sends from now on: the first transfer of the first request."""
        self._first.pop(node, None)
        transfers: dict[int, _Transfer] = {}
        for each in self._waiting[node]:
            transfers.setdefault(each.request.number, each)
        if not transfers:
            return
        byte_s = 8 * (len(self._first) + 1) / self.rate_bps if self.rate_bps > 0 else 0.0
        states = [
            Sending(r.number, r.arrived_at, r.due_at, byte_s * max(0.0, r.left_bytes))
            for r in (each.request for each in transfers.values())
        ]
        self._first[node] = transfers[send_order(states, self._loop.now)[0].seq_id]

    def _serve(self, num_bytes: float) -> None:
        for transfer in self._first.values():
            transfer.left_bytes -= num_bytes
            transfer.request.left_bytes -= num_bytes

    def _least_left(self) -> float:
        return min(transfer.left_bytes for transfer in self._first.values())

    def _take_finished(self) -> list[_Transfer]:
        until = max(self._least_left(), 1e-3)
        finished = [each for each in self._first.values() if each.left_bytes <= until]
        for transfer in finished:
            self._waiting[transfer.request.node].remove(transfer)
            self._choose(transfer.request.node)
        return finished
