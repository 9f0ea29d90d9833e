"""What to measure of a node, and what to make of it: lengths and batches, typical values, curves that rise, costs.

Pure: profiler.py takes the measurements, profile.py reads what comes out of here. Samples are numbers; no engine is
known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

from common.policy.costs import PREFILL_SCALE, DecodeFit, NonNegativeFit, prefill_terms

FIRST_TOKENS = 64
"""The shortest prompt that is measured, where the limit allows three others."""
MIN_LIMIT = 16
"""Below it there is no ladder."""
# Parts of the time limit: what one measurement may be expected to take, and what one may that is repeated.
LONGEST_PART, REPEATED_PART = 1 / 5, 1 / 50


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """`num_tokens` behind `num_cached` others took so long to compute; `is_quiet`: nothing else ran meanwhile."""

    num_cached: int
    num_tokens: int
    seconds: float
    is_quiet: bool = True


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A decode step took so long. `num_context_tokens`: of all rows together."""

    num_rows: int
    num_context_tokens: int
    seconds: float
    is_quiet: bool = True


@dataclass(slots=True)
class Samples:
    """Everything that was measured of a node, repeats and all, and what has to be said about it."""

    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def ladder(limit: int) -> tuple[int, ...]:
    """Prompt lengths that double up to `limit`, three at least: as many as a cost has terms.

    Raises:
        ValueError: `limit` is below MIN_LIMIT.
    """
    if limit < MIN_LIMIT:
        raise ValueError(f"prompts of up to {limit} tokens are too short to be measured, {MIN_LIMIT} is the least")
    lengths = [min(FIRST_TOKENS, limit // 4)]
    while 2 * lengths[-1] <= limit:
        lengths.append(2 * lengths[-1])
    # A step of less says little, and noise may turn it around.
    return (*lengths, limit) if 2 * limit >= 3 * lengths[-1] else tuple(lengths)


def expected_s(before: PrefillSample, num_tokens: int) -> float:
    """Seconds of a longer prompt, somewhere between linear and quadratic."""
    return before.seconds * float((num_tokens / before.num_tokens) ** 1.5)


def rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The nearest points (least squares) whose seconds do not fall: what noise has turned around is averaged.

    Pools adjacent violators (Ayer and others, Ann. Math. Stat. 26, 1955). `points` rise in their first coordinate.
    """
    pools: list[tuple[float, int]] = []
    for _, seconds in points:
        total, count = seconds, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    level = [total / count for total, count in pools for _ in range(count)]
    return [(tokens, seconds) for (tokens, _), seconds in zip(points, level, strict=True)]


def prefill_facts(samples: Samples) -> dict[str, Any]:
    """`prefill` of a profile: the curve's points, and the cost nearest to all that was measured."""
    typical = _typical_prefill(samples.prefill)
    points = rising(_curve(typical))
    fit = NonNegativeFit(None, PREFILL_SCALE, half_life=inf)
    for s in typical:
        fit.observe(prefill_terms(s.num_cached, s.num_tokens), s.seconds)
    constant, linear, square = fit.weights
    cost = {"constant_s": constant, "per_token_s": linear, "per_square_s": square}
    return {"points": [[int(x), significant(y)] for x, y in points]} | {k: significant(v) for k, v in cost.items()}


def decode_facts(samples: Samples, max_rows: int) -> dict[str, Any]:
    """`decode` of a profile: the cost nearest to the steps that were measured."""
    fit = DecodeFit()
    for s in samples.decode:
        fit.observe(s.num_rows, s.num_context_tokens, s.seconds)
    base, row, context = astuple(fit.cost) if fit.cost is not None else (0.0, 0.0, 0.0)
    cost = {"base_s": base, "per_row_s": row, "per_context_s": context}
    return {k: significant(v) for k, v in cost.items()} | {"max_rows": max_rows}


def measured_facts(samples: Samples) -> dict[str, Any]:
    """All of it as it was measured, for whoever wants to see the noise."""
    kinds = sorted({(s.num_cached, s.num_tokens) for s in samples.prefill})
    return {
        "prefill": [
            {
                "cached": cached,
                "tokens": tokens,
                "seconds": [
                    significant(s.seconds) for s in samples.prefill if (s.num_cached, s.num_tokens) == (cached, tokens)
                ],
            }
            for cached, tokens in kinds
        ],
        "decode": [
            {"rows": s.num_rows, "context_tokens": s.num_context_tokens, "step_s": significant(s.seconds)}
            for s in samples.decode
        ],
    }


def was_idle(samples: Samples) -> bool:
    """Whether every figure that counts was taken while nothing else ran."""
    return all(s.is_quiet for s in _typical_prefill(samples.prefill)) and all(s.is_quiet for s in samples.decode)


def doubts(samples: Samples) -> list[str]:
    """What whoever relies on the figures has to know, a sentence each."""
    found = list(samples.remarks)
    if not was_idle(samples):
        found.append("requests were served meanwhile: figures are those of a node under load")
    curve = _curve(_typical_prefill(samples.prefill))
    if turned := [f"{a[0]:.0f} and {b[0]:.0f}" for a, b in pairwise(curve) if b[1] < a[1]]:
        found.append(f"seconds fell between prompts of {', '.join(turned)} tokens: noise, which was averaged")
    return found


def significant(value: float) -> float:
    """Six digits: more than any clock is worth."""
    return float(f"{value:.6g}")


def _curve(typical: Sequence[PrefillSample]) -> list[tuple[float, float]]:
    return [(float(s.num_tokens), s.seconds) for s in typical if not s.num_cached]


def _typical_prefill(samples: Sequence[PrefillSample]) -> list[PrefillSample]:
    """One of each kind, by length: the median of those taken in quiet, or of all where there was none."""
    kinds: dict[tuple[int, int], list[PrefillSample]] = {}
    for s in samples:
        kinds.setdefault((s.num_tokens, s.num_cached), []).append(s)
    found = []
    for (tokens, cached), same in sorted(kinds.items()):
        quiet = [s.seconds for s in same if s.is_quiet]
        found.append(PrefillSample(cached, tokens, median(quiet or [s.seconds for s in same]), bool(quiet)))
    return found
