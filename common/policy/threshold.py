"""The threshold while running: solved anew over what is asked for, raised at once when the far side cannot keep up.

The slow loop solves equations (6) and (7) of the paper over the uncached lengths observed lately. The fast loop
multiplies that by a factor: up when the egress is nearly full, bytes are sent again, or the peers' queue is long; down
again, slower and only after a quiet time (the paper names the signals and leaves the marks open). Pure; called by
whoever routes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.policy.capacity import Solution
from common.policy.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Signals:
    """How both sides do.

    Attributes:
        utilisation, retransmitted: parts of the path's capacity in use, and of its bytes sent again.
        queue_s: seconds until a new prompt's state could be here from the far side, itself not counted.
        own_queue_s: seconds until a new prompt could start at decoded's own site.
    """

    utilisation: float = 0.0
    retransmitted: float = 0.0
    queue_s: float = 0.0
    own_queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Marks:
    """When to act. A signal at its `high` mark raises the threshold, all below the `low` ones let it fall.

    At the best threshold a scarce path is full all the time, so a full path alone is no reason: the own side must have
    the shorter queue by `margin_s`, or it would be handed what it cannot do either. When its queue is the longer one by
    as much, the threshold falls at once.
    """

    high: Signals = Signals(0.95, 0.05, 8.0)
    low: Signals = Signals(0.80, 0.02, 3.0)
    raise_by: float = 1.25
    lower_by: float = 0.95
    most: float = 8.0
    fast_s: float = 2.0
    quiet_s: float = 10.0
    margin_s: float = 2.0
    slow_s: float = 60.0


MARKS = Marks()


class LengthHistogram:
    """Uncached lengths seen lately: counts in bins of 1/16 octave that decay to half within `half_life` requests."""

    _BINS_PER_OCTAVE = 16

    def __init__(self, half_life: float = 2000.0) -> None:
        self._counts: dict[int, float] = {}
        # Growing weights instead of decaying counts: one addition a request; rescaled before they overflow.
        self._weight, self._grow = 1.0, 2.0 ** (1.0 / half_life)
        self.num_seen = 0

    def add(self, num_tokens: int) -> None:
        """One request; those with nothing to compute do not count."""
        if num_tokens < 1:
            return
        slot = round(self._BINS_PER_OCTAVE * math.log2(num_tokens))
        self._counts[slot] = self._counts.get(slot, 0.0) + self._weight
        self._weight *= self._grow
        self.num_seen += 1
        if self._weight > 1e100:
            self._counts = {n: c / self._weight for n, c in self._counts.items()}
            self._weight = 1.0

    def lengths(self) -> Lengths:
        """The distribution. Raises ValueError before anything was seen."""
        slots = sorted(self._counts)
        return Lengths([2.0 ** (n / self._BINS_PER_OCTAVE) for n in slots], [self._counts[n] for n in slots])


class ThresholdController:
    """`observe` every request, `step` now and then; `threshold_tokens` is what to route by."""

    def __init__(self, initial: float, *, marks: Marks = MARKS, min_requests: int = 100) -> None:
        """`initial` holds until `min_requests` were seen and it could be solved."""
        self.base, self.factor = initial, 1.0
        self.solution: Solution | None = None
        self.histogram = LengthHistogram()
        self._marks, self._min_requests = marks, min_requests
        self._solved_at = -math.inf
        self._raised_at = self._lowered_at = -math.inf

    @property
    def threshold_tokens(self) -> float:
        return self.base * self.factor

    def observe(self, num_uncached_tokens: int) -> None:
        """A request was routed."""
        self.histogram.add(num_uncached_tokens)

    @property
    def exchange_tokens(self) -> float | None:
        """The threshold as it was solved, by which `adaptive` prices; None before."""
        return self.base if self.solution is not None else None

    def step(
        self, now: float, signals: Signals, solve: Callable[[Lengths], Solution | None] | None = None
    ) -> Solution | None:
        """Both loops as far as they are due; the slow one's solution when it ran. Without `solve`, or where it returns
        None (costs not known yet), only the fast loop runs.
        """
        self._fast(now, signals)
        is_due = now - self._solved_at >= self._marks.slow_s and self.histogram.num_seen >= self._min_requests
        solved = solve(self.histogram.lengths()) if is_due and solve is not None else None
        if solved is not None:
            self._solved_at, self.base, self.solution = now, solved.threshold_tokens, solved
        return solved

    def _fast(self, now: float, signals: Signals) -> None:
        marks, ahead_s = self._marks, signals.queue_s - signals.own_queue_s
        if _is_any_above(signals, marks.high) and ahead_s > marks.margin_s:
            if now - self._raised_at >= marks.fast_s:
                self.factor = min(self.factor * marks.raise_by, marks.most)
                self._raised_at = now
        elif self.factor > 1.0 and now - self._lowered_at >= marks.fast_s:
            is_quiet = not _is_any_above(signals, marks.low) and now - self._raised_at >= marks.quiet_s
            if is_quiet or ahead_s < -marks.margin_s:
                self.factor = max(1.0, self.factor * (marks.lower_by if is_quiet else 1 / marks.raise_by))
                self._lowered_at = now


def _is_any_above(signals: Signals, marks: Signals) -> bool:
    return (
        signals.utilisation >= marks.utilisation
        or signals.retransmitted >= marks.retransmitted
        or signals.queue_s >= marks.queue_s
    )
