"""How fast a queue drains, and how far predictions are off: both measured, so that what requests wait for (slots,
memory, rows, compute) need not be known. Pure; used by admission.py.
"""

from __future__ import annotations

from dataclasses import dataclass

# One start in so many is the weight of the latest; so many must have been seen.
MEMORY = 32
MIN_STARTS = 3
# Weight of the latest error, and how many mean deviations to be on the safe side of it.
ERROR_WEIGHT, MARGIN_DEVIATIONS = 1 / 16, 3.0
# Part of a margin that goes with each request that is refused for it.
FADE_WEIGHT = 1 / 64
# Of the requests with a deadline that are let in so many may miss it; what a miss adds to the reserve, in deadlines,
# and the most that it may be.
MISS_RATE, MISS_STEP, MOST_RESERVE = 0.01, 0.05, 0.5


@dataclass(slots=True)
class DrainPace:
    """Service that left the queue, over the time in which something waited; older starts count ever less."""

    cost: float = 0.0
    seconds: float = 0.0
    num_starts: float = 0.0
    _since: float | None = None

    def begin(self, now: float) -> None:
        """Something waits from now on, if nothing did."""
        if self._since is None:
            self._since = now

    def end(self) -> None:
        """Nothing waits any more."""
        self._since = None

    def note(self, cost: float, now: float) -> None:
        """A request that waited, of so many tokens of service, starts."""
        keep = 1.0 - 1.0 / MEMORY
        self.cost = keep * self.cost + cost
        self.seconds = keep * self.seconds + (now - self._since if self._since is not None else 0.0)
        self.num_starts = keep * self.num_starts + 1.0
        self._since = now

    @property
    def per_s(self) -> float:
        """Tokens of service per second; 0 before enough was seen."""
        return self.cost / self.seconds if self.num_starts >= MIN_STARTS and self.seconds > 0.0 else 0.0

    def wait_s(self, cost_before: float, now: float) -> float | None:
        """Seconds until a request starts that has so much service before it; None before anything was seen.

        A start that is overdue slows the pace before it happens.
        """
        if self.num_starts < MIN_STARTS or not self.cost:
            return None
        gap_s = self.seconds / self.num_starts
        late_s = max(0.0, now - self._since - gap_s) if self._since is not None else 0.0
        return (self.seconds + late_s) / self.cost * cost_before + gap_s + late_s


@dataclass(slots=True)
class Errors:
    """How far predictions of one kind were off: mean, and mean deviation from that, as round-trip times are tracked
    (Jacobson, Karels: Congestion Avoidance and Control, SIGCOMM 1988, appendix A). In seconds.
    """

    mean_s: float = 0.0
    deviation_s: float = 0.0

    def note(self, error_s: float) -> None:
        """It took that much longer than predicted."""
        self.deviation_s += ERROR_WEIGHT * (abs(error_s - self.mean_s) - self.deviation_s)
        self.mean_s += ERROR_WEIGHT * (error_s - self.mean_s)

    def fade(self) -> None:
        """Somebody was refused for the margin alone: where nobody is let in nothing more is learnt."""
        self.mean_s *= 1.0 - FADE_WEIGHT
        self.deviation_s *= 1.0 - FADE_WEIGHT

    @property
    def margin_s(self) -> float:
        """What to add to a prediction so that few take longer."""
        return max(0.0, self.mean_s + MARGIN_DEVIATIONS * self.deviation_s)


@dataclass(slots=True)
class Misses:
    """Keeps the rate of missed deadlines at MISS_RATE, whatever the errors look like: `reserve` is the part of a
    deadline that must be left over, and settles where misses and hits balance (Robbins, Monro: A stochastic
    approximation method, Ann. Math. Statist. 22, 1951).
    """

    reserve: float = 0.0

    def note(self, *, is_missed: bool) -> None:
        """A request that was let in has kept its deadline, or not."""
        step = MISS_STEP * ((1.0 - MISS_RATE) if is_missed else -MISS_RATE)
        self.reserve = min(MOST_RESERVE, max(0.0, self.reserve + step))

    def fade(self) -> None:
        """Somebody was refused for the reserve alone."""
        self.reserve *= 1.0 - FADE_WEIGHT
