"""Measures all data links that send, ten times a second while they do, and tunes them as an EgressControl decides.

One for all peers of a daemon. Owned by PrefillServer; the rules are in common/policy/egress.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from common.linkfacts import EgressControl, LinkKey
from common.net.link import Link, now

TICK_S = 0.1
# Without a byte to send for so long, nothing is measured until there is one.
_REST_S = 2.0

Links = Callable[[], Iterable[tuple[LinkKey, Link]]]


class Governor:
    """`wake` whenever bytes are given to a link."""

    def __init__(self, control: EgressControl, links: Links) -> None:
        self.control = control
        self._links = links
        self._timer: asyncio.TimerHandle | None = None
        self._woken_at = 0.0

    def wake(self) -> None:
        """Something is being sent."""
        self._woken_at = now()
        if self._timer is None:
            self._tick()

    def close(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        at = now()
        links = dict(self._links())
        samples = [s for key, link in links.items() if (s := link.sample(key)) is not None]
        for key, plan in self.control.step(at, samples).items():
            links[key].tune(plan)
        if any(s.has_backlog for s in samples):
            self._woken_at = at
        is_resting = at - self._woken_at > _REST_S
        self._timer = None if is_resting else asyncio.get_running_loop().call_later(TICK_S, self._tick)
