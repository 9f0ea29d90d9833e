"""Whose chunk is computed next, where several prompts share an engine: the order in which they take turns.

Pure. Used by scheduler.py, and by the simulator where nodes share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol, TypeVar

from common.sched.deadlines import Due, in_order


class Waiting(Due, Protocol):
    """A prompt with chunks left to compute; see common/sched/sequence.py."""

    @property
    def priority(self) -> int: ...
    @property
    def num_remaining(self) -> int: ...

    last_turn: int


W = TypeVar("W", bound=Waiting)


class Turns:
    """Counts turns. Where any prompt is due at some time, the turn is that of the first in the order of deadlines.py;
    every other turn knows the highest priority alone.

    Otherwise every other one is the shortest prompt's, so that it waits for few chunks of others; turns between go to
    the oldest (a long prompt ends) and to the longest waiting (none in the middle starves).
    """

    def __init__(self) -> None:
        self._count = 0

    def join(self, prompt: Waiting) -> None:
        """A newcomer, as if served on arrival: it lines up behind those who have waited longer."""
        prompt.last_turn = self._count

    def take(self, prompts: Iterable[W], now: float, left_s: Callable[[W], float]) -> W | None:
        """The next turn is whose? `prompts` are in order of arrival; None of none, which is no turn.

        `left_s` answers how long a prompt takes from here alone, in seconds, as far as that is known.
        """
        ready = list(prompts)
        if not ready:
            return None
        self._count += 1
        if any(p.due_at < inf for p in ready):
            chosen = self._first_due(ready, now, left_s)
        elif self._count % 2:
            chosen = min(ready, key=lambda p: (-p.priority, p.num_remaining, p.seq_id))
        elif self._count % 4:
            chosen = ready[0]
        else:
            chosen = min(ready, key=lambda p: p.last_turn)
        chosen.last_turn = self._count
        return chosen

    def _first_due(self, ready: list[W], now: float, left_s: Callable[[W], float]) -> W:
        if self._count % 2:
            highest = max(p.priority for p in ready)
            ready = [p for p in ready if p.priority == highest]
        return in_order(ready, now, left_s)[0]
