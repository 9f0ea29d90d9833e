"""A scenario's prompts, and when they come: its sections `workload` and `arrivals`, checked key by key.

Called by scenario.py and the benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.policy.fields import Fields, Limits
from common.policy.lengths import Lengths
from common.sim.caches import BlockCache
from common.sim.traces import MAX_TOKENS, Trace, read_trace
from common.sim.workload import BLOCK_TOKENS, Shape, log_normal, retrieval, sessions
from common.units import parse_duration

WORKLOAD_KEYS = {
    "log-normal": ("kind", "mu", "sigma", "low", "high", "num_output"),
    "trace": ("kind", "path"),
    "retrieval": ("kind", "num_output"),
    "sessions": ("kind", "num_output"),
}
ARRIVAL_KEYS = ("load", "cv", "swing", "period", "num_requests", "as_recorded")
_MAX_REQUESTS = 1_000_000
# The closed form goes through each length between the bounds: 10 s for so many.
_MAX_LENGTH = 2_000_000
_SEED = 1


@dataclass(frozen=True, slots=True)
class Prompts:
    """`lengths` are of uncached tokens, `instants` those of a trace that is to be replayed as it was."""

    shapes: tuple[Shape, ...]
    lengths: Lengths
    instants: tuple[float, ...]

    @property
    def mean_output(self) -> float:
        """Tokens of an answer."""
        return float(np.mean([s.num_output for s in self.shapes]))

    @property
    def mean_context(self) -> float:
        """Tokens of a row of a full batch: its prompt and half of its answer, in the mean over the time that rows stay,
        which is as long as their answers.
        """
        stays = sum(s.num_output for s in self.shapes)
        return sum(s.num_output * (s.num_prompt + s.num_output / 2) for s in self.shapes) / stays


@dataclass(frozen=True, slots=True)
class Arrivals:
    """As `Scenario` has them."""

    load: float
    cv: float
    swing: float
    period_s: float


def arrivals(plan: Fields) -> Arrivals:
    """The section `arrivals`, without what `prompts` reads of it. Raises ValueError naming the field."""
    told = plan.table("arrivals", ARRIVAL_KEYS)
    return Arrivals(
        told.number("load", Limits(0.001, 100.0), 0.8),
        told.number("cv", Limits(0.0, 100.0), 1.0),
        told.number("swing", Limits(0.0, 1.0, is_high_open=True), 0.0),
        told.unit("period", parse_duration, Limits(1.0, 1e9), "24h"),
    )


def prompts(plan: Fields, folder: Path, cache_tokens: float) -> Prompts:
    """The section `workload`, and what `arrivals` says of how many. A trace's path starts at `folder`.

    Raises:
        ValueError: naming the field, or the file and its line.
    """
    asked, told = plan.table("workload"), plan.table("arrivals", ARRIVAL_KEYS)
    kind = asked.get("kind")
    if not isinstance(kind, str) or kind not in WORKLOAD_KEYS:
        raise ValueError(f"workload.kind must be {', '.join(map(repr, WORKLOAD_KEYS))}, not {kind!r:.40}")
    # First what a trace cannot do without: its name says more than that of a key put in its place.
    path = folder / asked.text("path") if kind == "trace" else None
    asked = plan.table("workload", WORKLOAD_KEYS[kind])
    count = told.whole("num_requests", 100, _MAX_REQUESTS, 6000)
    is_recorded = told.flag("as_recorded")
    if path is not None:
        trace = _trace(path)
        shapes = tuple(trace.repeated(count))
        instants = _instants(trace, count) if is_recorded else ()
        return Prompts(shapes, _uncached(shapes, cache_tokens), instants)
    if is_recorded:
        raise ValueError("arrivals.as_recorded needs workload.kind = 'trace'")
    return _drawn(asked, kind, count, cache_tokens)


def uncached_lengths(shapes: Sequence[Shape], cache_tokens: float) -> list[int]:
    """What is left to compute of each prompt when they come in this order to one cache of that size."""
    cache = BlockCache(cache_tokens, BLOCK_TOKENS)
    left = []
    for shape in shapes:
        left.append(max(0, shape.num_prompt - 1 - cache.match(shape.blocks)))
        cache.add(shape.blocks)
    return left


def _uncached(shapes: Sequence[Shape], cache_tokens: float) -> Lengths:
    lengths = uncached_lengths(shapes, cache_tokens)
    if not any(lengths):
        raise ValueError(
            f"workload: none of {len(lengths)} prompts has a token left to compute before its last one, so there is"
            f" nothing to plan: all are one token long, or known to a cache of cache_tokens = {cache_tokens:g}"
        )
    return Lengths.of(lengths)


def _trace(path: Path) -> Trace:
    try:
        return read_trace(path)
    except OSError as e:
        raise ValueError(f"workload.path: {path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise ValueError(f"workload.path: {path}: {e}") from e


def _instants(trace: Trace, count: int) -> tuple[float, ...]:
    if count > len(trace.instants):
        raise ValueError(f"arrivals.num_requests = {count}, but the trace has {len(trace.instants)}")
    return trace.instants[:count]


def _drawn(asked: Fields, kind: str, count: int, cache_tokens: float) -> Prompts:
    rng, output = np.random.default_rng(_SEED), asked.whole("num_output", 1, MAX_TOKENS, 256)
    if kind == "log-normal":
        mu, sigma = asked.number("mu", Limits(0.0, 100.0)), asked.number("sigma", Limits(0.0, 100.0, is_low_open=True))
        low = asked.whole("low", 1, _MAX_LENGTH)
        high = asked.whole("high", low, _MAX_LENGTH)
        # The distribution is known exactly.
        try:
            lengths = Lengths.log_normal(mu, sigma, low, high)
        except ValueError as e:
            raise ValueError(
                f"workload: no whole number from low = {low} to high = {high} has any weight in a log-normal with"
                f" mu = {mu:g} and sigma = {sigma:g}: they must come nearer to exp(mu), or sigma must be larger"
            ) from e
        shapes = log_normal(count, rng, mu=mu, sigma=sigma, low=low, high=high, num_output=output)
        return Prompts(tuple(shapes), lengths, ())
    made = retrieval if kind == "retrieval" else sessions
    shapes = made(count, rng, num_output=output)
    return Prompts(tuple(shapes), _uncached(shapes, cache_tokens), ())
