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

from common.policy.costs import PREFILL_SCALE, DecodeCost, NonNegativeFit, PrefillCost, StateSize


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

    `fitted` is the cost model nearest to what was measured, where whoever measured says so.
    """

    name: str
    prefill: Curve | Polynomial
    decode: DecodeCost | None = None
    max_rows: int = 1
    fitted: PrefillCost | None = None

    def decode_rps(self, mean_output_tokens: float, mean_context_tokens: float = 0.0) -> float:
        """Requests per second of one decoding node with all rows in use (equation 5); 0 where it does not decode."""
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
            fit.observe((1.0, tokens, tokens**2), self.prefill(tokens))
        return PrefillCost(*fit.weights)


def node_profile(data: Mapping[str, Any]) -> NodeProfile:
    """From JSON: {"name", "prefill": {"points": [[tokens, seconds], ...]} or {"constant_s", "per_token_s",
    "per_square_s"}, "decode": {"base_s", "per_row_s", "per_context_s", "max_rows"}}.

    With both, the points hold as far as they go, and the cost goes on behind them.

    Raises:
        ValueError: naming the field that is missing or wrong.
    """
    name = data.get("name", "node")
    prefill = table(data, "prefill", f"profile {name!r}")
    curve: Curve | Polynomial
    fitted: PrefillCost | None = None
    if "points" not in prefill or "per_token_s" in prefill:
        where = f"profile {name!r}: prefill"
        constant, linear = number(prefill, "constant_s", where), number(prefill, "per_token_s", where)
        fitted = PrefillCost(constant, linear, number(prefill, "per_square_s", where, 0.0))
        curve = Polynomial(fitted.constant_s, fitted.per_token_s, fitted.per_square_s)
    if "points" in prefill:
        try:
            points = [(float(x), float(y)) for x, y in prefill["points"]]
            curve = Curve(points + (_beyond(points[-1], fitted) if fitted is not None and points else []))
        except (TypeError, ValueError, OverflowError) as e:
            raise ValueError(f"profile {name!r}: prefill.points: {e}") from e
    if data.get("decode") is None:
        return NodeProfile(str(name), curve, fitted=fitted)
    where, told = f"profile {name!r}: decode", table(data, "decode", f"profile {name!r}")
    cost = DecodeCost(
        number(told, "base_s", where), number(told, "per_row_s", where, 0.0), number(told, "per_context_s", where, 0.0)
    )
    return NodeProfile(str(name), curve, cost, max(1, int(number(told, "max_rows", where, 1))), fitted)


def _beyond(last: tuple[float, float], cost: PrefillCost) -> list[tuple[float, float]]:
    """Points behind the last one measured, as the cost goes on from there."""
    tokens, seconds = last
    more = [tokens * 2**n for n in range(1, 12)]
    return [(x, seconds + cost.seconds(0, x) - cost.seconds(0, tokens)) for x in more]


def state_size(data: Mapping[str, Any]) -> StateSize:
    """From JSON: {"fixed_bytes", "bytes_per_token"}. Raises ValueError naming the field."""
    return StateSize(number(data, "fixed_bytes", "state", 0.0), number(data, "bytes_per_token", "state"))


def table(data: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    """An object within a JSON object. Raises ValueError naming it."""
    value = data.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}{': ' if where else ''}{key} must be a table, not {value!r}")
    return value


def number(data: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """A finite number >= 0 of a JSON object. Raises ValueError naming it."""
    value = data.get(key, default)
    # Python reads whole numbers of any size, and floats them or not.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e300
    if not is_number:
        raise ValueError(f"{where}.{key} must be a number >= 0, not {value!r:.40}")
    return float(value)
