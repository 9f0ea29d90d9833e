"""What prefilld has learned of its own speed, for its peers to predict with: a cost model over the prompts it computed.

Told by stream.py of each prompt that is done, asked by service.py for Status messages and `status`. Decides nothing.
"""

from __future__ import annotations

from dataclasses import asdict

from common.policy.costs import PrefillCost, PrefillFit

MIN_PROMPTS = 3
"""Without a profile the model is believed from so many prompts on."""


class LearnedCost:
    """Seconds of prefill here, from the profile on."""

    def __init__(self, prior: PrefillCost | None = None) -> None:
        self._fit, self._has_prior = PrefillFit(prior), prior is not None
        self._num_prompts = 0

    def prefilled(self, num_cached: int, num_uncached: int, seconds: float) -> None:
        """So many tokens of a prompt were computed behind others, in so many seconds of its own chunks."""
        if num_uncached > 0 and seconds > 0:
            self._fit.observe(num_cached, num_uncached, seconds)
            self._num_prompts += 1

    @property
    def cost(self) -> PrefillCost | None:
        """None before it is known."""
        return self._fit.cost if self._has_prior or self._num_prompts >= MIN_PROMPTS else None

    def load(self) -> dict[str, float]:
        """For Status messages; empty before it is known."""
        cost = self.cost
        return {f"prefill_{name}": value for name, value in asdict(cost).items()} if cost is not None else {}

    def facts(self) -> dict[str, object]:
        """For `status`."""
        cost = self.cost
        known = asdict(cost) if cost is not None else {}
        return {**known, "has_profile": self._has_prior, "num_prompts": self._num_prompts}
