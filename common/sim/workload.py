"""Requests to simulate: how long, when, and what their prompts share. Deterministic by seed.

A prompt is a length and a chain of block ids: equal ids at equal places mean equal prompts so far. Generators make
lists of `Shape`s (what is asked); `arrive` gives them instants. Called by plan.py and the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.policy.lengths import Lengths

BLOCK_TOKENS = 512
# Lengths outside of the bounds are drawn again as long as so large a part falls inside. docs/policies.md was measured
# with that stream of random numbers; with fewer inside it would take long, or for ever.
_LEAST_REDRAWN = 0.01
# Arrivals whose intervals vary less are regular: a gamma distribution's parameters would overflow.
_LEAST_CV = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """A prompt and how much is generated. `blocks` are chained ids of its whole blocks of BLOCK_TOKENS tokens.

    `follows` is the place in the list of the request whose answer this one continues, -1 for none: it arrives
    `think_s` after that was answered.
    """

    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    follows: int = -1
    think_s: float = 0.0

    def request(self, number: int, arrives_at: float = 0.0) -> SimRequest:
        """Ask for it."""
        return SimRequest(number, arrives_at, self.num_prompt, self.num_output, self.blocks)


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request on its way: what is asked, where it was prefilled, and when things happened (virtual seconds).

    `left_bytes` of its state, encoded, are still to come over the path.
    """

    number: int
    arrived_at: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    next: list[tuple[float, SimRequest]] = field(default_factory=list)
    place: str = ""
    node: str = ""
    reason: str = ""
    predicted_ttft_s: float | None = None
    num_computed: int = 0
    num_held: int = 0
    num_sent_rows: int = 0
    num_pending: int = 0
    is_all_computed: bool = False
    due_at: float = math.inf
    left_bytes: float = 0.0
    first_token_at: float = 0.0
    done_at: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens."""
        return (self.done_at - self.first_token_at) / max(1, self.num_output - 1)


def log_normal(
    count: int, rng: np.random.Generator, *, mu: float = 9.9, sigma: float = 1.0, low: int = 128, high: int = 128_000,
    num_output: int = 1024,
) -> list[Shape]:  # fmt: skip
    """The paper's prompts: truncated log-normal lengths, nothing shared, one output length.

    Raises:
        ValueError: no length from `low` to `high` has a weight that is not 0.
    """
    below, above = (math.erfc((mu - math.log(n)) / sigma / math.sqrt(2)) / 2 for n in (low, high))
    if above - below < _LEAST_REDRAWN:
        known = Lengths.log_normal(mu, sigma, low, high)
        return [Shape(int(known.quantile(part)), num_output) for part in rng.random(count)]
    found: list[int] = []
    while len(found) < count:
        with np.errstate(over="ignore"):
            drawn = np.exp(rng.normal(mu, sigma, count))
        found.extend(int(n) for n in drawn[(drawn >= low) & (drawn <= high)])
    return [Shape(n, num_output) for n in found[:count]]


def retrieval(
    count: int, rng: np.random.Generator, *, num_documents: int = 400, per_request: int = 5, num_output: int = 64
) -> list[Shape]:
    """Short answers from documents of 1K to 16K tokens, some far more wanted than others (Zipf), in an order of their
    own each time: only what comes before the first difference is shared.
    """
    sizes = np.clip(np.exp(rng.normal(8.2, 0.7, num_documents)), 1024, 16384).astype(int) // BLOCK_TOKENS
    popularity = 1.0 / np.arange(1, num_documents + 1)
    popularity /= popularity.sum()
    chains: dict[tuple[int, int, int], int] = {}
    shapes = []
    for _ in range(count):
        chosen = rng.choice(num_documents, per_request, replace=False, p=popularity)
        blocks = [_chained(chains, -1, -1, 0)]
        for document in chosen:
            for part in range(int(sizes[document])):
                blocks.append(_chained(chains, blocks[-1], int(document), part))
        question = int(rng.integers(20, 400))
        shapes.append(Shape(len(blocks) * BLOCK_TOKENS + question, num_output, tuple(blocks)))
    return shapes


def _chained(chains: dict[tuple[int, int, int], int], parent: int, document: int, part: int) -> int:
    return chains.setdefault((parent, document, part), len(chains))


def sessions(
    count: int, rng: np.random.Generator, *, num_turns: int = 8, system_tokens: int = 1500, turn_tokens: int = 400,
    num_output: int = 200, think_s: float = 20.0,
) -> list[Shape]:  # fmt: skip
    """Chats: every prompt is the one before, its answer, and a new turn; all share a system prompt."""
    shapes: list[Shape] = []
    fresh = system_tokens // BLOCK_TOKENS
    shared = tuple(range(fresh))
    while len(shapes) < count:
        length, blocks, before = system_tokens, list(shared), -1
        for _ in range(num_turns):
            length += max(1, int(rng.exponential(turn_tokens)))
            while (len(blocks) + 1) * BLOCK_TOKENS <= length:
                blocks.append(fresh)
                fresh += 1
            shapes.append(Shape(length, num_output, tuple(blocks), before, float(rng.exponential(think_s))))
            before = len(shapes) - 1
            length += num_output
    return shapes


def gaps(count: int, rng: np.random.Generator, *, cv: float = 1.0) -> np.ndarray:
    """Intervals with mean 1: exponential for cv 1 (Poisson), equal for 0, else gamma (bursts for cv > 1)."""
    if cv < _LEAST_CV:
        return np.ones(count)
    return rng.exponential(1.0, count) if cv == 1.0 else rng.gamma(1 / cv**2, cv**2, count)


def diurnal(instants: np.ndarray, *, period: float, swing: float) -> np.ndarray:
    """Instants of a steady process, moved so that the rate follows 1 + swing sin(2 pi t / period), 0 <= swing < 1."""
    grid = np.linspace(0.0, float(instants[-1]) * 1.1 / (1 - swing) + period, 100_000)
    served = grid + swing * period / (2 * np.pi) * (1 - np.cos(2 * np.pi * grid / period))
    return np.asarray(np.interp(instants, served, grid))


def arrive(
    shapes: Sequence[Shape], rate_rps: float, rng: np.random.Generator, *, cv: float = 1.0, swing: float = 0.0,
    period_s: float = 86400.0,
) -> list[SimRequest]:  # fmt: skip
    """Give every shape that follows no other an instant, `rate_rps` of all shapes together."""
    first = [n for n, shape in enumerate(shapes) if shape.follows < 0]
    instants = np.cumsum(gaps(len(first), rng, cv=cv)) * len(shapes) / len(first) / rate_rps
    if swing:
        instants = diurnal(instants, period=period_s, swing=swing)
    requests = [shape.request(n) for n, shape in enumerate(shapes)]
    for n, when in zip(first, instants, strict=True):
        requests[n].arrived_at = float(when)
    for n, shape in enumerate(shapes):
        if shape.follows >= 0:
            requests[shape.follows].next.append((shape.think_s, requests[n]))
    return [requests[n] for n in first]
