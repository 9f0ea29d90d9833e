"""Which of several prompts goes first where each is due at an instant of its own: as few as can be are late.

Pure: instants and remaining work come in, an order comes out, asked anew whenever one may give way to another. Knows
neither nodes nor links: work is seconds of whatever the prompts share. Asked by turns.py, by the network of prefilld,
which gets it from there, and by the simulator's links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import isinf
from typing import Protocol, TypeVar

PATIENCE_S = 30.0
"""So long after its due time, or after its arrival where it has none, a prompt gives way to none that came later."""


class Due(Protocol):
    """A prompt with something left to do. Instants are seconds of one clock.

    Attributes:
        seq_id: order of arrival, unique.
        arrived_at, due_at: until the latter it counts as on time; inf: it may come whenever.
        left_s: what it still takes alone.
    """

    @property
    def seq_id(self) -> int: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def due_at(self) -> float: ...
    @property
    def left_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Work:
    """A Due that is nothing more."""

    seq_id: int
    arrived_at: float
    due_at: float
    left_s: float


D = TypeVar("D", bound=Due)


def in_order(prompts: Iterable[D], now: float) -> list[D]:
    """All of them in the order in which to serve them.

    The earliest due go first, and whenever that makes one late, the one with most work among those so far is put off:
    no order has more on time (Moore, An n job, one machine sequencing algorithm for minimizing the number of late jobs,
    Management Science 1968). Those put off follow, the least work first. Who has been late, or waited without a time,
    for PATIENCE_S goes before all others. Without times that is the order of arrival.
    """
    overdue: list[D] = []
    rest: list[D] = []
    for prompt in prompts:
        (overdue if now >= _waits_until(prompt) else rest).append(prompt)
    overdue.sort(key=lambda p: (_waits_until(p), p.seq_id))
    rest.sort(key=lambda p: (p.due_at, p.seq_id))
    free_at = now + sum(p.left_s for p in overdue)
    chosen: list[tuple[float, int]] = []
    late: set[int] = set()
    for prompt in rest:
        heappush(chosen, (-prompt.left_s, -prompt.seq_id))
        free_at += prompt.left_s
        if free_at > prompt.due_at:
            left_s, seq_id = heappop(chosen)
            free_at += left_s
            late.add(-seq_id)
    put_off = sorted((p for p in rest if p.seq_id in late), key=lambda p: (p.left_s, p.seq_id))
    return [*overdue, *(p for p in rest if p.seq_id not in late), *put_off]


def _waits_until(prompt: Due) -> float:
    """From then on whoever else is due has to wait."""
    return (prompt.arrived_at if isinf(prompt.due_at) else prompt.due_at) + PATIENCE_S
