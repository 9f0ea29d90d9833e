"""What computing and sending takes: models with few terms, fitted to what was measured, a profile as the prior.

Seconds of prefill grow with the uncached tokens, and with their attention to everything before them; seconds of a
decode step with rows and context. Pure; used by routing, capacity and the simulator, shown by `decodectl explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import combinations

# An observation counts half after so many later ones: a node whose clock or neighbours change is learned anew.
HALF_LIFE = 200.0
# Without a profile a node's first prompt of so many tokens tells its speed, and the shape is guessed: at `CURVE_TOKENS`
# attention takes as long as all else, and what a prompt costs whatever its length is some `GUESS_S`, give or take.
FIRST_TOKENS, CURVE_TOKENS, GUESS_S = 64, 1e4, 0.1
COST_FACTS = ("prefill_constant_s", "prefill_per_token_s", "prefill_per_square_s")
"""What prefilld tells of its PrefillCost in Status, in its order."""
# Slower nodes are not believed: (whatever a prompt's length, each token, each square), in seconds.
MOST_COST = (1e4, 1e2, 1e-1)
# How many observations the prior weighs at first, and for ever: terms that nothing excites stay where it has them.
PRIOR_WEIGHT, LASTING_WEIGHT = 8.0, 0.02
# The same for a guess: one observation is worth far more, it is right to a sixth or so.
GUESS_WEIGHT, GUESS_LASTS = 0.03, 0.002
# Sizes at which the terms of each model are of the order of their weights; keeps the equations well conditioned.
PREFILL_SCALE = (1.0, 1e4, 1e8)
_DECODE_SCALE = (1.0, 1e1, 1e5)
# A prior is not taken for faster than that at its terms' scales; the inverse square must be a number.
LEAST_TYPICAL = 1e-12


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of prefill on one node: constant_s + per_token_s u + per_square_s ((c + u)^2 - c^2) for u uncached tokens
    after c cached ones; the square is attention of each new token to all before it.
    """

    constant_s: float
    per_token_s: float
    per_square_s: float = 0.0

    def seconds(self, num_cached: float, num_uncached: float) -> float:
        """Seconds alone on the node; 0 when there is nothing to compute."""
        if num_uncached <= 0:
            return 0.0
        one, tokens, squares = prefill_terms(num_cached, num_uncached)
        return self.constant_s * one + self.per_token_s * tokens + self.per_square_s * squares

    def queue_s(self, num_tokens: float, num_requests: int) -> float:
        """Seconds for a queue, its requests taken to be alike."""
        if num_tokens <= 0:
            return 0.0
        count = max(1, num_requests)
        return count * self.seconds(0, num_tokens / count)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode step of a batch: base_s + per_row_s rows + per_context_s context tokens of all rows."""

    base_s: float
    per_row_s: float = 0.0
    per_context_s: float = 0.0

    def step_s(self, num_rows: float, num_context_tokens: float = 0.0) -> float:
        """Seconds of one step."""
        return self.base_s + self.per_row_s * num_rows + self.per_context_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class StateSize:
    """Raw bytes of a prompt's state: what each token adds, and what is there once whatever the length. Layers with a
    sliding window add `window_bytes_per_token` for each of the last `window_tokens`.
    """

    fixed_bytes: float
    bytes_per_token: float
    window_bytes_per_token: float = 0.0
    window_tokens: float = 0.0

    def num_bytes(self, num_tokens: float, num_held: float = 0.0) -> float:
        """Bytes that a receiver lacks that holds the rows of the first `num_held` tokens; 0 for nothing new."""
        if num_tokens <= num_held:
            return 0.0
        return self.bytes_per_token * (num_tokens - num_held) + self.final_bytes(num_tokens, num_held)

    def final_bytes(self, num_tokens: float, num_held: float = 0.0) -> float:
        """What of them only the end of a prompt gives off."""
        return self.fixed_bytes + self.window_bytes_per_token * min(num_tokens - num_held, self.window_tokens)


def prefill_terms(num_cached: float, num_uncached: float) -> tuple[float, float, float]:
    """What the weights of a PrefillCost are multiplied by, in its order."""
    return 1.0, num_uncached, num_uncached * (num_uncached + 2.0 * num_cached)


class NonNegativeFit:
    """Least squares with weights >= 0, older observations forgotten, relative errors equally bad at all sizes.

    The normal equations are kept and decay; with at most a handful of terms the exact non-negative solution is the best
    of the unconstrained ones over every subset of terms (Lawson and Hanson, Solving Least Squares Problems, ch. 23).
    """

    def __init__(
        self,
        prior: Sequence[float] | None,
        scale: Sequence[float],
        *,
        half_life: float = HALF_LIFE,
        doubts: Sequence[float] | None = None,
    ) -> None:
        """`doubts`: the prior is a guess, and each of its weights may well be wrong by so much."""
        self._scale, self.has_prior = tuple(scale), prior is not None
        prior = prior if prior is not None else [0.0] * len(scale)
        self._keep = 0.5 ** (1.0 / half_life)
        self._prior = [p * s for p, s in zip(prior, scale, strict=True)]
        size = len(self._prior)
        # Without a prior a trace of pull towards zero keeps the equations solvable.
        typical = max(sum(self._prior), LEAST_TYPICAL) if any(self._prior) else 0.0
        weight = (PRIOR_WEIGHT if doubts is None else GUESS_WEIGHT) if typical else 0.0
        wrong = [typical] * size if doubts is None else [d * s for d, s in zip(doubts, scale, strict=True)]
        self._pulls = [max(by, LEAST_TYPICAL) ** -2 if by else 1e-9 for by in wrong]
        self._lasting = LASTING_WEIGHT if doubts is None else GUESS_LASTS
        self._a = [[weight * pull if i == j else 0.0 for j in range(size)] for i, pull in enumerate(self._pulls)]
        self._b = [weight * pull * p for pull, p in zip(self._pulls, self._prior, strict=True)]
        self._solution: tuple[float, ...] | None = tuple(prior)
        self.num_observations = 0

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """One measurement; one that cannot be (seconds <= 0) is left out."""
        if seconds <= 0:
            return
        x = [t / s / seconds for t, s in zip(terms, self._scale, strict=True)]
        for i, xi in enumerate(x):
            self._b[i] = self._keep * self._b[i] + xi
            row = self._a[i]
            for j, xj in enumerate(x):
                row[j] = self._keep * row[j] + xi * xj
        self.num_observations += 1
        self._solution = None

    def is_known(self, least: int) -> bool:
        """Whether there is a prior, or so many observations were seen."""
        return self.has_prior or self.num_observations >= least

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights by what was seen so far."""
        if self._solution is None:
            lasting = [self._lasting * pull for pull in self._pulls]
            a = [[v + lasting[i] * (i == j) for j, v in enumerate(row)] for i, row in enumerate(self._a)]
            best = _non_negative(a, [v + w * p for v, w, p in zip(self._b, lasting, self._prior, strict=True)])
            self._solution = tuple(w / s for w, s in zip(best, self._scale, strict=True))
        return self._solution


def _non_negative(a: list[list[float]], b: list[float]) -> list[float]:
    """The w >= 0 with the least w'Aw - 2b'w."""
    size = len(b)
    best, least = [0.0] * size, 0.0
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            part = _solve([[a[i][j] for j in chosen] for i in chosen], [b[i] for i in chosen])
            if part is None or min(part) < 0:
                continue
            # At the optimum of a subset the quadratic form is -b'w.
            value = -sum(b[i] * w for i, w in zip(chosen, part, strict=True))
            if value < least:
                least, best = value, [0.0] * size
                for i, w in zip(chosen, part, strict=True):
                    best[i] = w
    return best


def _solve(a: list[list[float]], b: list[float]) -> list[float] | None:
    """Gaussian elimination with pivots; None for a singular matrix."""
    size = len(b)
    rows = [[*row, value] for row, value in zip(a, b, strict=True)]
    for n in range(size):
        pivot = max(range(n, size), key=lambda i: abs(rows[i][n]))
        if abs(rows[pivot][n]) < 1e-300:
            return None
        rows[n], rows[pivot] = rows[pivot], rows[n]
        for i in range(n + 1, size):
            factor = rows[i][n] / rows[n][n]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[n], strict=True)]
    out = [0.0] * size
    for n in reversed(range(size)):
        out[n] = (rows[n][size] - sum(rows[n][j] * out[j] for j in range(n + 1, size))) / rows[n][n]
    return out


class PrefillFit:
    """One node's PrefillCost, learned from its measured prompts, from a profile on or from a guess at the first."""

    def __init__(self, prior: PrefillCost | None = None) -> None:
        self.has_prior, self.num_prompts = prior is not None, 0
        self._fit = NonNegativeFit(astuple(prior), PREFILL_SCALE) if prior is not None else None

    def observe(self, num_cached: int, num_uncached: int, seconds: float) -> None:
        """A prompt of which `num_uncached` tokens were computed took so long, its waits not counted."""
        if num_uncached <= 0 or seconds <= 0:
            return
        if self._fit is None:
            if num_uncached < FIRST_TOKENS:
                return
            token_s = seconds / PrefillCost(0.0, 1.0, 1.0 / CURVE_TOKENS).seconds(num_cached, num_uncached)
            guess = (0.0, token_s, token_s / CURVE_TOKENS)
            self._fit = NonNegativeFit(guess, PREFILL_SCALE, doubts=(GUESS_S, *guess[1:]))
        self.num_prompts += 1
        self._fit.observe(prefill_terms(num_cached, num_uncached), seconds)

    @property
    def cost(self) -> PrefillCost | None:
        """None before it is known."""
        return PrefillCost(*self._fit.weights) if self._fit is not None else None


class DecodeFit:
    """One node's DecodeCost, learned from its measured steps; without a prior it is believed from `least` on."""

    def __init__(self, prior: DecodeCost | None = None, *, least: int = 1) -> None:
        self._fit, self._least = NonNegativeFit(astuple(prior) if prior is not None else None, _DECODE_SCALE), least

    def observe(self, num_rows: int, num_context_tokens: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._fit.observe((1.0, float(num_rows), float(num_context_tokens)), seconds)

    @property
    def cost(self) -> DecodeCost | None:
        """None before it is known."""
        return DecodeCost(*self._fit.weights) if self._fit.is_known(self._least) else None
