"""How much local prefill may stand in for missing peers: a token bucket, so that fallback never swamps decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FallbackBudget:
    """Prompt tokens per second on average, with a burst.

    The bucket may go below zero by one request, so that a prompt longer than the burst is still served once the debt of
    earlier ones is paid; the long-run rate holds all the same.
    """

    tokens_per_s: float
    burst_tokens: float
    level: float = 0.0
    updated_at: float | None = None

    def take(self, num_tokens: int, now: float) -> float:
        """0.0 and the tokens are taken, or the seconds after which asking again makes sense."""
        self._refill(now)
        if self.level > 0:
            self.level -= num_tokens
            return 0.0
        if self.tokens_per_s <= 0:
            return 60.0
        return max(1.0, (1.0 - self.level) / self.tokens_per_s)

    def can_take(self, now: float) -> bool:
        """Whether `take` would."""
        self._refill(now)
        return self.level > 0

    def set_rate(self, tokens_per_s: float, burst_tokens: float) -> None:
        """Take over new limits (reload); what was used stays used."""
        self.tokens_per_s, self.burst_tokens = tokens_per_s, burst_tokens
        self.level = min(self.level, self._full())

    def _full(self) -> float:
        # A rate of zero means "never": not even a burst.
        return max(self.burst_tokens, 1.0) if self.tokens_per_s > 0 else 0.0

    def _refill(self, now: float) -> None:
        if self.updated_at is None:
            self.level = self._full()
        else:
            self.level = min(self._full(), self.level + (now - self.updated_at) * self.tokens_per_s)
        self.updated_at = now
