"""Figures from samples: percentiles, spreads over rounds, ratios between engines. Pure; knows no engine and no cell."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, interpolated linearly between neighbours.

    Raises:
        ValueError: no samples, or a share outside 0 to 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"a percentile needs samples and a share within 0 to 1, not {len(values)} and {share}")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Spread:
    """One figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


def speed_ratios(ours: Mapping[int, float], theirs: Mapping[int, float], *, higher_is_better: bool) -> Spread | None:
    """How many times as fast ours is, paired by round: above 1 means ours is ahead. None without a common round.

    For times (`higher_is_better` False) it is theirs over ours.
    """
    values = []
    for number in sorted(ours.keys() & theirs.keys()):
        top, bottom = ours[number], theirs[number]
        if not higher_is_better:
            top, bottom = bottom, top
        if bottom > 0:
            values.append(top / bottom)
    return Spread.of(values)


def histogram_percentile(buckets: Mapping[float, float], share: float) -> float:
    """A percentile from cumulative counts by upper bound (Prometheus `le`), linear within a bucket.

    The last finite bound when it lies beyond. Raises ValueError without samples.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        raise ValueError("the histogram holds no samples")
    wanted, below, lower = share * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (buckets[bound] - below)
        below, lower = buckets[bound], bound
    return lower
