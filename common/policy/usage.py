"""What of a thing that several share is used by each, lately, and what one of them can count on.

For a node's time and for its egress. Fair queues and `waterfill` divide both so: everybody gets what it wants, or an
even part of what those leave who want less. So who asks whether to want more is answered as if it wanted all. Pure;
used by prefilld/sharing.py, for the slow loop of the decodeds that share a prefilld.
"""

from __future__ import annotations

from math import exp, inf

from common.policy.egress import waterfill

# What was used so long ago counts e times less.
FORGET_S = 60.0
# A smaller part of the whole is as good as nothing.
LEAST_PART = 0.005
# After so many `FORGET_S` nothing is left of a user.
_KEPT = 10.0


class Usage:
    """Rates by user, averaged over the past with weights that fall exponentially. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, float]] = {}

    def note(self, user: str, seconds: float, now: float, rate: float = 1.0) -> None:
        """It used `rate` of the thing for so many seconds, until `now`. A rate of 1 is the whole node."""
        kept = {name: known for name, known in self._rates.items() if now - known[1] < _KEPT * FORGET_S}
        kept[user] = (self.rates(now).get(user, 0.0) + rate * (1.0 - exp(-seconds / FORGET_S)), now)
        self._rates = kept

    def rates(self, now: float) -> dict[str, float]:
        """What each uses, on the average."""
        return {user: rate * exp(-max(0.0, now - at) / FORGET_S) for user, (rate, at) in self._rates.items()}

    def share(self, user: str, now: float, total: float = 1.0) -> float:
        """What of `total` it can have, as long as the others want no more than they use: what these leave, and never
        less than an even part among those who use anything.
        """
        busy = {name: rate for name, rate in self.rates(now).items() if rate >= LEAST_PART * total}
        return waterfill(total, {**busy, user: inf})[user]
