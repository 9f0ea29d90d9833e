"""What each prefilld holds of prefixes, as it tells by CacheEvents: whom to ask, and what to send along.

Lives on the event loop; written by the net layer's callbacks, read by the dispatcher. Knows no bytes of state. A peer
that is not connected holds nothing here, and tells everything anew when it comes back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.layout import StateLayout
from common.sched.prefix_index import Entry, Needs, PrefixIndex
from common.sched.prefix_index import Holding as HeldGroups
from common.sched.prefixes import Prefixes
from common.wire.holdings import Holding

log = logging.getLogger(__name__)
# A peer's word for more than that is not kept: some 200 bytes each.
MAX_ENTRIES = 1 << 19


class Directory:
    """Prefixes by peer."""

    def __init__(self, layout: StateLayout) -> None:
        self._needs = Needs.of(layout)
        self._peers: dict[str, PrefixIndex] = {}
        self.num_ignored = 0

    def told(self, peer: str, holdings: Sequence[Holding], *, is_anew: bool) -> None:
        """A peer says what it holds; with `is_anew` nothing else of what it said before holds."""
        index = self._peers.setdefault(peer, PrefixIndex(self._needs))
        if is_anew:
            index.clear()
        for each in holdings:
            if each.groups and len(index) >= MAX_ENTRIES and not index.holding(each.name).groups:
                if not self.num_ignored:
                    log.warning("the peer holds more prefixes than are kept track of", extra={"peer": peer})
                self.num_ignored += 1
                continue
            entry = Entry(each.name, each.parent, each.stop, each.num_tokens)
            index.set(entry, HeldGroups(each.groups, each.window_first))

    def forget(self, peer: str) -> None:
        """The peer left the configuration."""
        self._peers.pop(peer, None)

    def num_entries(self, peer: str) -> int:
        """Prefixes that a peer holds."""
        index = self._peers.get(peer)
        return len(index) if index is not None else 0

    def num_cached_tokens(self, peer: str, prompt: Prefixes | None, limit: int) -> int:
        """The longest point up to `limit` from which a peer could go on with a prompt."""
        index = self._peers.get(peer)
        return index.find(prompt, limit).num_tokens if index is not None and prompt is not None else 0
