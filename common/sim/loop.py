"""Virtual time: callbacks in the order of their instants, ties in the order they were asked for.

Knows nothing of what happens. Used by everything in common/sim.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Loop:
    """`now` only moves inside `run`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call at `when`, or now if that has passed."""
        self._count += 1
        heappush(self._heap, (max(when, self.now), self._count, call, args))

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is left, or past `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heappop(heap)
            self.num_events += 1
            call(*args)
