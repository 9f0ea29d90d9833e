"""Tells every decoded what prefilld's prefix cache holds: all of it when a session begins, then what changes.

Lives on the event loop. Between the cache's books (common/sched) and the server's messages (common/wire).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from common.net.server import PrefillServer
from common.sched.prefix_index import Entry
from common.sched.prefix_index import Holding as HeldGroups
from common.state_cache import StateCache
from common.wire.holdings import Holding

# Changes are told together, once in so many seconds.
PERIOD_S = 0.05


class CacheFeed:
    """From one cache to the clients of one server."""

    def __init__(self, cache: StateCache, server: PrefillServer) -> None:
        self._cache, self._server = cache, server
        self._timer: asyncio.TimerHandle | None = None
        server.cache = self._held
        cache.on_change = self._changed

    def close(self) -> None:
        """Tell nothing more."""
        self._cache.on_change = _nothing
        if self._timer is not None:
            self._timer.cancel()

    def _changed(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        changes = self._cache.books.take_changes()
        if changes is None:
            self._server.tell_cache(list(self._held()), is_anew=True)
        elif changes:
            # Only how an entry ended up; in the order of the last changes.
            latest = {entry.name: (entry, held) for entry, held in changes}
            self._server.tell_cache([_told(*each) for each in latest.values()], is_anew=False)

    def _held(self) -> Iterator[Holding]:
        return (_told(*each) for each in self._cache.books.held())


def _told(entry: Entry, held: HeldGroups) -> Holding:
    return Holding(entry.name, entry.parent, entry.stop, entry.num_tokens, held.groups, held.window_first)


def _nothing() -> None:
    """Nobody wants to know."""
