"""Profiles: what a node was measured to do, as numbers or as JSON. The prior of cost models, the input of plans.

A prefill profile is a curve through measured (tokens, seconds): monotone between the points, straight outside of them.
Pure; used by capacity.py, the simulator and `decodectl plan`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from common.policy.costs import (
    LEAST_TYPICAL,
    MOST_COST,
    PREFILL_SCALE,
    DecodeCost,
    NonNegativeFit,
    PrefillCost,
    StateSize,
    prefill_terms,
)
from common.policy.fields import Fields, Limits, is_number

_PREFILL_KEYS = ("points", "constant_s", "per_token_s", "per_square_s")
_DECODE_KEYS = ("base_s", "per_row_s", "per_context_s", "max_rows")
_MODEL_KEYS = ("name", "digest", "max_context")
NODE_KEYS = (
    "name", "prefill", "decode", "state", "model",
    # Further facts that `profile` writes for whoever reads the file.
    "daemon", "version", "measured_at", "took_s", "was_idle", "warnings", "numerics", "chunk_tokens", "measured",
    "stored",
)  # fmt: skip


# Of constants, of each token or row, and of each pair of tokens.
_CONSTANT, _EACH, _SQUARE = (Limits(0.0, most) for most in MOST_COST)
_TOKENS, _SECONDS, _BYTES = Limits(0.0, 1e12), Limits(LEAST_TYPICAL, 1e6), Limits(0.0, 1e15)


class Curve:
    """Seconds (or anything else) by tokens: a piecewise cubic that rises wherever its points do.

    Slopes are those of Fritsch and Butland (SIAM J. Sci. Stat. Comput. 5, 1984): harmonic means, so nothing overshoots.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """`points` rise in both coordinates; two at least.

        Raises:
            ValueError: not so.
        """
        is_finite = all(isfinite(x) and isfinite(y) and y >= 0 for x, y in points)
        if not is_finite or len(points) < 2 or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(points)):
            raise ValueError("a curve needs two points or more that rise in tokens and do not fall in seconds")
        self.points = tuple((float(x), float(y)) for x, y in points)
        self._x, self._y = [p[0] for p in self.points], [p[1] for p in self.points]
        self._slopes = self._all_slopes()

    def __call__(self, tokens: float) -> float:
        x, y, m = self._x, self._y, self._slopes
        if tokens <= x[0]:
            return max(0.0, y[0] + m[0] * (tokens - x[0]))
        if tokens >= x[-1]:
            return y[-1] + m[-1] * (tokens - x[-1])
        k = bisect_right(x, tokens) - 1
        width, u = x[k + 1] - x[k], (tokens - x[k]) / (x[k + 1] - x[k])
        rise = y[k + 1] - y[k]
        # Hermite form, nested in u.
        a, b = width * m[k] - rise, rise - width * m[k + 1]
        return y[k] + u * rise + u * (1 - u) * (a * (1 - u) + b * u)

    def _all_slopes(self) -> list[float]:
        steps = [b - a for a, b in zip(self._x, self._x[1:], strict=False)]
        rises = [(b - a) / s for a, b, s in zip(self._y, self._y[1:], steps, strict=False)]
        if len(steps) == 1:
            return [rises[0], rises[0]]
        inner = [_between(s, t, d, e) for s, t, d, e in zip(steps, steps[1:], rises, rises[1:], strict=False)]
        first = _at_end(steps[0], steps[1], rises[0], rises[1])
        last = _at_end(steps[-1], steps[-2], rises[-1], rises[-2])
        return [first, *inner, last]


def _between(step: float, next_step: float, rise: float, next_rise: float) -> float:
    if rise <= 0 or next_rise <= 0:
        return 0.0
    left, right = 2 * next_step + step, next_step + 2 * step
    return (left + right) / (left / rise + right / next_rise)


def _at_end(step: float, next_step: float, rise: float, next_rise: float) -> float:
    """The slope of the parabola through three points at its end, held where the curve would turn back."""
    slope = ((2 * step + next_step) * rise - step * next_rise) / (step + next_step)
    return min(max(slope, 0.0), 3 * rise)


@dataclass(frozen=True, slots=True)
class Polynomial:
    """a + b x + c x^2."""

    constant: float
    linear: float
    square: float = 0.0

    def __call__(self, x: float) -> float:
        return self.constant + x * (self.linear + x * self.square)


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One kind of node: seconds of prefill by prompt tokens, and of decode steps, `max_rows` together.

    `fitted` is the cost model nearest to what was measured, where whoever measured says so; `max_context` the longest
    prompt that the model takes, None where that is not known.
    """

    name: str
    prefill: Curve | Polynomial
    decode: DecodeCost | None = None
    max_rows: int = 1
    fitted: PrefillCost | None = None
    max_context: int | None = None

    def decode_rps(self, mean_output_tokens: float, mean_context_tokens: float = 0.0) -> float:
        """Requests per second of one decoding node with all rows in use, each of so much context in the mean (equation
        5, whose T_decode has no context); 0 where it does not decode.
        """
        if self.decode is None or mean_output_tokens <= 0:
            return 0.0
        step_s = self.decode.step_s(self.max_rows, self.max_rows * mean_context_tokens)
        return self.max_rows / (step_s * mean_output_tokens)

    def cost(self, longest: float = 131072.0) -> PrefillCost:
        """The cost model that was fitted, else that nearest to the curve, errors relative, up to `longest` tokens."""
        if self.fitted is not None:
            return self.fitted
        if isinstance(self.prefill, Polynomial):
            return PrefillCost(self.prefill.constant, self.prefill.linear, self.prefill.square)
        fit = NonNegativeFit(None, PREFILL_SCALE, half_life=1e9)
        for n in range(1, 65):
            tokens = longest * n / 64
            fit.observe(prefill_terms(0.0, tokens), self.prefill(tokens))
        return PrefillCost(*fit.weights)


def node_profile(data: Mapping[str, Any], where: str = "profile", *, is_strict: bool = False) -> NodeProfile:
    """From JSON: {"name", "prefill": {"points": [[tokens, seconds], ...]} or {"constant_s", "per_token_s",
    "per_square_s"}, "decode": {"base_s", "per_row_s", "per_context_s", "max_rows"}, "model": {"max_context"}}.

    With both, the points hold as far as they go, and the cost goes on behind them. `is_strict` refuses keys that
    neither this reads nor `profile` writes: for files of people's; a daemon reads its own of any version.

    Raises:
        ValueError: naming the field that is missing, unknown or wrong.
    """
    prefill_keys, decode_keys, model_keys = (_PREFILL_KEYS, _DECODE_KEYS, _MODEL_KEYS) if is_strict else [None] * 3
    node = Fields(data, where, NODE_KEYS if is_strict else None)
    curve, fitted = _prefill(node.table("prefill", prefill_keys))
    cost, max_rows = None, 1
    if data.get("decode") is not None:
        cost, max_rows = _decode(node.table("decode", decode_keys))
    if is_strict and "state" in node:
        state_size(node.get("state"), node.name("state"))
    model = node.table("model", model_keys) if "model" in node else None
    max_context = model.whole("max_context", 1, 10**12) if model is not None and "max_context" in model else None
    return NodeProfile(node.text("name", "node"), curve, cost, max_rows, fitted, max_context)


def _prefill(told: Fields) -> tuple[Curve | Polynomial, PrefillCost | None]:
    points = _points(told) if "points" in told else []
    fitted: PrefillCost | None = None
    if "points" not in told or "per_token_s" in told:
        constant, linear = told.number("constant_s", _CONSTANT), told.number("per_token_s", _EACH)
        fitted = PrefillCost(constant, linear, told.number("per_square_s", _SQUARE, 0.0))
        if "points" not in told:
            _refuse_no_time(told, _PREFILL_KEYS[1:], fitted.seconds(0, 1))
            return Polynomial(fitted.constant_s, fitted.per_token_s, fitted.per_square_s), fitted
    try:
        return Curve(points + (_beyond(points[-1], fitted) if fitted is not None and points else [])), fitted
    except ValueError as e:
        raise ValueError(f"{told.name('points')}: {e}") from e


def _points(told: Fields) -> list[tuple[float, float]]:
    pairs = told.get("points")
    if not isinstance(pairs, list):
        raise ValueError(f"{told.name('points')} must be a list of [tokens, seconds], not {pairs!r:.80}")
    for n, pair in enumerate(pairs):
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
        if not is_pair or not _TOKENS.hold(pair[0]) or not _SECONDS.hold(pair[1]):
            limits = f"tokens {_TOKENS}, seconds {_SECONDS}"
            raise ValueError(f"{told.name('points')}[{n}] must be [tokens, seconds], {limits}, not {pair!r:.60}")
        if n and (pair[0] < pairs[n - 1][0] + 1 or pair[1] < pairs[n - 1][1]):
            raise ValueError(
                f"{told.name('points')}[{n}] must have a token more, and no fewer seconds, than the point before it,"
                f" {pairs[n - 1]}, not {pair!r:.60}"
            )
    return [(float(tokens), float(seconds)) for tokens, seconds in pairs]


def _decode(told: Fields) -> tuple[DecodeCost, int]:
    base, row = told.number("base_s", _CONSTANT), told.number("per_row_s", _EACH, 0.0)
    # A row attends to each token of its context, as prefill does for each square.
    cost = DecodeCost(base, row, told.number("per_context_s", _SQUARE, 0.0))
    _refuse_no_time(told, _DECODE_KEYS[:3], cost.step_s(1, 1))
    return cost, told.whole("max_rows", 1, 10**6, 1)


def _refuse_no_time(told: Fields, keys: Sequence[str], token_s: float) -> None:
    """A term alone may be 0, or nearly so where it was fitted, but all of them together must take some seconds."""
    if token_s < LEAST_TYPICAL:
        raise ValueError(
            f"{told.where}: {', '.join(keys[:-1])} and {keys[-1]} must take {LEAST_TYPICAL:g} seconds or more for a"
            f" token, not {token_s:.3g}"
        )


def _beyond(last: tuple[float, float], cost: PrefillCost) -> list[tuple[float, float]]:
    """Points behind the last one measured, as the cost goes on from there."""
    tokens, seconds = last
    more = [tokens * 2**n for n in range(1, 12)]
    return [(x, seconds + cost.seconds(0, x) - cost.seconds(0, tokens)) for x in more]


def state_size(data: object, where: str = "state") -> StateSize:
    """From JSON: {"fixed_bytes", "bytes_per_token"}. Raises ValueError naming the field."""
    told = Fields(data, where, ("fixed_bytes", "bytes_per_token"))
    found = StateSize(told.number("fixed_bytes", _BYTES, 0.0), told.number("bytes_per_token", _BYTES))
    if found.num_bytes(1) <= 0:
        raise ValueError(f"{where}: fixed_bytes and bytes_per_token are both 0, one must be above")
    return found
