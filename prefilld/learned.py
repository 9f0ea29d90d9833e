"""What prefilld has learned of its own speed, for its peers to predict with: a cost model over the prompts it computed.

Told by stream.py of each prompt that is done, asked by service.py for Status messages and `status`. Decides nothing.
"""

from __future__ import annotations

from dataclasses import asdict, astuple

from common.policy.costs import COST_FACTS, PrefillCost, PrefillFit


class LearnedCost:
    """Seconds of prefill here, from the profile on."""

    def __init__(self, prior: PrefillCost | None = None) -> None:
        self._fit = PrefillFit(prior)

    def prefilled(self, num_cached: int, num_uncached: int, seconds: float) -> None:
        """So many tokens of a prompt were computed behind others, in so many seconds of its own chunks."""
        self._fit.observe(num_cached, num_uncached, seconds)

    @property
    def cost(self) -> PrefillCost | None:
        """None before it is known."""
        return self._fit.cost

    def load(self) -> dict[str, float]:
        """For Status messages; empty before it is known."""
        return dict(zip(COST_FACTS, astuple(self.cost), strict=True)) if self.cost is not None else {}

    def facts(self) -> dict[str, object]:
        """For `status`."""
        known = asdict(self.cost) if self.cost is not None else {}
        return {**known, "has_profile": self._fit.has_prior, "num_prompts": self._fit.num_prompts}
