"""Which of several prompts goes first where each is due at an instant of its own: as few as can be are late.

Pure: instants and remaining work come in, an order comes out, asked anew whenever one may give way to another. Knows
neither nodes nor links: work is seconds of whatever the prompts share. Asked by turns.py, by the network of prefilld,
to which the daemon gives it, and by the simulator's links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from math import isinf
from typing import Protocol, TypeVar

from common.linkfacts import Sending

PATIENCE_S = 30.0
"""So long after its due time, or after its arrival where it has none, a prompt gives way to none that came later."""


class Due(Protocol):
    """A prompt with something left to do. Instants are seconds of one clock.

    Attributes:
        seq_id: order of arrival, unique.
        arrived_at, due_at: until the latter it counts as on time; inf: it may come whenever.
    """

    @property
    def seq_id(self) -> int: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def due_at(self) -> float: ...


D = TypeVar("D", bound=Due)


def in_order(prompts: Iterable[D], now: float, left_s: Callable[[D], float]) -> list[D]:
    """All of them in the order in which to serve them; `left_s` answers how long one still takes alone.

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
    free_at = now + sum(map(left_s, overdue))
    chosen: list[tuple[float, int]] = []
    late: dict[int, float] = {}  # what those put off still take
    for prompt in rest:
        took_s = left_s(prompt)
        heappush(chosen, (-took_s, -prompt.seq_id))
        free_at += took_s
        if free_at > prompt.due_at:
            least, seq_id = heappop(chosen)
            free_at += least
            late[-seq_id] = -least
    put_off = sorted((p for p in rest if p.seq_id in late), key=lambda p: (late[p.seq_id], p.seq_id))
    return [*overdue, *(p for p in rest if p.seq_id not in late), *put_off]


def send_order(states: Sequence[Sending], now: float) -> list[Sending]:
    """The same for states that wait for a path: a SendOrder of common/linkfacts.py."""
    return in_order(states, now, lambda state: state.left_s)


def _waits_until(prompt: Due) -> float:
    """From then on whoever else is due has to wait."""
    return (prompt.arrived_at if isinf(prompt.due_at) else prompt.due_at) + PATIENCE_S
