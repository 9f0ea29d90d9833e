"""How much of this prefilld each decoded uses, and what each can count on: told to it, for its slow loop.

Told by stream.py of every chunk and by service.py of the bytes of sessions; common/policy/usage.py has the averages.
Decides nothing: the queue and the egress see to it that everybody gets its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from common.policy.usage import Usage
from prefilld.egress_notes import is_local


class Sharing:
    """By the names of decodeds, as the queue has them. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._compute, self._egress = Usage(), Usage()
        self._sent: dict[str, int] = {}
        self._looked_at = 0.0

    def computed(self, peer: str, seconds: float, now: float) -> None:
        """A chunk of a prompt of this decoded took so long."""
        self._compute.note(peer, seconds, now)

    def look(self, rows: Iterable[Mapping[str, Any]], now: float) -> None:
        """At the rows of `peers`, now and then: what was sent to each. Nothing on loopback takes of the budget."""
        seconds, before = now - self._looked_at, self._sent
        far = [row for row in rows if not is_local(row)]
        self._sent, self._looked_at = {row["instance_id"]: row["bytes_out"] for row in far}, now
        for row in far:
            num_bytes = row["bytes_out"] - before.get(row["instance_id"], row["bytes_out"])
            # A session that ended and began anew between two looks counts from 0.
            if num_bytes := num_bytes if num_bytes >= 0 else row["bytes_out"]:
                self._egress.note(row["name"], seconds, now, 8.0 * num_bytes / seconds)

    def busy_shares(self, now: float) -> dict[str, float]:
        """The part of the last minute's time that went to prompts of each decoded."""
        return self._compute.rates(now)

    def load(self, peer: str, max_bps: float, now: float) -> dict[str, float]:
        """For Status messages; `max_bps` is the budget of all peers, inf for none."""
        facts = {"compute_share": self._compute.share(peer, now)}
        return facts | ({"egress_bps": self._egress.share(peer, now, max_bps)} if max_bps < inf else {})
