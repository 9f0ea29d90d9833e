"""How much service is asked for, by class and API key, whether or not it is let in: who will want a turn before a
request that waits. Pure; used by fair.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import exp

# What was asked for so long ago counts 1/e of what is asked for now.
MEMORY_S = 1.0
# A tenant that has asked for nothing for so long takes no turns; so many are known at most, the latest.
IDLE_S, MAX_TENANTS = 5.0, 4096


@dataclass(slots=True)
class Rate:
    """Tokens of service per second."""

    tokens: float = 0.0
    at: float = 0.0

    def note(self, cost: float, now: float) -> None:
        """Somebody asks for so much."""
        self.tokens, self.at = self._left(now) + cost, max(self.at, now)

    def per_s(self, now: float) -> float:
        """What is asked for in a second."""
        return self._left(now) / MEMORY_S

    def _left(self, now: float) -> float:
        return self.tokens * exp(min(0.0, self.at - now) / MEMORY_S)


@dataclass(slots=True)
class Asked:
    """Of one class. Operations take O(1), each tenant that has gone idle once more."""

    total: Rate = field(default_factory=Rate)
    _tenants: OrderedDict[str, Rate] = field(default_factory=OrderedDict)

    def note(self, tenant: str, cost: float, now: float) -> None:
        """A tenant asks for so much."""
        self.total.note(cost, now)
        self._tenants.setdefault(tenant, Rate()).note(cost, now)
        self._tenants.move_to_end(tenant)
        self._forget(now)

    def num_tenants(self, now: float) -> int:
        """How many have asked lately."""
        self._forget(now)
        return len(self._tenants)

    def others_per_s(self, tenant: str, now: float) -> float:
        """Tokens per second that others than this one ask for."""
        own = self._tenants.get(tenant)
        return max(0.0, self.total.per_s(now) - (own.per_s(now) if own is not None else 0.0))

    def _forget(self, now: float) -> None:
        while self._tenants:
            name, oldest = next(iter(self._tenants.items()))
            if oldest.at >= now - IDLE_S and len(self._tenants) <= MAX_TENANTS:
                break
            del self._tenants[name]
