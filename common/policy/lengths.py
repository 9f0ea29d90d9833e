"""Distributions of uncached prompt lengths: the paper's truncated log-normal, and histograms of what was observed.

A distribution is a list of lengths with weights and running sums over them, so that what lies above and below any
threshold is found by halving. Pure; used by capacity.py, the threshold controller and the simulator.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Part:
    """The requests on one side of a threshold: their share of all, and their mean length (0 when there are none)."""

    share: float
    mean: float


class Lengths:
    """A discrete distribution over lengths in tokens."""

    def __init__(self, lengths: Sequence[float], weights: Sequence[float]) -> None:
        """`lengths` rise strictly; `weights` are any positive numbers.

        Raises:
            ValueError: nothing in it, or not as said.
        """
        if not lengths or len(lengths) != len(weights):
            raise ValueError(f"a distribution needs as many weights as lengths, not {len(weights)} and {len(lengths)}")
        if any(b <= a for a, b in pairwise(lengths)):
            raise ValueError("the lengths of a distribution must rise strictly")
        total = math.fsum(weights)
        if min(weights) < 0 or not total > 0:
            raise ValueError("the weights of a distribution must be positive")
        self.lengths = list(lengths)
        self.weights = [w / total for w in weights]
        self.below = list(accumulate(self.weights))
        self._mean_below = self.sums(lambda length: length)
        self.mean = self._mean_below[-1]

    @classmethod
    def log_normal(cls, mu: float, sigma: float, low: int, high: int) -> Lengths:
        """Whole lengths in [low, high], log-normal between them (paper section 4: mu 9.9, sigma 1, 128 to 128K).

        Raises:
            ValueError: no such distribution.
        """
        if not (0 < low <= high and sigma > 0):
            raise ValueError(f"a log-normal needs 0 < low <= high and sigma > 0, not {low}, {high}, {sigma}")
        lengths = range(low, high + 1)
        # Products, since a square that is too large is infinite, while ** would raise.
        far = ((math.log(n) - mu) / sigma for n in lengths)
        return cls(lengths, [math.exp(-0.5 * z * z) / n for n, z in zip(lengths, far, strict=True)])

    @classmethod
    def of(cls, samples: Iterable[float]) -> Lengths:
        """What was observed. Raises ValueError when there is nothing above zero."""
        return cls.weighted((length, 1.0) for length in samples if length > 0)

    @classmethod
    def weighted(cls, pairs: Iterable[tuple[float, float]]) -> Lengths:
        """Of (length, weight) in any order; weights of equal lengths add up. Raises ValueError when there are none."""
        weights: dict[float, float] = {}
        for length, weight in pairs:
            weights[length] = weights.get(length, 0.0) + weight
        lengths = sorted(weights)
        return cls(lengths, [weights[n] for n in lengths])

    def sums(self, value: Callable[[float], float]) -> list[float]:
        """Running sums of weight times `value(length)`."""
        return list(accumulate(w * value(n) for n, w in zip(self.lengths, self.weights, strict=True)))

    def index(self, threshold: float) -> int:
        """How many of the lengths are at most `threshold`."""
        return bisect_right(self.lengths, threshold)

    def split(self, threshold: float) -> tuple[Part, Part]:
        """(at most the threshold, above it)."""
        at = self.index(threshold)
        if at == 0:
            return Part(0.0, 0.0), Part(1.0, self.mean)
        if at == len(self.lengths):
            return Part(1.0, self.mean), Part(0.0, 0.0)
        share, mass = self.below[at - 1], self._mean_below[at - 1]
        return Part(share, mass / share), Part(1.0 - share, (self.mean - mass) / (1.0 - share))

    def quantile(self, part: float) -> float:
        """The least length that so large a part of the requests does not exceed."""
        return self.lengths[min(bisect_right(self.below, part), len(self.lengths) - 1)]
