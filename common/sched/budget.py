"""How many prompt tokens may share a step with decode rows, so that running streams keep their pace.

With a fixed budget that is a number. Otherwise it follows what steps take: a mixed step (decode rows, then a chunk)
should last at most `max_stretch` times as long as the decode rows alone. Chunk time grows with the context and falls
short of proportional for small chunks, so the budget is steered by ratio instead of by a model of it. Pure: durations
come from the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

# Smallest chunk of a mixed step, unless the limit is smaller: prompts always advance.
MIN_TOKENS = 8
# Kernels work on rows by fours.
MULTIPLE = 4
# How fast the averages follow, and how far one step may move the budget.
WEIGHT = 0.3
MAX_CHANGE = 1.5


@dataclass(slots=True)
class TokenBudget:
    """The budget of the next mixed step.

    Attributes:
        limit: most tokens of any chunk.
        fixed: this many tokens, or 0 to steer.
        max_stretch: longest mixed step, in durations of its decode rows.
        mixed_tokens, mixed_s: prompt tokens computed in mixed steps, and how long those steps took in all: their ratio
            is the local prefill rate beside running streams.
    """

    limit: int
    fixed: int = 0
    max_stretch: float = 3.0
    mixed_tokens: int = 0
    mixed_s: float = 0.0
    _tokens: float = 0.0
    _decode_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Most tokens of the next mixed step's chunk."""
        if self.fixed:
            return min(self.fixed, self.limit)
        steered = max(MIN_TOKENS, int(self._tokens) // MULTIPLE * MULTIPLE)
        return min(steered, self.limit)

    @property
    def tokens_per_s(self) -> float:
        """Local prefill rate beside running streams so far; 0 before the first mixed step."""
        return self.mixed_tokens / self.mixed_s if self.mixed_s else 0.0

    def note_step(self, decode_s: float, chunk_tokens: int, chunk_s: float) -> None:
        """Learn from a step with decode rows that took `decode_s`, and its chunk if it had one (0 tokens if not)."""
        self._decode_s += (WEIGHT if self._decode_s else 1.0) * (decode_s - self._decode_s)
        if not chunk_tokens:
            return
        self.mixed_tokens += chunk_tokens
        self.mixed_s += decode_s + chunk_s
        # A shorter chunk than allowed (the end of a prompt) says little about longer ones.
        if self.fixed or chunk_tokens < self.tokens or chunk_s <= 0:
            return
        change = (self.max_stretch - 1.0) * self._decode_s / chunk_s
        aim = chunk_tokens * min(MAX_CHANGE, max(1 / MAX_CHANGE, change))
        self._tokens = min(float(self.limit), aim)
