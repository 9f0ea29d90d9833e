"""What decoded has learned of the speeds of both sides from requests that are done: cost models, codec ratios.

Told by active.py as parts of a request end and by router.py of decode steps; asked by views.py for the next decision.
Decides nothing. The models are common/policy/costs.py's. Peers fit their own, over the prompts of all decodeds, and
tell; before anything was seen of a node, its rate as it tells it has to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.backend import DecodeStep
from common.policy.costs import COST_FACTS, MOST_COST, DecodeCost, DecodeFit, PrefillCost, PrefillFit
from common.policy.profile import NodeProfile
from common.request import RequestReport

# How fast averages over requests follow.
_WEIGHT = 0.1
# What a peer tells less of its time than this is not believed: so many busy decodeds are at no prefilld.
LEAST_SHARE = 0.01
# A model of decode steps, which come by the hundred, is believed from so many on.
MIN_STEPS = 8


class Mean:
    """A mean that follows; `value` is `unknown` before the first."""

    def __init__(self, unknown: float) -> None:
        self.value, self._is_known = unknown, False

    def add(self, value: float) -> None:
        """The first counts whole."""
        self.value += (value - self.value) * (_WEIGHT if self._is_known else 1.0)
        self._is_known = True


class Learned:
    """Of decoded itself, of its requests, and of each peer."""

    def __init__(self, prior: NodeProfile | None = None) -> None:
        """`prior`: decoded's own profile."""
        self._prefill = PrefillFit(prior.cost() if prior is not None else None)
        self._decode = DecodeFit(prior.decode if prior is not None else None, least=MIN_STEPS)
        self._codec_ratio: dict[str, Mean] = {}
        self.output_tokens = Mean(0.0)
        """Of a request; 0 before the first has ended."""
        self.context_tokens = Mean(0.0)
        """Of a row: its prompt and half of its output."""
        self.uncached_share = Mean(1.0)
        """Part of a prompt that is not cached here."""

    def prefilled(self, report: RequestReport, seconds: float) -> None:
        """A prompt was computed here, alone: all of it behind what was cached, in so many seconds."""
        num_uncached = report.num_prompt_tokens - 1 - report.num_cached_tokens
        self._prefill.observe(report.num_cached_tokens, num_uncached, seconds)

    def decoded(self, steps: Iterable[DecodeStep]) -> None:
        """Decode steps without prompt tokens."""
        for step in steps:
            self._decode.observe(step.num_rows, step.num_context_tokens, step.seconds)

    def ended(self, report: RequestReport, num_output_tokens: int) -> None:
        """A request ended well."""
        self.output_tokens.add(num_output_tokens)
        self.context_tokens.add(report.num_prompt_tokens + num_output_tokens / 2)

    def transferred(self, peer: str, wire_bytes: int, raw_bytes: int) -> None:
        """State came from a peer."""
        if raw_bytes:
            self._codec_ratio.setdefault(peer, Mean(1.0)).add(wire_bytes / raw_bytes)

    def local_cost(self, tokens_per_s: float) -> PrefillCost | None:
        """What computing takes here; from the rate alone until enough was seen, None without either."""
        return self._prefill.cost or (PrefillCost(0.0, 1.0 / tokens_per_s) if tokens_per_s else None)

    @property
    def decode_cost(self) -> DecodeCost | None:
        """What a decode step takes; None before enough was seen."""
        return self._decode.cost

    def codec_ratio(self, peer: str) -> float:
        """Encoded by raw bytes of what came lately; 1 before anything did."""
        return self._codec_ratio[peer].value if peer in self._codec_ratio else 1.0


def told_cost(load: Mapping[str, float]) -> PrefillCost | None:
    """What computing takes at a peer by its own word; from its rate alone while it has no more to tell; None where that
    is not known or cannot be.
    """
    if all(fact in load for fact in COST_FACTS):
        told = [load[fact] for fact in COST_FACTS]
        return PrefillCost(*told) if all(s <= most for s, most in zip(told, MOST_COST, strict=True)) else None
    rate = load.get("prefill_tokens_per_s", 0.0)
    return PrefillCost(0.0, 1.0 / rate) if rate * MOST_COST[1] >= 1 else None


def told_share(load: Mapping[str, float]) -> float:
    """The part of a peer's time that decoded can count on, by the peer's word; all where it says nothing."""
    return min(1.0, max(LEAST_SHARE, load.get("compute_share", 1.0)))
