"""What decoded has learned of the speeds of both sides from requests that are done: cost models, codec ratios.

Told by active.py as parts of a request end, asked by views.py for the next decision. Decides nothing. The models are
common/policy/costs.py's; before anything was seen of a node, its rate as it tells it has to do.
"""

from __future__ import annotations

from common.policy.costs import PrefillCost, PrefillFit
from common.request import RequestReport

# How fast the ratio of encoded to raw bytes follows.
_WEIGHT = 0.2
# A model is believed from so many prompts on.
MIN_PROMPTS = 3


class Learned:
    """Of decoded itself (under the name "") and of each peer."""

    def __init__(self) -> None:
        self._fits: dict[str, PrefillFit] = {}
        self._num_seen: dict[str, int] = {}
        self._codec_ratio: dict[str, float] = {}

    def prefilled(self, node: str, report: RequestReport, seconds: float) -> None:
        """A prompt was computed by a node: all of it behind what it had cached, in so many seconds of its own."""
        num_uncached = report.num_prompt_tokens - 1 - report.num_cached_tokens
        if num_uncached > 0 and seconds > 0:
            self._fits.setdefault(node, PrefillFit()).observe(report.num_cached_tokens, num_uncached, seconds)
            self._num_seen[node] = self._num_seen.get(node, 0) + 1

    def transferred(self, peer: str, wire_bytes: int, raw_bytes: int) -> None:
        """State came from a peer."""
        if raw_bytes:
            before = self._codec_ratio.get(peer, wire_bytes / raw_bytes)
            self._codec_ratio[peer] = before + _WEIGHT * (wire_bytes / raw_bytes - before)

    def cost(self, node: str, tokens_per_s: float) -> PrefillCost | None:
        """What computing takes at a node; from the rate alone until enough was seen, None without either."""
        if self._num_seen.get(node, 0) >= MIN_PROMPTS:
            return self._fits[node].cost
        return PrefillCost(0.0, 1.0 / tokens_per_s) if tokens_per_s else None

    def codec_ratio(self, peer: str) -> float:
        """Encoded by raw bytes of what came lately; 1 before anything did."""
        return self._codec_ratio.get(peer, 1.0)
