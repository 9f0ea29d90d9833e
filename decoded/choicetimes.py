"""When the tokens of a request's choices were handed out: gaps between them, and the mean of the slowest choice.

Told the time. Used by active.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Choice:
    first_at: float
    last_at: float
    num_tokens: int = 1


@dataclass(slots=True)
class ChoiceTimes:
    """Of all choices of one request."""

    num_tokens: int = 0
    _choices: dict[int, _Choice] = field(default_factory=dict)

    def note(self, choice: int, now: float) -> float | None:
        """A token came. Seconds since the one before it of its choice; None for the first."""
        self.num_tokens += 1
        known = self._choices.get(choice)
        if known is None:
            self._choices[choice] = _Choice(now, now)
            return None
        gap_s, known.last_at = now - known.last_at, now
        known.num_tokens += 1
        return gap_s

    @property
    def tpot_s(self) -> float:
        """TPOT, (last - first) / (tokens - 1), of the slowest choice; 0 where no choice has two tokens."""
        several = (c for c in self._choices.values() if c.num_tokens > 1)
        return max(((c.last_at - c.first_at) / (c.num_tokens - 1) for c in several), default=0.0)
