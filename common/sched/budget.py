"""How many prompt tokens may share a step with decode rows, so that running streams keep their pace.

With a fixed budget that is a number. Otherwise it follows what steps take: a step with a chunk should last at most
`max_stretch` times as long as its decode rows alone. What rows take alone is known by their number, what a token of a
chunk adds from the last chunk; both are measured, not modelled, since they depend on context and on the size itself.
Pure: durations come from the worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Smallest chunk of a mixed step, unless the limit is smaller: prompts always advance.
MIN_TOKENS = 4
# Kernels work on rows by fours.
MULTIPLE = 4
# Chunks that share one forward with decode rows have one of these sizes: an engine prepares for each (replay.py).
JOINT_SIZES = (4, 8, 16, 24, 32, 48, 64)
# And the last tokens of a prompt.
ALL_JOINT_SIZES = (*range(1, JOINT_SIZES[0]), *JOINT_SIZES)
# One in so many steps goes without a chunk, to see how long decode rows take alone; so many in a row at most, since
# the first ones of a new number of rows tell nothing.
QUIET_EVERY, QUIET_TRIES = 24, 6
# A single step counts as at most so many times what was known: it may have waited for the machine.
MAX_SURPRISE = 2.0
# How fast the averages follow, and how far one step may move the budget.
WEIGHT = 0.3
MAX_CHANGE = 2.0
# A joint size is kept while it is at most so much too large: preparing for another is slow.
MIN_CHANGE = 0.9


def joint_size(size: int) -> int:
    """The largest prepared size of a joint chunk up to `size`; itself when it is less than all, or more."""
    return size if size > JOINT_SIZES[-1] else max((s for s in JOINT_SIZES if s <= size), default=size)


# Aims at this part of the stretch: the next step is never quite like the last.
AIM = 0.9
# Before anything is known.
START_TOKENS = 32


@dataclass(slots=True)
class TokenBudget:
    """The budget of the next mixed step.

    Attributes:
        limit: most tokens of any chunk.
        fixed: this many tokens, or 0 to steer.
        max_stretch: longest mixed step, in durations of its decode rows.
        alone_tokens, alone_s: prompt tokens computed in steps without decode rows, and how long those took.
        mixed_tokens, mixed_s: prompt tokens computed in mixed steps, and how long those steps took in all: their ratio
            is the local prefill rate beside running streams.
        last_tokens: of the last chunk in a mixed step.
    """

    limit: int
    fixed: int = 0
    max_stretch: float = 3.0
    alone_tokens: int = 0
    alone_s: float = 0.0
    mixed_tokens: int = 0
    mixed_s: float = 0.0
    last_tokens: int = 0
    _quiet_s: dict[int, float] = field(default_factory=dict)  # by number of rows
    _token_s: float = 0.0
    _last: int = START_TOKENS
    _since_quiet: int = 0

    def prompt_s(self, num_tokens: int, *, is_mixed: bool) -> float:
        """How long so many tokens of a prompt take, in mixed steps or alone; 0 before anything is known."""
        num, seconds = (self.mixed_tokens, self.mixed_s) if is_mixed else (self.alone_tokens, self.alone_s)
        return num_tokens * seconds / num if num else 0.0

    def tokens(self, num_rows: int) -> int:
        """Most tokens of a chunk that shares its step with so many decode rows."""
        if self.fixed:
            return min(self.fixed, self.limit)
        wanted = float(self._last)
        if self._token_s and self._quiet_s:
            wanted = max(AIM * self.max_stretch - 1.0, 0.0) * self.decode_s(num_rows) / self._token_s
            if self._last in JOINT_SIZES and MIN_CHANGE * self._last <= wanted < self._last:
                wanted = self._last
            wanted = min(max(wanted, self._last / MAX_CHANGE), self._last * MAX_CHANGE)
        return min(max(MIN_TOKENS, int(wanted) // MULTIPLE * MULTIPLE), self.limit)

    def joint_tokens(self, num_rows: int) -> int:
        """Most tokens of a chunk in one forward with decode rows; 0: a larger one is due, in a forward of its own."""
        size = self.tokens(num_rows)
        if size > JOINT_SIZES[-1]:
            return 0
        return size if self.fixed else joint_size(size)

    def decode_s(self, num_rows: int) -> float:
        """How long so many decode rows take alone; 0 before anything is known.

        Of a number not seen yet: from the nearest, by the square root, between "reads weights" and "computes".
        """
        if not self._quiet_s:
            return 0.0
        nearest = min(self._quiet_s, key=lambda n: abs(n - num_rows))
        return self._quiet_s[nearest] * math.sqrt(num_rows / nearest)

    def wants_quiet(self) -> bool:
        """Whether the next step should go without a chunk, so that its length can be seen. Asked once a step."""
        self._since_quiet += 1
        if self._since_quiet > QUIET_EVERY + QUIET_TRIES:
            self._since_quiet = 1
        return not self.fixed and self._since_quiet > QUIET_EVERY

    def note_quiet(self, num_rows: int, decode_s: float) -> None:
        """Learn from decode rows that took `decode_s` on their own."""
        self._since_quiet = 0
        known = self._quiet_s.get(num_rows, decode_s)
        self._quiet_s[num_rows] = known + WEIGHT * (min(decode_s, MAX_SURPRISE * known) - known)

    def note_alone(self, num_tokens: int, step_s: float) -> None:
        """A chunk had a step of its own: nothing to steer by, but a rate."""
        self.alone_tokens += num_tokens
        self.alone_s += step_s

    def note_chunk(self, num_tokens: int, num_rows: int, step_s: float, *, is_settled: bool = True) -> None:
        """Learn from a step of `step_s` in all: decode rows and `num_tokens` of a prompt.

        A step that is not settled took longer than others like it will; it counts if it was short all the same.
        """
        self.last_tokens = num_tokens
        self.mixed_tokens += num_tokens
        self.mixed_s += step_s
        # A shorter chunk than allowed (the end of a prompt) says little about longer ones.
        if self.fixed or num_tokens < min(self._last, self.joint_tokens(num_rows) or self.tokens(num_rows)):
            return
        token_s = max(step_s - self.decode_s(num_rows), 0.01 * step_s) / num_tokens
        if is_settled or not self._token_s or token_s < self._token_s:
            self._token_s, self._last = token_s, num_tokens
